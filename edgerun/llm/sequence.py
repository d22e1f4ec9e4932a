"""A sequence: one request on its way through the scheduler. Pure Python; owned by the engine thread."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from edgerun.llm.prefix_cache import KvSlot
from edgerun.llm.request import Request


class SequenceStatus(Enum):
    WAITING = auto()  # never ran
    RUNNING = auto()  # holds a sequence id and blocks
    PREEMPTED = auto()  # ran, gave its cells back, waits to go on
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class SwappedCells:
    """Cells of a preempted sequence in host memory: positions start .. start + num_tokens - 1."""

    key: int
    start: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens: prompt and answer so far. Its slot tells how many of them are in the KV cache."""

    request: Request
    tokens: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    slot: KvSlot | None = None  # where its cells are, while it runs
    num_cached: int = 0  # prompt tokens that the prefix cache gave when it first ran
    was_admitted: bool = False
    uses_cache: bool = True  # False once its shared cells turned out to be incomplete
    swapped: SwappedCells | None = None
    num_passed_over: int = 0  # steps in a row in which its prompt got nothing

    @classmethod
    def of(cls, request: Request) -> Sequence:
        return cls(request=request, tokens=list(request.prompt_token_ids))

    @property
    def num_computed(self) -> int:
        return self.slot.num_tokens if self.slot is not None else 0

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
