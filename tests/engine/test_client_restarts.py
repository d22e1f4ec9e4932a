"""The engine killed, stopped or stuck: every request ends once, and a new engine goes on with what waited."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun.engine.calls import Generation
from edgerun.engine.check import CheckedModels
from edgerun.engine.client import EngineClient
from edgerun.engine.messages import Load, Loaded, Progress
from edgerun.errors import EngineLost

from .harness import Rig, Run, children, prompt, until

pytestmark = pytest.mark.native


def test_kill_in_mid_stream_ends_the_stream_with_an_error_and_the_next_request_is_served(run: Run) -> None:
    async def body(rig: Rig) -> None:
        expected = await rig.answer()
        old_pid = rig.client.pid
        generation = await rig.client.generate("tiny", prompt(max_tokens=400))
        await anext(generation)
        rig.kill_engine()
        with pytest.raises(EngineLost, match="died"):
            async for _ in generation:
                pass
        assert await rig.answer() == expected
        assert rig.client.pid != old_pid
        assert (rig.client.num_restarts, rig.client.state) == (1, "ready")
        assert "tiny" in rig.client.loaded

    run(body)


def test_a_request_without_a_token_survives_a_crash(run: Run) -> None:
    async def body(rig: Rig) -> None:
        expected = await rig.answer("queued")
        long_ones = [await rig.client.generate("tiny", prompt(max_tokens=450)) for _ in range(4)]
        queued = [asyncio.create_task(rig.answer("queued")) for _ in range(3)]
        await anext(long_ones[0])
        rig.kill_engine()
        for generation in long_ones[:1]:
            with pytest.raises(EngineLost):
                async for _ in generation:
                    pass
        assert await asyncio.gather(*queued) == [expected] * 3

    run(body)


def test_a_request_that_ends_two_engines_is_not_tried_a_third_time(run: Run) -> None:
    async def body(rig: Rig) -> None:
        blockers = [await rig.client.generate("tiny", prompt(max_tokens=450)) for _ in range(4)]
        waiting = asyncio.create_task(rig.answer("queued", 450))
        await anext(blockers[0])
        for _ in range(2):
            while rig.client.state != "ready":
                await asyncio.sleep(0.01)
            rig.kill_engine()
            while rig.client.state == "ready":
                await asyncio.sleep(0.01)
        with pytest.raises(EngineLost):
            await waiting

    run(body)


@pytest.mark.parametrize("delay_s", [0.02, 0.08, 0.16])  # before and during the launch
def test_stop_during_a_restart_leaves_no_process_and_nobody_waiting(run: Run, delay_s: float) -> None:
    async def body(rig: Rig) -> None:
        rig.kill_engine()
        await until(lambda: rig.client.state == "restarting")
        waiting = [asyncio.create_task(rig.answer()), asyncio.create_task(rig.client.load(rig.spec))]
        await asyncio.sleep(delay_s)
        await rig.client.stop()
        await asyncio.wait(waiting, timeout=10)
        for task in waiting:  # a fast machine may have answered before the stop
            assert task.done()
            assert task.exception() is None or isinstance(task.exception(), EngineLost)
        assert children() == []

    run(body)


def test_load_and_unload_during_a_restart_wait_for_the_new_engine(run: Run) -> None:
    async def body(rig: Rig) -> None:
        other = replace(rig.spec, name="other")
        rig.kill_engine()
        await until(lambda: rig.client.state == "restarting")
        await asyncio.gather(rig.client.load(other), rig.client.unload("tiny"))
        assert list(rig.client.loaded) == ["other"]

    run(body)


def test_what_was_cancelled_during_a_restart_is_not_run_again(run: Run) -> None:
    async def body(rig: Rig) -> None:
        tasks = [asyncio.create_task(rig.client.generate("tiny", prompt(max_tokens=450))) for _ in range(12)]
        await asyncio.sleep(0.02)
        rig.kill_engine()
        await until(lambda: rig.client.state == "restarting")
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Generation):  # accepted before the crash
                result.cancel()
        await until(lambda: rig.client.state == "ready")
        stats = (await rig.client.stats()).llm["tiny"]
        assert (stats.num_running, stats.num_waiting, stats.prompt_tokens_total) == (0, 0, 0)

    run(body)


def test_an_engine_that_cannot_be_forked_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(rig: Rig) -> None:
        spawn, failures = asyncio.create_subprocess_exec, iter(range(2))

        async def short_of_memory(*args: str, **options: object) -> asyncio.subprocess.Process:
            if next(failures, None) is not None:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return await spawn(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", short_of_memory)
        rig.kill_engine()
        await until(lambda: rig.client.state == "restarting")
        assert (await rig.answer())[1] == "length"

    run(body)


def test_a_kill_storm_ends_every_request_once(run: Run) -> None:
    async def body(rig: Rig) -> None:
        ends: list[str | None] = []
        is_over = False

        async def ask() -> None:
            while not is_over:
                try:
                    ends.append((await rig.answer("storm", 60))[1])
                except EngineLost:
                    ends.append("lost")

        askers = [asyncio.create_task(ask()) for _ in range(8)]
        for pause_s in (0.05, 0.3, 0.6, 0.9, 0.2):
            await asyncio.sleep(pause_s)
            if rig.client.pid is not None:
                rig.kill_engine()
        await until(lambda: rig.client.state == "ready")
        is_over = True
        await asyncio.gather(*askers)
        assert set(ends) <= {"length", "lost"}
        stats = (await rig.client.stats()).llm["tiny"]
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)

    run(body)


class DoomedClient(EngineClient):
    """Its engine dies whenever it loads the model named `doomed`."""

    doomed = ""

    async def _load(self, message: Load, on_progress: Callable[[Progress], None] | None) -> Loaded:
        if message.spec.name == self.doomed:
            assert self.pid is not None
            os.kill(self.pid, signal.SIGKILL)
        return await super()._load(message, on_progress)


def test_a_model_that_ends_every_engine_is_left_out_and_the_others_come_back(run: Run) -> None:
    async def body(rig: Rig) -> None:
        client = DoomedClient(rig.start, checked=CheckedModels(rig.cache))
        await client.start()
        await client.load(replace(rig.spec, name="doomed"))
        await client.load(rig.spec)
        client.doomed = "doomed"
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.state == "restarting")
        await until(lambda: client.state == "ready")
        assert list(client.loaded) == ["tiny"]
        assert client.num_restarts == 4  # the kill, and three loads
        await client.stop()

    run(body)


class Ends:
    """How each of many requests ended, in the order in which they did."""

    def __init__(self) -> None:
        self.lost: list[EngineLost] = []
        self.answered: list[int] = []

    async def read(self, stream: Generation) -> None:
        try:
            async for _ in stream:
                pass
        except EngineLost as error:
            self.lost.append(error)
        with pytest.raises(StopAsyncIteration):  # once
            await anext(stream)

    async def ask(self, rig: Rig, number: int) -> None:
        tokens, reason = await rig.answer(f"question {number}")
        assert (len(tokens), reason) == (10, "length")
        self.answered.append(number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_8_that_stream_end_with_an_error_and_20_that_wait_are_answered(
    run: Run, number: signal.Signals
) -> None:
    async def body(rig: Rig) -> None:
        ends, streams = Ends(), await rig.streams(8)
        waiting = [asyncio.create_task(ends.ask(rig, index)) for index in range(20)]
        await until(lambda: len(rig.client._pending) == 28)
        rig.kill_engine(number)
        await asyncio.gather(*map(ends.read, streams), *waiting)
        assert len(ends.lost) == 8
        assert sorted(ends.answered) == list(range(20))
        expected = "out of memory" if number == signal.SIGKILL else "stopped answering"
        assert all(expected in error.message for error in ends.lost)
        assert (rig.client.num_restarts, rig.client.state, rig.client.trouble) == (1, "ready", "")

    run(body, max_num_seqs=8, step_timeout_s=3)


def test_what_waited_keeps_its_order(run: Run) -> None:
    async def body(rig: Rig) -> None:
        ends = Ends()
        (stream,) = await rig.streams(1)
        waiting = [asyncio.create_task(ends.ask(rig, index)) for index in range(10)]
        await until(lambda: len(rig.client._pending) == 11)
        rig.kill_engine()
        await asyncio.gather(ends.read(stream), *waiting)
        assert ends.answered == list(range(10))

    run(body, max_num_seqs=1)


def test_an_engine_that_does_not_answer_is_not_ready_before_it_is_replaced(run: Run) -> None:
    async def body(rig: Rig) -> None:
        assert rig.client.trouble == ""
        old_pid = rig.client.pid
        rig.kill_engine(signal.SIGSTOP)
        await until(lambda: rig.client.trouble != "")
        assert "has not answered" in rig.client.trouble
        assert (rig.client.state, rig.client.pid) == ("ready", old_pid)
        await until(lambda: rig.client.state == "restarting")
        assert "restarting" in rig.client.trouble
        assert "no sign of life" in rig.client.trouble
        await until(lambda: rig.client.state == "ready")
        assert rig.client.trouble == ""
        assert [child.pid for child in children()] == [rig.client.pid]

    run(body, step_timeout_s=3)


def test_an_engine_that_goes_on_in_time_is_kept(run: Run) -> None:
    async def body(rig: Rig) -> None:
        (stream,) = await rig.streams(1)
        rig.kill_engine(signal.SIGSTOP)
        await until(lambda: rig.client.trouble != "")
        rig.kill_engine(signal.SIGCONT)
        assert [output async for output in stream][-1].finish_reason == "length"
        await until(lambda: rig.client.trouble == "")
        assert rig.client.num_restarts == 0

    run(body, step_timeout_s=8)


def test_a_server_that_was_held_up_itself_does_not_blame_the_engine(run: Run) -> None:
    async def body(rig: Rig) -> None:
        streams = await rig.streams(2)
        time.sleep(2.5)  # the whole event loop
        for stream in streams:
            assert [output async for output in stream][-1].finish_reason == "length"
        await asyncio.sleep(0.5)
        assert (rig.client.num_restarts, rig.client.trouble) == (0, "")

    run(body, step_timeout_s=2)


@pytest.fixture
def stuck_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file exists the steps of every engine that is started do not end."""
    file, spawn = tmp_path / "stuck", asyncio.create_subprocess_exec

    async def spawn_stuck(*args: str, env: dict[str, str] | None = None, **options: Any) -> Process:
        if "edgerun.engine.main" in args:
            python, _, _, *rest = args
            args = (python, str(Path(__file__).with_name("stuck_engine.py")), str(file), *rest)
            # A script does not look for modules in the folder where it is started.
            env = {**(env or {}), "PYTHONPATH": str(Path(edgerun.__file__).parents[1])}
        return await spawn(*args, env=env, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_stuck)
    return file


def test_a_step_that_never_ends_ends_the_engine_and_what_waits_is_answered(
    run: Run, stuck_file: Path
) -> None:
    async def body(rig: Rig) -> None:
        ends, streams = Ends(), await rig.streams(4)
        waiting = [asyncio.create_task(ends.ask(rig, index)) for index in range(5)]
        stuck_file.touch()
        await until(lambda: rig.client.trouble != "")
        assert "in one step" in rig.client.trouble
        assert len((await rig.client.stats()).llm) == 1  # the main thread answers all the while
        await until(lambda: rig.client.state == "restarting")
        stuck_file.unlink()
        await asyncio.gather(*map(ends.read, streams), *waiting)
        assert len(ends.lost) == 4
        assert "one step has taken" in ends.lost[0].message
        assert sorted(ends.answered) == list(range(5))
        assert rig.client.num_restarts == 1

    run(body, step_timeout_s=2)


def test_a_request_whose_steps_never_end_is_given_up_after_two_engines(run: Run, stuck_file: Path) -> None:
    async def body(rig: Rig) -> None:
        stuck_file.touch()
        with pytest.raises(EngineLost, match="one step has taken"):
            await rig.answer()
        assert rig.client.num_restarts == 2
        stuck_file.unlink()
        assert (await rig.answer())[1] == "length"

    run(body, step_timeout_s=1)
