"""The loop with a fake runner: every request ends exactly once, whatever happens to it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from edgerun.engine.messages import Accepted, Failed, Message, Tokens
from edgerun.llm.block_pool import BlockPool
from edgerun.llm.engine import LlmEngine
from edgerun.llm.request import RequestId
from edgerun.llm.scheduler import Scheduler, SchedulerLimits
from edgerun.llm.step import ModelRunnerOutput, SchedulerOutput

from .fakes import END, FakeRunner, expected_answer, make_request


class Inbox:
    """What the engine replied, sorted by request."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.answers: dict[int, list[int]] = {}
        self.ends: dict[int, list[str]] = {}
        self.accepted: list[int] = []

    def wait_for_ends(self, count: int, timeout_s: float = 20) -> None:
        deadline = time.monotonic() + timeout_s
        while sum(map(len, self.ends.values())) < count:
            self._take(self.messages.get(timeout=max(0.01, deadline - time.monotonic())))

    def drain(self) -> None:
        while not self.messages.empty():
            self._take(self.messages.get())

    def _take(self, message: Message) -> None:
        if isinstance(message, Accepted):
            self.accepted.append(message.request_id)
        elif isinstance(message, Failed):
            self.ends.setdefault(message.request_id, []).append(message.kind)
        elif isinstance(message, Tokens):
            for output in message.outputs:
                self.answers.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason:
                    self.ends.setdefault(output.request_id, []).append(output.finish_reason)


def make_engine(
    runner: FakeRunner,
    inbox: Inbox,
    on_fatal: Callable[[BaseException], None] = lambda error: None,
    max_waiting: int = 100,
) -> LlmEngine:
    pool = BlockPool(64, 16)
    scheduler = Scheduler(pool, SchedulerLimits(4, 36, 256, max_waiting), {END})
    return LlmEngine(scheduler, pool, runner, inbox.messages.put, on_fatal, max_num_seqs=4)


def test_each_request_is_accepted_and_ends_once_with_its_own_answer() -> None:
    inbox, runner = Inbox(), FakeRunner()
    engine = make_engine(runner, inbox)
    engine.start()
    prompts = {i: list(range(1, 3 + i)) for i in range(1, 20)}
    for request_id, prompt in prompts.items():
        engine.submit(make_request(request_id, prompt, max_tokens=6))
    inbox.wait_for_ends(len(prompts))
    engine.close()
    inbox.drain()
    assert sorted(inbox.accepted) == sorted(prompts)
    assert inbox.ends == {i: ["length"] for i in prompts}
    assert inbox.answers == {i: expected_answer(prompt, 6) for i, prompt in prompts.items()}
    assert sorted(runner.forgotten) == sorted(prompts)
    assert runner.is_closed


def test_an_abort_ends_the_request_and_leaves_the_others_alone() -> None:
    inbox = Inbox()
    engine = make_engine(FakeRunner(), inbox)
    engine.submit(make_request(1, [1, 2], max_tokens=10**6))
    engine.submit(make_request(2, [3, 4], max_tokens=5))
    engine.abort(RequestId(1))
    engine.abort(RequestId(99))  # unknown: ignored
    engine.start()
    inbox.wait_for_ends(2)
    engine.close()
    assert inbox.ends == {1: ["abort"], 2: ["length"]}
    assert inbox.answers[2] == expected_answer([3, 4], 5)
    assert engine.stats().num_free_blocks == 64


def test_close_fails_what_still_runs_once() -> None:
    inbox = Inbox()
    engine = make_engine(FakeRunner(), inbox)
    engine.submit(make_request(1, [1], max_tokens=10**9))
    engine.start()
    engine.close()
    inbox.drain()
    assert inbox.ends == {1: ["EngineLost"]}


def test_a_full_queue_fails_the_newcomer_alone() -> None:
    inbox = Inbox()
    engine = make_engine(FakeRunner(), inbox, max_waiting=1)
    for request_id in (1, 2):
        engine.submit(make_request(request_id, [1], max_tokens=2))
    engine.start()
    inbox.wait_for_ends(2)
    engine.close()
    assert inbox.ends == {1: ["length"], 2: ["QueueFull"]}


def test_an_exception_in_a_step_is_fatal_not_silent() -> None:
    class BrokenRunner(FakeRunner):
        def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
            raise RuntimeError("llama_decode returned -3")

    fatal: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    engine = make_engine(BrokenRunner(), Inbox(), fatal.put)
    engine.submit(make_request(1, [1]))
    engine.start()
    assert "llama_decode returned -3" in str(fatal.get(timeout=10))


def test_counters_count_prompt_and_generated_tokens() -> None:
    inbox = Inbox()
    engine = make_engine(FakeRunner(), inbox)
    engine.submit(make_request(1, [1, 2, 3], max_tokens=4))
    engine.start()
    inbox.wait_for_ends(1)
    engine.close()
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (3, 4)
    assert stats.steps_total == 4
    assert (stats.num_running, stats.num_waiting) == (0, 0)
