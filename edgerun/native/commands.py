"""Running other programs: everything they print goes to a log, line by line to a listener too.

A Runner is passed in where one is needed, so that tests need no pip, network or compiler.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from edgerun.errors import NativeLibraryMissing

# (what is being done, how far, of how much); the last is 0 where nobody knows. A change of the first starts
# a new line on the screen.
Report = Callable[[str, int, int], None]

_TAIL_LINES = 15


class Runner(Protocol):
    def __call__(
        self, command: Sequence[str], *, log: Path, on_line: Callable[[str], None], env: Mapping[str, str]
    ) -> int:
        """Run command with env added to ours, append its output to log, return its exit status."""


def run_logged(
    command: Sequence[str], *, log: Path, on_line: Callable[[str], None], env: Mapping[str, str]
) -> int:
    """The real Runner. The child ends before an exception (Ctrl-C) leaves this function."""
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **env},
        )
        with process:
            assert process.stdout is not None  # PIPE was asked for
            try:
                for line in process.stdout:
                    out.write(line)
                    on_line(line.rstrip("\n"))
                return process.wait()
            except BaseException:
                process.terminate()
                raise


def run_step(
    runner: Runner,
    what: str,
    command: Sequence[str],
    *,
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run one step. Raises NativeLibraryMissing that names the log and shows its end."""
    try:
        status = runner(command, log=log, on_line=on_line, env=env or {})
    except FileNotFoundError as error:
        raise NativeLibraryMissing(f"{what} failed: {command[0]} is not there", log=str(log)) from error
    if status != 0:
        raise NativeLibraryMissing(
            f"{what} failed (exit status {status}); the whole log is {log}, its end:\n{_tail(log)}",
            log=str(log),
            status=status,
        )


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  {line[:300]}" for line in lines[-_TAIL_LINES:])
