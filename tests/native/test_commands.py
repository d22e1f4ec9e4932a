from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgerun.errors import NativeLibraryMissing
from edgerun.native.commands import run_logged, run_step


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_output_goes_to_the_log_and_the_listener_in_order(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys; print('one'); sys.stdout.flush(); print('two', file=sys.stderr)"
    status = run_logged(python(code), log=tmp_path / "log", on_line=lines.append, env={})
    assert status == 0
    assert lines == ["one", "two"]
    assert (tmp_path / "log").read_text().splitlines()[-2:] == ["one", "two"]


def test_env_is_added_to_ours(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import os; print(os.environ['CMAKE_ARGS'], 'PATH' in os.environ)"
    run_logged(python(code), log=tmp_path / "log", on_line=lines.append, env={"CMAKE_ARGS": "-DX"})
    assert lines == ["-DX True"]


def test_failure_names_step_status_log_and_the_end_of_the_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(NativeLibraryMissing) as caught:
        run_step(run_logged, "compiling", python("print('no such header'); raise SystemExit(3)"), log=log)
    for part in ("compiling", "3", str(log), "no such header"):
        assert part in caught.value.message


def test_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NativeLibraryMissing, match="edgerun-no-such-program"):
        run_step(run_logged, "compiling", ["edgerun-no-such-program"], log=tmp_path / "log")


def test_listener_that_raises_ends_the_child(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    # The child would go on for a minute; `run_logged` returns only after it has ended.
    code = "import time; print('started', flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        run_logged(python(code), log=tmp_path / "log", on_line=interrupt, env={})
