"""Installing llama-cpp-python without its native part, and edgerun itself: what `make run` does with pip.

A plain `pip install llama-cpp-python` compiles 193 steps; its Python layer alone is 143 kB and takes seconds.
Where pip can find a full wheel (the user's index or find-links), that is used: its libraries are one more
flavour.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from edgerun import paths
from edgerun.errors import NativeLibraryMissing
from edgerun.native import LLAMA_CPP_PYTHON
from edgerun.native.commands import Report, Runner, run_logged, run_step
from edgerun.native.sources import REQUIREMENT, fetch_sdist, pip_command


def install(
    checkout: Path | None, extras: Sequence[str], report: Report, runner: Runner = run_logged
) -> None:
    """Install llama-cpp-python, and edgerun from checkout (editable, with extras) when one is given.

    Uses pip of this interpreter and the user's pip settings. Raises NativeLibraryMissing with the end of
    pip's log.
    """
    log = paths.cache_dir() / "install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    wanted: list[str] = []
    if installed_version() != LLAMA_CPP_PYTHON:
        wanted.append(str(ensure_wheel(report, runner=runner, log=log)))
    if checkout is not None:
        names = ",".join(extras)
        wanted += ["--editable", f"{checkout}[{names}]" if names else str(checkout)]
    if not wanted:
        return
    stage = f"installing edgerun[{','.join(extras)}]" if checkout is not None else f"installing {REQUIREMENT}"
    num_collected = 0

    def on_line(line: str) -> None:
        nonlocal num_collected
        if line.startswith("Collecting "):
            num_collected += 1
            report(stage, num_collected, 0)

    report(stage, 0, 0)
    run_step(runner, stage, [*pip_command(), "install", *wanted], log=log, on_line=on_line)


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def ensure_wheel(
    report: Report,
    *,
    log: Path,
    runner: Runner = run_logged,
    wheels: Path | None = None,
    fetch_sources: Callable[..., Path] = fetch_sdist,
) -> Path:
    """A llama-cpp-python wheel in the cache: a full one if pip finds one, else the Python layer alone."""
    wheels = wheels or paths.cache_dir() / "wheels"
    pattern = f"llama_cpp_python-{LLAMA_CPP_PYTHON}-*.whl"
    if kept := sorted(wheels.glob(pattern)):
        return kept[0]
    wheels.mkdir(parents=True, exist_ok=True)
    report(f"getting the Python layer of {REQUIREMENT}", 0, 0)
    with tempfile.TemporaryDirectory(dir=wheels, prefix=".") as scratch:
        if not _download_wheel(Path(scratch), runner, log):
            sdist = fetch_sources(paths.cache_dir() / "sources", runner=runner, log=log, report=report)
            run_step(
                runner,
                f"making the Python layer of {REQUIREMENT}",
                # From the file, not by name: pip's cache would else hand this wheel, which has no libraries,
                # to the user's other projects.
                [*pip_command(), "wheel", "--no-deps", "--wheel-dir", scratch, str(sdist)],
                log=log,
                env={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"},
            )
        made = next(Path(scratch).glob(pattern), None)
        if made is None:
            raise NativeLibraryMissing(f"pip made no wheel of {REQUIREMENT}; its log is {log}", log=str(log))
        shutil.move(made, wheels / made.name)
        return wheels / made.name


def _download_wheel(target: Path, runner: Runner, log: Path) -> bool:
    """Whether pip found a prebuilt wheel. PyPI has none, so a refusal is the usual answer and no error."""
    command = [*pip_command(), "download", "--no-deps", "--only-binary", "llama-cpp-python"]
    status = runner(
        [*command, "--dest", str(target), REQUIREMENT], log=log, on_line=lambda line: None, env={}
    )
    return status == 0
