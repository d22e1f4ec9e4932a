"""Reads the header of a GGUF file in plain Python, to say early and clearly whether the file is whole.

Owns the format's rules (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Reads the header only,
never the weights, and trusts no length in it. Knows nothing of llama.cpp.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgerun.errors import InvalidModelFile
from edgerun.repository.gguf_types import FILE_TYPES, GGML_TYPES
from edgerun.repository.sniff import HEAD_BYTES, advise_on_wrong_bytes, open_model

SUPPORTED_VERSIONS = (2, 3)
_MAX_KEY_BYTES = 65535  # the format's own limit
_MAX_KEPT_TEXT_BYTES = 4 << 20  # chat templates are some ten kB; a longer text is skipped, not kept
_MAX_DIMS = 4  # GGML_MAX_DIMS
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)

Value = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """What the header says. Of a shard set: of the first part, with sizes of the whole set."""

    version: int
    architecture: str
    name: str
    license: str
    quantization: str
    context_length: int  # tokens; 0: not said
    num_parameters: int
    has_chat_template: bool
    size_bytes: int
    files: tuple[str, ...]  # absolute, the shards in order


@dataclass(frozen=True, slots=True)
class _Header:
    version: int
    metadata: dict[str, Value]
    num_parameters: int


class _Reader:
    """Sequential reads that never leave the file. Every short read is InvalidModelFile."""

    def __init__(self, file: BinaryIO, path: Path, size_bytes: int) -> None:
        self._file = file
        self.path = path
        self.size_bytes = size_bytes
        self.offset = 0

    def fail(self, what: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self.path.name} {what}", path=str(self.path))

    def cut(self) -> InvalidModelFile:
        return self.fail(
            f"is cut off inside its header ({self.size_bytes} bytes; a broken download?); "
            "delete it and pull again"
        )

    def need(self, num_bytes: int) -> None:
        if num_bytes > self.size_bytes - self.offset:
            raise self.cut()

    def take(self, num_bytes: int) -> bytes:
        self.need(num_bytes)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:  # the file shrank while we read
            raise self.cut()
        self.offset += num_bytes
        return data

    def skip(self, num_bytes: int) -> None:
        self.need(num_bytes)
        self._file.seek(num_bytes, 1)
        self.offset += num_bytes

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self, max_bytes: int) -> str:
        length = self.u64()
        if length > max_bytes:
            self.need(length)
            raise self.fail(f"is damaged: a name of {length} bytes in its header; delete it and pull again")
        return self.take(length).decode("utf-8", errors="replace")

    def value(self) -> Value | None:
        """One metadata value; None for arrays and overlong texts, which are skipped."""
        kind = self.u32()
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            result: Value = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
            return result
        if kind == _STRING:
            length = self.u64()
            if length > _MAX_KEPT_TEXT_BYTES:
                self.skip(length)
                return None
            return self.take(length).decode("utf-8", errors="replace")
        if kind == _ARRAY:
            self._skip_array()
            return None
        raise self.fail(f"is damaged: metadata of unknown type {kind}; delete it and pull again")

    def _skip_array(self) -> None:
        kind, count = self.u32(), self.u64()
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            self.need(count * 8)  # each has a length of 8 bytes: bounds the loop by the file's size
            for _ in range(count):
                self.skip(self.u64())
        else:
            raise self.fail(f"is damaged: an array of unknown type {kind}; delete it and pull again")


def read_gguf(path: Path) -> GgufSummary:
    """Check that the file, or the shard set that it begins, is whole; return what the header says.

    Raises InvalidModelFile, in one line that names the file and what is wrong with it.
    """
    files = _shard_set(path)
    headers = [_read_one(file) for file in files]
    _check_split(files, headers)
    metadata = headers[0].metadata
    architecture = _text(metadata, "general.architecture")
    if not architecture:
        raise InvalidModelFile(
            f"{path.name} names no model architecture in its header, so it is no language model",
            path=str(path),
        )
    if architecture == "clip":
        raise InvalidModelFile(
            f"{path.name} is the picture part (mmproj) of a model, not a language model; name the other file",
            path=str(path),
        )
    return GgufSummary(
        version=headers[0].version,
        architecture=architecture,
        name=_text(metadata, "general.name"),
        license=_text(metadata, "general.license"),
        quantization=_quantization(metadata),
        context_length=_int(metadata, f"{architecture}.context_length"),
        num_parameters=sum(header.num_parameters for header in headers),
        has_chat_template=bool(_text(metadata, "tokenizer.chat_template")),
        size_bytes=sum(file.stat().st_size for file in files),
        files=tuple(str(file.absolute()) for file in files),
    )


def model_stem(path: Path) -> str:
    """The file's name without suffix and without a shard's number."""
    match = _SHARD.fullmatch(path.name)
    return match["stem"] if match else path.stem


def is_shard(path: Path) -> bool:
    """Whether the name says that this is a part of a split model."""
    return _SHARD.fullmatch(path.name) is not None


def is_later_shard(path: Path) -> bool:
    """Whether the name says that this is part 2 or later of a split model."""
    match = _SHARD.fullmatch(path.name)
    return match is not None and int(match["number"]) > 1


def _text(metadata: dict[str, Value], key: str) -> str:
    value = metadata.get(key, "")
    return value if isinstance(value, str) else ""


def _int(metadata: dict[str, Value], key: str) -> int:
    value = metadata.get(key, 0)
    return int(value) if isinstance(value, int) else 0


def _quantization(metadata: dict[str, Value]) -> str:
    return FILE_TYPES.get(_int(metadata, "general.file_type"), "") if "general.file_type" in metadata else ""


def shards(path: Path) -> list[Path]:
    """The parts that are there of the model that `path` is or begins; [path] for any other file."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    numbers = range(1, int(match["count"]) + 1)
    parts = (_part(path, match, number) for number in numbers)
    return [part for part in parts if part.is_file()]


def _part(path: Path, match: re.Match[str], number: int) -> Path:
    return path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}{path.suffix}")


def _shard_set(path: Path) -> list[Path]:
    """All parts of a split model in order; [path] for a model in one file."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])

    first = _part(path, match, 1)
    if number != 1:
        where = "beside it" if first.exists() else "which is missing in its folder"
        raise InvalidModelFile(
            f"{path.name} is part {number} of {count} of a split model; "
            f"name the first part, {first.name} ({where})",
            path=str(path),
        )
    parts = [_part(path, match, index) for index in range(1, count + 1)]
    missing = [part for part in parts if not part.is_file()]
    if missing and path.exists():
        shown = ", ".join(part.name for part in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InvalidModelFile(
            f"{path.name} is part 1 of {count} of a split model and {shown}{more} is missing; "
            f"put all {count} parts into {path.parent}",
            path=str(path),
        )
    return parts if not missing else [path]


def _check_split(files: list[Path], headers: list[_Header]) -> None:
    """The parts' own headers must agree with their names: mixed sets and renamed parts are refused."""
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        # llama.cpp writes 0, 1 or nothing for a model in one file.
        count = _int(header.metadata, "split.count") or 1
        number = _int(header.metadata, "split.no")
        if count == len(files) and (number == index or count == 1):
            continue
        if len(files) == 1:
            what = (
                f"its name is not of the form NAME-00001-of-{count:05d}.gguf; give the parts their names back"
            )
        else:
            what = f"its name says {index + 1} of {len(files)}; the parts of different models were mixed"
        raise InvalidModelFile(
            f"{file.name} says that it is part {number + 1} of {count} of a split model, but {what}",
            path=str(file),
        )


def _read_one(path: Path) -> _Header:
    with open_model(path) as file:
        size_bytes = path.stat().st_size
        head = file.read(HEAD_BYTES)
        file.seek(0)
        reader = _Reader(file, path, size_bytes)
        _check_magic(reader, head)
        return _read_header(reader)


def _check_magic(reader: _Reader, head: bytes) -> None:
    if not head.startswith(b"GGUF"):
        raise reader.fail(advise_on_wrong_bytes(head) or f"is not a GGUF file (it begins with {head[:4]!r})")
    reader.take(4)


def _read_header(reader: _Reader) -> _Header:
    version = reader.u32()
    if version not in SUPPORTED_VERSIONS:
        if version & 0xFFFF == 0:  # the format's documented sign of the other byte order
            raise reader.fail("is a big-endian GGUF file; this device needs a little-endian one")
        raise reader.fail(f"is GGUF version {version}; versions {SUPPORTED_VERSIONS} are supported")
    num_tensors, num_entries = reader.u64(), reader.u64()
    reader.need(num_entries * 13 + num_tensors * 32)  # the least that so many entries take
    metadata: dict[str, Value] = {}
    for _ in range(num_entries):
        key = reader.text(_MAX_KEY_BYTES)
        value = reader.value()
        if value is not None:
            metadata[key] = value
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.fail(f"is damaged: alignment {alignment!r} is no power of two; delete it and pull again")
    num_parameters, data_bytes = _read_tensor_infos(reader, num_tensors, alignment)
    data_start = -(-reader.offset // alignment) * alignment
    if data_bytes and data_start + data_bytes > reader.size_bytes:
        raise reader.fail(
            f"is cut off: it has {reader.size_bytes} bytes of the {data_start + data_bytes} that its header "
            "promises (a broken download?); delete it and pull again"
        )
    return _Header(version, metadata, num_parameters)


def _read_tensor_infos(reader: _Reader, num_tensors: int, alignment: int) -> tuple[int, int]:
    """(number of weights, bytes of data up to the end of the last tensor)."""
    num_parameters = data_bytes = 0
    for _ in range(num_tensors):
        name = reader.text(_MAX_KEY_BYTES)
        num_dims = reader.u32()
        if num_dims > _MAX_DIMS:
            raise reader.fail(
                f"is damaged: tensor {name!r:.80} has {num_dims} dimensions; delete it and pull again"
            )
        shape = [reader.u64() for _ in range(num_dims)]
        type_id, offset = reader.u32(), reader.u64()
        if type_id not in GGML_TYPES:
            raise reader.fail(
                f"has a tensor ({name!r:.80}) of type {type_id}, which this edgerun does not know; "
                "the file is damaged, or made for a newer llama.cpp"
            )
        if offset % alignment:
            raise reader.fail(f"is damaged: tensor {name!r:.80} is not aligned; delete it and pull again")
        _, block_values, block_bytes = GGML_TYPES[type_id]
        num_values = 1
        for length in shape:
            num_values *= length
        num_parameters += num_values
        data_bytes = max(data_bytes, offset + -(-num_values // block_values) * block_bytes)
    return num_parameters, data_bytes
