"""One generating request: from an accepted prompt to pieces of text.

Owns the detokenizer of the request, its token counts, how it ended and its times. Does not know the wire
format: chat.py turns what comes out into JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from edgerun.engine.messages import TokenOutput
from edgerun.errors import EngineLost, InvalidRequest
from edgerun.server.engine import Engine, Generation
from edgerun.server.metrics import GenerationTimer, ServerMetrics
from edgerun.server.models import ReadyLlm
from edgerun.text.detokenizer import Detokenizer
from edgerun.text.prompt import Prompt, SamplingParams

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


class Answer:
    """The answer to one accepted prompt, while it is made.

    Iterate `pieces()` once, at once; `finish_reason` and the final `usage` are there when it has ended. When
    the iteration stops early, for whatever reason, the engine's work is cancelled.
    """

    def __init__(
        self, generation: Generation, detokenizer: Detokenizer, timer: GenerationTimer, model: str
    ) -> None:
        self.finish_reason: StopReason | None = None
        self._generation = generation
        self._detokenizer = detokenizer
        self._timer = timer
        self._model = model
        self._num_cached_tokens = 0
        timer.accepted(generation.num_prompt_tokens)

    @property
    def usage(self) -> Usage:
        """As of now: up to and including the token that completed a stop text."""
        return Usage(
            self._generation.num_prompt_tokens, self._detokenizer.num_tokens, self._num_cached_tokens
        )

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Text that is certain, one piece for each engine step that made some. Raises EngineLost."""
        ended_by = "abort"  # unless it gets to its end below
        try:
            async for output in self._generation:
                text = self._take(output)
                for late in self._generation.take_all() if self.finish_reason is None else ():
                    text += self._take(late)
                if text:
                    yield text
                if self.finish_reason is not None:
                    ended_by = self.finish_reason
                    return
            raise EngineLost(f"the engine stopped answering for {self._model}; ask again")
        except Exception:
            ended_by = "error"
            raise
        finally:
            self._generation.cancel()
            self._timer.finished(ended_by)

    def _take(self, output: TokenOutput) -> str:
        if self.finish_reason is not None:
            return ""  # steps that the engine made before it heard of the stop text
        if output.finish_reason == "abort":
            raise EngineLost(f"model {self._model} was unloaded while it answered; ask again")
        detokenizer = self._detokenizer
        num_before = detokenizer.num_tokens
        text = detokenizer.push(output.token_ids)
        self._num_cached_tokens = output.num_cached_tokens
        if detokenizer.num_tokens > num_before:
            self._timer.tokens(detokenizer.num_tokens - num_before)
        if detokenizer.stopped:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            text += detokenizer.finish()
            # What was held back may hold a stop text after all, once the last character is complete.
            self.finish_reason = "stop" if detokenizer.stopped else output.finish_reason
        return text


async def begin(
    engine: Engine, metrics: ServerMetrics, model: ReadyLlm, prompt: Prompt, stop: list[str]
) -> Answer:
    """Hand the prompt to the engine; returns when it is accepted.

    Raises RequestError, QueueFull, EngineLost.
    """
    check_token_ids(model, prompt.sampling)
    timer = GenerationTimer(metrics, model.spec.name)
    generation = await engine.generate(model.spec.name, prompt)
    return Answer(generation, Detokenizer(model.info.pieces, stop), timer, model.spec.name)


def check_token_ids(model: ReadyLlm, sampling: SamplingParams) -> None:
    """A token id beyond the vocabulary must not reach the sampler: it would write past its array."""
    vocabulary = len(model.info.pieces)
    for token_id in sampling.logit_bias:
        if token_id >= vocabulary:
            raise InvalidRequest(
                f"logit_bias names token {token_id}; {model.spec.name} has {vocabulary} tokens",
                param="logit_bias",
            )
