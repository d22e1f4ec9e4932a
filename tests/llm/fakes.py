"""A runner without a model: each sequence's next token is a fixed function of its tokens."""

from __future__ import annotations

from edgerun.errors import ModelError
from edgerun.llm.request import Request, RequestId
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import FailedSequence, ModelRunnerOutput, NoKvRoom, SampledToken, SchedulerOutput
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


def make_request(request_id: int, prompt: list[int], max_tokens: int = 8, priority: int = 0) -> Request:
    return Request(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(),
        num_max_tokens=max_tokens,
        priority=priority,
        arrival_s=float(request_id),
    )


class FakeRunner:
    """Keeps what each sequence id holds, as llama.cpp would, and computes from that alone.

    So a scheduler that skips a token, repeats one, or forgets to free an id gives a wrong answer.
    """

    def __init__(self, num_cells: int = 10**6) -> None:
        self.num_cells = num_cells
        self.cells: dict[int, list[int]] = {}
        self.steps: list[SchedulerOutput] = []
        self.forgotten: list[int] = []
        self.is_warm = self.is_closed = False

    def warm_up(self) -> None:
        self.is_warm = True

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for seq_id in step.removed:
            self.cells.pop(seq_id, None)
        if sum(map(len, self.cells.values())) + step.num_tokens > self.num_cells:
            raise NoKvRoom
        self.steps.append(step)
        sampled, failed = [], []
        for chunk in step.chunks:
            held = self.cells.setdefault(chunk.seq_id, [])
            assert len(held) == chunk.start, "a chunk must start where the sequence's cells end"
            held += chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
            if chunk.wants_token:
                assert held == chunk.sequence.tokens, "a token is sampled from the whole sequence"
                if NAN in held:
                    failed.append(FailedSequence(chunk.sequence, ModelError("not finite")))
                else:
                    sampled.append(SampledToken(chunk.sequence, next_token(held)))
        return ModelRunnerOutput(tuple(sampled), tuple(failed))

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.request.request_id)

    def close(self) -> None:
        self.is_closed = True
