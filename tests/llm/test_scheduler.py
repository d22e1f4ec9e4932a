"""The scheduler against a runner that computes from its own cells: wrong scheduling gives wrong answers."""

from __future__ import annotations

from typing import Literal

import pytest

from edgerun.errors import QueueFull
from edgerun.llm.kv_cache import KvCache, KvCacheConfig
from edgerun.llm.request import RequestId
from edgerun.llm.scheduler import Scheduler, SchedulerLimits
from edgerun.llm.sequence import Sequence, SequenceStatus
from edgerun.llm.step import CallTiming, ModelRunnerOutput, SampledToken
from edgerun.text.prompt import SamplingParams

from .fakes import END, NAN, expected_answer, make_request
from .scheduler_rig import FREE_CUTS, Rig


def test_answers_equal_those_of_each_request_alone() -> None:
    rig = Rig()
    prompts = {i: list(range(1, 2 + 13 * i)) for i in range(1, 9)}
    for request_id, prompt in prompts.items():
        rig.add(request_id, prompt, max_tokens=10)
    rig.run()
    assert rig.answers == {i: expected_answer(prompt, 10) for i, prompt in prompts.items()}
    assert set(rig.reasons.values()) == {"length"}


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
    assert rig.kv.pool.num_available == 64
    assert not rig.scheduler.has_work
    rig.add(3, [5, 6], max_tokens=3)
    rig.run()
    assert rig.answers[3] == expected_answer([5, 6], 3)


def test_an_end_token_ends_without_being_shown_or_counted() -> None:
    rig = Rig()
    sequence = rig.add(1, [1, 2], max_tokens=9)
    step = rig.scheduler.schedule()
    outputs = rig.scheduler.update(ModelRunnerOutput(step.chunks, (SampledToken(sequence, END),)))
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
    outputs = rig.scheduler.update(ModelRunnerOutput(step.chunks, (SampledToken(sequence, END),)))
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [((END,), None)]


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    rig = Rig(max_waiting=2)
    rig.add(1, [1])
    rig.add(2, [1])
    with pytest.raises(QueueFull) as refused:
        rig.add(3, [1])
    assert refused.value.details["retry_after_s"] == 1


def test_a_step_without_room_preempts_and_the_answers_are_right() -> None:
    rig = Rig(num_blocks=64, max_num_seqs=3)
    rig.runner.num_cells = 60  # far fewer cells than the accounting believes
    for request_id in range(1, 4):
        rig.add(request_id, list(range(1, 20)), max_tokens=20)
    rig.run()
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
    rig.runner.num_cells = 1
    rig.add(1, [1, 2])
    with pytest.raises(RuntimeError, match="disagree"):
        rig.run()


def test_limits_that_cannot_work_are_refused() -> None:
    kv = KvCache(KvCacheConfig("unified", 2, 2, FREE_CUTS))
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Scheduler(kv, SchedulerLimits(8, 4, 16), FREE_CUTS, {END})
    with pytest.raises(ValueError, match="must fit"):
        Scheduler(kv, SchedulerLimits(2, 40, 64), FREE_CUTS, {END})


# ---- prefix sharing

LAYOUTS: tuple[Literal["unified", "streams"], ...] = ("unified", "streams")
SYSTEM = [1 + i % 40 for i in range(100)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_that_arrive_together_compute_their_common_prefix_once(layout: Literal["unified"]) -> None:
    rig = Rig(max_num_seqs=8, budget=64, num_blocks=128, layout=layout)
    prompts = {i: [*SYSTEM, 50 + i, 60 + i, 70 + i] for i in range(1, 9)}
    sequences = [rig.add(i, prompt, max_tokens=5) for i, prompt in prompts.items()]
    rig.run()
    assert rig.answers == {i: expected_answer(prompt, 5) for i, prompt in prompts.items()}
    assert [s.num_cached >= 96 for s in sequences] == [False] + [True] * 7
    assert sequences[0].num_cached == 0
    computed = sum(len(prompt) for prompt in prompts.values()) - sum(s.num_cached for s in sequences)
    assert rig.runner.num_computed == computed + 8 * 4, "cached_tokens says exactly what was not computed"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chat_finds_its_whole_history_again(layout: Literal["unified"]) -> None:
    rig = Rig(layout=layout)
    history = list(range(1, 60))
    for turn in range(1, 5):
        sequence = rig.ask(turn, history, max_tokens=10)
        assert rig.answers[turn] == expected_answer(history, 10)
        expected = 0 if turn == 1 else len(history) - 4 - 10 - 1
        assert sequence.num_cached >= expected // 16 * 16 - 16
        history = [*history, *rig.answers[turn], 7, 8, 9]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_request_again_computes_next_to_nothing(layout: Literal["unified"]) -> None:
    rig = Rig(layout=layout)
    prompt = list(range(1, 100))
    rig.ask(1, prompt)
    before = rig.runner.num_computed
    assert rig.ask(2, prompt).num_cached == (96 if layout == "unified" else 98)
    assert rig.answers[1] == rig.answers[2]
    assert rig.runner.num_computed - before <= 3 + 7


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    rig = Rig(prefix_cache=False)
    rig.ask(1, SYSTEM)
    assert rig.ask(2, SYSTEM).num_cached == 0
    assert rig.kv.misses == {"off": 2}
    assert rig.kv.num_parked == 0


def test_misses_are_counted_with_their_reason() -> None:
    rig = Rig(num_blocks=8, max_len=128)
    rig.ask(1, [1, 2, 3])
    rig.ask(2, SYSTEM)
    rig.ask(3, SYSTEM)
    rig.ask(4, [9] * 110)  # takes the room
    rig.ask(5, SYSTEM)
    assert rig.kv.misses == {"short": 1, "new": 2, "evicted": 1}


def test_parked_sequences_give_way_the_least_recently_used_first_and_from_the_tail() -> None:
    rig = Rig(num_blocks=16, max_len=256)
    rig.ask(1, [1] * 60, max_tokens=4)
    rig.ask(2, [2] * 60, max_tokens=4)
    rig.ask(3, [1] * 60, max_tokens=4)  # the first is fresh again
    rig.ask(4, [4] * 150, max_tokens=1)  # needs two blocks of the second's
    assert rig.ask(5, [1] * 60, max_tokens=1).num_cached >= 48
    assert 0 < rig.ask(6, [2] * 60, max_tokens=1).num_cached <= 32


def test_whoever_waits_for_a_prefix_goes_on_when_the_one_computing_it_leaves() -> None:
    rig = Rig(max_num_seqs=4, budget=36)
    first = rig.add(1, SYSTEM, max_tokens=3)
    rig.add(2, [*SYSTEM, 5], max_tokens=3)
    rig.step()
    assert rig.scheduler.num_waiting == 1
    assert rig.scheduler.abort(first.request.request_id) is first
    rig.run()
    assert rig.answers[2] == expected_answer([*SYSTEM, 5], 3)


def test_incomplete_shared_cells_cost_a_second_computation_not_a_wrong_answer() -> None:
    rig = Rig()
    rig.ask(1, SYSTEM)
    rig.runner.incomplete.add(2)
    rig.ask(2, SYSTEM)
    assert rig.answers[2] == expected_answer(SYSTEM, 8)


def test_parked_cells_that_misled_one_request_mislead_no_other() -> None:
    rig = Rig()
    rig.ask(1, SYSTEM)
    rig.runner.incomplete.add(2)
    rig.ask(2, SYSTEM)
    assert rig.kv.num_parked == 0
    rig.ask(3, SYSTEM)
    assert rig.ask(4, SYSTEM).num_cached > 0


def test_a_failed_sequence_leaves_nothing_behind_for_others() -> None:
    rig = Rig()
    rig.ask(1, [*SYSTEM, NAN])
    assert rig.reasons[1] == "failed"
    assert rig.kv.num_parked == 0


# ---- memory


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("swap_tokens", [0, 200])
def test_more_than_fits_all_finish_with_the_right_answers(swap_tokens: int, exact: bool) -> None:
    rig = Rig(num_blocks=16, max_num_seqs=8, swap_tokens=swap_tokens, exact=exact)
    prompts = {i: [i] * 40 for i in range(1, 13)}
    for request_id, prompt in prompts.items():
        rig.add(request_id, prompt, max_tokens=40)
    rig.run()
    assert rig.answers == {i: expected_answer(prompt, 40) for i, prompt in prompts.items()}
    assert rig.scheduler.num_preemptions > 0
    assert (rig.scheduler.num_swaps > 0) == (swap_tokens > 0)


def test_only_the_tail_is_swapped_where_the_prefix_is_shared() -> None:
    rig = Rig(num_blocks=16, max_num_seqs=4, swap_tokens=1000)
    for request_id in range(1, 5):
        rig.add(request_id, [*SYSTEM, request_id, request_id], max_tokens=60)
    while not rig.kv.num_swapped:
        rig.step()
    assert 0 < rig.kv.num_swapped_tokens < 100
    rig.run()
    for request_id in range(1, 5):
        assert rig.answers[request_id] == expected_answer([*SYSTEM, request_id, request_id], 60)


def test_an_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    rig = Rig(max_num_seqs=1, layout="streams", swap_tokens=500)
    rig.add(1, SYSTEM, max_tokens=30, priority=1)
    for _ in range(8):
        rig.step()
    rig.add(2, [3, 4, 5], max_tokens=2, priority=0)
    rig.run()
    assert list(rig.reasons) == [2, 1]
    assert rig.answers[1] == expected_answer(SYSTEM, 30)


def test_waste_stays_below_one_block_a_sequence() -> None:
    rig = Rig(num_blocks=512, max_num_seqs=8, budget=64, max_len=1024)
    for request_id in range(1, 9):
        rig.add(request_id, [request_id] * 600, max_tokens=30)
    while rig.scheduler.has_work:
        rig.step()
        held = sum(len(cells) for cells in rig.runner.cells.values())
        if held > 1000:
            assert rig.kv.waste() < 0.04


# ---- time


def test_prompt_chunks_shrink_so_that_running_answers_meet_their_target() -> None:
    rig = Rig(max_num_seqs=4, budget=512, num_blocks=256, max_len=2048)
    rig.add(1, [1, 2, 3], max_tokens=200)
    for _ in range(3):
        rig.step()
    cost = rig.scheduler.planner.cost
    for _ in range(20):  # 10 ms a decode, 1 ms a prompt token
        cost.see(ModelRunnerOutput((), (), timings=(CallTiming(1, 0, 0.01), CallTiming(0, 64, 0.069))))
    rig.add(2, list(range(1, 1500)), max_tokens=1)
    sizes = []
    for _ in range(5):
        step = rig.scheduler.schedule()
        sizes.append(step.num_tokens - 1)
        took = tuple(
            CallTiming(1, 0, 0.01)
            if c.is_decode
            else CallTiming(0, c.num_tokens, 0.005 + 0.001 * c.num_tokens)
            for c in step.chunks
        )
        result = rig.runner.execute(step)
        rig.scheduler.update(ModelRunnerOutput(result.computed, result.sampled, timings=took))
    # 0.9 of 100 ms, less 10 ms for the decode and 5 ms that any call costs: 75 tokens, by fours
    assert set(sizes) == {72}


def test_a_short_prompt_need_not_wait_for_a_long_one() -> None:
    rig = Rig(max_num_seqs=4, budget=36, num_blocks=128, max_len=1024)
    rig.add(1, list(range(1, 900)), max_tokens=2)
    rig.step()
    rig.add(2, [1, 2, 3, 4], max_tokens=2)
    rig.run()
    assert list(rig.reasons) == [2, 1]


def test_a_long_prompt_goes_on_though_short_ones_keep_coming() -> None:
    rig = Rig(max_num_seqs=4, budget=36, num_blocks=128, max_len=1024)
    rig.add(1, list(range(1, 300)), max_tokens=2)
    rig.step()
    for request_id in range(2, 200):
        rig.add(request_id, [request_id] * 20, max_tokens=1)
        rig.step()
        if 1 in rig.reasons:
            break
    assert rig.reasons[1] == "length"


def test_one_client_with_many_requests_does_not_starve_another_with_one() -> None:
    rig = Rig(max_num_seqs=2)
    for request_id in range(1, 51):
        rig.add(request_id, [request_id] * 5, max_tokens=6, client="many")
    rig.step()
    rig.add(99, [1, 2, 3], max_tokens=6, client="one")
    rig.run()
    assert list(rig.reasons).index(99) <= 4


def test_what_is_late_ends_wherever_it_is() -> None:
    rig = Rig(max_num_seqs=1)
    running, waiting = rig.add(1, [1, 2], max_tokens=50), rig.add(2, [1, 2], max_tokens=50)
    for sequence, deadline_s in ((running, 5.0), (waiting, 3.0)):
        object.__setattr__(sequence.request, "deadline_s", deadline_s)
    rig.step()
    assert rig.scheduler.expire() == []
    rig.now_s = 5.0
    assert running in rig.scheduler.expire()


@pytest.mark.parametrize("ids", [[0, 2], [1, 3], [0, 1, 3]])
def test_answers_that_run_together_are_moved_to_neighbouring_streams(ids: list[int]) -> None:
    rig = Rig(max_num_seqs=4, layout="streams")
    for request_id in range(4):
        rig.add(request_id, [request_id + 1] * 20, max_tokens=100 if request_id in ids else 3)
    for _ in range(20):
        rig.step()
    (*_, last) = rig.runner.steps
    found = sorted(chunk.seq_id for chunk in last.chunks)
    assert len(found) == len(ids)
    assert found == list(range(found[0], found[0] + len(ids)))
    rig.run()
    for request_id in ids:
        assert rig.answers[request_id] == expected_answer([request_id + 1] * 20, 100)
