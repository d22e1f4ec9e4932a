"""The engine thread: runs the steps of every loaded language model, in turn, on one thread.

One thread for all, and all computing on it (the first touch at load too), because OpenMP counts the teams of
every thread that ever computed: with a second team there are more threads than cores, libgomp stops spinning
at its barriers, and decoding falls to a third (107 against 32 tokens/s for SmolLM2-135M on 2 cores).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Stepper(Protocol):
    """What the loop drives; called on the engine thread alone."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None: ...


class EngineLoop:
    """Commands first, then one step of each stepper that has work; sleeps when none has.

    An exception in either is fatal: `on_fatal` is called, and the process is expected to end, since the
    state of the native context is unknown then.
    """

    def __init__(self, on_fatal: Callable[[BaseException], None]) -> None:
        self._on_fatal = on_fatal
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._steppers: list[Stepper] = []
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, command: Callable[[], None]) -> None:
        """From any thread: run command on the engine thread before the next step."""
        self._commands.put(command)

    def call(self, function: Callable[[], _T]) -> _T:
        """From any other thread: run function on the engine thread and return, or raise, what it does."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.put(run)
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
            while self._carry_out_commands(wait=not any(s.has_work for s in self._steppers)):
                for stepper in tuple(self._steppers):
                    if stepper.has_work:
                        stepper.step()
        except BaseException as error:  # whatever it is, the native state is unknown now
            logger.exception("a step failed; the engine process ends")
            self._on_fatal(error)

    def _carry_out_commands(self, *, wait: bool) -> bool:
        """False when it is time to stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False
