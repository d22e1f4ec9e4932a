"""Trying providers in child processes, all at once, and remembering what worked.

A driver fault, an abort or a hang costs a child and becomes the reason shown to the user. Only successes are
remembered: whatever made a check fail (a group, a missing library) may have been mended since.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgerun.repository.spec import ModelKind

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0
CheckId = tuple[ModelKind, str]  # kind, provider


@dataclass(frozen=True, slots=True)
class SmokeCheck:
    """One provider to try. fingerprint: everything that could change the answer."""

    kind: ModelKind
    provider: str
    argv: tuple[str, ...]
    fingerprint: str = ""
    timeout_s: float = TIMEOUT_S

    @property
    def cache_key(self) -> str:
        parts = (self.kind, self.provider, *self.argv, self.fingerprint)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SmokeResult:
    is_ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """returncode: None when it was killed for taking too long; negative for a signal, as in subprocess."""

    returncode: int | None
    stdout: str
    stderr: str


ChildRunner = Callable[[Sequence[SmokeCheck]], Sequence[ChildOutcome]]


def run_checks(
    checks: Sequence[SmokeCheck], runner: ChildRunner, cache_path: Path, *, use_cache: bool
) -> dict[CheckId, SmokeResult]:
    """Each check's result. use_cache=False tries all again; successes are written down either way."""
    remembered = _load(cache_path)
    known = {c: remembered[c.cache_key] for c in checks if use_cache and c.cache_key in remembered}
    todo = [c for c in checks if c not in known]
    results = {
        (c.kind, c.provider): SmokeResult(True, f"{detail}, checked earlier") for c, detail in known.items()
    }
    for check, outcome in zip(todo, runner(todo) if todo else (), strict=True):
        result = judge(outcome, check.timeout_s)
        results[check.kind, check.provider] = result
        remembered.pop(check.cache_key, None)
        if result.is_ok:
            remembered[check.cache_key] = result.detail
    if todo:
        _save(cache_path, remembered)
    return results


def judge(outcome: ChildOutcome, timeout_s: float) -> SmokeResult:
    """What the end of a child means. It is believed only when it says ok and also exits 0."""
    if outcome.returncode is None:
        return SmokeResult(False, f"hung: no answer within {timeout_s:.0f} s, the test was stopped")
    if outcome.returncode < 0:
        return SmokeResult(
            False, f"the test crashed with {_signal_name(-outcome.returncode)}{_last(outcome)}"
        )
    said = _answer(outcome.stdout)
    if said is None:
        return SmokeResult(False, f"the test ended with code {outcome.returncode}{_last(outcome)}")
    is_ok = said.get("ok") is True and outcome.returncode == 0
    return SmokeResult(is_ok, str(said.get("detail", "")) or f"exit code {outcome.returncode}")


def run_children(checks: Sequence[SmokeCheck]) -> list[ChildOutcome]:
    """Run all at the same time, each in its own session, so that a hung one is killed with its helpers."""
    with ExitStack() as stack:
        started = time.monotonic()
        children = [_Child(check.argv, stack) for check in checks]
        return [
            child.finish(check.timeout_s - (time.monotonic() - started))
            for child, check in zip(children, checks, strict=True)
        ]


class _Child:
    """A running check. Output goes to files: a pipe that nobody reads in time would block the child."""

    def __init__(self, argv: Sequence[str], stack: ExitStack) -> None:
        self._stdout: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._stderr: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
            # `python -m` looks in its working directory first: there must be edgerun, not the user's files.
            cwd=Path(__file__).resolve().parents[2],
        )
        stack.callback(self._kill)

    def finish(self, remaining_s: float) -> ChildOutcome:
        returncode: int | None
        try:
            returncode = self._process.wait(max(0.0, remaining_s))
        except subprocess.TimeoutExpired:
            self._kill()
            returncode = None
        return ChildOutcome(returncode, _tail(self._stdout), _tail(self._stderr))

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs one of edgerun's modules with this interpreter."""
    return (sys.executable, "-m", module, *arguments)


def fingerprint_folder(folder: Path) -> str:
    """Changes when a library in the folder is replaced."""
    try:
        entries = sorted((p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir())
    except OSError:
        entries = []
    return json.dumps([str(folder), *entries])


def _answer(stdout: str) -> dict[str, object] | None:
    """The last line that is a JSON object: a native library may have printed before it."""
    for line in reversed(stdout.splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return None


def _last(outcome: ChildOutcome) -> str:
    lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(file: IO[bytes], max_bytes: int = 65536) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - max_bytes))
    return file.read().decode("utf-8", errors="replace")


def _load(path: Path) -> dict[str, str]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {k: v for k, v in value.items() if isinstance(v, str)}


def _save(path: Path, remembered: Mapping[str, str]) -> None:
    # Old versions' entries would pile up for ever; the newest few hundred are plenty.
    newest = dict(list(remembered.items())[-256:])
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(newest), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        logger.debug("provider checks are not remembered: %s", error)
