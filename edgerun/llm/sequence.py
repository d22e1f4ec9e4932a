"""A sequence: one request on its way through the scheduler. Pure Python; owned by the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from edgerun.llm.request import BlockId, Request, SeqId


class SequenceStatus(Enum):
    WAITING = auto()  # never ran
    RUNNING = auto()  # holds a sequence id and blocks
    PREEMPTED = auto()  # ran, gave everything back, waits to be computed again
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens: prompt and answer so far. num_computed: how many of them are in the KV pool."""

    request: Request
    tokens: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    seq_id: SeqId | None = None
    num_computed: int = 0
    block_table: list[BlockId] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> Sequence:
        return cls(request=request, tokens=list(request.prompt_token_ids))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is left to compute: the next step gives one more."""
        return self.num_computed == len(self.tokens) - 1 and self.num_output_tokens > 0
