from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgerun.device.smoke import (
    ChildOutcome,
    SmokeCheck,
    SmokeResult,
    fingerprint_folder,
    judge,
    run_checks,
    run_children,
)

GOOD = ChildOutcome(0, '{"ok": true, "detail": "ran"}\n', "")
CHECK = SmokeCheck("vision", "P", ("x",), "v1")


class Runner:
    """Gives the same outcome for every check and remembers what it was asked."""

    def __init__(self, outcome: ChildOutcome) -> None:
        self.outcome = outcome
        self.asked: list[SmokeCheck] = []

    def __call__(self, checks: Sequence[SmokeCheck]) -> list[ChildOutcome]:
        self.asked += checks
        return [self.outcome for _ in checks]


@pytest.mark.parametrize(
    ("outcome", "is_ok", "said"),
    [
        (GOOD, True, "ran"),
        (ChildOutcome(0, 'ggml: found GPU\n{"ok": true, "detail": "ran"}\n', ""), True, "ran"),
        (
            ChildOutcome(1, '{"ok": false, "detail": "the session runs on CPU instead"}', ""),
            False,
            "on CPU instead",
        ),
        (ChildOutcome(1, '{"ok": true, "detail": "ran"}', ""), False, "ran"),  # died while leaving
        (ChildOutcome(0, "", ""), False, "ended with code 0"),
        (ChildOutcome(0, "[1]\nnull\n", ""), False, "ended with code 0"),
        (ChildOutcome(3, "", "Traceback\nImportError: libfoo\n"), False, "code 3: ImportError: libfoo"),
        (ChildOutcome(-11, "", ""), False, "crashed with SIGSEGV"),
        (ChildOutcome(-6, "", "GGML_ASSERT failed"), False, "SIGABRT: GGML_ASSERT failed"),
        (ChildOutcome(-9, '{"ok": true, "detail": "ran"}', ""), False, "SIGKILL"),
        (ChildOutcome(None, "", ""), False, "hung: no answer within 30 s"),
    ],
)
def test_only_a_clean_yes_is_believed(outcome: ChildOutcome, is_ok: bool, said: str) -> None:
    result = judge(outcome, 30.0)

    assert result.is_ok == is_ok
    assert said in result.detail


def test_success_is_remembered_and_told_as_such(tmp_path: Path) -> None:
    runner = Runner(GOOD)
    first = run_checks([CHECK], runner, tmp_path / "c" / "cache.json", use_cache=True)
    second = run_checks([CHECK], runner, tmp_path / "c" / "cache.json", use_cache=True)

    assert first == {("vision", "P"): SmokeResult(True, "ran")}
    assert second == {("vision", "P"): SmokeResult(True, "ran, checked earlier")}
    assert runner.asked == [CHECK]


def test_failure_is_tried_again(tmp_path: Path) -> None:
    runner = Runner(ChildOutcome(1, "", ""))
    for _ in range(2):
        run_checks([CHECK], runner, tmp_path / "cache.json", use_cache=True)

    assert runner.asked == [CHECK, CHECK]


def test_failure_forgets_an_earlier_success(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    run_checks([CHECK], Runner(GOOD), cache, use_cache=True)
    run_checks([CHECK], Runner(ChildOutcome(-11, "", "")), cache, use_cache=False)
    runner = Runner(GOOD)
    run_checks([CHECK], runner, cache, use_cache=True)

    assert runner.asked == [CHECK]


@pytest.mark.parametrize(
    "other",
    [
        SmokeCheck("vision", "P", ("x",), "v2"),
        SmokeCheck("vision", "P", ("y",), "v1"),
        SmokeCheck("vision", "Q", ("x",), "v1"),
        SmokeCheck("llm", "P", ("x",), "v1"),
    ],
)
def test_whatever_could_change_the_answer_is_asked_again(other: SmokeCheck, tmp_path: Path) -> None:
    run_checks([CHECK], Runner(GOOD), tmp_path / "cache.json", use_cache=True)
    runner = Runner(GOOD)
    run_checks([other], runner, tmp_path / "cache.json", use_cache=True)

    assert runner.asked == [other]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}'])
def test_broken_cache_file_is_an_empty_one(content: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    cache.write_text(content)

    assert run_checks([CHECK], Runner(GOOD), cache, use_cache=True)["vision", "P"].is_ok
    assert json.loads(cache.read_text()) == {CHECK.cache_key: "ran"}


def test_unwritable_cache_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert run_checks([CHECK], Runner(GOOD), tmp_path / "file" / "cache.json", use_cache=True)[
        "vision", "P"
    ].is_ok


def test_folder_fingerprint_follows_its_files(tmp_path: Path) -> None:
    before = fingerprint_folder(tmp_path)
    (tmp_path / "libllama.so").write_bytes(b"1")

    assert fingerprint_folder(tmp_path) != before
    assert fingerprint_folder(tmp_path / "nowhere") != before


def python(code: str, timeout_s: float = 30.0) -> SmokeCheck:
    return SmokeCheck("vision", "P", (sys.executable, "-c", code), timeout_s=timeout_s)


def test_children_run_at_the_same_time_and_in_order(tmp_path: Path) -> None:
    """Each waits for the other's file, so one after the other would time out."""
    code = (
        "import pathlib, time\npathlib.Path({mine!r}).touch()\n"
        "while not pathlib.Path({other!r}).exists(): time.sleep(0.01)\nprint({mine!r})"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    outcomes = run_children([python(code.format(mine=a, other=b)), python(code.format(mine=b, other=a))])

    assert [o.stdout.strip() for o in outcomes] == [a, b]


def test_crash_and_noise_are_reported() -> None:
    code = "import os, sys; sys.stderr.write('x' * 200_000 + '\\nlast words'); sys.stderr.flush(); os.abort()"
    (outcome,) = run_children([python(code)])

    assert outcome.returncode == -6
    assert judge(outcome, 1.0).detail.endswith("SIGABRT: last words")


def test_hung_child_is_killed_with_its_helpers(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(p.pid))\ntime.sleep(600)"
    )
    (outcome,) = run_children([python(code, timeout_s=2.0)])

    assert outcome.returncode is None
    assert is_gone(int(pid_file.read_text()))


def is_gone(pid: int) -> bool:
    """Whether the process ends soon; it is no child of ours, so init reaps it in its own time."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False
