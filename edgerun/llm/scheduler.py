"""Which tokens of which sequences the next step computes. Pure Python; owned by the engine thread.

One token budget a step and no phases (vLLM's v1 scheduler): running answers first, one token each, then
prompt chunks of those already started, then new sequences. Nothing is reserved for tokens not yet written;
when the pool is full the least urgent sequence gives everything back and is computed again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass

from edgerun.engine.messages import FinishReason
from edgerun.errors import QueueFull
from edgerun.llm.block_pool import BlockPool
from edgerun.llm.request import RequestId, SeqId
from edgerun.llm.sequence import Sequence, SequenceStatus
from edgerun.llm.step import ModelRunnerOutput, ScheduledChunk, SchedulerOutput


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_batched_tokens bounds one step; max_model_len one sequence; max_waiting the queue."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int = 512
    retry_after_s: int = 5  # what QueueFull tells the client

    @property
    def chunk_tokens(self) -> int:
        """Prompt chunks end at multiples of this, whatever else runs, so that equal prompts split equally."""
        return max(1, (self.max_num_batched_tokens - self.max_num_seqs) // 16 * 16)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a sequence gained in one step; finish_reason None while it runs."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


def _urgency(sequence: Sequence) -> tuple[int, float, int]:
    """Smaller is more urgent: priority as in vLLM, then arrival."""
    request = sequence.request
    return request.priority, request.arrival_s, request.request_id


class Scheduler:
    """Owns every Sequence, the queue and the block pool."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, end_tokens: Collection[int]) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if limits.max_model_len > pool.num_blocks * pool.block_size:
            raise ValueError("one sequence of max_model_len must fit into the pool")
        self._pool, self._limits = pool, limits
        self._end_tokens = frozenset(end_tokens)
        self._waiting: list[Sequence] = []  # sorted by urgency
        self._running: list[Sequence] = []  # in the order of admission
        self._free_seq_ids = [SeqId(i) for i in reversed(range(limits.max_num_seqs))]
        self._removed: list[SeqId] = []  # cells to free before the next step
        # After llama.cpp had less room than the accounting: nobody is admitted until somebody ends, else
        # the one just preempted would come back into the same lack of room.
        self._is_short_of_room = False
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises QueueFull."""
        if len(self._waiting) >= self._limits.max_waiting:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting already; try again in "
                f"{self._limits.retry_after_s} s",
                retry_after_s=self._limits.retry_after_s,
            )
        insort(self._waiting, sequence, key=_urgency)

    def abort(self, request_id: RequestId) -> Sequence | None:
        """End a sequence wherever it is; None when it is not (or no longer) here."""
        for sequence in (*self._running, *self._waiting):
            if sequence.request.request_id == request_id:
                self._finish(sequence)
                return sequence
        return None

    def abort_all(self) -> list[Sequence]:
        """End every sequence; those that were here."""
        sequences = [*self._running, *self._waiting]
        for sequence in sequences:
            self._finish(sequence)
        return sequences

    # ---- before the step

    def schedule(self) -> SchedulerOutput:
        """The next step. Empty chunks: nothing can run (no work)."""
        chunks = self._schedule_decodes()
        budget = self._limits.max_num_batched_tokens - len(chunks)
        is_short = self._is_short_of_room and bool(self._running)
        for sequence in self._running:
            if not sequence.is_decoding:
                taken = self._schedule_prompt(sequence, budget, chunks)
                budget -= taken
                is_short = is_short or taken == 0  # newcomers must not take what this one waits for
        while self._waiting and self._free_seq_ids and not is_short:
            sequence = self._waiting[0]
            if not self._admit(sequence, budget):
                break
            budget -= self._schedule_prompt(sequence, budget, chunks)
        if not chunks and self._running:
            # Started prompts hold the whole pool and each waits for more: the least urgent starts anew.
            self._preempt(max(self._running, key=_urgency))
            return self.schedule()
        removed = tuple(self._removed)
        self._removed.clear()
        return SchedulerOutput(removed=removed, chunks=tuple(chunks))

    def _schedule_decodes(self) -> list[ScheduledChunk]:
        for sequence in sorted(self._running, key=_urgency):
            if sequence.status is SequenceStatus.RUNNING and sequence.is_decoding:
                self._make_room(sequence)
        return [_chunk(sequence, sequence.num_tokens) for sequence in self._running if sequence.is_decoding]

    def _make_room(self, sequence: Sequence) -> None:
        """A block for one more token, taken from the least urgent when none is free (perhaps from itself)."""
        while not self._pool.grow(sequence.block_table, sequence.num_tokens):
            victim = max(self._running, key=_urgency)
            self._preempt(victim)
            if victim is sequence:
                return

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Move the head of the queue to running when its first chunk fits budget and pool."""
        end = self._chunk_end(sequence)
        # One block is left to each running sequence, else the newcomer would be preempted at once.
        spare = self._pool.num_free - self._pool.blocks_for(end)
        if end > budget or spare < len(self._running):
            return False
        self._waiting.pop(0)
        sequence.status = SequenceStatus.RUNNING
        sequence.seq_id = self._free_seq_ids.pop()
        self._running.append(sequence)
        return True

    def _schedule_prompt(self, sequence: Sequence, budget: int, chunks: list[ScheduledChunk]) -> int:
        """Add the sequence's next prompt chunk when it fits, whole or not at all; the tokens taken."""
        end = self._chunk_end(sequence)
        count = end - sequence.num_computed
        if count > budget or not self._pool.grow(sequence.block_table, end):
            return 0
        chunks.append(_chunk(sequence, end))
        return count

    def _chunk_end(self, sequence: Sequence) -> int:
        size = self._limits.chunk_tokens
        return min(sequence.num_tokens, (sequence.num_computed // size + 1) * size)

    # ---- after the step

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[SequenceOutput]:
        """Apply what the runner computed. Finished sequences have given everything back."""
        for chunk in step.chunks:
            chunk.sequence.num_computed = chunk.start + chunk.num_tokens
        outputs = []
        for sampled in result.sampled:
            sequence, token = sampled.sequence, sampled.token_id
            reason = self._finish_reason(sequence, token)
            # An end token is neither shown nor counted: it is the end, not a part of the answer.
            token_ids = () if reason == "stop" else (token,)
            sequence.tokens.extend(token_ids)
            if reason is not None:
                self._finish(sequence)
            outputs.append(SequenceOutput(sequence, token_ids, reason))
        return outputs

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        ends = token in self._end_tokens and not request.sampling.ignore_eos
        if ends or token in request.sampling.stop_token_ids:
            return "stop"
        if sequence.num_output_tokens + 1 >= request.num_max_tokens:
            return "length"
        return None

    def no_room(self) -> None:
        """llama.cpp had no cells for a step that the accounting had granted: free the least urgent.

        Raises RuntimeError when it is the only one, since then freeing it would repeat for ever.
        """
        if len(self._running) < 2:
            raise RuntimeError("llama.cpp has no room for a single sequence: pool and accounting disagree")
        self._is_short_of_room = True
        self._preempt(max(self._running, key=_urgency))

    def check_integrity(self) -> None:
        """Every block is free or held by a running sequence. AssertionError otherwise."""
        self._pool.check_integrity(sequence.block_table for sequence in self._running)
        ids = [*self._free_seq_ids, *(s.seq_id for s in self._running)]
        assert len(set(ids)) == len(ids) == self._limits.max_num_seqs, "a sequence id is lost or held twice"

    # ---- giving back

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._give_back(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_computed = 0
        insort(self._waiting, sequence, key=_urgency)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._give_back(sequence)
            self._is_short_of_room = False
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.seq_id is not None, "a running sequence has a sequence id"
        self._running.remove(sequence)
        self._pool.release(sequence.block_table)
        self._removed.append(sequence.seq_id)
        self._free_seq_ids.append(sequence.seq_id)
        sequence.seq_id = None


def _chunk(sequence: Sequence, end: int) -> ScheduledChunk:
    assert sequence.seq_id is not None, "only a running sequence is scheduled"
    return ScheduledChunk(
        sequence=sequence,
        seq_id=sequence.seq_id,
        start=sequence.num_computed,
        num_tokens=end - sequence.num_computed,
        wants_token=end == sequence.num_tokens,
    )
