"""Finds models on the search path and their weights on the disk. Changes nothing.

A model is a folder `<name>/` with a config.toml, or with `<version>/model.gguf|model.onnx` alone. Weights lie
beside the config, or under the same name in the store, where pulls put them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgerun.errors import ConfigError, EdgerunError, ModelNotFound
from edgerun.repository.config_file import (
    CONFIG_NAME,
    FileSource,
    ModelConfig,
    VersionConfig,
    nearest,
    read_config,
)
from edgerun.repository.gguf_file import GgufSummary, is_later_shard
from edgerun.repository.inspection import PATH_SUFFIXES, Summary, check_structure, infer_vision_settings
from edgerun.repository.onnx_file import OnnxSummary
from edgerun.repository.spec import ModelKind

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION_FOLDER = re.compile(r"[1-9][0-9]{0,8}")
_SUFFIXES: dict[ModelKind, str] = {"llm": ".gguf", "vision": ".onnx"}


def is_safe_name(name: str) -> bool:
    """Names become folders: nothing else may ever be joined to a path.

    None ends like a model file, so that a text is either a name or a path and never both.
    """
    return _SAFE_NAME.fullmatch(name) is not None and not name.lower().endswith(PATH_SUFFIXES)


@dataclass(slots=True)
class Inspector:
    """check_structure with a memory: a file that did not change is read once."""

    _seen: dict[tuple[str, int, int], Summary] = field(default_factory=dict)

    def __call__(self, path: Path) -> Summary:
        try:
            stat = path.stat()
        except OSError:
            return check_structure(path)  # raises, with the right sentence
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._seen:
            summary = check_structure(path)
            # Other parts may change without this file: what has several is read each time.
            has_parts = summary.data_files if isinstance(summary, OnnxSummary) else summary.files[1:]
            if has_parts:
                return summary
            self._seen[key] = summary
        return self._seen[key]


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its config. store_folder: where its pulled weights and its state lie."""

    name: str
    folder: Path
    store_folder: Path
    config: ModelConfig

    def declared(self, version: int) -> VersionConfig:
        """What the config says of a version; empty settings for one that is only on the disk."""
        found = (entry for entry in self.config.versions if entry.version == version)
        return next(found, VersionConfig(version))

    def target(self, version: int) -> Path:
        """Where a pull puts the weights."""
        file = self.declared(version).file or f"model{_SUFFIXES[self.config.kind]}"
        return self.store_folder / str(version) / file

    def references(self, version: int) -> list[Path]:
        """The user's own files that the config points at, used where they lie."""
        sources = self.declared(version).sources
        paths = (Path(source.path).expanduser() for source in sources if isinstance(source, FileSource))
        return [self.folder / path for path in paths]

    def weights(self, version: int) -> Path | None:
        """The file of a version on this machine. Raises ConfigError where it cannot be told which it is."""
        for path in self.references(version):
            if path.is_file():
                return path.absolute()
        file = self.declared(version).file
        for base in dict.fromkeys((self.folder, self.store_folder)):
            folder = base / str(version)
            found = folder / file if file else find_weights(folder, _SUFFIXES[self.config.kind])
            if found is not None and found.is_file():
                return found.absolute()
        return None

    def present(self) -> dict[int, Path]:
        """version -> weights, of all that are on this machine."""
        numbers = {entry.version for entry in self.config.versions}
        for base in {self.folder, self.store_folder}:
            numbers.update(version_folders(base))
        found = {version: self.weights(version) for version in sorted(numbers, reverse=True)}
        return {version: path for version, path in found.items() if path is not None}


def version_folders(folder: Path) -> list[int]:
    """The numbers of the version folders of a model, newest first."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []
    return sorted((int(name) for name in names if _VERSION_FOLDER.fullmatch(name)), reverse=True)


def find_weights(folder: Path, suffix: str) -> Path | None:
    """`model<suffix>` of a version folder, else the only model there. Partial downloads never count."""
    preferred = folder / f"model{suffix}"
    if preferred.is_file():
        return preferred
    try:
        files = [path for path in folder.iterdir() if path.suffix.lower() == suffix and path.is_file()]
    except OSError:
        return None
    candidates = [path for path in files if not is_later_shard(path)] or files
    candidates = [path for path in candidates if not path.name.startswith(".")]
    if len(candidates) > 1 and not all(is_later_shard(path) for path in candidates):
        names = ", ".join(sorted(path.name for path in candidates))
        raise ConfigError(
            f"{folder} holds several models ({names}); say which in {CONFIG_NAME} (versions.file)"
        )
    return min(candidates, default=None)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The search path. A folder of the store without a config can be the weights of another root's model."""

    roots: tuple[Path, ...]
    store: Path
    inspect: Inspector = field(default_factory=Inspector)

    @classmethod
    def of(cls, search_path: Sequence[Path], store: Path) -> Catalog:
        return cls(tuple(dict.fromkeys(path.absolute() for path in search_path)), store.absolute())

    def names(self) -> list[str]:
        found: set[str] = set()
        for root in self.roots:
            try:
                found.update(entry.name for entry in root.iterdir() if is_safe_name(entry.name))
            except OSError:
                continue  # a root that is not there holds no models
        return sorted(name for name in found if self.find(name) is not None)

    def find(self, name: str) -> Path | None:
        """The folder that defines the model: of the first root that has it."""
        if not is_safe_name(name):
            return None
        weights_only: Path | None = None
        for root in self.roots:
            folder = root / name
            if (folder / CONFIG_NAME).is_file():
                return folder
            if weights_only is None and _holds_weights(folder):
                if root != self.store:
                    return folder
                weights_only = folder
        return weights_only

    def folder(self, name: str) -> Path:
        """As find. Raises ModelNotFound naming the nearest."""
        folder = self.find(name)
        if folder is None:
            names = self.names()
            similar = nearest(name, names)
            hint = f"did you mean {similar}?" if similar else f"there is: {', '.join(names) or 'none yet'}"
            raise ModelNotFound(f"no model named {name[:200]!r}; {hint}", name=name[:200])
        return folder

    def load(self, name: str) -> Model:
        """Raises ModelNotFound, ConfigError; InvalidModelFile for a bad file in a folder without config."""
        folder = self.folder(name)
        path = folder / CONFIG_NAME
        try:
            config = read_config(path) if path.is_file() else self._infer(folder)
        except EdgerunError as error:
            error.details.setdefault("name", name)
            raise
        return Model(name, folder, self.store / name, config)

    def guess_kind(self, folder: Path) -> ModelKind:
        """For a model whose config cannot be read."""
        return "vision" if any(folder.glob("*/*.onnx")) else "llm"

    def _infer(self, folder: Path) -> ModelConfig:
        """Settings of a folder without config.toml, from its newest version's file."""
        for version in version_folders(folder):
            found = [find_weights(folder / str(version), suffix) for suffix in _SUFFIXES.values()]
            files = [path for path in found if path is not None]
            if len(files) > 1:
                raise ConfigError(f"{files[0].parent} holds a .gguf and an .onnx file; write a {CONFIG_NAME}")
            if files:
                return self.infer_from_file(files[0], folder)
        raise ConfigError(f"{folder} has neither a {CONFIG_NAME} nor <version>/model.gguf or model.onnx")

    def infer_from_file(self, path: Path, folder: Path | None = None) -> ModelConfig:
        """A config without versions. folder: a second place where labels may lie. Raises InvalidModelFile."""
        summary = self.inspect(path)
        if isinstance(summary, GgufSummary):
            return ModelConfig("llm", description=describe(summary), license=summary.license)
        return ModelConfig("vision", vision=infer_vision_settings(path, summary, folder).settings)


def describe(summary: GgufSummary) -> str:
    """One line from the header of a language model."""
    size = f"{summary.num_parameters / 1e6:.0f}M parameters" if summary.num_parameters else ""
    parts = (summary.name or summary.architecture, size, summary.quantization)
    return ", ".join(part for part in parts if part)


def _holds_weights(folder: Path) -> bool:
    return any(
        path.suffix.lower() in _SUFFIXES.values()
        for version in version_folders(folder)
        for path in (folder / str(version)).iterdir()
    )
