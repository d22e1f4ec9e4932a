"""Small model files, made from the formats' own rules (and the onnx package for ONNX)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper


def gguf_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(gguf_string(item) for item in value)


def gguf_bytes(
    metadata: Mapping[str, Any] | None = None,
    tensors: Sequence[tuple[str, Sequence[int], int]] = (("token_embd.weight", (8, 4), 0),),
    version: int = 3,
) -> bytes:
    """tensors: (name, shape, type id), all F32 (0) or Q4_0 (2)."""
    data = {"general.architecture": "llama", "llama.context_length": 512} if metadata is None else metadata
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(data))
    for key, value in data.items():
        header += gguf_string(key) + gguf_value(value)
    offset = 0
    for name, shape, type_id in tensors:
        header += gguf_string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        header += struct.pack("<IQ", type_id, offset)
        count = 1
        for length in shape:
            count *= length
        size = count * 4 if type_id == 0 else count // 32 * 18
        offset += -(-size // 32) * 32
    return header + b"\0" * (-len(header) % 32) + b"\1" * offset


def write_gguf(path: Path, **kwargs: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(**kwargs))
    return path


def write_shards(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for index in range(count):
        metadata: dict[str, Any] = {"split.no": index, "split.count": count}
        if index == 0:
            metadata["general.architecture"] = "llama"
        name = f"big-{index + 1:05d}-of-{count:05d}.gguf"
        paths.append(write_gguf(folder / name, metadata=metadata))
    return paths


def onnx_model(
    *,
    num_classes: int = 3,
    shape: Sequence[int | str] = ("n", 3, 8, 8),
    dtype: int = TensorProto.FLOAT,
    softmax: bool = False,
    ir_version: int = 8,
    opset: int = 13,
    external: str = "",
) -> onnx.ModelProto:
    """Mean over the picture times a (3, num_classes) matrix, and softmax if asked for."""
    weights = helper.make_tensor("w", TensorProto.FLOAT, [3, num_classes], [1.0] * (3 * num_classes))
    if external:
        weights.ClearField("float_data")
        weights.data_location = TensorProto.EXTERNAL
        for key, value in (("location", external), ("offset", "0"), ("length", str(12 * num_classes))):
            entry = weights.external_data.add()
            entry.key, entry.value = key, value
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["m", "w"], ["z"]),
        helper.make_node("Softmax" if softmax else "Identity", ["z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", num_classes])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = ir_version
    return model


def write_onnx(path: Path, **kwargs: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(onnx_model(**kwargs).SerializeToString())
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_labels(path: Path, count: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(f"name {index}" for index in range(count)) + "\n", encoding="utf-8")
    return path
