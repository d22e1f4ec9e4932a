"""onnx_file: says what a file declares, agreeing with the onnx package, and refuses what is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from edgerun.errors import InvalidModelFile
from edgerun.repository.onnx_file import MAX_IR_VERSION, MAX_OPSET_VERSION, read_onnx

from .builders import onnx_model, write_onnx


def refused(path: Path) -> InvalidModelFile:
    with pytest.raises(InvalidModelFile) as caught:
        read_onnx(path)
    assert "\n" not in caught.value.message
    assert path.name in caught.value.message
    return caught.value


def test_declarations_are_read(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", num_classes=11, dtype=TensorProto.FLOAT16)
    summary = read_onnx(path)
    assert (summary.ir_version, summary.opset_version) == (8, 13)
    (tensor,) = summary.inputs
    assert (tensor.name, tensor.dtype, tensor.shape) == ("x", "float16", (-1, 3, 8, 8))
    (output,) = summary.outputs
    assert (output.name, output.dtype, output.shape) == ("y", "float32", (-1, 11))
    assert summary.output_ops == ("MatMul",)  # seen through Identity
    assert summary.size_bytes == path.stat().st_size


@pytest.mark.parametrize("number", range(1, 17))
def test_dtype_names_agree_with_onnx(tmp_path: Path, number: int) -> None:
    names = {"FLOAT": "float32", "DOUBLE": "float64"}
    name = TensorProto.DataType.Name(number)
    summary = read_onnx(write_onnx(tmp_path / "m.onnx", dtype=number))
    assert summary.inputs[0].dtype == names.get(name, name.lower())


def test_softmax_before_the_output_is_seen(tmp_path: Path) -> None:
    assert read_onnx(write_onnx(tmp_path / "m.onnx", softmax=True)).output_ops == ("Softmax",)


def test_names_of_axes_do_not_matter(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", shape=("N?", 3, "hauteur", "width of image"))
    assert read_onnx(path).inputs[0].shape == (-1, 3, -1, -1)


def test_initializers_listed_as_inputs_are_not_inputs(tmp_path: Path) -> None:
    model = onnx_model()
    extra = model.graph.input.add()
    extra.name = "w"
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert [tensor.name for tensor in read_onnx(path).inputs] == ["x"]


def test_too_new_files_are_refused_with_both_versions(tmp_path: Path) -> None:
    error = refused(write_onnx(tmp_path / "ir.onnx", ir_version=99))
    assert (error.details["found"], error.details["supported"]) == (99, MAX_IR_VERSION)
    assert "99" in error.message
    error = refused(write_onnx(tmp_path / "opset.onnx", opset=77))
    assert (error.details["found"], error.details["supported"]) == (77, MAX_OPSET_VERSION)


def test_external_weights_are_found_beside_the_model(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", external="m.onnx.data")
    assert "m.onnx.data" in refused(path).message
    (tmp_path / "m.onnx.data").write_bytes(b"\0" * 36)
    summary = read_onnx(path)
    assert summary.data_files == ("m.onnx.data",)
    assert summary.size_bytes == path.stat().st_size + 36
    (tmp_path / "m.onnx.data").write_bytes(b"\0" * 35)
    assert "cut off" in refused(path).message


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd"])
def test_external_weights_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    assert "outside" in refused(write_onnx(tmp_path / "m.onnx", external=location)).message


@pytest.mark.parametrize("data", [b"", b"<html>no</html>", b"\x08\x08\x12\x04junk\0\1\2\3", b"\x08\x08"])
def test_garbage_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    refused(path)


def test_every_cut_is_refused(tmp_path: Path) -> None:
    data = onnx_model().SerializeToString()
    opset = (
        len(onnx_model().opset_import[0].SerializeToString()) + 2
    )  # the last field; without it all is whole
    path = tmp_path / "m.onnx"
    for size in range(len(data) - opset):
        path.write_bytes(data[:size])
        refused(path)


WHOLE = onnx_model(external="w.data").SerializeToString()


@settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_files_raise_nothing_else(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for position, byte in edits:
        data[position] = byte
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    try:
        read_onnx(path)
    except InvalidModelFile as error:
        assert "\n" not in error.message


@settings(max_examples=100, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(InvalidModelFile):
        read_onnx(path)
