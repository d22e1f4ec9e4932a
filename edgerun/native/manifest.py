"""`manifest.json`: what a folder of native libraries is, written when it is built and read at every start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from edgerun.errors import NativeLibraryMissing

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """cpu_flags are the instructions the build may use: empty means that it runs on any CPU of `machine`."""

    flavour: str
    provider: str  # "cpu" or "cuda"
    llama_cpp_python: str  # the Python layer these libraries belong to
    machine: str  # platform.machine()
    cpu_flags: tuple[str, ...]
    compute_capabilities: tuple[str, ...]  # "8.7"; empty for cpu
    cuda_version: str | None  # "12.6": libraries of another major version cannot be loaded
    cmake_args: tuple[str, ...]
    built_at: str  # ISO 8601, UTC
    sha256: Mapping[str, str]  # file name -> hash; links are not listed


def hash_libraries(folder: Path) -> dict[str, str]:
    """sha256 of every library in folder, links left out."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.glob("*.so*"))
        if not file.is_symlink()
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises NativeLibraryMissing when the file is absent, cut off or of another shape."""
    file = folder / MANIFEST_NAME
    try:
        raw = json.loads(file.read_text())
        return Manifest(
            flavour=str(raw["flavour"]),
            provider=str(raw["provider"]),
            llama_cpp_python=str(raw["llama_cpp_python"]),
            machine=str(raw["machine"]),
            cpu_flags=tuple(map(str, raw["cpu_flags"])),
            compute_capabilities=tuple(map(str, raw["compute_capabilities"])),
            cuda_version=None if raw["cuda_version"] is None else str(raw["cuda_version"]),
            cmake_args=tuple(map(str, raw["cmake_args"])),
            built_at=str(raw["built_at"]),
            sha256={str(name): str(value) for name, value in raw["sha256"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NativeLibraryMissing(
            f"{file} cannot be read as a manifest ({type(error).__name__}: {error}): delete that folder"
            " and build it again",
            path=str(file),
        ) from error
