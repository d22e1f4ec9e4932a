"""Who runs next: priority, preempted first, fair between clients, deadlines within one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgerun.errors import QueueFull
from edgerun.llm.request import Request, RequestId
from edgerun.llm.sequence import Sequence
from edgerun.llm.waiting_queue import WaitingQueue
from edgerun.text.prompt import SamplingParams


def make_sequence(
    request_id: int,
    client: str = "",
    *,
    priority: int = 0,
    num_tokens: int = 10,
    deadline_s: float = math.inf,
) -> Sequence:
    """Requests arrive in the order of their ids."""
    request = Request(
        request_id=RequestId(request_id),
        prompt_token_ids=(1,) * num_tokens,
        sampling=SamplingParams(),
        num_max_tokens=8,
        priority=priority,
        arrival_s=float(request_id),
        client=client,
        deadline_s=deadline_s,
    )
    return Sequence.of(request)


def ids(sequences: Iterator[Sequence]) -> list[int]:
    return [one.request.request_id for one in sequences]


def admit_next(queue: WaitingQueue) -> Sequence:
    sequence = next(queue.in_order())
    queue.admitted(sequence)
    return sequence


def admit_all(queue: WaitingQueue) -> list[int]:
    return [admit_next(queue).request.request_id for _ in range(len(queue))]


# ---- the queue


def test_a_full_queue_refuses_and_says_when() -> None:
    queue = WaitingQueue(2)
    for number in range(2):
        queue.add(make_sequence(number))
    with pytest.raises(QueueFull, match="2 requests are waiting already; try again in 5 s") as refused:
        queue.add(make_sequence(2))
    assert refused.value.details == {"retry_after_s": 5}
    assert len(queue) == 2


def test_the_time_to_try_again_is_asked_for_when_it_is_needed() -> None:
    waits = iter([7, 9])
    queue = WaitingQueue(0, lambda: next(waits))
    for wait_s in (7, 9):
        with pytest.raises(QueueFull) as refused:
            queue.add(make_sequence(1))
        assert refused.value.details["retry_after_s"] == wait_s


def test_a_preempted_sequence_is_never_refused() -> None:
    queue = WaitingQueue(1)
    queue.add(make_sequence(1))
    queue.put_back(make_sequence(2))
    assert ids(queue.in_order()) == [2, 1]


def test_what_does_not_wait_cannot_be_removed() -> None:
    queue = WaitingQueue(9)
    sequence = make_sequence(1)
    queue.add(sequence)
    queue.remove(sequence)
    for stranger in (sequence, make_sequence(1)):
        with pytest.raises(ValueError, match="request 1 does not wait"):
            queue.remove(stranger)
        with pytest.raises(ValueError, match="request 1 does not wait"):
            queue.admitted(stranger)


def test_find_knows_what_waits() -> None:
    queue = WaitingQueue(9)
    sequence = make_sequence(1)
    queue.add(sequence)
    assert queue.find(RequestId(1)) is sequence
    queue.remove(sequence)
    assert queue.find(RequestId(1)) is None


def test_expired_names_those_whose_deadline_has_come_and_keeps_them() -> None:
    queue = WaitingQueue(9)
    for number, deadline_s in enumerate([math.inf, 5.0, 6.0]):
        queue.add(make_sequence(number, deadline_s=deadline_s))
    assert ids(iter(queue.expired(4.9))) == []
    assert ids(iter(queue.expired(5.0))) == [1]
    assert ids(iter(queue.expired(7.0))) == [1, 2]
    for late in queue.expired(7.0):
        queue.remove(late)
    assert queue.expired(7.0) == []
    assert ids(iter(queue)) == [0]


# ---- the order


def test_priority_comes_before_all_else() -> None:
    queue = WaitingQueue(9)
    queue.put_back(make_sequence(1, "a", priority=1))
    queue.add(make_sequence(2, "a", priority=0))
    queue.add(make_sequence(3, "b", priority=-1))
    queue.add(make_sequence(4, "b", priority=1))
    assert ids(queue.in_order()) == [3, 2, 1, 4]


def test_within_a_client_the_earliest_deadline_then_arrival() -> None:
    queue = WaitingQueue(9)
    for number, deadline_s in [(4, math.inf), (2, 9.0), (3, math.inf), (5, 8.0), (1, 9.0)]:
        queue.add(make_sequence(number, deadline_s=deadline_s))
    assert ids(queue.in_order()) == admit_all(queue) == [5, 1, 2, 3, 4]


def test_the_current_one_may_be_taken_out_on_the_way() -> None:
    queue = WaitingQueue(99)
    for number in range(12):
        queue.add(make_sequence(number, "abc"[number % 3], priority=number % 2))
    expected = ids(queue.in_order())
    seen = []
    for sequence in queue.in_order():
        seen.append(sequence.request.request_id)
        if sequence.request.request_id % 5 == 0:
            queue.remove(sequence)
        elif sequence.request.request_id % 5 < 3:
            queue.admitted(sequence)
    assert sorted(seen) == sorted(expected)
    assert sorted(ids(queue.in_order())) == [3, 4, 8, 9]


def test_what_leaves_before_its_turn_is_skipped() -> None:
    queue = WaitingQueue(9)
    sequences = [make_sequence(number) for number in range(3)]
    for sequence in sequences:
        queue.add(sequence)
    order = queue.in_order()
    assert next(order) is sequences[0]
    queue.remove(sequences[1])
    assert list(order) == [sequences[2]]


# ---- clients


def test_fifty_of_one_client_do_not_keep_one_of_another_waiting() -> None:
    queue = WaitingQueue(99)
    for number in range(50):
        queue.add(make_sequence(number, "many"))
    queue.add(make_sequence(50, "one"))
    assert ids(itertools.islice(queue.in_order(), 3)) == [0, 50, 1]
    assert admit_all(queue)[:3] == [0, 50, 1]


@pytest.mark.parametrize("num_before", [1, 7])
def test_who_comes_while_another_is_served_is_next(num_before: int) -> None:
    queue = WaitingQueue(99)
    for number in range(20):
        queue.add(make_sequence(number, "many"))
    for _ in range(num_before):
        admit_next(queue)
        queue.charge("many", 33)
    queue.add(make_sequence(50, "one"))
    assert admit_next(queue).request.request_id == 50


def test_equal_clients_alternate() -> None:
    queue = WaitingQueue(99)
    for number in range(12):
        queue.add(make_sequence(number, "abc"[number // 4]))
    assert admit_all(queue) == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]


def test_answers_count_as_service() -> None:
    queue = WaitingQueue(99)
    for number in range(6):
        queue.add(make_sequence(number, "ab"[number % 2]))
    admit_next(queue)
    queue.charge("a", 25)  # with the prompt 35, which are more than three prompts of b
    assert admit_all(queue) == [1, 3, 5, 2, 4]


def test_a_long_prompt_is_paid_for_and_a_cached_one_is_not() -> None:
    queue = WaitingQueue(99)
    long = make_sequence(0, "a", num_tokens=100)
    for sequence in (long, make_sequence(1, "a"), *(make_sequence(number, "b") for number in (2, 3, 4))):
        queue.add(sequence)
    assert admit_all(queue) == [0, 2, 3, 4, 1]
    for sequence in (long, make_sequence(1, "a"), *(make_sequence(number, "b") for number in (2, 3, 4))):
        queue.add(sequence)
    long.num_cached = 90
    queue.charge("b", 70)  # both had 110 and 30, now they are even
    queue.charge("b", 10)
    assert admit_all(queue)[:2] == [0, 1]


def test_going_on_after_a_preemption_is_free() -> None:
    queue = WaitingQueue(99)
    queue.add(make_sequence(0, "a"))
    queue.add(make_sequence(1, "a"))
    queue.add(make_sequence(2, "b"))
    queue.add(make_sequence(3, "b"))
    first = admit_next(queue)
    for _ in range(5):
        queue.put_back(first)
        assert admit_next(queue) is first
    assert admit_all(queue) == [2, 1, 3]


def test_who_was_away_cannot_save_up() -> None:
    queue = WaitingQueue(99)
    queue.add(make_sequence(0, "away"))
    admit_next(queue)
    for number in range(1, 60):
        queue.add(make_sequence(number, "there"))
    for _ in range(40):
        admit_next(queue)
    for number in range(60, 80):
        queue.add(make_sequence(number, "away"))
    clients = [admit_next(queue).request.client for _ in range(10)]
    assert clients.count("there") == 5


def test_who_used_an_idle_machine_owes_nothing_to_who_comes_later() -> None:
    queue = WaitingQueue(99)
    queue.add(make_sequence(0, "busy"))
    admit_next(queue)
    queue.charge("busy", 100_000)
    for number in range(1, 21):
        queue.add(make_sequence(number, "new" if number % 2 else "busy"))
    clients = [admit_next(queue).request.client for _ in range(10)]
    assert clients.count("busy") == 5


@given(costs=st.lists(st.integers(1, 200), min_size=2, max_size=60), num_clients=st.integers(2, 5))
def test_service_of_those_who_wait_differs_by_one_prompt_at_most(costs: list[int], num_clients: int) -> None:
    """The paper's bound on counters of those who wait, without answers: the largest prompt."""
    queue = WaitingQueue(10**6)
    numbers = itertools.count()
    clients = [str(number) for number in range(num_clients)]
    served = dict.fromkeys(clients, 0)
    for client in clients:
        queue.add(make_sequence(next(numbers), client, num_tokens=costs[0]))
    for cost in costs:
        sequence = next(queue.in_order())
        client = sequence.request.client
        queue.add(make_sequence(next(numbers), client, num_tokens=cost))  # there is always one more
        queue.admitted(sequence)
        served[client] += sequence.num_prompt_tokens
        assert max(served.values()) - min(served.values()) <= max(costs)


@settings(deadline=None)
@given(
    debt=st.integers(0, 2000),
    crowd=st.integers(1, 6),
    num_tokens=st.integers(1, 50),
    returns=st.booleans(),
)
def test_ever_new_clients_do_not_starve_an_old_one(
    debt: int, crowd: int, num_tokens: int, returns: bool
) -> None:
    """Each admission makes room for one more new client; the old one waits with a larger counter."""
    queue = WaitingQueue(10**6)
    numbers = itertools.count(1)

    def newcomer() -> Sequence:
        number = next(numbers)
        client = f"new-{number % (crowd + 3)}" if returns else f"new-{number}"
        return make_sequence(number, client, num_tokens=num_tokens)

    queue.add(make_sequence(-1, "old", num_tokens=num_tokens))
    queue.add(make_sequence(0, "old"))
    admit_next(queue)  # so that newcomers, who had nothing yet, win a tie
    for _ in range(crowd):
        queue.add(newcomer())
    queue.charge("old", debt)
    # Virtual time gains num_tokens / (crowd + 1) with each admission; those before it then still go first.
    limit = (crowd + 1) * (debt / num_tokens + 1) + 2 * crowd + 2
    for num_admitted in itertools.count():
        assert num_admitted <= limit
        if admit_next(queue).request.request_id == 0:
            break
        queue.add(newcomer())


def test_accounts_of_clients_that_went_are_not_kept_for_ever() -> None:
    queue = WaitingQueue(9)
    for number in range(5000):
        queue.add(make_sequence(number, str(number)))
        queue.charge(str(number), 3)
        admit_next(queue)
        queue.charge(str(number), 3)
    assert len(queue._absent) <= 1024
    assert queue.clients == {}


# ---- anything in any order


class AnyUse(RuleBasedStateMachine):
    """Against a plain list: nothing is lost or doubled, and the order is the documented one."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(12)
        self.waiting: dict[int, tuple[Sequence, bool]] = {}  # with whether it was never admitted
        self.ran: list[Sequence] = []
        self.numbers = itertools.count()

    @rule(
        client=st.sampled_from("abc"),
        priority=st.integers(0, 1),
        num_tokens=st.integers(1, 40),
        deadline_s=st.sampled_from([1.0, 2.0, math.inf]),
    )
    def add(self, client: str, priority: int, num_tokens: int, deadline_s: float) -> None:
        number = next(self.numbers)
        sequence = make_sequence(
            number, client, priority=priority, num_tokens=num_tokens, deadline_s=deadline_s
        )
        try:
            self.queue.add(sequence)
        except QueueFull:
            assert len(self.waiting) >= 12
        else:
            self.waiting[number] = (sequence, True)

    @precondition(lambda self: self.ran)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        sequence = self.ran.pop(data.draw(st.integers(0, len(self.ran) - 1)))
        self.queue.put_back(sequence)
        self.waiting[sequence.request.request_id] = (sequence, False)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence, _ = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.queue.remove(sequence)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 5))
    def admit(self, which: int) -> None:
        """Mostly the head, sometimes one further down."""
        sequence = [*itertools.islice(self.queue.in_order(), which + 1)][-1]
        self.queue.admitted(sequence)
        del self.waiting[sequence.request.request_id]
        self.ran.append(sequence)

    @rule(client=st.sampled_from("abcd"), num_tokens=st.integers(0, 50))
    def charge(self, client: str, num_tokens: int) -> None:
        self.queue.charge(client, num_tokens)

    @rule()
    def admit_everything_as_announced(self) -> None:
        announced = ids(self.queue.in_order())
        assert admit_all(self.queue) == announced
        self.ran += [self.waiting[number][0] for number in announced]
        self.waiting.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        queue = self.queue
        assert len(queue) == len(self.waiting) == sum(queue.clients.values())
        assert sorted(ids(iter(queue))) == sorted(ids(queue.in_order())) == sorted(self.waiting)
        assert all(queue.find(RequestId(number)) is one for number, (one, _) in self.waiting.items())
        late = {number for number, (one, _) in self.waiting.items() if one.request.deadline_s <= 1.5}
        assert set(ids(iter(queue.expired(1.5)))) == late

    @invariant()
    def the_order_is_kept(self) -> None:
        order = [self.waiting[number] for number in ids(self.queue.in_order())]
        levels = [(one.request.priority, is_new) for one, is_new in order]
        assert levels == sorted(levels)
        for client, level in itertools.product("abc", set(levels)):
            mine = [
                (one.request.deadline_s, one.request.arrival_s)
                for (one, _), its in zip(order, levels, strict=True)
                if one.request.client == client and its == level
            ]
            assert mine == sorted(mine)


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
