"""llama-cpp-python's sdist: fetched with pip's own settings, checked, and the C++ part unpacked."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from edgerun.errors import NativeLibraryMissing
from edgerun.native import LLAMA_CPP_PYTHON, SDIST_SHA256
from edgerun.native.commands import Report, Runner, run_step

REQUIREMENT = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"

# Three quarters of the sdist's 176 MB, none of it used by the target `llama`.
_UNUSED_FOLDERS = frozenset({"benches", "docs", "examples", "media", "models", "tests", "tools"})


def pip_command() -> list[str]:
    """pip of this interpreter. Raises NativeLibraryMissing where the environment was made without it."""
    if importlib.util.find_spec("pip") is None:
        raise NativeLibraryMissing(
            f"{sys.executable} has no pip, which fetches llama.cpp's sources:"
            f" run `{sys.executable} -m ensurepip`"
        )
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def fetch_sdist(
    folder: Path, *, runner: Runner, log: Path, report: Report, sha256: str = SDIST_SHA256
) -> Path:
    """The sdist in folder, downloaded (77 MB) unless it is there already.

    Raises NativeLibraryMissing when pip cannot get it, or gets a file with another sha256.
    """
    name = f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
    kept = folder / name
    if kept.is_file() and _sha256(kept) == sha256:
        return kept
    report("fetching llama.cpp's sources (77 MB)", 0, 0)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        command = [*pip_command(), "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        run_step(
            runner,
            f"fetching {REQUIREMENT}",
            [*command, "--dest", scratch, REQUIREMENT],
            log=log,
            # pip asks the sdist for its metadata: no settings of the user's may turn that into a build.
            env={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"},
        )
        fetched = Path(scratch) / name
        if not fetched.is_file():
            raise NativeLibraryMissing(f"pip fetched no {name}; its log is {log}", log=str(log))
        actual = _sha256(fetched)
        if actual != sha256:
            raise NativeLibraryMissing(
                f"the sources of {REQUIREMENT} have sha256 {actual}, expected {sha256}:"
                " the package index serves another file; check pip's index settings",
                sha256=actual,
            )
        fetched.replace(kept)
    return kept


def unpack_llama_cpp(sdist: Path, target: Path) -> Path:
    """Unpack what the target `llama` needs of vendor/llama.cpp into target; returns the source folder."""
    prefix = PurePosixPath(f"llama_cpp_python-{LLAMA_CPP_PYTHON}/vendor/llama.cpp")
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if (
                not path.is_relative_to(prefix)
                or ".." in path.parts
                or not (member.isfile() or member.isdir())
            ):
                continue
            inside = path.relative_to(prefix)
            if inside.parts and (inside.parts[0] in _UNUSED_FOLDERS or inside.parts[0].startswith(".")):
                continue
            member.name = inside.as_posix()
            # Interpreters from before the filter argument (3.10.11, 3.11.3) lack it; 3.12 warns without.
            if hasattr(tarfile, "data_filter"):
                archive.extract(member, target, filter="data")
            else:
                archive.extract(member, target)
    if not (target / "CMakeLists.txt").is_file():
        raise NativeLibraryMissing(f"{sdist} holds no {prefix}: delete it and try again", path=str(sdist))
    return target


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
