"""A runner without a model: each sequence's next token is a fixed function of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from edgerun.errors import ModelError
from edgerun.llm.request import Request, RequestId, SeqId
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import (
    CallTiming,
    Copy,
    Exchange,
    FailedSequence,
    KvMismatch,
    KvOperation,
    ModelRunnerOutput,
    Remove,
    SampledToken,
    SchedulerOutput,
    SwapDrop,
    SwapIn,
    SwapOut,
)
from edgerun.text.prompt import SamplingParams

END = 0  # the fake vocabulary's end token
NAN = -7  # a token that makes the fake model's logits useless


def next_token(tokens: list[int]) -> int:
    """Depends on every token and its place, never END."""
    return 1 + sum((i + 1) * t for i, t in enumerate(tokens)) % 97


def expected_answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def make_request(
    request_id: int, prompt: list[int], max_tokens: int = 8, priority: int = 0, client: str = ""
) -> Request:
    return Request(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(),
        num_max_tokens=max_tokens,
        priority=priority,
        arrival_s=float(request_id),
        client=client,
    )


@dataclass(eq=False)
class Cell:
    """One cell of the pool: it may carry several sequence ids, so it is shared by reference."""

    token: int


class FakeRunner:
    """Keeps what each sequence id holds, as llama.cpp would, and computes from that alone.

    So a scheduler that skips a token, repeats one, shares the wrong prefix or forgets to free an id gives a
    wrong answer. Each chunk takes a hundredth of a second, whatever its length.
    """

    def __init__(self, num_cells: int = 10**6, *, is_unified: bool = True) -> None:
        self.num_cells, self.is_unified = num_cells, is_unified
        self.cells: dict[int, list[Cell]] = {}
        self.swapped: dict[int, list[Cell]] = {}
        self.steps: list[SchedulerOutput] = []
        self.num_computed = 0
        self.forgotten: list[int] = []
        self.is_warm = self.is_closed = False
        self.incomplete: set[int] = set()  # requests whose shared cells turn out to lack their beginning

    def warm_up(self) -> None:
        self.is_warm = True

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for operation in step.kv_operations:
            self._operate(operation)
        for chunk in step.chunks:
            if chunk.start and chunk.sequence.request.request_id in self.incomplete:
                self.incomplete.discard(chunk.sequence.request.request_id)
                raise KvMismatch(chunk.sequence)
        self.steps.append(step)
        sampled, failed, computed = [], [], []
        had_room = True
        for chunk in step.chunks:
            if self.num_used + chunk.num_tokens > self.num_cells:
                had_room = False
                break
            computed.append(chunk)
            self.num_computed += chunk.num_tokens
            held = self.cells.setdefault(chunk.seq_id, [])
            assert len(held) == chunk.start, "a chunk must start where the sequence's cells end"
            held += map(Cell, chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens])
            if chunk.wants_token:
                tokens = [cell.token for cell in held]
                assert tokens == chunk.sequence.tokens, "a token is sampled from the whole sequence"
                if NAN in tokens:
                    failed.append(FailedSequence(chunk.sequence, ModelError("not finite")))
                else:
                    sampled.append(SampledToken(chunk.sequence, next_token(tokens)))
        timings = [CallTiming(int(c.is_decode), 0 if c.is_decode else c.num_tokens, 0.01) for c in computed]
        return ModelRunnerOutput(
            computed=tuple(computed),
            sampled=tuple(sampled),
            failed=tuple(failed),
            timings=tuple(timings),
            had_room=had_room,
        )

    @property
    def num_used(self) -> int:
        return len({id(cell) for cells in self.cells.values() for cell in cells})

    def _operate(self, operation: KvOperation) -> None:
        match operation:
            case Remove(seq_id, start):
                held = self.cells.pop(seq_id, [])
                assert start <= len(held), "what is not there cannot be cut"
                if start:
                    self.cells[seq_id] = held[:start]
            case Copy(source, target, num_tokens):
                assert not self.cells.get(target), "a copy goes to an empty sequence"
                assert len(self.cells.get(source, [])) >= num_tokens, "a copy of what is not there"
                shared = self.cells[source][:num_tokens]
                self.cells[target] = shared if self.is_unified else [Cell(cell.token) for cell in shared]
            case Exchange(first, second):
                assert not self.is_unified, "ids need no order in a shared pool"
                one, other = self.cells.pop(first, []), self.cells.pop(second, [])
                self.cells[first], self.cells[second] = other, one
            case SwapOut(seq_id, key, start, num_tokens):
                self.swapped[key] = [Cell(cell.token) for cell in self.cells[seq_id][start:]]
                assert len(self.swapped[key]) == num_tokens, "the tail has another length"
            case SwapIn(seq_id, key, num_tokens):
                self.cells.setdefault(seq_id, []).extend(self.swapped.pop(key))
            case SwapDrop(key):
                del self.swapped[key]

    def check_integrity(self, num_tokens: dict[SeqId, int]) -> None:
        held = {seq_id: len(cells) for seq_id, cells in self.cells.items() if cells}
        assert held == {seq_id: count for seq_id, count in num_tokens.items() if count}

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.request.request_id)

    def close(self) -> None:
        self.is_closed = True
