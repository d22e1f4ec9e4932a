"""From logits to one token: vLLM's sampling parameters in numpy. Pure: no native code, no clock.

One Sampler per sequence, so that a seed repeats whatever else is in the batch. The order of the filters is
vLLM's: bias, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from edgerun.errors import ModelError
from edgerun.text.prompt import SamplingParams

# Sorting a vocabulary of 150,000 takes milliseconds; the mass of a top-p is nearly always in far fewer.
_TOP_P_CANDIDATES = 512
_GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a temperature of less is 0


class Sampler:
    """Samples for one sequence; keeps its random state between steps."""

    def __init__(self, params: SamplingParams, num_vocab: int, end_tokens: Collection[int]) -> None:
        self._params = params
        self._end_tokens = [t for t in end_tokens if 0 <= t < num_vocab]
        self._rng = np.random.default_rng(params.seed)
        bias = [(t, b) for t, b in params.logit_bias.items() if 0 <= t < num_vocab]
        self._bias_ids = np.array([t for t, _ in bias], dtype=np.int64)
        self._bias = np.array([b for _, b in bias], dtype=np.float32)
        self._has_penalties = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )

    def sample(self, logits: NDArray[np.float32], tokens: Sequence[int], num_prompt_tokens: int) -> int:
        """The next token. logits: (vocabulary,), left as it is. tokens: prompt and answer so far.

        Raises ModelError when the best logit is NaN or infinite.
        """
        params = self._params
        wants_more = len(tokens) - num_prompt_tokens < params.min_tokens
        if len(self._bias_ids) or self._has_penalties or wants_more:
            logits = logits.copy()
            logits[self._bias_ids] += self._bias
            if self._has_penalties:
                self._penalise(logits, tokens, num_prompt_tokens)
            if wants_more:
                logits[self._end_tokens] = -np.inf
        best = int(logits.argmax())  # the first NaN where there is one
        if not math.isfinite(logits[best]):
            raise ModelError(
                "the model computed scores that are not finite (NaN or infinity): its file is damaged, "
                "or too coarsely quantised for this prompt"
            )
        return best if params.temperature < _GREEDY_BELOW else self._draw(logits)

    def _penalise(self, logits: NDArray[np.float32], tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Repetition penalty over prompt and answer, the other two over the answer (as vLLM and OpenAI)."""
        params = self._params
        if params.repetition_penalty != 1:
            seen = np.unique(np.asarray(tokens, dtype=np.int64))
            values = logits[seen]
            factor = np.float32(params.repetition_penalty)
            logits[seen] = np.where(values > 0, values / factor, values * factor)
        if len(tokens) > num_prompt_tokens:
            answer, counts = np.unique(
                np.asarray(tokens[num_prompt_tokens:], dtype=np.int64), return_counts=True
            )
            logits[answer] -= params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)

    def _draw(self, logits: NDArray[np.float32]) -> int:
        params = self._params
        ids: NDArray[np.int64] | None = None  # None: all of the vocabulary, in its order
        # float64 from here: a running sum over 100,000 float32 values loses the tail.
        scaled = logits.astype(np.float64) / params.temperature
        scaled -= scaled.max()
        if params.min_p > 0:
            # p / p_max >= min_p, in logarithms
            ids = np.flatnonzero(scaled >= np.log(params.min_p))
            scaled = scaled[ids]
        if 0 < params.top_k < len(scaled):
            kept = np.argpartition(scaled, -params.top_k)[-params.top_k :]
            ids, scaled = (kept if ids is None else ids[kept]), scaled[kept]
        weights = np.exp(scaled)
        if params.top_p < 1:
            kept = _nucleus(weights, params.top_p)
            ids, weights = (kept if ids is None else ids[kept]), weights[kept]
        mass = np.cumsum(weights)
        chosen = int(np.searchsorted(mass, self._rng.random() * mass[-1], side="right"))
        chosen = min(chosen, len(weights) - 1)
        return chosen if ids is None else int(ids[chosen])


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the fewest largest weights whose share of the sum reaches top_p; at least one."""
    goal = top_p * float(weights.sum())
    count = len(weights)
    if count > _TOP_P_CANDIDATES:
        best = np.argpartition(weights, -_TOP_P_CANDIDATES)[-_TOP_P_CANDIDATES:]
        if float(weights[best].sum()) < goal:  # a flat distribution: look at all of it
            best = np.arange(count)
    else:
        best = np.arange(count)
    order = best[np.argsort(-weights[best], kind="stable")]
    needed = int(np.searchsorted(np.cumsum(weights[order]), goal)) + 1
    return order[:needed]
