"""The loop with a fake runner: every request ends exactly once, whatever happens to it."""

from __future__ import annotations

import queue
import time

from edgerun.engine.messages import Accepted, Failed, Message, Tokens
from edgerun.llm.chunks import ChunkRule
from edgerun.llm.engine import LlmEngine
from edgerun.llm.kv_cache import KvCache, KvCacheConfig
from edgerun.llm.loop import EngineLoop
from edgerun.llm.request import RequestId
from edgerun.llm.scheduler import Scheduler, SchedulerLimits

from .fakes import END, NAN, FakeRunner, expected_answer, make_request


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


class Rig:
    """An engine on a loop of its own; requests may be submitted before it starts."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.inbox, self.runner = Inbox(), FakeRunner()
        self.loop = EngineLoop(lambda error: None)
        rule = ChunkRule.of(flash_attention=False)
        kv = KvCache(KvCacheConfig("unified", 64, 16, rule))
        scheduler = Scheduler(kv, SchedulerLimits(4, 36, 256, max_waiting), rule, {END})
        self.engine = LlmEngine(self.loop, scheduler, kv, self.runner, self.inbox.messages.put, 4)

    def start(self) -> None:
        self.loop.start()
        self.engine.start()

    def close(self) -> None:
        self.engine.close()
        self.loop.stop()
        self.inbox.drain()


def test_each_request_is_accepted_and_ends_once_with_its_own_answer() -> None:
    rig = Rig()
    rig.start()
    prompts = {i: list(range(1, 3 + i)) for i in range(1, 20)}
    for request_id, prompt in prompts.items():
        rig.engine.submit(make_request(request_id, prompt, max_tokens=6))
    rig.inbox.wait_for_ends(len(prompts))
    rig.close()
    assert sorted(rig.inbox.accepted) == sorted(prompts)
    assert rig.inbox.ends == {i: ["length"] for i in prompts}
    assert rig.inbox.answers == {i: expected_answer(prompt, 6) for i, prompt in prompts.items()}
    assert sorted(rig.runner.forgotten) == sorted(prompts)
    assert rig.runner.is_warm
    assert rig.runner.is_closed


def test_an_abort_ends_the_request_and_leaves_the_others_alone() -> None:
    rig = Rig()
    rig.engine.submit(make_request(1, [1, 2], max_tokens=10**6))
    rig.engine.submit(make_request(2, [3, 4], max_tokens=5))
    rig.engine.abort(RequestId(1))
    rig.engine.abort(RequestId(99))  # unknown: ignored
    rig.start()
    rig.inbox.wait_for_ends(2)
    rig.close()
    assert rig.inbox.ends == {1: ["abort"], 2: ["length"]}
    assert rig.inbox.answers[2] == expected_answer([3, 4], 5)
    assert rig.engine.stats().num_free_blocks == 64


def test_a_sequence_without_usable_logits_fails_alone() -> None:
    rig = Rig()
    rig.engine.submit(make_request(1, [1, NAN], max_tokens=5))
    rig.engine.submit(make_request(2, [3, 4], max_tokens=5))
    rig.start()
    rig.inbox.wait_for_ends(2)
    rig.close()
    assert rig.inbox.ends == {1: ["ModelError"], 2: ["length"]}
    assert rig.inbox.answers == {2: expected_answer([3, 4], 5)}
    assert sorted(rig.runner.forgotten) == [1, 2]
    assert rig.engine.stats().num_free_blocks == 64


def test_close_fails_what_still_runs_once() -> None:
    rig = Rig()
    rig.engine.submit(make_request(1, [1], max_tokens=10**9))
    rig.start()
    rig.close()
    assert rig.inbox.ends == {1: ["EngineLost"]}


def test_a_full_queue_fails_the_newcomer_alone() -> None:
    rig = Rig(max_waiting=1)
    for request_id in (1, 2):
        rig.engine.submit(make_request(request_id, [1], max_tokens=2))
    rig.start()
    rig.inbox.wait_for_ends(2)
    rig.close()
    assert rig.inbox.ends == {1: ["length"], 2: ["QueueFull"]}


def test_counters_count_prompt_and_generated_tokens() -> None:
    rig = Rig()
    rig.engine.submit(make_request(1, [1, 2, 3], max_tokens=4))
    rig.start()
    rig.inbox.wait_for_ends(1)
    rig.close()
    stats = rig.engine.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (3, 4)
    assert stats.steps_total == 4
    assert (stats.num_running, stats.num_waiting) == (0, 0)
