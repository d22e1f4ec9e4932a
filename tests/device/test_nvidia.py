from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from edgerun.device.files import CommandOutput, SystemFiles
from edgerun.device.nvidia import QUERY_FIELDS, number, query, read_nvidia
from tests.device.trees import FIXTURES, make_tree

QUERY = f"_cmd/nvidia-smi--query-gpu={','.join(QUERY_FIELDS)}--format=csv,noheader,nounits"
OLD_QUERY = QUERY.replace(",compute_cap", "")


@pytest.mark.parametrize("text", ["[N/A]", "Not Supported", "ERR!", "", None, "nan", "1 MiB"])
def test_fields_that_are_no_number_are_none(text: str | None) -> None:
    assert number(text) is None


def test_desktop_card() -> None:
    facts = read_nvidia(SystemFiles(FIXTURES / "desktop-rtx4090"))
    (gpu,) = facts.gpus

    assert (gpu.name, gpu.kind) == ("NVIDIA GeForce RTX 4090", "discrete")
    assert (gpu.compute_capability, gpu.memory_total_bytes) == ("8.9", 24564 << 20)
    assert (facts.cuda, facts.driver, facts.problem) == ("12.8", "570.133.07", None)


def test_thor_answers_without_memory() -> None:
    (gpu,) = read_nvidia(SystemFiles(FIXTURES / "agx-thor-jp72")).gpus

    assert (gpu.kind, gpu.memory_total_bytes, gpu.compute_capability) == ("integrated", None, "11.0")


def test_unified_desktop_chip_is_integrated(tmp_path: Path) -> None:
    files = make_tree(tmp_path, {QUERY: "NVIDIA GB10, 580.95.05, [N/A], [N/A], 0, 12.1\n"})

    assert read_nvidia(files).gpus[0].kind == "integrated"


def test_several_cards_keep_their_order(tmp_path: Path) -> None:
    rows = "NVIDIA A, 580.1, 100, 1, 0, 8.6\nNVIDIA B, 580.1, 200, 1, [N/A], 8.9\n"

    assert [g.name for g in read_nvidia(make_tree(tmp_path, {QUERY: rows})).gpus] == ["NVIDIA A", "NVIDIA B"]


def test_old_driver_is_asked_without_compute_capability(tmp_path: Path) -> None:
    (gpu,) = read_nvidia(make_tree(tmp_path, {OLD_QUERY: "Tesla K80, 470.82, 11441, 0, 0\n"})).gpus

    assert gpu.name == "Tesla K80"
    assert gpu.compute_capability is None


def test_cuda_version_err_is_a_problem_and_no_version() -> None:
    root = FIXTURES / "wsl2-rtx3060"
    text = (root / "_cmd/nvidia-smi.cuda-err").read_text()
    facts = read_nvidia(Recorded(text))

    assert facts.cuda is None
    assert facts.problem is not None and "ERR!" in facts.problem


def test_failing_nvidia_smi_says_why() -> None:
    facts = read_nvidia(Recorded("NVIDIA-SMI has failed because it couldn't communicate\n", is_ok=False))

    assert facts.gpus == ()
    assert facts.problem == "nvidia-smi failed: NVIDIA-SMI has failed because it couldn't communicate"


def test_driver_without_nvidia_smi_still_names_its_cards(tmp_path: Path) -> None:
    files = make_tree(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.07  Fri\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA L4\nIRQ: 1\n",
        },
    )
    (gpu,) = read_nvidia(files).gpus

    assert (gpu.name, gpu.driver) == ("NVIDIA L4", "570.133.07")


def test_lines_of_another_shape_are_left_out(tmp_path: Path) -> None:
    assert query(make_tree(tmp_path, {QUERY: "garbage\n\na,b\n"}), QUERY_FIELDS) == []


class Recorded(SystemFiles):
    """A machine whose plain nvidia-smi says `text` and whose queries are refused."""

    def __init__(self, text: str, *, is_ok: bool = True) -> None:
        super().__init__(Path("/nonexistent"))
        self._output = CommandOutput(text, is_ok)

    def run(self, argv: Sequence[str]) -> CommandOutput | None:
        return self._output if len(argv) == 1 else None
