"""One step as plain data: what the scheduler asks for and what the runner gives back. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgerun.errors import ModelError
from edgerun.llm.request import SeqId
from edgerun.llm.sequence import Sequence

# ---- operations on the KV cache, done in their order before the step computes


@dataclass(frozen=True, slots=True)
class Remove:
    """Free the cells of a sequence id from position `start` on; 0 frees it whole."""

    seq_id: SeqId
    start: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Give `target`, which is empty, the first num_tokens positions of `source`."""

    source: SeqId
    target: SeqId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two sequence ids change places."""

    first: SeqId
    second: SeqId


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Keep the num_tokens cells of a sequence from position `start` on in host memory, under `key`."""

    seq_id: SeqId
    key: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Put back what was kept under `key` behind the cells that seq_id has; the copy in host memory goes."""

    seq_id: SeqId
    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SwapDrop:
    """Forget what was kept under `key`."""

    key: int


KvOperation = Remove | Copy | Exchange | SwapOut | SwapIn | SwapDrop


# ---- the step


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Compute tokens[start : start + num_tokens] of a sequence; sample after the last if it wants_token.

    is_decode: its one token rides with the decodes: the answer's newest, or a prompt's last where the rest of
    the prompt was computed before, if only earlier in this step.
    """

    sequence: Sequence
    seq_id: SeqId
    start: int
    num_tokens: int
    wants_token: bool
    is_decode: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """kv_operations: done first, in order. chunks: of one sequence in their order."""

    kv_operations: tuple[KvOperation, ...]
    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    sequence: Sequence
    token_id: int


@dataclass(frozen=True, slots=True)
class FailedSequence:
    """The model gave no usable logits for this one; the others of its batch are right."""

    sequence: Sequence
    error: ModelError


@dataclass(frozen=True, slots=True)
class CallTiming:
    """How long one call of the model took, sampling included."""

    num_decodes: int
    num_prompt_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What was computed: one sampled token for each chunk that wanted one, in their order, or its failure.

    had_room: False when the pool had no room for some chunk; it and all behind it were not computed then.
    """

    computed: tuple[ScheduledChunk, ...]
    sampled: tuple[SampledToken, ...]
    failed: tuple[FailedSequence, ...] = ()
    timings: tuple[CallTiming, ...] = ()
    num_swapped_tokens: int = 0  # moved between the cache and host memory before the step, in swap_s seconds
    swap_s: float = 0.0
    had_room: bool = True


class KvMismatch(Exception):
    """The cells of a sequence are not what the accounting says, found before anything was computed.

    A sliding window drops old cells, so that a shared prefix may lack its beginning.
    """

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(f"the cells of request {sequence.request.request_id} are incomplete")
        self.sequence = sequence


class ModelRunner(Protocol):
    """What the engine drives: llama_runner, or a fake in tests."""

    def warm_up(self) -> None:
        """Compute something small, on the engine thread, before the first request."""
        ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Raises KvMismatch when nothing was computed."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended: drop what was kept for it (its sampler)."""
        ...

    def check_integrity(self, num_tokens: dict[SeqId, int]) -> None:
        """Every id holds exactly positions 0 .. num_tokens - 1, all others none. AssertionError if not."""
        ...

    def close(self) -> None: ...
