from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import QueueFull
from edgerun.repository.spec import DynamicBatching
from edgerun.vision.batcher import DynamicBatcher
from tests.vision.onnx_models import batching


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(policy: DynamicBatching, max_batch_size: int = 8) -> tuple[DynamicBatcher[int], FakeClock]:
    clock = FakeClock()
    return DynamicBatcher(policy, max_batch_size, clock), clock


def items(batcher: DynamicBatcher[int]) -> list[int]:
    return [queued.item for queued in batcher.next_batch()]


def make_busy(batcher: DynamicBatcher[int]) -> None:
    """As after a dispatch: what comes now finds the instance at work."""
    batcher.put(-1)
    assert items(batcher) == [-1]


def test_lone_request_pays_no_delay() -> None:
    batcher, _ = make(batching(preferred=4, delay_us=5000))
    batcher.put(1)
    assert batcher.wait_s() == 0.0
    assert items(batcher) == [1]


def test_lone_client_pays_no_delay_the_second_time_either() -> None:
    batcher, _ = make(batching(preferred=4, delay_us=5000))
    make_busy(batcher)
    assert items(batcher) == []  # the worker comes back and finds nothing: idle again
    batcher.put(2)
    assert items(batcher) == [2]


def test_requests_that_came_while_busy_wait_for_the_preferred_size() -> None:
    batcher, _ = make(batching(preferred=3, delay_us=5000))
    make_busy(batcher)
    batcher.put(1)
    batcher.put(2)
    assert items(batcher) == []
    batcher.put(3)
    assert items(batcher) == [1, 2, 3]


def test_delay_counts_from_the_oldest() -> None:
    batcher, clock = make(batching(preferred=4, delay_us=5000))
    make_busy(batcher)
    batcher.put(1)
    clock.now_s += 0.003
    batcher.put(2)
    assert batcher.wait_s() == pytest.approx(0.002)
    assert items(batcher) == []
    clock.now_s += 0.0021
    assert items(batcher) == [1, 2]


def test_asking_too_early_does_not_make_the_waiting_ones_idle_arrivals() -> None:
    batcher, _ = make(batching(preferred=4, delay_us=5000))
    make_busy(batcher)
    batcher.put(1)
    assert items(batcher) == []
    batcher.put(2)
    assert items(batcher) == []


def test_without_delay_all_that_wait_go_together_up_to_the_maximum() -> None:
    batcher, _ = make(batching(preferred=1, delay_us=0), max_batch_size=4)
    for number in range(6):
        batcher.put(number)
    assert items(batcher) == [0, 1, 2, 3]
    assert items(batcher) == [4, 5]


def test_preferred_size_beyond_the_maximum_does_not_hold_requests_back() -> None:
    batcher, _ = make(batching(preferred=100, delay_us=1_000_000), max_batch_size=2)
    make_busy(batcher)
    batcher.put(1)
    batcher.put(2)
    assert items(batcher) == [1, 2]


def test_full_queue_refuses_and_keeps_what_it_has() -> None:
    batcher, _ = make(batching(preferred=1, delay_us=0, queue=2))
    batcher.put(1)
    batcher.put(2)
    with pytest.raises(QueueFull, match="the limit is 2") as caught:
        batcher.put(3)
    assert caught.value.details["retry_after_s"] == 1
    assert items(batcher) == [1, 2]
    batcher.put(4)
    assert items(batcher) == [4]


def test_empty_batcher_waits_for_a_put_only() -> None:
    batcher, _ = make(batching(preferred=1, delay_us=0))
    assert batcher.wait_s() is None
    assert items(batcher) == []
    assert batcher.drain() == ()


def test_arrival_time_is_kept() -> None:
    batcher, clock = make(batching(preferred=1, delay_us=0))
    batcher.put(1)
    clock.now_s += 2.5
    (queued,) = batcher.next_batch()
    assert clock.now_s - queued.arrived_s == 2.5


@given(
    preferred=st.integers(0, 6),
    delay_us=st.integers(0, 5000),
    maximum=st.integers(1, 5),
    queue=st.integers(1, 12),
    steps=st.lists(st.sampled_from(["put", "take", "tick"]), max_size=80),
)
@settings(deadline=None)
def test_nothing_is_lost_doubled_reordered_or_late(
    preferred: int, delay_us: int, maximum: int, queue: int, steps: list[str]
) -> None:
    batcher, clock = make(batching(preferred, delay_us, queue), maximum)
    accepted: list[int] = []
    served: list[int] = []
    for number, step in enumerate(steps):
        if step == "put":
            try:
                batcher.put(number)
                accepted.append(number)
            except QueueFull:
                assert len(batcher) == queue
        elif step == "tick":
            clock.now_s += 0.001
        else:
            is_due = batcher.wait_s() == 0.0
            batch = batcher.next_batch()
            assert bool(batch) == is_due
            assert len(batch) <= maximum
            served += [queued.item for queued in batch]
        assert len(batcher) == len(accepted) - len(served) <= queue
    # Whatever happened before: after the delay every waiting request is due.
    clock.now_s += delay_us / 1e6 + 1e-6
    while batch := batcher.next_batch():
        served += [queued.item for queued in batch]
    assert served == accepted


@given(st.lists(st.integers(), max_size=20))
@settings(deadline=None)
def test_drain_gives_all_that_wait_in_order(numbers: list[int]) -> None:
    batcher, _ = make(batching(preferred=64, delay_us=1_000_000))
    for number in numbers:
        batcher.put(number)
    assert batcher.drain() == tuple(numbers)
    assert len(batcher) == 0
