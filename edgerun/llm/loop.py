"""The engine thread: runs the steps of every loaded language model, in turn, on one thread.

One thread for all, and all computing on it (the first touch at load too), because OpenMP counts the teams of
every thread that ever computed: with a second team there are more threads than cores, libgomp stops spinning
at its barriers, and decoding falls to a third (107 against 32 tokens/s for SmolLM2-135M on 2 cores).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_IDLE_AFTER_S = 2.0  # without work; a check at once would delay the next turn of a chat


class Stepper(Protocol):
    """What the loop drives; called on the engine thread alone."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def idle(self) -> None:
        """Some seconds after the last work of all: time for a short check. What it raises is fatal."""


@dataclass(frozen=True, slots=True)
class _Command:
    """is_timed: it is short, so that one that lasts is stuck; a warm-up may take minutes."""

    run: Callable[[], None]
    is_timed: bool


class EngineLoop:
    """Commands first, then one step of each stepper that has work; sleeps when none has.

    An exception in either is fatal: `on_fatal` is called, and the process is expected to end, since the
    state of the native context is unknown then. Nothing here ends a step that lasts for ever: `step_age_s`
    tells whoever asks (see engine/watch.py).
    """

    def __init__(
        self, on_fatal: Callable[[BaseException], None], *, idle_after_s: float = _IDLE_AFTER_S
    ) -> None:
        self._on_fatal, self._idle_after_s = on_fatal, idle_after_s
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._steppers: list[Stepper] = []
        self._began_s = 0.0  # time.monotonic() of the running step; 0.0: none. Written by the thread alone
        self._is_checked = True  # nothing was computed since the last idle()
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def step_age_s(self) -> float:
        """From any thread: how long the running step, or command of `put`, has taken; 0.0 without one."""
        began_s = self._began_s
        return time.monotonic() - began_s if began_s else 0.0

    def put(self, command: Callable[[], None]) -> None:
        """From any thread: run command, a short one, on the engine thread before the next step."""
        self._commands.put(_Command(command, is_timed=True))

    def call(self, function: Callable[[], _T]) -> _T:
        """From any other thread: run function on the engine thread and return, or raise, what it does.

        It may take long: `step_age_s` leaves it out.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._commands.put(_Command(run, is_timed=False))
        return future.result()

    def add(self, stepper: Stepper) -> None:
        """On the engine thread."""
        self._steppers.append(stepper)

    def remove(self, stepper: Stepper) -> None:
        """On the engine thread."""
        self._steppers.remove(stepper)

    def stop(self) -> None:
        """After the running step; what was put before is still carried out."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._carry_out_commands():
                for stepper in tuple(self._steppers):
                    if stepper.has_work:
                        self._is_checked = False
                        self._timed(stepper.step)
        except BaseException as error:  # whatever it is, the native state is unknown now
            logger.exception("a step failed; the engine process ends")
            self._on_fatal(error)

    def _carry_out_commands(self) -> bool:
        """Those that are there; without work, wait for one. False when it is time to stop."""
        must_wait = not any(stepper.has_work for stepper in self._steppers)
        while True:
            try:
                command = self._next(must_wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            if command.is_timed:
                self._timed(command.run)
            else:
                command.run()
            must_wait = False

    def _next(self, must_wait: bool) -> _Command | None:
        """Once between work and sleep the steppers may check themselves. Raises queue.Empty."""
        if not must_wait or self._is_checked:
            return self._commands.get(block=must_wait)
        try:
            return self._commands.get(timeout=self._idle_after_s)
        except queue.Empty:
            self._is_checked = True
            for stepper in tuple(self._steppers):
                self._timed(stepper.idle)
            return self._commands.get()

    def _timed(self, run: Callable[[], None]) -> None:
        # CLOCK_MONOTONIC stands still while the machine sleeps: a closed lid makes no step look stuck.
        self._began_s = time.monotonic()
        run()
        self._began_s = 0.0
