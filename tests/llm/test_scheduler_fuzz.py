"""The scheduler under random requests, cancels, failures and lack of room, in both layouts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edgerun.llm.chunks import ChunkRule
from edgerun.llm.request import RequestId

from .fakes import expected_answer
from .scheduler_rig import Rig


class SchedulerFuzz(RuleBasedStateMachine):
    """Add, step, abort, fail and lack of room in any order: blocks and ids are conserved, answers are right,
    each request ends once, and nobody waits for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = self.make_rig()
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.aborted: set[int] = set()

    def make_rig(self) -> Rig:
        return Rig(num_blocks=10, max_len=96, max_num_seqs=3, budget=36)

    @rule(
        length=st.integers(1, 70),
        family=st.integers(0, 2),
        own=st.integers(0, 20),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
    )
    def add(self, length: int, family: int, own: int, max_tokens: int, priority: int) -> None:
        request_id = len(self.prompts) + 1
        common = [1 + (family * 7 + i) % 50 for i in range(length)]
        prompt = [*common, *(1 + (request_id + i) % 50 for i in range(min(own, 75 - length)))]
        self.prompts[request_id] = (prompt, max_tokens)
        self.rig.add(request_id, prompt, max_tokens, priority, client=f"client {family}")

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.rig.scheduler.has_work:
                self.rig.step()

    @rule(which=st.integers(1, 30))
    def abort(self, which: int) -> None:
        if self.rig.scheduler.abort(RequestId(which)) is not None:
            self.aborted.add(which)

    @rule(which=st.integers(1, 30))
    def lose_shared_cells(self, which: int) -> None:
        self.rig.runner.incomplete.add(which)

    @rule(num_cells=st.integers(97, 160))
    def have_less_room(self, num_cells: int) -> None:
        if self.rig.runner.is_unified:
            self.rig.runner.num_cells = num_cells

    @invariant()
    def blocks_and_ids_are_conserved(self) -> None:
        self.rig.check_integrity()

    def teardown(self) -> None:
        self.rig.run()
        for request_id, (prompt, max_tokens) in self.prompts.items():
            if request_id not in self.aborted:
                assert self.rig.answers[request_id] == expected_answer(prompt, max_tokens)


class SwapFuzz(SchedulerFuzz):
    def make_rig(self) -> Rig:
        return Rig(num_blocks=10, max_len=96, max_num_seqs=3, budget=36, swap_tokens=100)


class ManyChunksFuzz(SchedulerFuzz):
    """Many ids and little room: several prompts are started at once."""

    def make_rig(self) -> Rig:
        return Rig(num_blocks=10, max_len=96, max_num_seqs=40, budget=64, rule=ChunkRule(16, 16))


class StreamsFuzz(SchedulerFuzz):
    def make_rig(self) -> Rig:
        return Rig(max_len=96, max_num_seqs=3, budget=64, layout="streams", swap_tokens=200)


class ExactFuzz(SchedulerFuzz):
    def make_rig(self) -> Rig:
        return Rig(max_len=96, max_num_seqs=3, budget=64, layout="streams", exact=True, swap_tokens=60)


TestSchedulerFuzz = SchedulerFuzz.TestCase
TestSwapFuzz = SwapFuzz.TestCase
TestManyChunksFuzz = ManyChunksFuzz.TestCase
TestStreamsFuzz = StreamsFuzz.TestCase
TestExactFuzz = ExactFuzz.TestCase
# At least 10,000 steps in all: 5 kinds, 100 examples, up to 40 rules of up to 12 steps, and a run to the end.
for case in (TestSchedulerFuzz, TestSwapFuzz, TestManyChunksFuzz, TestStreamsFuzz, TestExactFuzz):
    case.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
del case  # else pytest would run the last one twice
