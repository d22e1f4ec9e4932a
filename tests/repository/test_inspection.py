"""inspection: settings guessed from an ONNX file, and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from edgerun.errors import InvalidModelFile
from edgerun.repository.inspection import Guess, check_structure, infer_vision_settings
from edgerun.repository.onnx_file import read_onnx

from .builders import onnx_model, write_gguf, write_labels, write_onnx


def guess(path: Path, **kwargs: Any) -> Guess:
    write_onnx(path, **kwargs)
    return infer_vision_settings(path, read_onnx(path))


def test_float_nchw_logits(tmp_path: Path) -> None:
    write_labels(tmp_path / "labels_rgb.txt", 3)
    found = guess(tmp_path / "m.onnx")
    settings = found.settings
    assert (settings.task, settings.input, settings.output, settings.output_kind) == (
        "classify",
        "x",
        "y",
        "logits",
    )
    assert (settings.preprocess.layout, settings.preprocess.width_px, settings.preprocess.height_px) == (
        "NCHW",
        8,
        8,
    )
    assert not settings.preprocess.in_graph
    assert settings.labels == str(tmp_path / "labels_rgb.txt")
    assert found.num_classes == 3
    assert any("normalisation" in note for note in found.notes)
    assert any("labels_rgb.txt" in note for note in found.notes)


def test_softmax_inside_gives_probabilities(tmp_path: Path) -> None:
    assert guess(tmp_path / "m.onnx", softmax=True).settings.output_kind == "probabilities"


def test_uint8_nhwc_is_normalised_in_the_graph(tmp_path: Path) -> None:
    preprocess = guess(tmp_path / "m.onnx", shape=("n", 6, 5, 3), dtype=TensorProto.UINT8).settings.preprocess
    assert (preprocess.layout, preprocess.height_px, preprocess.width_px) == ("NHWC", 6, 5)
    assert preprocess.in_graph


def test_thousand_classes_get_imagenets_normalisation_and_say_so(tmp_path: Path) -> None:
    found = guess(tmp_path / "m.onnx", num_classes=1000)
    assert found.settings.preprocess.mean == pytest.approx([255 * m for m in (0.485, 0.456, 0.406)])
    assert found.settings.preprocess.std == pytest.approx([255 * s for s in (0.229, 0.224, 0.225)])
    assert any("ImageNet" in note for note in found.notes)


def test_free_size_and_fixed_batch_are_said(tmp_path: Path) -> None:
    found = guess(tmp_path / "m.onnx", shape=(1, 3, "h", "w"))
    assert found.settings.max_batch_size == 1
    assert found.settings.preprocess.width_px == 224
    assert any("224x224" in note for note in found.notes)


def test_what_takes_no_picture_is_raw(tmp_path: Path) -> None:
    found = guess(tmp_path / "m.onnx", shape=("n", 7))
    assert (found.settings.task, found.num_classes) == ("raw", 0)


def test_embedding_beside_logits_is_told_apart(tmp_path: Path) -> None:
    model = onnx_model()
    model.graph.output.insert(0, helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["n", 64]))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    settings = infer_vision_settings(path, read_onnx(path)).settings
    assert (settings.output, settings.embedding_output) == ("y", "embedding")


def test_format_goes_by_suffix_and_plans_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "M.GGUF")
    assert check_structure(path).size_bytes == path.stat().st_size
    with pytest.raises(InvalidModelFile, match="TensorRT plan"):
        check_structure(tmp_path / "m.plan")
    with pytest.raises(InvalidModelFile, match=r"\.gguf and \.onnx"):
        check_structure(tmp_path / "m.bin")
