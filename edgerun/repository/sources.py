"""Brings one version's weights onto this machine: sources in order, checked, the final name at last.

Owns what lies in `<store>/<name>/<version>/` while a pull runs. Does not know search paths or policies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgerun.errors import HashMismatch, InvalidModelFile, PullFailed
from edgerun.repository.config_file import (
    AnySource,
    FileSource,
    HuggingFaceSource,
    UrlSource,
    VersionConfig,
    WheelSource,
)
from edgerun.repository.files import Progress, disk_errors, publish, sha256_file
from edgerun.repository.http_download import HttpDownload, Stream, http_stream
from edgerun.repository.inspection import check_structure
from edgerun.repository.wheel import RunPip, WheelDownload, run_pip

logger = logging.getLogger(__name__)


def describe_source(source: AnySource) -> str:
    """One word or two for lists and errors."""
    if isinstance(source, HuggingFaceSource):
        return f"Hugging Face {source.repo}/{source.filename}"
    if isinstance(source, WheelSource):
        return f"wheel {source.package}=={source.version}"
    return source.url if isinstance(source, UrlSource) else f"file {source.path}"


@dataclass(frozen=True, slots=True)
class Fetcher:
    """The outside world of a pull; tests give their own."""

    stream: Stream = http_stream
    run_pip: RunPip = run_pip
    sleep: Callable[[float], None] = time.sleep

    def fetch(self, name: str, version: VersionConfig, target: Path, progress: Progress) -> None:
        """Make `target` from the first source that gives the right file.

        Raises PullFailed that names every source and what went wrong with it; HashMismatch where the last
        word was a wrong file; at once, without trying the rest, where this machine's disk is the reason.
        """
        if not version.sources:
            raise PullFailed(
                f"{name} version {version.version} has no source to pull from; put the file at {target}",
                name=name,
            )
        failures: list[PullFailed] = []
        for source in version.sources:
            try:
                return self._from_source(version, source, target, progress)
            except PullFailed as error:
                if error.details.get("is_local"):
                    raise
                logger.info("%s: %s failed: %s", name, describe_source(source), error)
                failures.append(error)
        if len(failures) == 1:
            cls = type(failures[0])
            raise cls(f"cannot pull {name}: {failures[0]}", **{**failures[0].details, "name": name})
        tried = "; ".join(
            f"{describe_source(source)}: {error}"
            for source, error in zip(version.sources, failures, strict=True)
        )
        cls = HashMismatch if all(isinstance(error, HashMismatch) for error in failures) else PullFailed
        raise cls(f"cannot pull {name}: all {len(failures)} sources failed: {tried}", name=name)

    def _from_source(
        self, version: VersionConfig, source: AnySource, target: Path, progress: Progress
    ) -> None:
        partial = target.with_name(f"{target.name}.partial")
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, FileSource):
            raise PullFailed(
                f"the file {source.path} is not there; bring it back, or change its path in config.toml"
            )
        if isinstance(source, WheelSource):
            folder = target.parent / ".wheel"
            found = WheelDownload(source, folder, partial, version.size_bytes).run(self.run_pip, progress)
            self._accept(version, partial, target, found)
            return
        url, headers = (source.url, {}) if isinstance(source, UrlSource) else _hub_address(source)
        download = HttpDownload(url, partial, version.size_bytes, bool(version.sha256), headers)
        was_resumed = download.run(self.stream, progress, self.sleep)
        try:
            self._accept(version, partial, target, sha256_file(partial, progress))
        except HashMismatch:
            if not was_resumed:
                raise
            # The part of an earlier run was of another file: once more, from the beginning.
            download.run(self.stream, progress, self.sleep)
            self._accept(version, partial, target, sha256_file(partial, progress))

    def _accept(self, version: VersionConfig, partial: Path, target: Path, found: str) -> None:
        """Check what arrived and give it its name; remove it where it is wrong."""
        try:
            if version.sha256 and found != version.sha256:
                raise HashMismatch(
                    f"what arrived has sha256 {found}, config.toml says {version.sha256}; it was deleted",
                    found=found,
                    expected=version.sha256,
                )
            if not version.sha256:
                logger.warning("%s: config.toml names no sha256, only the structure was checked", target)
            check_structure(partial, target.suffix)
        except InvalidModelFile as error:
            partial.unlink(missing_ok=True)
            raise PullFailed(f"what arrived is no model: {error}") from error
        except HashMismatch:
            partial.unlink(missing_ok=True)
            raise
        with disk_errors(target):
            publish(partial, target)


def _hub_address(source: HuggingFaceSource) -> tuple[str, dict[str, str]]:
    """URL and headers as the user's own Hugging Face settings have it: HF_ENDPOINT, token, offline mode."""
    from huggingface_hub import constants, get_token, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        raise PullFailed("HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked")
    url = hf_hub_url(source.repo, source.filename, revision=source.revision)
    token = get_token()
    return url, {"Authorization": f"Bearer {token}"} if token else {}
