"""One step as plain data: what the scheduler asks for and what the runner gives back. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgerun.errors import ModelError
from edgerun.llm.request import SeqId
from edgerun.llm.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Compute tokens[start : start + num_tokens] of a sequence; sample after the last if it wants_token."""

    sequence: Sequence
    seq_id: SeqId
    start: int
    num_tokens: int
    wants_token: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """removed: sequence ids whose cells must be freed first. chunks: decodes first, then prompt chunks."""

    removed: tuple[SeqId, ...]
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
class ModelRunnerOutput:
    """One sampled token for each chunk that wanted one, in the chunks' order, or its failure."""

    sampled: tuple[SampledToken, ...]
    failed: tuple[FailedSequence, ...] = ()


class NoKvRoom(Exception):
    """The pool had no room for the step; nothing was computed. Preempt and schedule again."""


class ModelRunner(Protocol):
    """What the engine drives: llama_runner, or a fake in tests."""

    def warm_up(self) -> None:
        """Compute something small, on the engine thread, before the first request."""
        ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Raises NoKvRoom when nothing could be written."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended: drop what was kept for it (its sampler)."""
        ...

    def close(self) -> None: ...
