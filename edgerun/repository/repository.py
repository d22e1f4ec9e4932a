"""The model repository: which models there are, and getting one ready to load.

The one door for server and command line. Methods are safe to call from several threads and processes: what
changes files holds the model's lock, and everything that is read is read anew.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from edgerun import paths
from edgerun.errors import (
    EdgerunError,
    HashMismatch,
    InvalidModelFile,
    ModelError,
    ModelNotFound,
    ModelNotPulled,
)
from edgerun.repository import adding, resolving, versions
from edgerun.repository.catalog import Catalog, Model, is_safe_name
from edgerun.repository.config_file import CONFIG_NAME, parse_config
from edgerun.repository.entries import ModelEntry, Removed, VerifyResult, VersionInfo
from edgerun.repository.files import Progress, disk_errors, locked, no_progress, sha256_file, write_atomically
from edgerun.repository.resolving import active_version, as_path, known_versions
from edgerun.repository.sources import Fetcher
from edgerun.repository.spec import ModelSpec

__all__ = ["ModelEntry", "Removed", "Repository", "VerifyResult", "VersionInfo", "default_repository"]

logger = logging.getLogger(__name__)


class Repository:
    """search_path: roots in order, the first that has a name wins. store: where pulls and `add` write."""

    def __init__(self, search_path: Sequence[Path], store: Path, fetcher: Fetcher | None = None) -> None:
        self._catalog = Catalog.of(search_path, store)
        self._fetcher = fetcher or Fetcher()

    # ---- what there is

    def list(self) -> list[ModelEntry]:
        """All models by name. One with a broken config is there too, with its error."""
        entries = []
        for name in self._catalog.names():
            try:
                entries.append(self.get(name))
            except EdgerunError as error:
                folder = self._catalog.folder(name)
                kind = self._catalog.guess_kind(folder)
                entries.append(ModelEntry(name, kind, folder=str(folder), error=error.message))
        return entries

    def get(self, name: str) -> ModelEntry:
        """Raises ModelNotFound naming the nearest, ConfigError, InvalidModelFile."""
        model = self._catalog.load(name)
        config, active, known = model.config, active_version(model), known_versions(model)
        shown = active or next(iter(versions.allowed(config.version_policy, known)), 0)
        return ModelEntry(
            name=name,
            kind=config.kind,
            task="chat" if config.kind == "llm" else config.vision.task,
            versions=tuple(known),
            is_pulled=active > 0,
            active_version=active,
            size_bytes=resolving.size_of(model, shown),
            license=config.license,
            description=config.description,
            source=resolving.source_words(model, shown),
            require=config.require,
            folder=str(model.folder),
        )

    def versions(self, name: str) -> tuple[VersionInfo, ...]:
        """Every version that is declared or on this machine, newest first."""
        model = self._catalog.load(name)
        present, active = model.present(), active_version(model)
        pinned = versions.read_state(model.store_folder).pinned
        return tuple(
            VersionInfo(
                version=version,
                is_pulled=version in present,
                is_active=version == active,
                is_pinned=version == pinned,
                size_bytes=resolving.size_of(model, version),
                source=resolving.source_words(model, version),
                path=str(present.get(version, "")),
            )
            for version in known_versions(model)
        )

    def details(self, name: str) -> tuple[tuple[str, str], ...]:
        """What the header of the active version's file says, as (word, value). Raises as resolve does."""
        return resolving.summary_details(self._catalog.inspect(Path(self.resolve(name).path)))

    # ---- ready to load

    def resolve(self, name: str, version: int | None = None) -> ModelSpec:
        """The spec of a model whose weights are here, checked for being whole (not for its hash: see verify).

        version: one that the policy serves; None: the active one. `name` may be the path of a .gguf or .onnx
        file: a server must not pass a client's text without `get`, which takes names only.
        Raises ModelNotFound, ModelNotPulled, InvalidModelFile, ConfigError.
        """
        path = as_path(name)
        if path is not None:
            config = self._catalog.infer_from_file(path)
            return resolving.build_spec(
                self._catalog.inspect, adding.name_of(path), config, 1, path.absolute()
            )
        try:
            model = self._catalog.load(name)
            chosen = active_version(model) if version is None else resolving.check_served(model, version)
            weights = model.present().get(chosen)
            if weights is None:
                raise resolving.not_pulled(model, chosen)
            return self._spec(model, chosen, weights)
        except InvalidModelFile as error:
            if name in error.message:
                raise
            # Every model's file is called model.gguf or model.onnx: say whose it is.
            raise InvalidModelFile(f"model {name}: {error.message}", **error.details) from error

    def _spec(self, model: Model, version: int, weights: Path) -> ModelSpec:
        return resolving.spec_of_model(self._catalog.inspect, model, version, weights)

    # ---- what changes files

    def pull(self, name: str, progress: Progress = no_progress, version: int | None = None) -> ModelSpec:
        """Fetch the weights of a version (None: the newest that the policy serves); what is there stays.

        progress is called from this thread; an exception from it stops the pull, and what arrived is kept so
        that the next pull resumes. A second pull of the model waits for the first. A newer version that
        arrives becomes the active one.
        """
        model = self._catalog.load(name)
        if version is None:
            declared = [entry.version for entry in model.config.versions]
            version = next(iter(versions.allowed(model.config.version_policy, declared)), None)
        elif version not in known_versions(model):
            there = resolving.shown(known_versions(model))
            raise ModelNotFound(f"{name} has no version {version}; there is: {there}", name=name)
        if version is None:  # nothing declared: a folder of the user's with the file in it, or nothing at all
            return self.resolve(name)
        with self._locked(name, progress):
            weights = model.weights(version)
            if weights == model.target(version) and resolving.is_stump(model, version, weights):
                logger.warning("%s has the wrong size; fetching it anew", weights)
                weights.unlink()
                weights = None
            if weights is None:
                weights = model.target(version)
                self._fetcher.fetch(name, model.declared(version), weights, progress)
                self._unpin_older(model, version)
        return self._spec(model, version, weights)

    def _unpin_older(self, model: Model, version: int) -> None:
        pinned = versions.read_state(model.store_folder).pinned
        if pinned and pinned < version:
            versions.write_state(model.store_folder, versions.VersionState())

    def add(self, path: Path, *, name: str | None = None, labels: Path | None = None) -> ModelEntry:
        """Make a .gguf or .onnx file a model, by reference. The entry's notes say what was assumed.

        Raises InvalidModelFile for a bad file, ModelError where the name is taken or not allowed.
        """
        chosen = name or adding.name_of(path)
        if not is_safe_name(chosen):
            raise ModelError(
                f"{chosen!r} cannot be a model's name: letters, digits and . _ - only", name=chosen
            )
        draft = adding.draft_config(path, labels)
        folder = self._catalog.store / chosen
        with self._locked(chosen, no_progress):
            taken = self._catalog.find(chosen)
            if taken is None:
                with disk_errors(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    write_atomically(folder / CONFIG_NAME, draft.text.encode())
                return replace(self.get(chosen), notes=draft.notes)
            if taken == folder and resolving.refers_to(
                self._catalog.load(chosen), parse_config(draft.text, CONFIG_NAME)
            ):
                note = f"it was added before; its config in {folder} stays as it is"
                return replace(self.get(chosen), notes=(note,))
            raise ModelError(
                f"there is a model named {chosen} already, in {taken}; choose another name (--name)",
                name=chosen,
            )

    def verify(self, name: str, progress: Progress = no_progress) -> VerifyResult:
        """Check the structure and, where one is known, the hash of a model or of a bare file.

        Raises InvalidModelFile or HashMismatch with one line; ModelNotPulled, ModelNotFound, ConfigError.
        """
        path = as_path(name)
        if path is not None:
            summary = self._catalog.inspect(path)
            details = resolving.summary_details(summary)
            return VerifyResult(path.name, 0, str(path.absolute()), summary.size_bytes, "", details)
        spec = self.resolve(name)
        found = sha256_file(Path(spec.path), progress) if spec.sha256 else ""
        if found != spec.sha256:
            raise HashMismatch(
                f"{spec.path} is damaged: its sha256 is {found}, config.toml says {spec.sha256}; run "
                f"`edgerun models rm {name}` and `edgerun models pull {name}`",
                name=name,
                found=found,
                expected=spec.sha256,
            )
        details = resolving.summary_details(self._catalog.inspect(Path(spec.path)))
        return VerifyResult(name, spec.version, spec.path, spec.size_bytes, found, details)

    def remove(self, name: str) -> Removed:
        """Delete what the store has of a model. Files that were added by reference stay where they are.

        Raises ModelError for a model that lies in another root: deleting that is not ours to do.
        """
        folder = self._catalog.folder(name)
        mine = self._catalog.store / name
        if not mine.exists():
            raise ModelError(
                f"nothing of {name} is in {self._catalog.store}; it is defined in {folder}, which stays",
                name=name,
            )
        with self._locked(name, no_progress), disk_errors(mine):
            if mine.is_symlink():  # what it points at is the user's
                mine.unlink()
                return Removed(name, 0, self._catalog.find(name) is None)
            freed = sum(path.lstat().st_size for path in mine.rglob("*") if not path.is_dir())
            shutil.rmtree(mine)
        return Removed(name, freed, self._catalog.find(name) is None)

    def rollback(self, name: str, to: int | None = None) -> int:
        """Serve the version before the active one (or `to`) from now on; returns it.

        Stays until undo_rollback or until a newer version is pulled. Raises ModelNotPulled if there is none.
        """
        with self._locked(name, no_progress):
            model = self._catalog.load(name)
            present = model.present()
            target = versions.previous(present, active_version(model)) if to is None else to
            if target not in present:
                there = resolving.shown([*present])
                wanted = "an earlier version" if to is None else f"version {to}"
                raise ModelNotPulled(
                    f"{name} does not have {wanted} on this machine to go back to; there is: {there}",
                    name=name,
                )
            with disk_errors(model.store_folder):
                versions.write_state(model.store_folder, versions.VersionState(pinned=target))
            return target

    def undo_rollback(self, name: str) -> int:
        """Let the version policy decide again; returns the version that is active then (0: none)."""
        with self._locked(name, no_progress):
            model = self._catalog.load(name)
            if versions.read_state(model.store_folder).pinned:
                with disk_errors(model.store_folder):
                    versions.write_state(model.store_folder, versions.VersionState())
            return active_version(model)

    def _locked(self, name: str, progress: Progress) -> AbstractContextManager[None]:
        if not is_safe_name(name):
            self._catalog.folder(name)  # raises ModelNotFound
        # Beside the models, not in their folders, which `remove` deletes.
        return locked(self._catalog.store / ".locks" / f"{name}.lock", progress)


def default_repository(extra: Sequence[Path] = ()) -> Repository:
    """The user's own repositories first, then the store, then what ships with edgerun."""
    store, shipped = paths.user_models_dir(), paths.shipped_models_dir()
    return Repository([*extra, store, *([shipped] if shipped else [])], store)
