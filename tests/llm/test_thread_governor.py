"""Threads follow what other programs leave, and stay where they are otherwise."""

from __future__ import annotations

from edgerun.llm.thread_governor import ThreadGovernor


def steps(governor: ThreadGovernor, count: int, seconds: dict[int, float], num_decodes: int = 1) -> list[int]:
    """Run steps that take seconds[threads]; the threads of each."""
    used = []
    for _ in range(count):
        used.append(governor.num_threads)
        governor.see(num_decodes, seconds[used[-1]])
    return used


IDLE, BUSY = {4: 0.010, 2: 0.018}, {4: 0.050, 2: 0.020}


def test_an_idle_machine_keeps_all_threads() -> None:
    used = steps(ThreadGovernor(4), 5000, IDLE)
    assert used.count(2) <= 5000 / 500 * 3


def test_a_crowd_is_never_tried_with_fewer_threads_without_need() -> None:
    assert set(steps(ThreadGovernor(4), 5000, IDLE, num_decodes=8)) == {4}


def test_threads_give_way_to_a_busy_program_and_come_back() -> None:
    governor = ThreadGovernor(4)
    steps(governor, 50, IDLE, num_decodes=8)
    busy = steps(governor, 500, BUSY, num_decodes=8)
    assert busy[:4] == [4, 4, 4, 2]
    assert busy.count(2) > 450
    idle = steps(governor, 200, IDLE, num_decodes=8)
    assert idle[100:] == [4] * 100


def test_a_start_on_a_busy_machine_is_found() -> None:
    used = steps(ThreadGovernor(4), 2000, BUSY)
    assert used[-100:].count(2) >= 90


def test_a_context_that_grows_is_no_jump() -> None:
    governor = ThreadGovernor(4)
    for i in range(400):
        assert governor.num_threads == 4
        governor.see(2, 0.01 * 1.02**i)


def test_one_thread_has_nothing_to_choose() -> None:
    assert set(steps(ThreadGovernor(1), 2000, {1: 0.01})) == {1}
