"""Long pieces of work that several callers may wait for: pulling and loading models.

A job belongs to the server, not to the request that began it: it goes on when that client leaves, and a
second request for the same thing joins it instead of doing it twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

ReportProgress = Callable[[str, int, int], None]  # stage, done, total (0: unknown) in the stage's own unit
_MIN_INTERVAL_S = 0.1  # between two progress events; a download reports every few kilobytes


class StageProgress(msgspec.Struct, frozen=True):
    """One progress event of a model route; the last one has stage "done"."""

    stage: str
    done: int
    total: int


class Job:
    """One running piece of work. `report` may be called from any thread."""

    def __init__(self, work: Callable[[ReportProgress], Awaitable[Any]], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Callable[[StageProgress], None]] = []
        self._name = name
        self.task: asyncio.Task[Any] = asyncio.create_task(self._run(work), name=name)
        self.task.add_done_callback(self._note_failure)

    async def _run(self, work: Callable[[ReportProgress], Awaitable[Any]]) -> Any:
        return await work(self.report)

    def report(self, stage: str, done: int, total: int) -> None:
        self._loop.call_soon_threadsafe(self._tell, StageProgress(stage, done, total))

    def _tell(self, progress: StageProgress) -> None:
        for listener in self._listeners:
            listener(progress)

    def _note_failure(self, task: asyncio.Task[Any]) -> None:
        # Who waits gets the error. Reading it here keeps asyncio quiet when everybody has left.
        if not task.cancelled() and task.exception() is not None:
            logger.debug("%s failed: %s", self._name, task.exception())

    async def result(self, on_progress: ReportProgress | None = None) -> Any:
        """Wait for the end; a waiter that is cancelled does not cancel the job."""
        if on_progress is None:
            return await asyncio.shield(self.task)

        def listen(progress: StageProgress) -> None:
            on_progress(progress.stage, progress.done, progress.total)

        self._listeners.append(listen)
        try:
            return await asyncio.shield(self.task)
        finally:
            self._listeners.remove(listen)

    async def progress(self) -> AsyncGenerator[StageProgress, None]:
        """The newest progress, at most ten times a second; ends with the job, raising its error."""
        news = asyncio.Event()
        newest: list[StageProgress] = []

        def listen(progress: StageProgress) -> None:
            newest[:] = [progress]
            news.set()

        def end(_: asyncio.Task[Any]) -> None:
            news.set()

        self._listeners.append(listen)
        self.task.add_done_callback(end)
        try:
            while True:
                await news.wait()
                news.clear()
                if newest:
                    yield newest.pop()
                if self.task.done():
                    self.task.result()
                    return
                await asyncio.wait({self.task}, timeout=_MIN_INTERVAL_S)
        finally:
            self._listeners.remove(listen)
            self.task.remove_done_callback(end)


class Jobs:
    """The running jobs by what they do and to which model. Used from the event loop only."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Job] = {}

    def join(self, action: str, model: str, work: Callable[[ReportProgress], Awaitable[Any]]) -> Job:
        """The job that does `action` to `model` now, or a new one that runs `work`."""
        key = (action, model)
        job = self._running.get(key)
        if job is None:
            job = self._running[key] = Job(work, f"{action} {model}")
            job.task.add_done_callback(lambda _: self._running.pop(key, None))
        return job
