"""Which tokens of which sequences the next step computes. Pure Python; owned by the engine thread.

No phases (vLLM's v1 scheduler): running answers first, one token each, then prompt chunks of those already
started, then new sequences, as many as the inter-token target allows. Nothing is reserved for tokens not yet
written; when the cache is full the least urgent sequence gives its cells back and goes on later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice

from edgerun.engine.messages import FinishReason
from edgerun.llm.chunks import ChunkRule
from edgerun.llm.kv_cache import KvCache, Lookup
from edgerun.llm.request import RequestId
from edgerun.llm.sequence import Sequence, SequenceStatus
from edgerun.llm.step import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from edgerun.llm.step_budget import StepBudget, StepPlanner
from edgerun.llm.waiting_queue import WaitingQueue

_LONGEST_RETRY_S = 60
_MAX_LOOKED_AT = 64  # waiting sequences looked at in one step: each costs a walk through the prefix tree
_MAX_PASSED_OVER = 3
_STEADY_STEPS = 4


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_batched_tokens bounds one step; max_model_len one sequence; max_waiting the queue.

    exact: an answer that is computed again is computed token by token, as it was the first time.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int = 512
    inter_token_target_s: float = 0.1
    exact: bool = False


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a sequence gained in one step; finish_reason None while it runs."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


def _urgency(sequence: Sequence) -> tuple[int, float, float, int]:
    """Smaller is more urgent: priority as in vLLM, then the deadline, then arrival."""
    request = sequence.request
    return request.priority, request.deadline_s, request.arrival_s, request.request_id


class Scheduler:
    """Owns every Sequence and the queue; decides over the KV cache."""

    def __init__(
        self,
        kv: KvCache,
        limits: SchedulerLimits,
        rule: ChunkRule,
        end_tokens: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if limits.max_model_len > kv.pool.num_blocks * kv.pool.block_size:
            raise ValueError("one sequence of max_model_len must fit into the pool")
        self._kv, self._limits, self._rule, self._clock = kv, limits, rule, clock
        self._end_tokens = frozenset(end_tokens)
        self._waiting = WaitingQueue(limits.max_waiting, self._retry_after_s)
        self._awaits: dict[Sequence, Lookup] = {}  # waiting for a prefix that a running one computes
        self._running: list[Sequence] = []  # in the order of admission
        # After llama.cpp had less room than the accounting: nobody is admitted until somebody ends, else
        # the one just preempted would come back into the same lack of room.
        self._is_short_of_room = False
        self._duration_s = 0.0  # of a request, from its admission to its end: a running mean
        self._admitted_s: dict[Sequence, float] = {}
        self.planner = StepPlanner(limits.inter_token_target_s, limits.max_num_batched_tokens)
        self._decoded_together: list[Sequence] = []
        self._num_steady_steps = 0
        self.num_preemptions = self.num_swaps = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self._waiting))

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises QueueFull."""
        self._waiting.add(sequence)

    def abort(self, request_id: RequestId) -> Sequence | None:
        """End a sequence wherever it is; None when it is not (or no longer) here."""
        for sequence in self._running:
            if sequence.request.request_id == request_id:
                self._finish(sequence)
                return sequence
        waiting = self._waiting.find(request_id)
        if waiting is not None:
            self._finish(waiting)
        return waiting

    def abort_all(self) -> list[Sequence]:
        """End every sequence; those that were here."""
        sequences = [*self._running, *self._waiting]
        for sequence in sequences:
            self._finish(sequence)
        return sequences

    def expire(self) -> list[Sequence]:
        """End those whose deadline has passed; they are returned."""
        now_s = self._clock()
        late = [s for s in self._running if s.request.deadline_s <= now_s]
        late += self._waiting.expired(now_s)
        for sequence in late:
            self._finish(sequence)
        return late

    def _retry_after_s(self) -> int:
        """About when a place in the queue is free: one in max_num_seqs of a request's duration."""
        return max(1, min(_LONGEST_RETRY_S, round(self._duration_s / self._limits.max_num_seqs)))

    # ---- before the step

    def schedule(self) -> SchedulerOutput:
        """The next step. Without chunks: nothing can run; its operations must be carried out all the same."""
        self._yield_to_urgent()
        for sequence in sorted(self._running, key=_urgency):
            if sequence.status is SequenceStatus.RUNNING and self._is_single(sequence):
                self._make_room(sequence)
        singles = [s for s in self._running if self._is_single(s)]
        self._gather(singles)
        chunks = [self._chunk(sequence, sequence.num_computed, 1) for sequence in singles]
        num_prompts = self.num_running - len(singles) + self.num_waiting - len(self._awaits)
        budget = self.planner.budget(len(singles), num_prompts)
        started = [s for s in self._running if not self._is_single(s)]
        may_admit = not (self._is_short_of_room and self._running)
        if started and may_admit:
            shortest = min(s.num_tokens - s.num_computed for s in started)
            # Time is shared with them, room is not: what the started ones still need is left to them.
            spare_blocks = sum(self._kv.num_missing_blocks(s) for s in started)
            self._schedule_new(budget, chunks, shorter_than=shortest // 2, spare_blocks=spare_blocks)
        starved = self._schedule_started(started, budget, chunks)
        if may_admit and not starved:
            self._schedule_new(budget, chunks)
        if not chunks and self._running:
            # Started prompts hold the whole pool and each waits for more: the least urgent starts anew.
            self._preempt(max(self._running, key=_urgency))
            return self.schedule()
        return SchedulerOutput(self._kv.take_operations(), tuple(chunks))

    def _gather(self, singles: list[Sequence]) -> None:
        """Neighbouring streams for what decodes together, once it has been the same for some steps: while
        requests come and go, a move is soon in vain."""
        if singles == self._decoded_together:
            self._num_steady_steps += 1
        else:
            self._decoded_together, self._num_steady_steps = singles, 0
        if self._num_steady_steps >= _STEADY_STEPS:
            self._num_steady_steps = 0
            self._kv.gather(singles)

    def _is_single(self, sequence: Sequence) -> bool:
        """Its next chunk is one token that rides with the decodes."""
        return self._is_single_from(sequence, sequence.num_computed)

    def _is_single_from(self, sequence: Sequence, start: int) -> bool:
        num_prompt = sequence.num_prompt_tokens
        if start < num_prompt:
            # The last token of a prompt, or of all that is computed again, where the rule has it alone.
            end = num_prompt if self._limits.exact else sequence.num_tokens
            return self._rule.tail_block == 1 and start == end - 1
        return self._limits.exact or start == sequence.num_tokens - 1

    def _make_room(self, sequence: Sequence) -> None:
        """A block for one more token, taken from the least urgent when none is free (perhaps from itself)."""
        while not self._kv.grow(sequence, sequence.num_computed + 1):
            victim = max(self._running, key=_urgency)
            self._preempt(victim)
            if victim is sequence:
                return

    def _schedule_started(
        self, started: list[Sequence], budget: StepBudget, chunks: list[ScheduledChunk]
    ) -> bool:
        """Prompt chunks of running sequences; True when one of them got nothing for lack of room or time.

        The one with the least left goes first, so that a short prompt need not wait for a long one; who was
        passed over several times goes before all.
        """

        def order(sequence: Sequence) -> tuple[bool, int]:
            is_passed_over = sequence.num_passed_over >= _MAX_PASSED_OVER
            return not is_passed_over, sequence.num_tokens - sequence.num_computed

        starved = False
        for sequence in sorted(started, key=order):
            size = self._next_size(
                sequence, sequence.num_computed, budget, must_advance=_has_no_prompt(chunks)
            )
            # Newcomers must not take what this one waits for.
            if size == 0 or not self._kv.grow(sequence, sequence.num_computed + size):
                sequence.num_passed_over += 1
                starved = True
                continue
            sequence.num_passed_over = 0
            self._append(sequence, sequence.num_computed, size, budget, chunks)
        return starved

    def _schedule_new(
        self,
        budget: StepBudget,
        chunks: list[ScheduledChunk],
        shorter_than: int | None = None,
        spare_blocks: int = 0,
    ) -> None:
        """Admit waiting sequences, the most urgent first; shorter_than: only those with so little to
        compute, since longer prompts have started already."""
        for sequence in islice(self._waiting.in_order(), _MAX_LOOKED_AT):
            if len(self._running) >= self._limits.max_num_seqs:
                return
            awaited = self._awaits.get(sequence)
            if awaited is not None and awaited.should_wait:
                continue
            lookup = self._kv.lookup(sequence)
            if lookup.should_wait:
                self._awaits[sequence] = lookup
                continue
            if shorter_than is not None and sequence.num_tokens - lookup.num_tokens >= shorter_than:
                continue
            if not self._admit(sequence, lookup, budget, chunks, spare_blocks):
                return

    def _admit(
        self,
        sequence: Sequence,
        lookup: Lookup,
        budget: StepBudget,
        chunks: list[ScheduledChunk],
        spare_blocks: int,
    ) -> bool:
        """Start a waiting sequence when its first chunk fits time, ids and room."""
        start, swapped = lookup.num_tokens, sequence.swapped
        if swapped is not None and start >= swapped.start:
            start = swapped.start + swapped.num_tokens  # it comes back from host memory
        size = self._next_size(sequence, start, budget, must_advance=_has_no_prompt(chunks))
        # One block is left to each running sequence, else the newcomer would be preempted at once.
        spare_blocks += len(self._running)
        if size == 0 or not self._kv.can_admit(lookup, start + size, spare_blocks):
            return False
        self._kv.admit(sequence, lookup)
        self._waiting.admitted(sequence)  # charges what the cache did not give
        self._awaits.pop(sequence, None)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        self._admitted_s.setdefault(sequence, self._clock())
        grown = self._kv.grow(sequence, start + size)
        assert grown, "can_admit said that there is room"
        self._append(sequence, start, size, budget, chunks)
        return True

    def _next_size(self, sequence: Sequence, start: int, budget: StepBudget, *, must_advance: bool) -> int:
        if self._is_single_from(sequence, start):
            return 1
        end = sequence.num_tokens
        if self._limits.exact and start < sequence.num_prompt_tokens:
            end = sequence.num_prompt_tokens
        most = budget.max_tokens if must_advance else 0
        size = self._rule.size(start, end, budget.tokens(), most=most)
        if size:
            return size
        # A chunk as long as another one of this step may ride with it.
        whole = self._rule.size(start, end, budget.max_tokens)
        return whole if whole and budget.fits(whole) else 0

    def _append(
        self, sequence: Sequence, start: int, size: int, budget: StepBudget, chunks: list[ScheduledChunk]
    ) -> None:
        """Add a chunk to the step, and behind the last piece of a prompt's body its one-token tail."""
        if self._is_single_from(sequence, start):
            chunks.append(self._chunk(sequence, start, 1))
            return
        budget.take(size)
        chunks.append(self._chunk(sequence, start, size))
        end = start + size
        if self._is_single_from(sequence, end) and self._kv.grow(sequence, end + 1):
            chunks.append(self._chunk(sequence, end, 1))

    def _chunk(self, sequence: Sequence, start: int, num_tokens: int) -> ScheduledChunk:
        slot = sequence.slot
        assert slot is not None, "only a running sequence is scheduled"
        return ScheduledChunk(
            sequence=sequence,
            seq_id=slot.seq_id,
            start=start,
            num_tokens=num_tokens,
            wants_token=start + num_tokens == sequence.num_tokens,
            is_decode=self._is_single_from(sequence, start),
        )

    # ---- after the step

    def update(self, result: ModelRunnerOutput) -> list[SequenceOutput]:
        """Apply what the runner computed. Finished sequences have given their cells back."""
        for chunk in result.computed:
            self._kv.computed(chunk.sequence, chunk.start + chunk.num_tokens)
        self.planner.cost.see(result)
        outputs = []
        for sampled in result.sampled:
            sequence, token = sampled.sequence, sampled.token_id
            reason = self._finish_reason(sequence, token)
            # An end token is neither shown nor counted: it is the end, not a part of the answer.
            token_ids = () if reason == "stop" else (token,)
            sequence.tokens.extend(token_ids)
            self._waiting.charge(sequence.request.client, 1)
            if reason is not None:
                self._finish(sequence)
            outputs.append(SequenceOutput(sequence, token_ids, reason))
        if not result.had_room:
            self._free_some()
        return outputs

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        ends = token in self._end_tokens and not request.sampling.ignore_eos
        if ends or token in request.sampling.stop_token_ids:
            return "stop"
        if sequence.num_output_tokens + 1 >= request.num_max_tokens:
            return "length"
        return None

    def _free_some(self) -> None:
        """llama.cpp had no cells for a step that the accounting had granted.

        Raises RuntimeError when there is nothing to free, since then it would repeat for ever.
        """
        if (
            self._kv.has_operations or self._kv.evict_one()
        ):  # what ended in this step is freed before the next
            return
        if len(self._running) < 2:
            raise RuntimeError("llama.cpp has no room for a single sequence: pool and accounting disagree")
        self._is_short_of_room = True
        self._preempt(max(self._running, key=_urgency))

    def drop_shared(self, sequence: Sequence) -> None:
        """The cells that the sequence got from others are incomplete: it starts anew without the cache."""
        sequence.uses_cache = False
        self._kv.drop_swapped(sequence)
        self._running.remove(sequence)
        self._kv.release_distrusted(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        self._waiting.put_back(sequence)

    def fail(self, sequence: Sequence) -> None:
        """The model gave nothing usable for it: end it, and keep none of its cells."""
        sequence.uses_cache = False
        self._finish(sequence)

    def check_integrity(self) -> None:
        """Blocks, ids and sequences agree. AssertionError otherwise."""
        self._kv.check_integrity(self._running)
        assert all(s.status is SequenceStatus.RUNNING for s in self._running), "not running"
        assert set(self._awaits) <= set(self._waiting), "one awaits a prefix and is not waiting"

    # ---- giving way

    def _yield_to_urgent(self) -> None:
        """One running sequence of a lower priority makes place when all places are taken."""
        if len(self._running) < self._limits.max_num_seqs or not len(self._waiting):
            return
        first = next(self._waiting.in_order())
        awaited = self._awaits.get(first)
        if awaited is not None and awaited.should_wait:
            return
        victim = max(self._running, key=_urgency)
        if first.request.priority < victim.request.priority:
            self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """To host memory where that is cheaper than computing it again; else its cells stay until somebody
        needs them."""
        self.num_preemptions += 1
        num_private = self._kv.num_private_tokens(sequence)
        pays = self.planner.cost.swapping_pays(num_private, num_private)
        if pays and self._kv.has_swap_space(num_private):
            self.num_swaps += 1
            self._kv.swap_out(sequence)
        else:
            self._kv.park(sequence)
        self._running.remove(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        self._waiting.put_back(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._kv.park(sequence)
            self._is_short_of_room = False
            took_s = self._clock() - self._admitted_s[sequence]
            self._duration_s += 0.1 * (took_s - self._duration_s)
        elif sequence.status is not SequenceStatus.FINISHED:
            self._waiting.remove(sequence)
            self._awaits.pop(sequence, None)
            self._kv.drop_swapped(sequence)
        self._admitted_s.pop(sequence, None)
        sequence.status = SequenceStatus.FINISHED


def _has_no_prompt(chunks: list[ScheduledChunk]) -> bool:
    return all(chunk.is_decode for chunk in chunks)
