"""The reader of PyTorch checkpoints that the model build uses: right values, and no foreign code."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

READER = Path(__file__).parents[2] / "packaging" / "models" / "torch_checkpoint.py"

HEADER = b"".join(
    pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
)
# The pickle opcodes by hand: dumping these names with pickle would need PyTorch.
STATE_DICT = (
    b"ccollections\nOrderedDict\n)R"  # the empty dict
    b"V%(name)s\n"
    b"ctorch._utils\n_rebuild_tensor_v2\n"
    b"((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI6\nNtQ"  # storage "0": six floats
    b"I%(offset)d\n(I2\nI2\nt(I%(stride)d\nI2\ntI00\nNtR"  # offset, shape (2, 2), stride (.., 2)
    b"s."
)
STORAGES = pickle.dumps(["0"], protocol=2) + (6).to_bytes(8, "little") + np.arange(6, dtype="<f4").tobytes()


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_checkpoint", READER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint(offset: int = 1, stride: int = 1) -> bytes:
    return HEADER + STATE_DICT % {b"name": b"weight", b"offset": offset, b"stride": stride} + STORAGES


def test_a_strided_tensor_is_read_in_its_logical_order(reader: ModuleType) -> None:
    tensors = reader.read_state_dict(checkpoint())

    assert list(tensors) == ["weight"]
    assert tensors["weight"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert tensors["weight"].flags.c_contiguous


@pytest.mark.parametrize(
    ("offset", "stride"), [(3, 1), (1, 3), (-1, 1), (4, -2)], ids=["offset", "stride", "below", "backwards"]
)
def test_a_tensor_outside_its_storage_is_refused(reader: ModuleType, offset: int, stride: int) -> None:
    with pytest.raises(ValueError, match="of a storage of 6"):
        reader.read_state_dict(checkpoint(offset, stride))


@pytest.mark.parametrize(
    ("module", "name"), [("os", "system"), ("builtins", "eval"), ("torch", "HalfStorage")]
)
def test_any_other_callable_is_refused_before_it_runs(reader: ModuleType, module: str, name: str) -> None:
    hostile = HEADER + f"c{module}\n{name}\n(Vtrue\ntR.".encode()

    with pytest.raises(pickle.UnpicklingError, match=f"{module}.{name}"):
        reader.read_state_dict(hostile)


def test_a_checkpoint_that_ends_early_is_refused(reader: ModuleType) -> None:
    with pytest.raises(ValueError):
        reader.read_state_dict(checkpoint()[:-4])


def test_another_pickle_is_refused(reader: ModuleType) -> None:
    with pytest.raises(ValueError, match="not a legacy"):
        reader.read_state_dict(pickle.dumps(1, protocol=2) + HEADER)
