from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgerun.engine.messages import Infer
from edgerun.errors import InvalidRequest, ModelLoadFailed
from edgerun.repository.spec import ModelSpec, PreprocessSpec, VisionSettings
from edgerun.vision.checks import check_classes, check_input, fits, output_names, read_input
from edgerun.vision.ort_runner import TensorSpec
from tests.vision.onnx_models import model_spec

DECLARED = TensorSpec("x", (-1, 3, 8, 8), "float32")


def spec_for(preprocess: PreprocessSpec, **settings: Any) -> ModelSpec:
    return model_spec("m.onnx", settings=VisionSettings(preprocess=preprocess, **settings))


def infer(array: np.ndarray, **changes: Any) -> Infer:
    fields: dict[str, Any] = {
        "request_id": 1,
        "model": "tiny",
        "data": array.tobytes(),
        "shape": array.shape,
        "dtype": array.dtype.name,
    }
    return Infer(**{**fields, **changes})


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (VisionSettings(), ("",)),
        (VisionSettings(output="y"), ("y",)),
        (VisionSettings(output="y", embedding_output="e"), ("y", "e")),
        (VisionSettings(embedding_output="e"), ("", "e")),
        (VisionSettings(task="embed", output="y", embedding_output="e"), ("e",)),
        (VisionSettings(task="embed", output="y"), ("y",)),
        (VisionSettings(task="raw"), ()),
        (VisionSettings(task="raw", output="y"), ("y",)),
    ],
)
def test_main_output_comes_first(settings: VisionSettings, names: tuple[str, ...]) -> None:
    assert output_names(settings) == names


def test_free_axes_take_any_side_but_an_empty_one() -> None:
    assert fits((3, 5, 9), (3, -1, -1))
    assert not fits((3, 0, 9), (3, -1, -1))
    assert not fits((4, 5, 9), (3, -1, -1))
    assert not fits((3, 5), (3, -1, -1))


@pytest.mark.parametrize(
    "preprocess", [PreprocessSpec(), PreprocessSpec(width_px=8, height_px=8, layout="NHWC")]
)
def test_preprocessing_that_makes_another_shape_is_refused_at_load(preprocess: PreprocessSpec) -> None:
    with pytest.raises(ModelLoadFailed, match=r"takes 3x8x8 .* makes"):
        check_input(spec_for(preprocess), DECLARED)


def test_normalised_values_for_an_integer_input_are_refused_at_load() -> None:
    spec = spec_for(PreprocessSpec(width_px=8, height_px=8))
    with pytest.raises(ModelLoadFailed, match="in_graph = true"):
        check_input(spec, replace(DECLARED, dtype="uint8"))


def test_raw_model_is_not_held_to_its_preprocessing() -> None:
    spec = spec_for(PreprocessSpec(), task="raw")
    assert check_input(spec, TensorSpec("ids", (-1, -1, 5), "int64")) == (1, 5)


@pytest.mark.parametrize(
    ("num_labels", "hint"),
    [(10, "add a first line `background`"), (12, "remove it"), (3, "one label for each")],
)
def test_label_count_that_differs_is_refused_with_both_numbers(num_labels: int, hint: str) -> None:
    spec = model_spec("m.onnx", labels=[f"class{i}" for i in range(num_labels)])
    with pytest.raises(ModelLoadFailed, match=f"{num_labels} labels for 11 outputs") as caught:
        check_classes(spec, np.arange(11.0)[None])
    assert hint in caught.value.message
    assert caught.value.details["num_labels"] == num_labels
    assert caught.value.details["num_outputs"] == 11


def test_matching_labels_or_none_pass() -> None:
    for labels in ((), ("a", "b", "c")):
        check_classes(model_spec("m.onnx", labels=labels), np.array([[5.0, -1.0, 2.0]]))


def test_softmax_inside_declared_as_logits_is_refused() -> None:
    probabilities = np.array([[0.2, 0.3, 0.5]])
    with pytest.raises(ModelLoadFailed, match='output_kind = "probabilities"'):
        check_classes(model_spec("m.onnx"), probabilities)
    declared = spec_for(PreprocessSpec(), output_kind="probabilities")
    check_classes(declared, probabilities)


def test_classifier_whose_output_is_a_map_is_refused() -> None:
    with pytest.raises(ModelLoadFailed, match="5x4"):
        check_classes(model_spec("m.onnx"), np.zeros((1, 5, 4)))


def test_input_is_read_without_change() -> None:
    array = np.random.default_rng(0).random((3, 8, 8), dtype=np.float32)
    np.testing.assert_array_equal(read_input(infer(array), DECLARED), array)


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8", "int32"])
def test_numbers_that_convert_are_taken(dtype: str) -> None:
    assert read_input(infer(np.ones((3, 8, 8), dtype=dtype)), DECLARED).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"shape": (3, 8, 9)}, "shape"),
        ({"shape": (1, 3, 8, 8)}, "shape"),
        ({"shape": (3, -8, -8)}, "shape"),
        ({"shape": ()}, "shape"),
        ({"dtype": "no such"}, "dtype"),
        ({"dtype": ","}, "dtype"),
        ({"dtype": "O"}, "dtype"),
        ({"dtype": "U4"}, "dtype"),
        ({"dtype": "complex64"}, "dtype"),
        ({"dtype": "float64"}, "data"),
        ({"data": b""}, "data"),
        ({"data": b"123"}, "data"),
    ],
)
def test_input_that_does_not_fit_is_refused_by_field(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_input(infer(np.zeros((3, 8, 8), dtype=np.float32), **changes), DECLARED)
    assert caught.value.details["param"] == param


def test_float_pixels_for_a_uint8_model_are_refused() -> None:
    declared = TensorSpec("x", (-1, 8, 8, 3), "uint8")
    with pytest.raises(InvalidRequest, match="is float32, model tiny takes uint8"):
        read_input(infer(np.zeros((8, 8, 3), dtype=np.float32)), declared)
