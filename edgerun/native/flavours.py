"""Finding the folder of llama.cpp libraries that fits this machine.

Owns the search order and the rules of fit. Does not build anything and does not load a library: whether a
CUDA build really runs is for the device probe to try.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgerun import paths
from edgerun.errors import NativeLibraryMissing
from edgerun.native import LLAMA_CPP_PYTHON
from edgerun.native.cpu_flags import read_instruction_flags
from edgerun.native.manifest import MANIFEST_NAME, Manifest, hash_libraries, read_manifest

LIBRARY_NAME = "libllama.so"


@dataclass(frozen=True, slots=True)
class NativeFlavour:
    """path is what LLAMA_CPP_LIB_PATH has to be; origin says in words where it was found."""

    name: str
    path: Path
    origin: str


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere to look. is_trusted: a folder without a manifest counts, the user or a wheel put it there."""

    folder: Path
    origin: str
    is_trusted: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What the rules of fit need to know of this machine."""

    architecture: str
    cpu_flags: frozenset[str]
    llama_cpp_python: str  # version of the installed Python layer

    @classmethod
    def read(cls) -> Machine:
        try:
            version = importlib.metadata.version("llama-cpp-python")
        except importlib.metadata.PackageNotFoundError:
            version = LLAMA_CPP_PYTHON
        return cls(platform.machine(), read_instruction_flags(), version)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that holds libllama. manifest is None where a trusted folder has none.

    problem says why it cannot be used on this machine, whatever the GPU.
    """

    flavour: NativeFlavour
    provider: str
    manifest: Manifest | None
    problem: str | None


def cpu_cache_dir() -> Path:
    """Where builds of this user for this version of llama.cpp are kept."""
    return paths.cache_dir() / "native" / LLAMA_CPP_PYTHON


def search_places() -> tuple[Place, ...]:
    """EDGERUN_NATIVE_DIR, the system's runtimes, the user's builds, then what is inside a full wheel."""
    places: list[Place] = []
    named = os.environ.get("EDGERUN_NATIVE_DIR", "")
    if named:
        places.append(Place(Path(named).expanduser(), "EDGERUN_NATIVE_DIR", is_trusted=True))
    places.append(Place(Path("/usr/lib/edgerun/runtimes"), "system package"))
    places.append(Place(Path("/var/lib/edgerun/runtimes"), "system runtimes"))
    places.append(Place(cpu_cache_dir(), "built on this machine"))
    bundled = _bundled_dir()
    if bundled is not None:
        places.append(Place(bundled, "inside the llama-cpp-python wheel", is_trusted=True))
    return tuple(places)


def candidates(places: Sequence[Place] | None = None, machine: Machine | None = None) -> list[Candidate]:
    """Every folder with libraries, in search order; none is loaded."""
    machine = machine or Machine.read()
    found: list[Candidate] = []
    for place in search_places() if places is None else places:
        folders = [place.folder]
        if place.folder.is_dir():  # folders that start with a dot are builds under way
            folders += sorted(p for p in place.folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        for folder in folders:
            has_manifest = (folder / MANIFEST_NAME).is_file()
            if has_manifest or (place.is_trusted and (folder / LIBRARY_NAME).is_file()):
                found.append(_inspect(folder, place.origin, has_manifest, machine))
    return found


def find(
    provider: str,
    compute_capability: str | None = None,
    *,
    cuda_version: str | None = None,
    places: Sequence[Place] | None = None,
    machine: Machine | None = None,
) -> NativeFlavour:
    """The first flavour for provider ("cpu" or "cuda") that fits this machine.

    compute_capability as NVIDIA writes it ("8.7"); cuda_version of the driver ("12.6"), whose major version
    must be the build's. Raises NativeLibraryMissing with the reason of every folder that did not fit and what
    to run.
    """
    rejected: list[str] = []
    for candidate in candidates(places, machine):
        if candidate.provider != provider:
            continue
        problem = candidate.problem or _gpu_mismatch(candidate.manifest, compute_capability, cuda_version)
        if problem is None:
            return candidate.flavour
        rejected.append(f"{candidate.flavour.path} {problem}")
    looked = "; ".join(rejected) or "none was found"
    raise NativeLibraryMissing(
        f"llama.cpp's {provider} libraries are not on this machine ({looked}): "
        f"{_what_to_do(provider, compute_capability)}",
        provider=provider,
        compute_capability=compute_capability,
    )


def verify(flavour: NativeFlavour) -> str | None:
    """What is wrong with the files of a flavour that has a manifest, or None. Hashes some 10 MB."""
    if not (flavour.path / MANIFEST_NAME).is_file():
        return None
    expected = read_manifest(flavour.path).sha256
    actual = hash_libraries(flavour.path)
    changed = sorted(name for name, value in expected.items() if actual.get(name) != value)
    return f"has files that are missing or changed: {', '.join(changed)}" if changed else None


def ensure_command() -> str:
    """What a user types to get the CPU libraries."""
    return f"{python_command()} ensure"


def python_command() -> str:
    """This package's own command; the interpreter is named in full, since `python` may be another."""
    return f"{shlex.quote(sys.executable)} -m edgerun.native"


def _bundled_dir() -> Path | None:
    """The library folder of an installed full wheel; the package is not imported, that would load it."""
    spec = importlib.util.find_spec("llama_cpp")
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "lib"
        if (folder / LIBRARY_NAME).is_file():
            return folder
    return None


def _inspect(folder: Path, origin: str, has_manifest: bool, machine: Machine) -> Candidate:
    if not has_manifest:
        provider = "cuda" if (folder / "libggml-cuda.so").exists() else "cpu"
        return Candidate(NativeFlavour(provider, folder, origin), provider, None, None)
    try:
        manifest = read_manifest(folder)
    except NativeLibraryMissing as error:
        # Both providers must hear of a folder that cannot be read; the name is the best guess there is.
        provider = folder.name.partition("-")[0].rstrip("0123456789")
        return Candidate(NativeFlavour(folder.name, folder, origin), provider, None, error.message)
    flavour = NativeFlavour(manifest.flavour, folder, origin)
    return Candidate(flavour, manifest.provider, manifest, _machine_mismatch(folder, manifest, machine))


def _machine_mismatch(folder: Path, manifest: Manifest, machine: Machine) -> str | None:
    if manifest.llama_cpp_python != machine.llama_cpp_python:
        return (
            f"belongs to llama-cpp-python {manifest.llama_cpp_python},"
            f" installed is {machine.llama_cpp_python}"
        )
    if manifest.machine != machine.architecture:
        return f"was built for {manifest.machine}, this machine is {machine.architecture}"
    lacking = sorted(set(manifest.cpu_flags) - machine.cpu_flags)
    if lacking:
        return f"was built on another CPU and uses instructions that this one lacks ({', '.join(lacking)})"
    if not (folder / LIBRARY_NAME).is_file():
        return f"has no {LIBRARY_NAME}"
    return None


def _gpu_mismatch(
    manifest: Manifest | None, compute_capability: str | None, cuda_version: str | None
) -> str | None:
    if manifest is None or manifest.provider == "cpu":
        return None
    if compute_capability is not None and compute_capability not in manifest.compute_capabilities:
        has = ", ".join(manifest.compute_capabilities)
        return f"is built for compute capability {has}, this GPU is {compute_capability}"
    if cuda_version and manifest.cuda_version:
        wanted, here = manifest.cuda_version.partition(".")[0], cuda_version.partition(".")[0]
        if wanted != here:
            return f"needs CUDA {wanted}, this machine has CUDA {cuda_version}"
    return None


def _what_to_do(provider: str, compute_capability: str | None) -> str:
    if provider == "cpu":
        return f"run `{ensure_command()}` (compiles once, some minutes)"
    architecture = (compute_capability or "").replace(".", "") or "native"
    return (
        "build llama.cpp with -DBUILD_SHARED_LIBS=ON -DGGML_CUDA=ON"
        f" -DCMAKE_CUDA_ARCHITECTURES={architecture}"
        " and set EDGERUN_NATIVE_DIR to the folder of its libraries"
    )
