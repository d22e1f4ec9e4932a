"""Who runs next: the sequences that wait, in the order in which they should be admitted.

Owns the waiting sequences and what service each client got. Knows neither blocks nor budgets: the scheduler
decides whether the next one fits. Pure Python; owned by the engine thread.

Order: priority (lower first, as in vLLM), then preempted before new, then the client that got the least
service, then within a client the earliest deadline, arrival, id. Priority is strict: while more urgent
requests keep coming, a less urgent one waits. Among equal priorities no client waits for ever.

Fairness is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI
2024): a counter for each client, charged with the prompt on admission, with answer tokens as they are made.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from edgerun.errors import QueueFull
from edgerun.llm.request import RequestId
from edgerun.llm.sequence import Sequence

_RETRY_AFTER_S = 5
_MAX_ABSENT = 1024  # accounts kept of clients with nothing waiting; more than ever run at once


@dataclass(slots=True)
class _Account:
    """served: tokens, lifted when the client comes back. last_turn: of its last admission, 0 for none.

    came: turn at which it came, so that of two clients that never ran the first goes first.
    """

    served: int = 0
    last_turn: int = 0
    came: int = 0
    num_waiting: int = 0


class _Level(NamedTuple):
    """Sequences that only their clients' service and their own deadline and arrival put in order."""

    priority: int
    is_new: bool  # never admitted


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    sequence: Sequence
    level: _Level


@dataclass(frozen=True, slots=True)
class _Passed:
    """What a walk through the queue has gone past: tokens that were left waiting, and each client's turn."""

    tokens: Counter[str]
    turns: dict[str, int]


class WaitingQueue:
    """Sequences that wait, of any number of clients."""

    def __init__(self, max_waiting: int, retry_after_s: Callable[[], int] | None = None) -> None:
        """retry_after_s: an estimate of when there will be room; asked when a sequence is refused."""
        self._max_waiting = max_waiting
        self._retry_after_s = retry_after_s or (lambda: _RETRY_AFTER_S)
        self._entries: dict[RequestId, _Entry] = {}
        self._levels: dict[_Level, dict[str, list[Sequence]]] = {}  # lists sorted, none empty
        self._with_deadline: dict[RequestId, Sequence] = {}
        self._present: dict[str, _Account] = {}  # clients with something waiting
        self._absent: dict[str, _Account] = {}  # the others, least recently served first
        self._last_admitted = _Account()
        self._virtual_time = 0.0  # in tokens: where the counter of a client that comes now starts
        self._turns = itertools.count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """All, in no order that matters; the queue may change meanwhile."""
        return iter([entry.sequence for entry in self._entries.values()])

    @property
    def clients(self) -> dict[str, int]:
        """How many sequences of each client wait."""
        return {client: account.num_waiting for client, account in self._present.items()}

    def find(self, request_id: RequestId) -> Sequence | None:
        entry = self._entries.get(request_id)
        return entry.sequence if entry else None

    def expired(self, now_s: float) -> list[Sequence]:
        """Those whose deadline has come; they stay in the queue."""
        return [one for one in self._with_deadline.values() if one.request.deadline_s <= now_s]

    # ---- coming and going

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises QueueFull."""
        if len(self) >= self._max_waiting:
            wait_s = self._retry_after_s()
            raise QueueFull(
                f"{len(self)} requests are waiting already; try again in {wait_s} s", retry_after_s=wait_s
            )
        self._insert(sequence, is_new=True)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence, ahead of the new ones of its priority. Never refused."""
        self._insert(sequence, is_new=False)

    def admitted(self, sequence: Sequence) -> None:
        """It runs now: remove it and charge its client for the prompt, once in the sequence's life.

        num_cached is read: what the prefix cache gave costs nothing. Raises ValueError if it does not wait.
        """
        entry = self._entry(sequence)
        client = sequence.request.client
        account = self._present[client]
        self.charge(client, _admission_cost(sequence, entry.level))  # before it leaves: see charge
        account.last_turn = next(self._turns)
        self._last_admitted = account
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It ended while it waited. Raises ValueError if it does not wait here."""
        entry = self._entry(sequence)
        request = sequence.request
        del self._entries[request.request_id]
        self._with_deadline.pop(request.request_id, None)
        by_client = self._levels[entry.level]
        by_client[request.client].remove(sequence)
        if not by_client[request.client]:
            del by_client[request.client]
        if not by_client:
            del self._levels[entry.level]
        self._leave(request.client)

    def charge(self, client: str, num_tokens: int) -> None:
        """The client got so many tokens of service. For answer tokens: `admitted` has charged the prompt."""
        account = self._present.get(client)
        if account is not None:
            # Virtual time is what each of those who wait has got, had they all got the same.
            self._virtual_time += num_tokens / len(self._present)
        else:
            account = self._absent.pop(client, None) or _Account()
            self._keep_absent(client, account)
        account.served += num_tokens

    def _entry(self, sequence: Sequence) -> _Entry:
        request_id = sequence.request.request_id
        entry = self._entries.get(request_id)
        if entry is None or entry.sequence is not sequence:
            raise ValueError(f"request {request_id} does not wait")
        return entry

    def _insert(self, sequence: Sequence, is_new: bool) -> None:
        request = sequence.request
        assert request.request_id not in self._entries, "a sequence waits once"
        self._come(request.client)
        level = _Level(request.priority, is_new)
        waiting = self._levels.setdefault(level, {}).setdefault(request.client, [])
        insort(waiting, sequence, key=_urgency)
        self._entries[request.request_id] = _Entry(sequence, level)
        if request.deadline_s != math.inf:
            self._with_deadline[request.request_id] = sequence

    # ---- clients

    def _come(self, client: str) -> None:
        account = self._present.get(client)
        if account is None:
            account = self._absent.pop(client, None) or _Account()
            # Who was away cannot save up service: it starts level with those who waited meanwhile.
            account.served = max(account.served, self._start_level())
            account.came = next(self._turns)
            self._present[client] = account
        account.num_waiting += 1

    def _leave(self, client: str) -> None:
        account = self._present[client]
        account.num_waiting -= 1
        if account.num_waiting == 0:
            del self._present[client]
            self._keep_absent(client, account)

    def _keep_absent(self, client: str, account: _Account) -> None:
        self._absent[client] = account
        if len(self._absent) > _MAX_ABSENT:
            del self._absent[next(iter(self._absent))]

    def _start_level(self) -> int:
        """The counter that a client gets at least when it comes.

        The paper takes the smallest of those who wait, and when none waits that of the last admitted. But the
        smallest stands still while ever new clients come with one request each (each process of a
        shell script is one), and they would keep an older client waiting for ever. Therefore virtual time is
        taken, within what those who wait have: at most one token behind the last of them.
        """
        if self._present:
            served = [account.served for account in self._present.values()]
            self._virtual_time = min(max(self._virtual_time, min(served)), max(served) + 1)
        else:
            self._virtual_time = max(self._virtual_time, self._last_admitted.served)
        return int(self._virtual_time)

    # ---- the order

    def in_order(self) -> Iterator[Sequence]:
        """The most urgent first, each as if those before it had been admitted. Lazy.

        The caller may take out what it was given, or leave it; what else leaves meanwhile is skipped.
        """
        passed = _Passed(Counter(), {})
        for level in sorted(self._levels):
            by_client = self._levels.get(level, {})
            lists: dict[str, Iterator[Sequence]] = {}
            ranks = [(self._rank(client, passed), client) for client in by_client]
            heapq.heapify(ranks)
            while ranks:
                _, client = heapq.heappop(ranks)
                if client not in lists:
                    lists[client] = iter(tuple(by_client.get(client, ())))
                sequence = next((one for one in lists[client] if self._waits_on(one, level)), None)
                if sequence is None:
                    continue
                yield sequence
                passed.turns[client] = next(self._turns)
                if self._waits_on(sequence, level):
                    passed.tokens[client] += _admission_cost(sequence, level)
                if client in self._present:
                    heapq.heappush(ranks, (self._rank(client, passed), client))

    def _rank(self, client: str, passed: _Passed) -> tuple[int, int, int]:
        """Between clients: least service, then longest not admitted, then first come."""
        account = self._present[client]
        last_turn = passed.turns.get(client, account.last_turn)
        return account.served + passed.tokens[client], last_turn, account.came

    def _waits_on(self, sequence: Sequence, level: _Level) -> bool:
        entry = self._entries.get(sequence.request.request_id)
        return entry is not None and entry.sequence is sequence and entry.level == level


def _urgency(sequence: Sequence) -> tuple[float, float, int]:
    """Within one client."""
    request = sequence.request
    return request.deadline_s, request.arrival_s, request.request_id


def _admission_cost(sequence: Sequence, level: _Level) -> int:
    """Tokens. Going on after a preemption is free: the client did not ask for being computed again."""
    return max(1, sequence.num_prompt_tokens - sequence.num_cached) if level.is_new else 0
