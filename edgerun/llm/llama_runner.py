"""Replays a step against llama.cpp and samples. Owned by the engine thread.

Knows batches, logits and samplers; does not know why a step looks as it does (see scheduler).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np

from edgerun.errors import ModelError, ModelLoadFailed
from edgerun.llm.llama_api import DECODE_NO_ROOM, LlamaContext, LlamaModel
from edgerun.llm.request import RequestId
from edgerun.llm.sampling import Sampler
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import (
    FailedSequence,
    ModelRunnerOutput,
    NoKvRoom,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
)

_WARM_UP_TOKENS = 32


class LlamaRunner:
    """One model and its context. Closing frees both."""

    def __init__(self, model: LlamaModel, context: LlamaContext, end_tokens: Tokens[int]) -> None:
        self._model, self._context = model, context
        self._end_tokens = tuple(end_tokens)
        self._samplers: dict[RequestId, Sampler] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Free, decode, sample. Raises NoKvRoom when llama.cpp had no cells (nothing was computed)."""
        context = self._context
        for seq_id in step.removed:
            context.remove_sequence(seq_id)
        batch = context.batch
        batch.clear()
        wanted: list[tuple[int, ScheduledChunk]] = []
        for chunk in step.chunks:
            tokens = chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
            index = batch.add(chunk.seq_id, tokens, chunk.start, wants_logits=chunk.wants_token)
            if chunk.wants_token:
                wanted.append((index, chunk))
        if context.decode() == DECODE_NO_ROOM:
            raise NoKvRoom
        sampled, failed = [], []
        for index, chunk in wanted:
            try:
                sampled.append(SampledToken(chunk.sequence, self._sample(index, chunk.sequence)))
            except ModelError as error:
                failed.append(FailedSequence(chunk.sequence, error))
        return ModelRunnerOutput(tuple(sampled), tuple(failed))

    def _sample(self, batch_index: int, sequence: Sequence) -> int:
        request = sequence.request
        sampler = self._samplers.get(request.request_id)
        if sampler is None:
            sampler = Sampler(request.sampling, self._model.num_tokens, self._end_tokens)
            self._samplers[request.request_id] = sampler
        logits = self._context.logits(batch_index)
        return sampler.sample(logits, sequence.tokens, sequence.num_prompt_tokens)

    def forget(self, sequence: Sequence) -> None:
        self._samplers.pop(sequence.request.request_id, None)

    def warm_up(self) -> None:
        """A prompt and a single token through the network: the two kinds of kernels that a chat uses.

        The first user does not pay for the first touch of the weights, and a build that crashes on either
        does so in the throw-away child (see engine/check.py), not in somebody's chat. Raises ModelLoadFailed
        when NaN or infinity comes out.
        """
        token = max(0, self._model.bos())
        prompt_tokens = min(_WARM_UP_TOKENS, self._context.batch.capacity)
        for num_tokens, start in ((prompt_tokens, 0), (1, prompt_tokens)):
            self._context.batch.clear()
            last = self._context.batch.add(0, [token] * num_tokens, start, wants_logits=True)
            self._context.decode()
            if not np.isfinite(self._context.logits(last).max()):
                path = self._model.path
                raise ModelLoadFailed(
                    f"{path} computes scores that are not finite (NaN or infinity): the file is damaged or "
                    "was converted wrongly; fetch it again",
                    path=path,
                )
        self._context.remove_sequence(0)

    def close(self) -> None:
        self._context.close()
        self._model.close()
