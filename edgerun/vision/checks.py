"""What must fit before a vision model takes requests, and before a request enters a batch.

Pure functions: they know the spec, the declared tensors and numpy, not the runtime. What is wrong here would
otherwise show late, as a wrong label.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgerun.engine.messages import Infer
from edgerun.errors import InvalidRequest, ModelLoadFailed
from edgerun.repository.spec import ModelSpec, PreprocessSpec, VisionSettings


class DeclaredTensor(Protocol):
    """An input as the model declares it: shape with the batch axis, -1 where an axis is free."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def output_names(settings: VisionSettings) -> tuple[str, ...]:
    """The outputs to compute, main one first. "": the first declared one not named here; (): all of them."""
    if settings.task == "raw":
        return (settings.output,) if settings.output else ()
    if settings.task == "embed":  # the embedding is the main output
        return (settings.embedding_output or settings.output,)
    return tuple(dict.fromkeys((settings.output, settings.embedding_output or settings.output)))


def picture_shape(preprocess: PreprocessSpec) -> tuple[int, int, int]:
    if preprocess.layout == "NCHW":
        return (3, preprocess.height_px, preprocess.width_px)
    return (preprocess.height_px, preprocess.width_px, 3)


def check_input(spec: ModelSpec, declared: DeclaredTensor) -> tuple[int, ...]:
    """The shape of one input without the batch axis, for the warm-up.

    Raises ModelLoadFailed when what the config's preprocessing makes is not what the model takes. A "raw"
    model gets its tensors from the client: its free axes are taken as 1, and nothing is compared.
    """
    axes = declared.shape[1:]
    if spec.vision.task == "raw":
        return tuple(1 if axis < 0 else axis for axis in axes)
    made = picture_shape(spec.vision.preprocess)
    if not fits(made, axes):
        raise ModelLoadFailed(
            f"model {spec.name}: input {declared.name!r} takes {_show(axes)} but the config's preprocessing"
            f" makes {_show(made)} ({spec.vision.preprocess.layout}): set width_px, height_px and layout in"
            " [vision.preprocess]",
            name=spec.name,
        )
    if not spec.vision.preprocess.in_graph and np.dtype(declared.dtype).kind != "f":
        raise ModelLoadFailed(
            f"model {spec.name}: input {declared.name!r} is {declared.dtype} but the config's preprocessing"
            " makes normalised values: set in_graph = true in [vision.preprocess]",
            name=spec.name,
        )
    return made


def check_classes(spec: ModelSpec, output: NDArray[Any]) -> None:
    """A classifier's first output for one picture, (1, ...), against its labels and its output_kind.

    Raises ModelLoadFailed. One label more or less than outputs shifts every name without a sign of it;
    softmax taken twice makes all scores nearly equal.
    """
    num_outputs, num_labels = output.size, len(spec.labels)
    if max(output.shape) != num_outputs:
        raise ModelLoadFailed(
            f"model {spec.name}: the output has shape {_show(output.shape[1:])}, not one score for each"
            ' class: name another output, or set task = "raw" in [vision]',
            name=spec.name,
        )
    if num_labels and num_labels != num_outputs:
        hint = "give one label for each output"
        if num_outputs == num_labels + 1:
            hint = "if the model's first class is the background, add a first line `background`"
        elif num_outputs == num_labels - 1:
            hint = "if the first line is the background, which this model does not have, remove it"
        raise ModelLoadFailed(
            f"model {spec.name}: {num_labels} labels for {num_outputs} outputs: {hint}",
            name=spec.name,
            num_labels=num_labels,
            num_outputs=num_outputs,
        )
    if spec.vision.output_kind == "logits" and num_outputs > 1 and _adds_to_one(output):
        raise ModelLoadFailed(
            f"model {spec.name}: the output already adds to 1, so softmax is inside the model:"
            ' set output_kind = "probabilities" in [vision]',
            name=spec.name,
        )


def read_input(request: Infer, declared: DeclaredTensor) -> NDArray[Any]:
    """The request's array, without the batch axis: a read-only view of its bytes.

    Raises InvalidRequest when shape, dtype or number of bytes do not fit the model or each other.
    """
    axes = declared.shape[1:]
    if not fits(request.shape, axes):
        raise InvalidRequest(
            f"the input has shape {_show(request.shape)}, model {request.model} takes {_show(axes)}"
            f" for {declared.name!r}",
            param="shape",
        )
    try:
        dtype = np.dtype(request.dtype)
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses commas and parentheses
        raise InvalidRequest(f"{request.dtype!r} is no numpy dtype", param="dtype") from error
    if dtype.kind not in "biuf" or not np.can_cast(dtype, declared.dtype, casting="same_kind"):
        raise InvalidRequest(
            f"the input is {dtype.name}, model {request.model} takes {declared.dtype}", param="dtype"
        )
    expected = math.prod(request.shape) * dtype.itemsize
    if len(request.data) != expected:
        raise InvalidRequest(
            f"the input has {len(request.data)} bytes, shape {_show(request.shape)} of {dtype.name} needs"
            f" {expected}",
            param="data",
        )
    return np.frombuffer(request.data, dtype=dtype).reshape(request.shape)


def fits(shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether a shape is one that the declared axes allow; no side may be empty."""
    if len(shape) != len(axes) or min(shape, default=1) < 1:
        return False
    return all(axis in (-1, side) for side, axis in zip(shape, axes, strict=True))


def _adds_to_one(output: NDArray[Any]) -> bool:
    values = output.astype(np.float64)
    # float16 probabilities of 1000 classes miss 1 by up to 0.005.
    return bool(values.min() >= 0.0 and abs(values.sum() - 1.0) < 0.01)


def _show(shape: tuple[int, ...]) -> str:
    return "x".join("?" if side < 0 else str(side) for side in shape) or "a scalar"
