"""What compiling llama.cpp needs: the system's C and C++ compilers, cmake and ninja from anywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgerun.errors import NativeLibraryMissing
from edgerun.native.commands import Report, Runner, run_step
from edgerun.native.sources import pip_command

_MIN_CMAKE = (3, 19)  # llama.cpp asks for 3.14; presets and policies it uses were tried from 3.19 on

# llama.cpp's largest files took 0.45 GB of compiler each; with less than that a board swaps for an hour.
_BYTES_PER_JOB = 600_000_000

_LIST_MACROS = ("-march=native", "-dM", "-E", "-x", "c", "/dev/null")
_NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")

Which = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Tools:
    """env must be set when cmake or ninja run: those that came from PyPI are Python scripts."""

    cmake: str
    ninja: str
    env: Mapping[str, str]


def require_compiler(which: Which = shutil.which, environ: Mapping[str, str] = os.environ) -> None:
    """Raises NativeLibraryMissing that says what to install when there is no C or no C++ compiler."""
    c = environ.get("CC", "").split()[:1] or ["cc", "gcc", "clang"]
    cxx = environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    missing = [
        f"{language} compiler ({' or '.join(names)})"
        for language, names in (("C", c), ("C++", cxx))
        if not any(which(name) for name in names)
    ]
    if missing:
        raise NativeLibraryMissing(
            f"llama.cpp is compiled once for this machine, which has no {' and no '.join(missing)}:"
            " install it (Debian, Ubuntu, JetPack: sudo apt install build-essential; Fedora: sudo dnf install"
            " gcc-c++; Arch: sudo pacman -S gcc; Alpine: apk add build-base) and run this again"
        )


def find_tools(
    scratch: Path, *, runner: Runner, log: Path, report: Report, which: Which = shutil.which
) -> Tools:
    """cmake and ninja of the system where they are new enough, else PyPI's wheels inside scratch."""
    cmake, ninja = which("cmake"), which("ninja")
    if cmake and ninja and _cmake_version(cmake) >= _MIN_CMAKE:
        return Tools(cmake, ninja, {})
    report("fetching cmake and ninja for this build only", 0, 0)
    target = scratch / "tools"
    run_step(
        runner,
        "fetching cmake and ninja",
        [*pip_command(), "install", "--quiet", "--target", str(target), "cmake", "ninja"],
        log=log,
    )
    return Tools(str(target / "bin" / "cmake"), str(target / "bin" / "ninja"), {"PYTHONPATH": str(target)})


def amx_off(environ: Mapping[str, str] = os.environ, which: Which = shutil.which) -> tuple[str, ...]:
    """cmake arguments that leave AMX out where this compiler would use it, none elsewhere.

    GCC 12's _tile_loadconfig tells the optimiser of 8 of the 64 bytes that it reads, so the rest may never be
    written: llama.cpp's AMX kernels then die with SIGSEGV at `ldtilecfg` for any prompt of two tokens or more
    (seen on Debian 12). Compilers that know no AMX (GCC 10) know no -mno-amx either and must not see it.
    """
    names = environ.get("CC", "").split()[:1] or ["cc", "gcc", "clang"]
    compiler = next(filter(None, map(which, names)), None)
    if compiler is None or "__AMX_TILE__" not in _output([compiler, *_LIST_MACROS]):
        return ()
    # What is given on the command line replaces what cmake takes from the environment: keep both.
    return tuple(
        f"-DCMAKE_{language}_FLAGS={' '.join([*environ.get(variable, '').split(), *_NO_AMX])}"
        for language, variable in (("C", "CFLAGS"), ("CXX", "CXXFLAGS"))
    )


def num_jobs(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Compilers to run at once: one for each core of ours, fewer when the free memory would not do."""
    cores = len(os.sched_getaffinity(0))
    try:
        available = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        available = None
    if available is None:
        return cores
    return max(1, min(cores, int(available[1]) * 1024 // _BYTES_PER_JOB))


def _cmake_version(cmake: str) -> tuple[int, int]:
    """(0, 0) where it does not say."""
    found = re.search(r"version (\d+)\.(\d+)", _output([cmake, "--version"]))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _output(command: Sequence[str]) -> str:
    """What command prints; nothing where it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
