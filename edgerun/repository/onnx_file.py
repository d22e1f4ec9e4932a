"""Reads what an ONNX file declares, without onnx or a runtime, so that every command can tell a bad file.

Owns the field numbers of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). Reads only the
outer structure: weights are skipped. Never raises anything but InvalidModelFile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from edgerun.errors import InvalidModelFile
from edgerun.repository.protobuf import MalformedProtobuf, Span, Wire, signed
from edgerun.repository.sniff import HEAD_BYTES, advise_on_wrong_bytes, open_model

# What ONNX Runtime 1.32 reads (its own messages say so). A newer runtime is asked itself, at load.
_JUDGED_RUNTIME = (1, 32)
MAX_IR_VERSION = 14
MAX_OPSET_VERSION = 28

_MAX_TEXT_BYTES = 1 << 16
_MAX_ITEMS = 1 << 20  # nodes, weights, inputs: far beyond real graphs, bounds the memory a bad file takes
_MAX_RANK = 64

# TensorProto.DataType -> numpy's name
_DTYPES = dict(
    enumerate(
        (
            *("float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16"),
            *("float64", "uint32", "uint64", "complex64", "complex128", "bfloat16"),
        ),
        start=1,
    )
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output of the graph. shape: -1 where the axis is free; None: rank not declared."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        lengths = (
            "unknown shape" if self.shape is None else "x".join(str(n) if n >= 0 else "?" for n in self.shape)
        )
        return f"{self.name} {self.dtype} {lengths}"


@dataclass(frozen=True, slots=True)
class OnnxSummary:
    ir_version: int
    opset_version: int  # of the standard operators; 0 where the file imports only others
    producer: str
    inputs: tuple[TensorInfo, ...]  # without initializers that older exporters list as inputs
    outputs: tuple[TensorInfo, ...]
    output_ops: tuple[str, ...]  # the operator that makes each output, behind reshapes and casts
    data_files: tuple[str, ...]  # external weights, relative to the model's folder
    size_bytes: int  # with external weights


@dataclass(slots=True)
class _Graph:
    inputs: list[TensorInfo] = field(default_factory=list)
    outputs: list[TensorInfo] = field(default_factory=list)
    initializers: set[str] = field(default_factory=set)
    producers: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # output -> (operator, its first input)
    data_files: dict[str, int] = field(default_factory=dict)  # file -> bytes it must have


def read_onnx(path: Path) -> OnnxSummary:
    """What the file declares; checks that it is an ONNX model, not too new, and has its external weights.

    Raises InvalidModelFile, in one line that names the file and what is wrong with it.
    """
    with open_model(path) as file:
        try:
            return _read(path, file)
        except MalformedProtobuf as error:
            file.seek(0)
            known = advise_on_wrong_bytes(file.read(HEAD_BYTES))
            raise InvalidModelFile(
                f"{path.name} {known or f'is not a whole ONNX model ({error}); export or download it again'}",
                path=str(path),
            ) from error
        except OSError as error:
            raise InvalidModelFile(f"cannot read {path}: {error.strerror}", path=str(path)) from error


def _read(path: Path, file: BinaryIO) -> OnnxSummary:
    size_bytes = path.stat().st_size
    wire = Wire(file.fileno(), size_bytes)
    ir_version = opset_version = 0
    producer = ""
    graph: _Graph | None = None
    for number, value in wire.fields(Span(0, size_bytes)):
        if number == 1 and isinstance(value, int):
            ir_version = value
        elif number == 2 and isinstance(value, Span):
            producer = _text(wire, value)
        elif number == 7 and isinstance(value, Span):
            graph = _read_graph(wire, value)
        elif number == 8 and isinstance(value, Span):
            opset_version = max(opset_version, _read_opset(wire, value))
    if ir_version == 0 or graph is None:
        raise MalformedProtobuf("no ir_version" if ir_version == 0 else "no graph")
    _check_versions(path, ir_version, opset_version)
    inputs = tuple(tensor for tensor in graph.inputs if tensor.name not in graph.initializers)
    if not inputs or not graph.outputs:
        raise MalformedProtobuf("a graph without inputs or outputs")
    return OnnxSummary(
        ir_version=ir_version,
        opset_version=opset_version,
        producer=producer,
        inputs=inputs,
        outputs=tuple(graph.outputs),
        output_ops=tuple(_deciding_op(graph, tensor.name) for tensor in graph.outputs),
        data_files=tuple(graph.data_files),
        size_bytes=size_bytes + _check_data_files(path, graph.data_files),
    )


def _check_versions(path: Path, ir_version: int, opset_version: int) -> None:
    if _runtime_version() > _JUDGED_RUNTIME:
        return
    for what, found, limit in (
        ("IR version", ir_version, MAX_IR_VERSION),
        ("opset", opset_version, MAX_OPSET_VERSION),
    ):
        if found > limit:
            raise InvalidModelFile(
                f"{path.name} has {what} {found}; up to {limit} is supported; "
                f"export it again for an older {what}",
                path=str(path),
                found=found,
                supported=limit,
            )


def _runtime_version() -> tuple[int, int]:
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            found = re.match(r"(\d+)\.(\d+)", metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
        if found:
            return int(found[1]), int(found[2])
    return (0, 0)


def _check_data_files(path: Path, data_files: dict[str, int]) -> int:
    """Bytes of the external weights. They lie beside the model: a name that leads elsewhere is refused."""
    total = 0
    for name, least_bytes in data_files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise InvalidModelFile(
                f"{path.name} wants its weights from {name!r}, outside its own folder; this is not allowed",
                path=str(path),
            )
        file = path.parent / name
        if not file.is_file():
            raise InvalidModelFile(
                f"{path.name} keeps its weights in {name}, which is missing; put it into {path.parent}",
                path=str(path),
            )
        found = file.stat().st_size
        if found < least_bytes:
            raise InvalidModelFile(
                f"{name}, the weights of {path.name}, is cut off: {found} bytes of at least {least_bytes}",
                path=str(path),
            )
        total += found
    return total


def _deciding_op(graph: _Graph, name: str) -> str:
    """The operator behind an output, seen through those that do not change values."""
    op = ""
    for _ in range(8):  # exporters put at most a few of these; bounds a graph that loops
        op, source = graph.producers.get(name, ("", ""))
        if op not in ("Identity", "Reshape", "Flatten", "Squeeze", "Cast", "Unsqueeze", "DequantizeLinear"):
            return op
        name = source
    return op


def _text(wire: Wire, span: Span) -> str:
    if span.num_bytes > _MAX_TEXT_BYTES:
        raise MalformedProtobuf(f"a name of {span.num_bytes} bytes")
    return wire.read(span).decode("utf-8", errors="replace")


def _read_opset(wire: Wire, span: Span) -> int:
    """The version, when it is of the standard operators; else 0."""
    domain, version = "", 0
    for number, value in wire.fields(span):
        if number == 1 and isinstance(value, Span):
            domain = _text(wire, value)
        elif number == 2 and isinstance(value, int):
            version = signed(value)
    return version if domain in ("", "ai.onnx") else 0


def _read_graph(wire: Wire, span: Span) -> _Graph:
    graph = _Graph()
    for items, (number, value) in enumerate(wire.fields(span)):
        if items > _MAX_ITEMS:
            raise MalformedProtobuf(f"a graph of more than {_MAX_ITEMS} parts")
        if not isinstance(value, Span):
            continue
        if number == 1:
            _read_node(wire, value, graph)
        elif number == 5:
            _read_initializer(wire, value, graph)
        elif number == 11:
            graph.inputs.append(_read_value_info(wire, value))
        elif number == 12:
            graph.outputs.append(_read_value_info(wire, value))
    return graph


def _read_node(wire: Wire, span: Span, graph: _Graph) -> None:
    first_input, op, outputs = "", "", []
    for number, value in wire.fields(span):
        if not isinstance(value, Span):
            continue
        if number == 1 and not first_input:
            first_input = _text(wire, value)
        elif number == 2:
            outputs.append(_text(wire, value))
        elif number == 4:
            op = _text(wire, value)
    for name in outputs:
        graph.producers[name] = (op, first_input)


def _read_initializer(wire: Wire, span: Span, graph: _Graph) -> None:
    external: dict[str, str] = {}
    for number, value in wire.fields(span):
        if number == 8 and isinstance(value, Span):
            graph.initializers.add(_text(wire, value))
        elif number == 13 and isinstance(value, Span):
            key, text = "", ""
            for entry, part in wire.fields(value):
                if entry == 1 and isinstance(part, Span):
                    key = _text(wire, part)
                elif entry == 2 and isinstance(part, Span):
                    text = _text(wire, part)
            external[key] = text
    if location := external.get("location"):
        end = _number(external.get("offset", "")) + _number(external.get("length", ""))
        graph.data_files[location] = max(end, graph.data_files.get(location, 0))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _read_value_info(wire: Wire, span: Span) -> TensorInfo:
    name, dtype, shape = "", "", None
    for number, value in wire.fields(span):
        if number == 1 and isinstance(value, Span):
            name = _text(wire, value)
        elif number == 2 and isinstance(value, Span):
            for kind, inner in wire.fields(value):
                if kind == 1 and isinstance(inner, Span):  # TypeProto.tensor_type
                    dtype, shape = _read_tensor_type(wire, inner)
    return TensorInfo(name, dtype, shape)


def _read_tensor_type(wire: Wire, span: Span) -> tuple[str, tuple[int, ...] | None]:
    dtype, shape = "", None
    for number, value in wire.fields(span):
        if number == 1 and isinstance(value, int):
            dtype = _DTYPES.get(value, f"type {value}")
        elif number == 2 and isinstance(value, Span):
            shape = tuple(_read_dim(wire, dim) for _, dim in wire.fields(value) if isinstance(dim, Span))
            if len(shape) > _MAX_RANK:
                raise MalformedProtobuf(f"a tensor of {len(shape)} dimensions")
    return dtype, shape


def _read_dim(wire: Wire, span: Span) -> int:
    """The length; -1 for a free axis, whatever name it bears."""
    for number, value in wire.fields(span):
        if number == 1 and isinstance(value, int):
            length = signed(value)
            return length if length > 0 else -1
    return -1
