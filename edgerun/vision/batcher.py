"""Which waiting pictures run together, and when. Triton's dynamic batcher for one model instance.

Pure Python: no thread, no lock, no runtime, and the clock is passed in. The owner (see worker) calls it
under its own lock.

A batch is due at once when it holds a request that came while the instance was idle, so that a lone client
never pays the delay. Else it is due when `preferred_batch_size` requests wait, or when the oldest has waited
for `max_queue_delay_microseconds`. A due batch takes all that wait, up to `max_batch_size`, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgerun.errors import QueueFull
from edgerun.repository.spec import DynamicBatching

Item = TypeVar("Item")

# What a client is told to wait. The default queue of 256 pictures takes about 3 s on two CPU cores (98
# pictures/s of EfficientNet-Lite0); there is room again long before it is empty.
_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Queued(Generic[Item]):
    """One waiting request. Times in seconds of the batcher's clock."""

    item: Item
    arrived_s: float
    due_s: float


class DynamicBatcher(Generic[Item]):
    """First in, first out. Every item that put() took leaves once, through next_batch() or drain()."""

    def __init__(self, policy: DynamicBatching, max_batch_size: int, clock: Callable[[], float]) -> None:
        self._max_batch_size = max(1, max_batch_size)
        # A preferred size beyond the largest batch could never be reached.
        self._preferred_size = min(max(1, policy.preferred_batch_size), self._max_batch_size)
        self._delay_s = policy.max_queue_delay_microseconds / 1e6
        self._max_queue_size = max(1, policy.max_queue_size)
        self._clock = clock
        self._queue: deque[Queued[Item]] = deque()
        self._is_idle = True

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: Item) -> None:
        """Raises QueueFull (details: retry_after_s) and keeps nothing when max_queue_size requests wait."""
        if len(self._queue) >= self._max_queue_size:
            raise QueueFull(
                f"{len(self._queue)} pictures wait, the limit is {self._max_queue_size}: try again soon",
                retry_after_s=_RETRY_AFTER_S,
            )
        now = self._clock()
        self._queue.append(Queued(item, now, now if self._is_idle else now + self._delay_s))

    def wait_s(self) -> float | None:
        """Seconds until a batch is due; 0: now; None: only a put() can make one due."""
        if not self._queue:
            return None
        if len(self._queue) >= self._preferred_size:
            return 0.0
        return max(0.0, self._queue[0].due_s - self._clock())

    def next_batch(self) -> tuple[Queued[Item], ...]:
        """Take the batch that is due, or () when none is. To call it says: the instance is free now."""
        if self.wait_s() != 0.0:
            self._is_idle = self._is_idle or not self._queue
            return ()
        self._is_idle = False
        size = min(len(self._queue), self._max_batch_size)
        return tuple(self._queue.popleft() for _ in range(size))

    def drain(self) -> tuple[Item, ...]:
        """Take everything that waits, due or not; for the end."""
        items = tuple(queued.item for queued in self._queue)
        self._queue.clear()
        return items
