from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgerun.device import ort_smoke
from edgerun.device.smoke import SmokeCheck, judge, python_module, run_children

CPU = "CPUExecutionProvider"


def test_hand_written_model_is_valid_onnx() -> None:
    onnx = pytest.importorskip("onnx", reason="the onnx package checks the bytes")
    model = onnx.load_model_from_string(ort_smoke.tiny_model())

    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["Conv", "MatMul"]


def test_expected_numbers_are_those_of_plain_arithmetic() -> None:
    picture = [[4 * y + x for x in range(4)] for y in range(4)]
    sums = [
        [sum(picture[y + i][x + j] for i in range(3) for j in range(3)) for x in range(2)] for y in range(2)
    ]
    weights = [[1, 2], [3, 4]]
    product = [sum(row[k] * weights[k][j] for k in range(2)) for row in sums for j in range(2)]

    assert tuple(product) == ort_smoke.EXPECTED


@pytest.mark.parametrize(("provider", "is_ok"), [(CPU, True), ("NoSuchExecutionProvider", False)])
def test_real_child_answers(provider: str, is_ok: bool) -> None:
    pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
    check = SmokeCheck("vision", provider, python_module("edgerun.device.ort_smoke", provider))
    (outcome,) = run_children([check])

    assert judge(outcome, check.timeout_s).is_ok == is_ok
    assert len(outcome.stdout.splitlines()) == 1
    assert "onnxruntime" in json.loads(outcome.stdout)["detail"]


def test_child_finds_edgerun_and_not_the_files_of_the_folder_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the working directory')")
    monkeypatch.chdir(tmp_path)
    (outcome,) = run_children([SmokeCheck("vision", "P", python_module("edgerun.device.ort_smoke", "P"))])

    assert outcome.stdout.startswith('{"ok": false')


class Session:
    def __init__(self, providers: list[str], result: list[float]) -> None:
        self._providers, self._result = providers, result

    def get_providers(self) -> list[str]:
        return self._providers

    def run(self, outputs: None, feeds: object) -> list[object]:
        import numpy as np

        return [np.array(self._result)]


def test_session_on_another_provider_is_refused() -> None:
    with pytest.raises(RuntimeError, match="runs on CPUExecutionProvider instead"):
        ort_smoke.run_session(Session([CPU], list(ort_smoke.EXPECTED)), "CUDAExecutionProvider")


@pytest.mark.parametrize("result", [[0.0, 0.0, 0.0, 0.0], [1.0], [float("nan")] * 4])
def test_wrong_numbers_are_refused(result: list[float]) -> None:
    with pytest.raises(RuntimeError, match="it computed"):
        ort_smoke.run_session(Session([CPU], result), CPU)


def test_right_numbers_on_the_right_provider_pass() -> None:
    ort_smoke.run_session(Session([CPU], [float(x) for x in ort_smoke.EXPECTED]), CPU)


def test_wrong_usage_is_an_error() -> None:
    assert ort_smoke.main([]) == 2
