"""Tiny ONNX models with answers that are known without running them.

The "rgb" models score red, green and blue by the mean of each channel, times 10: a red picture is class 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgerun.repository.spec import DynamicBatching, ModelSpec, PreprocessSpec, VisionSettings

Axis = int | str


@dataclass(frozen=True)
class RgbModel:
    """What varies between the test models; write() makes the file."""

    axes: tuple[Axis, ...] = ("n", 3, 8, 8)
    dtype: int = TensorProto.FLOAT
    softmax: bool = False
    embedding: bool = False  # a second output: the three means
    ir_version: int = 8
    opset: int = 13

    def write(self, path: Path) -> str:
        nodes = [helper.make_node("ReduceMean", ["x"], ["means"], axes=[2, 3], keepdims=0)]
        nodes.append(helper.make_node("Mul", ["means", "ten"], ["logits"]))
        if self.softmax:
            nodes.append(helper.make_node("Softmax", ["logits"], ["y"], axis=1))
        else:
            nodes.append(helper.make_node("Identity", ["logits"], ["y"]))
        outputs = [helper.make_tensor_value_info("y", self.dtype, [self.axes[0], 3])]
        if self.embedding:
            outputs.append(helper.make_tensor_value_info("means", self.dtype, [self.axes[0], 3]))
        ten = np.array(10, dtype=helper.tensor_dtype_to_np_dtype(self.dtype))
        graph = helper.make_graph(
            nodes,
            "rgb",
            [helper.make_tensor_value_info("x", self.dtype, list(self.axes))],
            outputs,
            [numpy_helper.from_array(ten, "ten")],
        )
        return save(graph, path, ir_version=self.ir_version, opset=self.opset)


def save(graph: onnx.GraphProto, path: Path, *, ir_version: int = 8, opset: int = 13) -> str:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = ir_version
    path.write_bytes(model.SerializeToString())
    return str(path)


def write_wide(path: Path, num_classes: int) -> str:
    """num_classes scores of which each is its own index times the mean of the picture."""
    weights = np.tile(np.arange(num_classes, dtype=np.float32), (3, 1))
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["x"], ["means"], axes=[2, 3], keepdims=0),
            helper.make_node("MatMul", ["means", "w"], ["y"]),
        ],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", num_classes])],
        [numpy_helper.from_array(weights, "w")],
    )
    return save(graph, path)


def write_with_external_weights(path: Path) -> str:
    """The weights lie in `<name>.data` beside the model."""
    write_wide(path, 3)
    model = onnx.load(str(path))
    onnx.save(model, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    return str(path)


def write_fails_on_large(path: Path) -> str:
    """Gives row int(value) of a table of 2 rows: an input of 2 or more fails, at run time."""
    table = np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "index"], ["rows"], axis=0),
            helper.make_node("Squeeze", ["rows", "one"], ["y"]),
        ],
        "fails",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array([1]), "one")],
    )
    return save(graph, path)


def model_spec(
    path: str, *, labels: Sequence[str] = (), settings: VisionSettings | None = None, max_batch_size: int = 8
) -> ModelSpec:
    """A spec for an 8 x 8 NCHW model; `settings` is taken as it is but for max_batch_size."""
    vision = settings or VisionSettings(preprocess=PreprocessSpec(width_px=8, height_px=8, crop_fraction=1.0))
    vision = replace(vision, max_batch_size=max_batch_size)
    return ModelSpec(
        name="tiny",
        kind="vision",
        version=1,
        path=path,
        sha256="",
        size_bytes=0,
        labels=tuple(labels),
        vision=vision,
    )


def batching(preferred: int, delay_us: int, queue: int = 256) -> DynamicBatching:
    return DynamicBatching(
        preferred_batch_size=preferred, max_queue_delay_microseconds=delay_us, max_queue_size=queue
    )
