"""`config.toml` of a model: from text to typed values, with errors that say what to write instead.

Owns the file's shape beyond the settings of spec.py: versions, their sources, the version policy. Does not
look at any other file.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from edgerun.errors import ConfigError
from edgerun.repository.files import read_text
from edgerun.repository.gguf_file import is_shard
from edgerun.repository.spec import LlmSettings, ModelKind, Requirement, VisionSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_NAME = "config.toml"
_MAX_CONFIG_BYTES = 1 << 20
_PLAIN_FILE = re.compile(r"[^/\\\0]{1,255}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Source(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Where a version's weights can be had. A relative `path` of a file is seen from config.toml's folder."""


class HuggingFaceSource(Source, frozen=True, kw_only=True, tag="huggingface"):
    repo: str
    filename: str
    revision: str = "main"


class WheelSource(Source, frozen=True, kw_only=True, tag="wheel"):
    package: str
    version: str
    member: str


class UrlSource(Source, frozen=True, kw_only=True, tag="url"):
    url: str


class FileSource(Source, frozen=True, kw_only=True, tag="file"):
    path: str


AnySource = HuggingFaceSource | WheelSource | UrlSource | FileSource


@dataclass(frozen=True, slots=True)
class VersionConfig:
    """`[[versions]]`. Empty or 0: not said, and then not checked."""

    version: int
    file: str = ""
    size_bytes: int = 0
    sha256: str = ""
    sources: tuple[AnySource, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """`[version_policy]`, Triton's words: serve the `latest` N versions, or exactly those of `specific`."""

    latest: int = 1
    specific: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    kind: ModelKind
    description: str = ""
    license: str = ""
    homepage: str = ""
    require: Requirement = "any"
    llm: LlmSettings = field(default_factory=LlmSettings)
    vision: VisionSettings = field(default_factory=VisionSettings)
    version_policy: VersionPolicy = field(default_factory=VersionPolicy)
    versions: tuple[VersionConfig, ...] = ()


# key -> (least, most); `least` is excluded where the third value says so
_RANGES: dict[str, tuple[float, float, bool]] = {
    "llm.max_model_len": (0, 1 << 31, False),
    "llm.max_num_seqs": (1, 256, False),  # llama.cpp's own limit on sequences
    "llm.max_num_batched_tokens": (1, 1 << 20, False),
    "llm.block_size": (1, 1 << 16, False),
    "llm.inter_token_target_ms": (1, 600_000, False),
    "llm.num_kv_tokens": (0, 1 << 31, False),
    "llm.swap_space_bytes": (-1, 1 << 40, False),
    "llm.num_threads": (0, 1024, False),
    # the ranges of the API (edgerun/server/openai.py)
    "llm.sampling.temperature": (0, 2, False),
    "llm.sampling.top_p": (0, 1, True),
    "llm.sampling.top_k": (0, 1 << 31, False),
    "llm.sampling.min_p": (0, 1, False),
    "llm.sampling.repetition_penalty": (0, 100, True),
    "vision.max_batch_size": (1, 4096, False),
    "vision.top_k": (1, 1 << 20, False),
    "vision.num_threads": (0, 1024, False),
    "vision.preprocess.width_px": (1, 16384, False),
    "vision.preprocess.height_px": (1, 16384, False),
    "vision.preprocess.crop_fraction": (0, 1, True),
    "vision.dynamic_batching.preferred_batch_size": (1, 4096, False),
    "vision.dynamic_batching.max_queue_delay_microseconds": (0, 60_000_000, False),
    "vision.dynamic_batching.max_queue_size": (1, 1 << 20, False),
    "version_policy.latest": (1, 1 << 31, False),
}


def read_config(path: Path) -> ModelConfig:
    """Parse and check a model's config.toml. Raises ConfigError naming the file and the key."""
    return parse_config(read_text(path, _MAX_CONFIG_BYTES), str(path))


def parse_config(text: str, file: str) -> ModelConfig:
    """As read_config, from text; `file` names it in errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", file=file) from error
    _check_keys(data, ModelConfig, "", file)
    try:
        config = msgspec.convert(data, ModelConfig)
    except msgspec.ValidationError as error:
        raise _readable(error, file) from error
    _check_tables(data, config, file)
    _check_ranges(config, file)
    _check_versions(config, file)
    return config


def bad_key(file: str, key: str, what: str) -> ConfigError:
    return ConfigError(f"{file}: {key}: {what}", file=file, key=key)


def nearest(word: str, known: list[str]) -> str:
    """The most similar of `known`; "" where none is similar."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return found[0] if found else ""


def _check_keys(data: Mapping[str, Any], cls: Any, where: str, file: str) -> None:
    """Every key of `data`, and of tables within, must be a field of the type that it becomes."""
    hints = get_type_hints(cls)
    known = [*hints, "type"] if issubclass(cls, Source) else list(hints)
    for key, value in data.items():
        full = f"{where}{key}"
        if key not in known:
            similar = nearest(key, known)
            hint = f"did you mean {where}{similar}?" if similar else f"known here: {', '.join(known)}"
            raise bad_key(file, full, f"unknown key; {hint}")
        if key in hints:
            _check_nested(value, hints[key], full, file)


def _check_nested(value: Any, hint: Any, full: str, file: str) -> None:
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        _check_keys(value, hint, f"{full}.", file)
    elif get_origin(hint) is tuple and isinstance(value, list):
        item = get_args(hint)[0]
        for index, entry in enumerate(value):
            if isinstance(entry, dict):
                _check_keys(entry, _source_class(entry, full, file) if item == AnySource else item,
                            f"{full}[{index}].", file)  # fmt: skip


def _source_class(entry: Mapping[str, Any], full: str, file: str) -> type[Source]:
    classes: dict[str, type[Source]] = {cls.__struct_config__.tag: cls for cls in get_args(AnySource)}
    kind = entry.get("type")
    if kind not in classes:
        raise bad_key(file, f"{full}.type", f"is {kind!r}; one of: {', '.join(classes)}")
    return classes[kind]


def _readable(error: msgspec.ValidationError, file: str) -> ConfigError:
    """msgspec's message has the form "what - at `$.a.b[0]`"; the key comes first in ours."""
    what, _, at = str(error).partition(" - at `$")
    key = at.rstrip("`").lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(.+)`", what)
    if missing is not None:
        key, what = f"{key}.{missing[1]}".lstrip("."), "is missing"
    key = key or CONFIG_NAME
    hint: Any = ModelConfig
    for part in re.findall(r"[a-z_0-9]+", re.sub(r"\[[^]]*\]", "", key)):
        hint = get_type_hints(hint).get(part) if dataclasses.is_dataclass(hint) else None
    if get_origin(hint) is Literal:
        return bad_key(file, key, f"{what[0].lower()}{what[1:]}; one of: {', '.join(get_args(hint))}")
    return bad_key(file, key, what[0].lower() + what[1:])


def _check_tables(data: Mapping[str, Any], config: ModelConfig, file: str) -> None:
    other = "vision" if config.kind == "llm" else "llm"
    if other in data:
        raise bad_key(
            file, other, f'kind = "{config.kind}" takes no [{other}] table; remove it or change kind'
        )
    policy = data.get("version_policy", {})
    if "latest" in policy and "specific" in policy:
        raise bad_key(file, "version_policy", "give latest or specific, not both")
    if policy.get("specific") == []:
        raise bad_key(file, "version_policy.specific", "names no version, so nothing could be served")


def _check_ranges(config: ModelConfig, file: str) -> None:
    for key, (least, most, is_open) in _RANGES.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if not (least < value if is_open else least <= value) or value > most:
            above = "above" if is_open else "from"
            raise bad_key(file, key, f"is {value}; it must be {above} {least} and at most {most}")
    preprocess = config.vision.preprocess
    if not all(math.isfinite(value) for value in (*preprocess.mean, *preprocess.std)):
        raise bad_key(file, "vision.preprocess", "mean and std must be finite numbers")
    if 0 in preprocess.std:
        raise bad_key(
            file, "vision.preprocess.std", f"is {list(preprocess.std)}; pixels are divided by it, so no 0"
        )


def _check_versions(config: ModelConfig, file: str) -> None:
    seen: set[int] = set()
    for index, version in enumerate(config.versions):
        at = f"versions[{index}]"
        if version.version < 1:
            raise bad_key(file, f"{at}.version", f"is {version.version}; versions count from 1")
        if version.version in seen:
            raise bad_key(file, f"{at}.version", f"{version.version} is there twice")
        seen.add(version.version)
        if version.size_bytes < 0:
            raise bad_key(file, f"{at}.size_bytes", f"is {version.size_bytes}; it must not be negative")
        if version.sha256 and not _SHA256.fullmatch(version.sha256):
            raise bad_key(file, f"{at}.sha256", "must be 64 hexadecimal digits in lower case")
        # The name is joined to the model's folder: it must not lead out of it.
        if version.file and (not _PLAIN_FILE.fullmatch(version.file) or version.file.startswith(".")):
            raise bad_key(file, f"{at}.file", f"is {version.file!r}; it must be a plain file name")
        suffix = ".gguf" if config.kind == "llm" else ".onnx"
        if version.file and Path(version.file).suffix.lower() != suffix:
            raise bad_key(
                file, f"{at}.file", f'is {version.file!r}; kind = "{config.kind}" needs a {suffix} file'
            )
        fetched = [source for source in version.sources if not isinstance(source, FileSource)]
        if fetched and is_shard(Path(version.file)):
            raise bad_key(
                file, f"{at}.sources", "a split model can only be added by its file, not pulled yet"
            )
        for number, source in enumerate(version.sources):
            _check_source(source, f"{at}.sources[{number}]", file)


def _check_source(source: AnySource, at: str, file: str) -> None:
    for name, value in msgspec.structs.asdict(source).items():
        if not value:
            raise bad_key(file, f"{at}.{name}", "is empty")
    if isinstance(source, UrlSource) and not source.url.startswith(("http://", "https://")):
        raise bad_key(file, f"{at}.url", f"is {source.url!r}; it must begin with https:// or http://")
    if isinstance(source, WheelSource):
        # Both become words of pip's command line.
        for name, value in (("package", source.package), ("version", source.version)):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", value):
                raise bad_key(file, f"{at}.{name}", f"is {value!r}; letters, digits and . _ - only")
