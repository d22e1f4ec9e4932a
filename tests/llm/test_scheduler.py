"""The scheduler against a runner that computes from its own cells: wrong scheduling gives wrong answers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edgerun.errors import QueueFull
from edgerun.llm.block_pool import BlockPool
from edgerun.llm.request import RequestId
from edgerun.llm.scheduler import Scheduler, SchedulerLimits
from edgerun.llm.sequence import Sequence, SequenceStatus
from edgerun.llm.step import ModelRunnerOutput, NoKvRoom, SampledToken
from edgerun.text.prompt import SamplingParams

from .fakes import END, FakeRunner, expected_answer, make_request


class Rig:
    """A scheduler, a pool and a fake runner, and what came out of them."""

    def __init__(
        self, num_blocks: int = 64, max_num_seqs: int = 4, budget: int = 36, max_len: int = 256, **limits: int
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size=16)
        self.scheduler = Scheduler(
            self.pool,
            SchedulerLimits(max_num_seqs, budget, min(max_len, num_blocks * 16), **limits),
            {END},
        )
        self.runner = FakeRunner(num_blocks * 16)
        self.answers: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}

    def add(self, request_id: int, prompt: list[int], max_tokens: int = 8, priority: int = 0) -> Sequence:
        sequence = Sequence.of(make_request(request_id, prompt, max_tokens, priority))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> int:
        """One step; the tokens computed."""
        step = self.scheduler.schedule()
        for output in self.scheduler.update(step, self.runner.execute(step)):
            request_id = output.sequence.request.request_id
            self.answers.setdefault(request_id, []).extend(output.token_ids)
            if output.finish_reason:
                assert request_id not in self.reasons, "a request ends once"
                self.reasons[request_id] = output.finish_reason
        self.scheduler.check_integrity()
        return step.num_tokens

    def run(self) -> None:
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < 10_000, "the scheduler makes no progress"


def test_answers_equal_those_of_each_request_alone() -> None:
    rig = Rig()
    prompts = {i: list(range(1, 2 + 13 * i)) for i in range(1, 9)}
    for request_id, prompt in prompts.items():
        rig.add(request_id, prompt, max_tokens=10)
    rig.run()
    assert rig.answers == {i: expected_answer(prompt, 10) for i, prompt in prompts.items()}
    assert set(rig.reasons.values()) == {"length"}
    assert rig.pool.num_free == 64


def test_a_running_stream_gets_a_token_in_each_step_beside_a_long_prompt() -> None:
    rig = Rig()
    rig.add(1, [1, 2, 3], max_tokens=50)
    rig.step()
    rig.add(2, list(range(1, 200)), max_tokens=2)
    for _ in range(6):
        before = len(rig.answers[1])
        rig.step()
        assert len(rig.answers[1]) == before + 1


def test_a_step_never_goes_over_its_token_budget() -> None:
    rig = Rig(budget=36)
    for request_id in range(1, 6):
        rig.add(request_id, list(range(1, 90)), max_tokens=4)
    while rig.scheduler.has_work:
        assert 0 < rig.step() <= 36


def test_prompt_chunks_end_at_the_same_places_whatever_else_runs() -> None:
    def borders(rig: Rig, request_id: int) -> list[int]:
        return [
            chunk.start + chunk.num_tokens
            for step in rig.runner.steps
            for chunk in step.chunks
            if chunk.sequence.request.request_id == request_id and chunk.start < 100
        ]

    alone, crowded = Rig(), Rig()
    alone.add(9, list(range(1, 101)), max_tokens=1)
    alone.run()
    for request_id in range(1, 4):
        crowded.add(request_id, list(range(1, 60)), max_tokens=20)
    crowded.add(9, list(range(1, 101)), max_tokens=1)
    crowded.run()
    assert borders(alone, 9) == borders(crowded, 9) == [32, 64, 96, 100]


def test_preempted_sequences_give_the_same_answer_as_uninterrupted_ones() -> None:
    rig = Rig(num_blocks=8, max_num_seqs=4, max_len=128)
    for request_id in range(1, 5):
        rig.add(request_id, list(range(1, 20)), max_tokens=60)
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    for request_id in range(1, 5):
        assert rig.answers[request_id] == expected_answer(list(range(1, 20)), 60)


def test_the_latest_of_equal_priority_is_preempted_first() -> None:
    rig = Rig(num_blocks=4, max_num_seqs=2, max_len=64)
    first, second = rig.add(1, list(range(1, 17)), 40), rig.add(2, list(range(1, 17)), 40)
    while not rig.scheduler.num_preemptions:
        rig.step()
    assert first.status is SequenceStatus.RUNNING
    assert second.status is SequenceStatus.PREEMPTED


def test_a_lower_priority_number_goes_first() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add(1, [1], max_tokens=1, priority=5)
    rig.add(2, [1], max_tokens=1, priority=0)
    rig.step()
    assert list(rig.reasons) == [2]


def test_abort_frees_blocks_and_cells_wherever_the_sequence_is() -> None:
    rig = Rig(max_num_seqs=1)
    running, waiting = rig.add(1, [1, 2], max_tokens=99), rig.add(2, [1, 2], max_tokens=99)
    rig.step()
    assert rig.scheduler.abort(RequestId(2)) is waiting
    assert rig.scheduler.abort(RequestId(1)) is running
    assert rig.scheduler.abort(RequestId(1)) is None
    assert rig.pool.num_free == 64
    assert not rig.scheduler.has_work
    rig.add(3, [5, 6], max_tokens=3)
    rig.run()
    assert rig.answers[3] == expected_answer([5, 6], 3)


def test_an_end_token_ends_without_being_shown_or_counted() -> None:
    rig = Rig()
    sequence = rig.add(1, [1, 2], max_tokens=9)
    step = rig.scheduler.schedule()
    outputs = rig.scheduler.update(step, ModelRunnerOutput((SampledToken(sequence, END),)))
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [((), "stop")]


def test_ignore_eos_goes_on_past_an_end_token() -> None:
    rig = Rig()
    request = make_request(1, [1, 2], max_tokens=2)
    sequence = Sequence.of(
        type(request)(
            request.request_id, request.prompt_token_ids, SamplingParams(ignore_eos=True), 2, 0, 0.0
        )
    )
    rig.scheduler.add(sequence)
    step = rig.scheduler.schedule()
    outputs = rig.scheduler.update(step, ModelRunnerOutput((SampledToken(sequence, END),)))
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [((END,), None)]


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    rig = Rig(max_waiting=2)
    rig.add(1, [1])
    rig.add(2, [1])
    with pytest.raises(QueueFull) as refused:
        rig.add(3, [1])
    assert refused.value.details["retry_after_s"] == 5


def test_a_step_without_room_preempts_and_the_answers_are_right() -> None:
    rig = Rig(num_blocks=64, max_num_seqs=3)
    rig.runner.num_cells = 60  # far fewer cells than the accounting believes
    for request_id in range(1, 4):
        rig.add(request_id, list(range(1, 20)), max_tokens=20)
    for _ in range(2000):
        if not rig.scheduler.has_work:
            break
        try:
            rig.step()
        except NoKvRoom:
            rig.scheduler.no_room()
    assert {i: rig.answers[i] for i in (1, 2, 3)} == {
        i: expected_answer(list(range(1, 20)), 20) for i in (1, 2, 3)
    }


def test_a_newcomer_does_not_take_the_blocks_that_a_started_prompt_waits_for() -> None:
    # Chunks of 64 tokens, 8 blocks: 1 holds one, 2 holds four and needs four more, three are free.
    rig = Rig(num_blocks=8, max_num_seqs=3, budget=67, max_len=128)
    rig.add(1, list(range(1, 11)), max_tokens=5)
    rig.step()
    rig.add(2, list(range(1, 121)), max_tokens=1)
    rig.step()
    rig.add(3, [1, 2], max_tokens=60)
    rig.run()
    assert list(rig.reasons) == [1, 2, 3]


def test_started_prompts_that_fill_the_pool_do_not_wait_for_each_other_for_ever() -> None:
    # Chunks of 32 tokens, two in a step: 1 and 2 hold eight of the 16 blocks each and both need more.
    rig = Rig(num_blocks=16, max_num_seqs=20, budget=64, max_len=256)
    prompts = {i: list(range(i, 200 + i)) for i in (1, 2, 3)}
    for request_id, prompt in prompts.items():
        rig.add(request_id, prompt, max_tokens=4)
    while rig.scheduler.has_work:
        assert rig.step() > 0, "llama.cpp fails on an empty batch"
    assert rig.answers == {i: expected_answer(prompt, 4) for i, prompt in prompts.items()}


def test_no_room_for_a_lone_sequence_is_an_error_not_an_endless_loop() -> None:
    rig = Rig()
    rig.add(1, [1, 2])
    rig.scheduler.schedule()
    with pytest.raises(RuntimeError, match="disagree"):
        rig.scheduler.no_room()


def test_limits_that_cannot_work_are_refused() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Scheduler(pool, SchedulerLimits(8, 4, 16), {END})
    with pytest.raises(ValueError, match="must fit"):
        Scheduler(pool, SchedulerLimits(2, 40, 64), {END})


class SchedulerFuzz(RuleBasedStateMachine):
    """Add, step and abort in any order: blocks and ids are conserved, answers are right, all ends once."""

    limits = {"max_num_seqs": 3, "budget": 36}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(num_blocks=10, max_len=96, **self.limits)
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.aborted: set[int] = set()

    @rule(length=st.integers(1, 70), max_tokens=st.integers(1, 20), priority=st.integers(0, 2))
    def add(self, length: int, max_tokens: int, priority: int) -> None:
        request_id = len(self.prompts) + 1
        prompt = [1 + (request_id * 7 + i) % 50 for i in range(length)]
        self.prompts[request_id] = (prompt, max_tokens)
        self.rig.add(request_id, prompt, max_tokens, priority)

    @rule()
    def step(self) -> None:
        if self.rig.scheduler.has_work:
            assert self.rig.step() > 0

    @rule(which=st.integers(1, 30))
    def abort(self, which: int) -> None:
        if self.rig.scheduler.abort(RequestId(which)) is not None:
            self.aborted.add(which)

    @invariant()
    def blocks_and_ids_are_conserved(self) -> None:
        self.rig.scheduler.check_integrity()

    def teardown(self) -> None:
        self.rig.run()
        assert self.rig.pool.num_free == 10
        for request_id, (prompt, max_tokens) in self.prompts.items():
            if request_id not in self.aborted:
                assert self.rig.answers[request_id] == expected_answer(prompt, max_tokens)


class ManyChunksFuzz(SchedulerFuzz):
    """Chunks of 16 tokens, four in a step: several prompts are started at once."""

    limits = {"max_num_seqs": 40, "budget": 64}  # noqa: RUF012


TestSchedulerFuzz = SchedulerFuzz.TestCase
TestManyChunksFuzz = ManyChunksFuzz.TestCase
for case in (TestSchedulerFuzz, TestManyChunksFuzz):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
