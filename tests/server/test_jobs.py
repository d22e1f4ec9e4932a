"""Work that several wait for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edgerun.errors import PullFailed
from edgerun.server.jobs import Job, Jobs, ReportProgress, StageProgress


def test_a_second_caller_joins_and_a_later_one_starts_anew() -> None:
    async def scenario() -> int:
        jobs, started = Jobs(), []

        async def work(report: ReportProgress) -> None:
            started.append(1)
            await asyncio.sleep(0)

        first = jobs.join("load", "m", work)
        assert jobs.join("load", "m", work) is first
        assert jobs.join("pull", "m", work) is not first
        await first.result()
        await asyncio.sleep(0)
        await jobs.join("load", "m", work).result()
        return len(started)

    assert asyncio.run(scenario()) == 3


def test_a_waiter_that_leaves_does_not_stop_the_job() -> None:
    async def scenario() -> str:
        gate = asyncio.Event()

        async def work(report: ReportProgress) -> str:
            await gate.wait()
            return "done"

        job = Job(work, "load m")
        leaving = asyncio.create_task(job.result())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        gate.set()
        return await job.result()

    assert asyncio.run(scenario()) == "done"


def test_progress_from_a_thread_reaches_every_listener_newest_last() -> None:
    async def scenario() -> tuple[list[StageProgress], list[tuple[str, int, int]]]:
        go = threading.Event()

        def download(report: ReportProgress) -> None:
            assert go.wait(10)
            for done in range(1000):
                report("download", done, 999)

        async def work(report: ReportProgress) -> None:
            await asyncio.to_thread(download, report)

        heard: list[tuple[str, int, int]] = []
        job = Job(work, "pull m")
        waiting = asyncio.create_task(job.result(lambda *args: heard.append(args)))
        await asyncio.sleep(0)
        go.set()
        seen = [progress async for progress in job.progress()]
        await waiting
        return seen, heard

    seen, heard = asyncio.run(scenario())
    assert seen[-1] == StageProgress("download", 999, 999)
    assert len(seen) < 100  # many reports, few events
    assert len(heard) == 1000


def test_progress_ends_with_the_jobs_error() -> None:
    async def scenario() -> None:
        async def work(report: ReportProgress) -> None:
            raise PullFailed("no network")

        job = Job(work, "pull m")
        with pytest.raises(PullFailed, match="no network"):
            async for _ in job.progress():
                pass

    asyncio.run(scenario())
