"""A scheduler, a KV cache and a fake runner put together, for tests that look at what comes out."""

from __future__ import annotations

from typing import Literal

from edgerun.llm.chunks import ChunkRule
from edgerun.llm.kv_cache import KvCache, KvCacheConfig
from edgerun.llm.scheduler import Scheduler, SchedulerLimits
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import KvMismatch

from .fakes import END, FakeRunner, make_request

FREE_CUTS = ChunkRule.of(flash_attention=False)


class Rig:
    """A scheduler, a KV cache and a fake runner with a clock, and what came out of them."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
        budget: int = 36,
        max_len: int = 256,
        *,
        layout: Literal["unified", "streams"] = "unified",
        prefix_cache: bool = True,
        exact: bool = False,
        swap_tokens: int = 0,
        max_waiting: int = 512,
        rule: ChunkRule = FREE_CUTS,
        spare_ids: int = 3,
    ) -> None:
        max_len = min(max_len, num_blocks * 16)
        if layout == "streams":
            num_blocks, spare_ids = max_num_seqs * -(-max_len // 16), 0
        config = KvCacheConfig(
            layout=layout,
            num_blocks=num_blocks,
            num_seq_ids=max_num_seqs + spare_ids,
            rule=rule,
            prefix_cache=prefix_cache,
            exact=exact,
            swap_tokens=swap_tokens,
        )
        self.kv = KvCache(config)
        self.now_s = 0.0
        self.scheduler = Scheduler(
            self.kv,
            SchedulerLimits(max_num_seqs, budget, max_len, max_waiting, exact=exact),
            rule,
            {END},
            clock=lambda: self.now_s,
        )
        self.runner = FakeRunner(num_blocks * 16, is_unified=layout == "unified")
        self.answers: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}

    def add(
        self, request_id: int, prompt: list[int], max_tokens: int = 8, priority: int = 0, client: str = ""
    ) -> Sequence:
        sequence = Sequence.of(make_request(request_id, prompt, max_tokens, priority, client))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> int:
        """One step; the tokens computed."""
        self.now_s += 0.01
        step = self.scheduler.schedule()
        try:
            result = self.runner.execute(step)
        except KvMismatch as mismatch:
            self.scheduler.drop_shared(mismatch.sequence)
            self.check_integrity()
            return 1
        for output in self.scheduler.update(result):
            request_id = output.sequence.request.request_id
            self.answers.setdefault(request_id, []).extend(output.token_ids)
            if output.finish_reason:
                self.end(request_id, output.finish_reason)
        for failed in result.failed:
            self.scheduler.fail(failed.sequence)
            self.end(failed.sequence.request.request_id, "failed")
        self.check_integrity()
        return step.num_tokens

    def end(self, request_id: int, reason: str) -> None:
        assert request_id not in self.reasons, "a request ends once"
        self.reasons[request_id] = reason

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()

    def check_idle(self) -> None:
        """As LlmEngine.idle does: nothing runs, and llama.cpp holds what the accounting says."""
        for operation in self.kv.take_operations():
            self.runner._operate(operation)
        self.check_integrity()
        self.runner.check_integrity(self.kv.held())
        assert self.kv.pool.num_available == self.kv.pool.num_blocks
        assert not self.runner.swapped
        assert self.kv.num_swapped == 0

    def run(self) -> None:
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < 10_000, "the scheduler makes no progress"
        self.check_idle()

    def ask(self, request_id: int, prompt: list[int], max_tokens: int = 8) -> Sequence:
        """Add one request and run until it is done."""
        sequence = self.add(request_id, prompt, max_tokens)
        self.run()
        return sequence
