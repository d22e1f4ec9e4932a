"""One answer: pieces, counts, and cancelling."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from edgerun.engine.messages import TokenOutput
from edgerun.errors import EngineLost, InvalidRequest
from edgerun.server.generation import Answer, begin
from edgerun.server.metrics import GenerationTimer, ServerMetrics
from edgerun.server.models import ReadyLlm
from edgerun.text.chat_template import ChatTemplate
from edgerun.text.detokenizer import Detokenizer
from edgerun.text.prompt import Prompt, SamplingParams

from .fakes import LLM_INFO, LLM_SPEC, PIECES, FakeEngine, loaded_of


class Scripted:
    """A generation whose outputs are given; `late` ones have arrived with the first."""

    num_prompt_tokens = 3

    def __init__(self, outputs: list[TokenOutput], late: list[TokenOutput] | None = None) -> None:
        self._outputs, self._late = iter(outputs), late or []
        self.num_cancels = 0

    def __aiter__(self) -> Scripted:
        return self

    async def __anext__(self) -> TokenOutput:
        for output in self._outputs:
            return output
        raise StopAsyncIteration

    def take_all(self) -> list[TokenOutput]:
        late, self._late = self._late, []
        return late

    def cancel(self) -> None:
        self.num_cancels += 1


def output(text: bytes, reason: str | None = None) -> TokenOutput:
    return TokenOutput(1, list(text), 2, reason)  # type: ignore[arg-type]


def answer_of(generation: Scripted, stop: tuple[str, ...] = ()) -> Answer:
    return Answer(generation, Detokenizer(PIECES, stop), GenerationTimer(ServerMetrics(), "m"), "m")


def pieces_of(answer: Answer) -> list[str]:
    async def collect() -> list[str]:
        return [piece async for piece in answer.pieces()]

    return asyncio.run(collect())


def test_what_arrived_together_is_one_piece() -> None:
    generation = Scripted([output(b"a")], late=[output(b"b"), output(b"c", "length")])
    answer = answer_of(generation)
    assert pieces_of(answer) == ["abc"]
    assert answer.finish_reason == "length"
    assert (answer.usage.num_completion_tokens, answer.usage.num_cached_tokens) == (3, 2)


def test_steps_after_a_stop_text_are_neither_shown_nor_counted() -> None:
    generation = Scripted([output(b"ab")], late=[output(b"cd"), output(b"ef", "length")])
    answer = answer_of(generation, stop=("bc",))
    assert pieces_of(answer) == ["a"]
    assert answer.finish_reason == "stop"
    assert answer.usage.num_completion_tokens == 3


def test_text_held_back_for_a_stop_text_comes_at_the_end() -> None:
    answer = answer_of(Scripted([output(b"ab"), output(b"", "stop")]), stop=("bx",))
    assert pieces_of(answer) == ["a", "b"]


def test_an_engine_that_ends_without_a_last_word_is_lost() -> None:
    with pytest.raises(EngineLost):
        pieces_of(answer_of(Scripted([output(b"ab")])))


def test_closing_early_cancels() -> None:
    generation = Scripted([output(b"a"), output(b"b")])

    async def scenario() -> None:
        async with aclosing(answer_of(generation).pieces()) as pieces:
            assert await anext(pieces) == "a"

    asyncio.run(scenario())
    assert generation.num_cancels == 1


def test_token_ids_beyond_the_vocabulary_do_not_reach_the_engine() -> None:
    template = ChatTemplate("", bos_text="", eos_text="", special_texts=[], add_bos=False)
    model = ReadyLlm(LLM_SPEC, loaded_of(LLM_SPEC), LLM_INFO, template)
    engine = FakeEngine()
    prompt = Prompt(sampling=SamplingParams(logit_bias={len(PIECES): 1.0}))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        asyncio.run(begin(engine, ServerMetrics(), model, prompt, []))  # type: ignore[arg-type]
    assert engine.prompts == []
