from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from edgerun.errors import InvalidModelFile, ModelError, ModelLoadFailed, ProviderUnavailable
from edgerun.vision.ort_runner import (
    OrtRunner,
    TensorSpec,
)
from tests.vision import onnx_models
from tests.vision.onnx_models import RgbModel

CPU = "CPUExecutionProvider"


def pictures(count: int, side: int = 8) -> np.ndarray:
    return np.random.default_rng(5).random((count, 3, side, side), dtype=np.float32)


def expected(batch: np.ndarray) -> np.ndarray:
    return batch.mean(axis=(2, 3)) * 10


def test_declared_input_and_output_are_read(tmp_path: Path) -> None:
    runner = OrtRunner(RgbModel().write(tmp_path / "m.onnx"), CPU, 1)
    assert runner.input == TensorSpec("x", (-1, 3, 8, 8), "float32")
    assert runner.outputs == (TensorSpec("y", (-1, 3), "float32"),)
    assert runner.provider == CPU


def test_names_of_free_axes_do_not_matter(tmp_path: Path) -> None:
    runner = OrtRunner(
        RgbModel(axes=("N?", 3, "hauteur", "width of image")).write(tmp_path / "m.onnx"), CPU, 1
    )
    assert runner.input.shape == (-1, 3, -1, -1)
    for side in (5, 9):
        (output,) = runner.run(pictures(2, side))
        np.testing.assert_allclose(output, expected(pictures(2, side)), rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("fixed", [1, 2])
def test_fixed_batch_size_is_run_as_often_as_it_takes(tmp_path: Path, fixed: int, count: int) -> None:
    runner = OrtRunner(RgbModel(axes=(fixed, 3, 8, 8), embedding=True).write(tmp_path / "m.onnx"), CPU, 1)
    logits, means = runner.run(pictures(count))
    np.testing.assert_allclose(logits, expected(pictures(count)), rtol=1e-5)
    np.testing.assert_allclose(means, expected(pictures(count)) / 10, rtol=1e-5)


def test_batch_is_cast_to_the_declared_dtype(tmp_path: Path) -> None:
    runner = OrtRunner(RgbModel(dtype=TensorProto.FLOAT16).write(tmp_path / "m.onnx"), CPU, 1)
    (output,) = runner.run(pictures(3))
    assert output.dtype == np.float16
    np.testing.assert_allclose(output, expected(pictures(3)), rtol=5e-3)  # float16 has 11 bits


def test_outputs_come_in_the_order_asked_for(tmp_path: Path) -> None:
    path = RgbModel(embedding=True).write(tmp_path / "m.onnx")
    for asked, names in [((), ("y", "means")), (("means", "y"), ("means", "y")), (("", "y"), ("means", "y"))]:
        runner = OrtRunner(path, CPU, 1, output_names=asked)
        assert tuple(output.name for output in runner.outputs) == names
        by_name = dict(zip(names, runner.run(pictures(2)), strict=True))
        np.testing.assert_allclose(by_name["y"], by_name["means"] * 10, rtol=1e-5)


def test_unknown_names_are_refused_with_those_that_exist(tmp_path: Path) -> None:
    path = RgbModel().write(tmp_path / "m.onnx")
    with pytest.raises(ModelLoadFailed, match=r"no output 'probs': it has y"):
        OrtRunner(path, CPU, 1, output_names=["probs"])
    with pytest.raises(ModelLoadFailed, match=r"no input 'image': it has x"):
        OrtRunner(path, CPU, 1, input_name="image")


def test_model_with_two_inputs_is_refused_by_their_names(tmp_path: Path) -> None:
    axes = ["n", 2]
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        "two",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name in ("a", "b")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, axes)],
    )
    with pytest.raises(ModelLoadFailed, match=r"2 inputs \(a, b\)"):
        OrtRunner(onnx_models.save(graph, tmp_path / "m.onnx"), CPU, 1)


def one_line(error: pytest.ExceptionInfo[InvalidModelFile], path: Path) -> str:
    message = error.value.message
    assert "\n" not in message
    assert str(path) in message
    assert "onnxruntime_src" not in message
    return message


@pytest.mark.parametrize("data", [b"\x00garbage" * 30, b"<html>404</html>"])
def test_file_that_is_no_model_is_named_with_its_size(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(InvalidModelFile) as caught:
        OrtRunner(str(path), CPU, 1)
    assert f"({len(data)} bytes) is no ONNX model" in one_line(caught, path)


def test_truncated_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx_models.write_wide(path, 500)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(InvalidModelFile) as caught:
        OrtRunner(str(path), CPU, 1)
    one_line(caught, path)


def test_empty_and_absent_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(InvalidModelFile, match="is not a file"):
        OrtRunner(str(path), CPU, 1)
    path.touch()
    with pytest.raises(InvalidModelFile, match=r"empty \(0 bytes\)"):
        OrtRunner(str(path), CPU, 1)


def test_too_new_ir_version_names_found_and_supported(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    RgbModel(ir_version=99).write(path)
    with pytest.raises(InvalidModelFile) as caught:
        OrtRunner(str(path), CPU, 1)
    assert "IR version 99: export it for IR version 1" in one_line(caught, path)


def test_too_new_opset_names_found_and_supported(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    RgbModel(opset=99).write(path)
    with pytest.raises(InvalidModelFile) as caught:
        OrtRunner(str(path), CPU, 1)
    assert "opset 99 of ai.onnx: export it for opset 2" in one_line(caught, path)


def test_external_weights_are_found_beside_the_model_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "m.onnx"
    path.parent.mkdir()
    onnx_models.write_with_external_weights(path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for name in (str(path), "../deep/m.onnx"):
        assert len(OrtRunner(name, CPU, 1).run(pictures(2))[0]) == 2


def test_missing_external_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx_models.write_with_external_weights(path)
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(InvalidModelFile) as caught:
        OrtRunner(str(path), CPU, 1)
    assert "m.onnx.data" in one_line(caught, path)
    assert "is missing" in caught.value.message


def test_unknown_operator_is_a_load_failure_in_one_line(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("NoSuchOperator", ["x"], ["y"])],
        "odd",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
    )
    with pytest.raises((InvalidModelFile, ModelLoadFailed), match="NoSuchOperator") as caught:
        OrtRunner(onnx_models.save(graph, tmp_path / "m.onnx"), CPU, 1)
    assert "\n" not in caught.value.message


def test_output_without_a_batch_axis_is_refused(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x"], ["y"], axes=[0], keepdims=0)],
        "flat",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    runner = OrtRunner(onnx_models.save(graph, tmp_path / "m.onnx"), CPU, 1)
    with pytest.raises(ModelError, match="a batch axis of 2 is needed"):
        runner.run(np.ones((2, 3), dtype=np.float32))


def test_failing_run_is_a_model_error_in_one_line(tmp_path: Path) -> None:
    runner = OrtRunner(onnx_models.write_fails_on_large(tmp_path / "m.onnx"), CPU, 1)
    np.testing.assert_array_equal(runner.run(np.array([[1.0]]))[0], [[3.0, 4.0]])
    with pytest.raises(ModelError, match="failed on an input of shape") as caught:
        runner.run(np.array([[7.0]]))
    assert "\n" not in caught.value.message


def test_nothing_is_printed_when_loading_or_running_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = OrtRunner(onnx_models.write_fails_on_large(tmp_path / "m.onnx"), CPU, 1)
    with pytest.raises(ModelError):
        runner.run(np.array([[7.0]]))
    RgbModel(ir_version=99).write(tmp_path / "new.onnx")
    with pytest.raises(InvalidModelFile):
        OrtRunner(str(tmp_path / "new.onnx"), CPU, 1)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_provider_that_is_not_built_in_is_refused_not_replaced(tmp_path: Path) -> None:
    path = RgbModel().write(tmp_path / "m.onnx")
    with pytest.raises(ProviderUnavailable, match="NoSuchExecutionProvider") as caught:
        OrtRunner(path, "NoSuchExecutionProvider", 1)
    assert CPU in caught.value.message  # what there is


def test_gpu_provider_without_a_gpu_is_refused_not_replaced(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    path = RgbModel().write(tmp_path / "m.onnx")
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA, and this machine may have a GPU")
    with pytest.raises(ProviderUnavailable, match="CUDAExecutionProvider"):
        OrtRunner(path, "CUDAExecutionProvider", 1)
