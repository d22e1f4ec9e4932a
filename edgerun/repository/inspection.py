"""Looks into a model file of either format, and guesses settings for one that came without a config.

Says what it guessed: `notes` are sentences for the user and for the comments of a written config.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from edgerun.errors import InvalidModelFile
from edgerun.repository.gguf_file import GgufSummary, read_gguf
from edgerun.repository.labels import find_labels
from edgerun.repository.onnx_file import OnnxSummary, TensorInfo, read_onnx
from edgerun.repository.spec import Layout, PreprocessSpec, VisionSettings

# What makes a text the path of a model file; plans are recognised to be refused with a reason.
PATH_SUFFIXES = (".gguf", ".onnx", ".plan")

Summary = GgufSummary | OnnxSummary

# Means and deviations of ImageNet's colours in 0..255, as torchvision's classifiers expect them
# (torchvision.transforms documentation: 0.485, 0.456, 0.406 and 0.229, 0.224, 0.225, times 255).
_IMAGENET_MEAN = (123.675, 116.28, 103.53)
_IMAGENET_STD = (58.395, 57.12, 57.375)
_CLASS_WORDS = re.compile(r"logit|prob|class|score|softmax|pred", re.IGNORECASE)
_EMBEDDING_WORDS = re.compile(r"embed|feature|pool", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Guess:
    """Settings from the file alone. num_classes 0: not a classifier, or not declared."""

    settings: VisionSettings
    num_classes: int
    notes: tuple[str, ...]


def check_structure(path: Path, suffix: str = "") -> Summary:
    """The format's own check, chosen by `suffix` (of the path where not given). Raises InvalidModelFile."""
    suffix = (suffix or path.suffix).lower()
    if suffix == ".gguf":
        return read_gguf(path)
    if suffix == ".onnx":
        return read_onnx(path)
    if suffix == ".plan":
        raise InvalidModelFile(
            f"{path.name} is a TensorRT plan; plans are not supported yet, add the .onnx it was built from",
            path=str(path),
        )
    raise InvalidModelFile(f"{path.name} is no model file: .gguf and .onnx are supported", path=str(path))


def infer_vision_settings(path: Path, summary: OnnxSummary, folder: Path | None = None) -> Guess:
    """What can be told of preprocessing and outputs from an ONNX file; labels from the files beside it.

    folder: where labels are looked for when none beside the file fits.
    """
    notes: list[str] = []
    tensor = summary.inputs[0]
    if len(summary.inputs) > 1:
        notes.append(f"it has {len(summary.inputs)} inputs; the picture goes to the first, {tensor.name}")
    layout = _layout(tensor)
    if layout is None:
        notes.append(f"its input ({tensor}) is no picture, so it takes raw tensors only (task)")
        return Guess(VisionSettings(task="raw", input=tensor.name, labels=""), 0, tuple(notes))
    output, embedding = _choose_outputs(summary, notes)
    num_classes = _width(output)
    kind: Literal["logits", "probabilities"] = "logits"
    deciding_op = summary.output_ops[summary.outputs.index(output)]
    if deciding_op in ("Softmax", "Sigmoid"):
        kind = "probabilities"
        notes.append(
            f"its output {output.name} comes from {deciding_op}, so scores are probabilities already"
        )
    preprocess = _preprocess(tensor, layout, num_classes, notes)
    labels = find_labels(path, num_classes, folder)
    notes.append(labels.note)
    settings = VisionSettings(
        input=tensor.name,
        output=output.name,
        output_kind=kind,
        embedding_output=embedding,
        labels=str(labels.path) if labels.path else "",
        preprocess=preprocess,
    )
    if tensor.shape and tensor.shape[0] > 0:
        settings = replace(settings, max_batch_size=tensor.shape[0])
        notes.append(f"it takes exactly {tensor.shape[0]} picture(s) at a time (max_batch_size)")
    return Guess(settings, num_classes, tuple(notes))


def _layout(tensor: TensorInfo) -> Layout | None:
    """Where the three colours are; None for what is no picture."""
    if tensor.shape is None or len(tensor.shape) != 4:
        return None
    if tensor.shape[1] == 3:
        return "NCHW"
    return "NHWC" if tensor.shape[3] == 3 else None


def _width(tensor: TensorInfo) -> int:
    """Length of the class axis of (N, C) or (N, C, 1, 1); 0 where there is none."""
    shape = tensor.shape or ()
    if len(shape) < 2 or any(length != 1 for length in shape[2:]):
        return 0
    return max(shape[1], 0)


def _choose_outputs(summary: OnnxSummary, notes: list[str]) -> tuple[TensorInfo, str]:
    """(the output with class scores, the name of an embedding output or "")."""
    outputs = summary.outputs
    if len(outputs) == 1:
        return outputs[0], ""
    embedding = next((tensor.name for tensor in outputs if _EMBEDDING_WORDS.search(tensor.name)), "")
    rest = [tensor for tensor in outputs if tensor.name != embedding] or list(outputs)
    named = [tensor for tensor in rest if _CLASS_WORDS.search(tensor.name)]
    flat = [tensor for tensor in rest if _width(tensor)]
    chosen = (named or flat or rest)[0]
    names = ", ".join(tensor.name for tensor in outputs)
    notes.append(f"it has the outputs {names}; classes are read from {chosen.name}")
    return chosen, embedding


def _preprocess(tensor: TensorInfo, layout: Layout, num_classes: int, notes: list[str]) -> PreprocessSpec:
    shape = tensor.shape or ()
    height, width = (shape[2], shape[3]) if layout == "NCHW" else (shape[1], shape[2])
    spec = PreprocessSpec(layout=layout)
    if height > 0 and width > 0:
        spec = replace(spec, height_px=height, width_px=width)
    else:
        notes.append(f"the picture's size is free; {spec.width_px}x{spec.height_px} is assumed")
    if tensor.dtype == "uint8":
        notes.append("it takes uint8 pixels, so it normalises them itself (in_graph)")
        return replace(spec, in_graph=True)
    if layout == "NCHW" and num_classes == 1000:
        notes.append("normalisation cannot be told from the file; ImageNet's usual mean and std are assumed")
        return replace(spec, mean=_IMAGENET_MEAN, std=_IMAGENET_STD)
    notes.append("normalisation cannot be told from the file; pixel / 255 is assumed (mean, std)")
    return spec
