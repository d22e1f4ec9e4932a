"""Compiling llama.cpp's CPU libraries, once for each machine and version.

Only the target `llama` is built (78 steps, against 193 of the wheel's own build), for this CPU's
instructions. The finished folder appears in the cache by one rename, so it is whole or not there; builds
that start at the same time wait for the first.
"""

from __future__ import annotations

import fcntl
import logging
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from edgerun import paths
from edgerun.errors import NativeLibraryMissing
from edgerun.native import LLAMA_CPP_PYTHON
from edgerun.native.commands import Report, Runner, run_logged, run_step
from edgerun.native.cpu_flags import read_instruction_flags
from edgerun.native.flavours import (
    LIBRARY_NAME,
    Machine,
    NativeFlavour,
    Place,
    cpu_cache_dir,
    find,
    python_command,
    search_places,
    verify,
)
from edgerun.native.manifest import Manifest, hash_libraries, write_manifest
from edgerun.native.sources import fetch_sdist, unpack_llama_cpp
from edgerun.native.toolchain import Tools, amx_off, find_tools, num_jobs, require_compiler

logger = logging.getLogger(__name__)

CMAKE_ARGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    # The libraries find each other wherever the folder is moved.
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
)

_CPU = "cpu"
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\]")
_NEEDED_BYTES = 600_000_000  # sdist 77 MB, sources 50 MB, objects and libraries 60 MB, cmake 100 MB, and room

# Measured on a core of 2023's servers (one compiler each on two cores: 98 s). Small boards take 4 times that.
_CORE_SECONDS_FAST, _CORE_SECONDS_SLOW = 200, 800


@dataclass(frozen=True, slots=True)
class BuildTools:
    """Who does the work outside this program; a test hands in its own."""

    runner: Runner = run_logged
    check_compiler: Callable[[], None] = require_compiler
    fetch_sources: Callable[..., Path] = fetch_sdist
    find_tools: Callable[..., Tools] = find_tools
    amx_off: Callable[[], tuple[str, ...]] = amx_off


def ensure_cpu(
    report: Report,
    *,
    places: tuple[Place, ...] | None = None,
    tools: BuildTools | None = None,
) -> NativeFlavour:
    """The CPU libraries for this machine, compiled if none are there that fit. The second call is instant.

    Says through report, before it starts, what will be compiled, how long that takes and why. Raises
    NativeLibraryMissing: no compiler, no room, no sources, or a failed build with the end of its log.
    Whatever ends it leaves no half-made folder.
    """
    cache = cpu_cache_dir()
    places = search_places() if places is None else places
    if (usable := _usable(places)) is not None:
        return usable
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".lock", report):
        if (usable := _usable(places)) is not None:  # another process built it while we waited
            return usable
        _compile_cpu(cache, report, tools or BuildTools())
    return find(_CPU, places=places)


def announcement(jobs: int) -> str:
    """What the user reads before a build starts."""
    low, high = (max(1, round(seconds / jobs / 60)) for seconds in (_CORE_SECONDS_FAST, _CORE_SECONDS_SLOW))
    return (
        f"compiling llama.cpp (of llama-cpp-python {LLAMA_CPP_PYTHON}) for this CPU, {jobs} files at a time:"
        f" about {low} to {high} minutes, this once; the result is kept in {cpu_cache_dir()}"
    )


def _usable(places: tuple[Place, ...]) -> NativeFlavour | None:
    try:
        flavour = find(_CPU, places=places)
    except NativeLibraryMissing as error:
        logger.info("%s", error.message)
        return None
    problem = verify(flavour)
    if problem is None:
        return flavour
    if flavour.path.parent != cpu_cache_dir():
        raise NativeLibraryMissing(
            f"{flavour.path} ({flavour.origin}) {problem}: put it there anew, or remove it",
            path=str(flavour.path),
        )
    logger.warning("%s %s: it is built again", flavour.path, problem)
    return None


def _compile_cpu(cache: Path, report: Report, tools: BuildTools) -> None:
    installed = Machine.read().llama_cpp_python
    if installed != LLAMA_CPP_PYTHON:
        raise NativeLibraryMissing(
            f"llama-cpp-python {installed} is installed, this edgerun needs {LLAMA_CPP_PYTHON}:"
            f" run `{python_command()} install`"
        )
    tools.check_compiler()
    free = shutil.disk_usage(cache).free
    if free < _NEEDED_BYTES:
        raise NativeLibraryMissing(
            f"compiling llama.cpp needs {_NEEDED_BYTES // 10**6} MB in {cache}, {free // 10**6} MB are free:"
            " make room, or set XDG_CACHE_HOME to a larger disk",
            free_bytes=free,
        )
    jobs = num_jobs()
    report(announcement(jobs), 0, 0)
    for stale in cache.glob(".build-*"):  # of a build that was killed: we hold the lock, so nobody uses it
        shutil.rmtree(stale, ignore_errors=True)
    log = cache / "cpu-build.log"
    log.write_text("")
    sdist = tools.fetch_sources(paths.cache_dir() / "sources", runner=tools.runner, log=log, report=report)
    scratch = Path(tempfile.mkdtemp(dir=cache, prefix=".build-"))
    try:
        finished = _build_in(scratch, sdist, log, jobs, report, tools)
        target = cache / _CPU
        if target.exists():  # damaged or of another CPU, else we would not be here
            target.replace(scratch / "old")
        finished.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    # Of no use any more: 77 MB that pip can fetch again, and 7 MB of compiler warnings.
    sdist.unlink(missing_ok=True)
    log.unlink()


def _build_in(scratch: Path, sdist: Path, log: Path, jobs: int, report: Report, tools: BuildTools) -> Path:
    """Configure, compile, and lay the finished folder out inside scratch."""
    report("unpacking", 0, 0)
    source = unpack_llama_cpp(sdist, scratch / "source")
    found = tools.find_tools(scratch, runner=tools.runner, log=log, report=report)
    build = scratch / "build"
    cmake_args = (*CMAKE_ARGS, *tools.amx_off())
    report("configuring", 0, 0)
    run_step(
        tools.runner,
        "configuring llama.cpp",
        [
            *(found.cmake, "-S", str(source), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={found.ninja}",
            *cmake_args,
        ],
        log=log,
        env=found.env,
    )

    def on_line(line: str) -> None:
        if (step := _NINJA_STEP.match(line)) is not None:
            report("compiling llama.cpp", int(step[1]), int(step[2]))

    run_step(
        tools.runner,
        "compiling llama.cpp",
        [found.ninja, "-C", str(build), "-j", str(jobs), "llama"],
        log=log,
        on_line=on_line,
        env={**found.env, "NINJA_STATUS": "[%f/%t] "},
    )
    return _lay_out(build / "bin", scratch / "finished", cmake_args, log)


def _lay_out(libraries: Path, folder: Path, cmake_args: tuple[str, ...], log: Path) -> Path:
    folder.mkdir()
    for file in libraries.glob("*.so*"):
        shutil.copy2(file, folder / file.name, follow_symlinks=False)
    if not (folder / LIBRARY_NAME).exists():
        raise NativeLibraryMissing(f"the build made no {LIBRARY_NAME}; its log is {log}", log=str(log))
    write_manifest(
        folder,
        Manifest(
            flavour=_CPU,
            provider=_CPU,
            # The sources, not what happens to be installed: `find` compares the two.
            llama_cpp_python=LLAMA_CPP_PYTHON,
            machine=platform.machine(),
            cpu_flags=tuple(sorted(read_instruction_flags())),
            compute_capabilities=(),
            cuda_version=None,
            cmake_args=cmake_args,
            built_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            sha256=hash_libraries(folder),
        ),
    )
    return folder


@contextmanager
def _locked(file: Path, report: Report) -> Iterator[None]:
    """Hold an exclusive lock on file; says so when it has to wait. The kernel frees it if we are killed."""
    with file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another edgerun that compiles llama.cpp", 0, 0)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
