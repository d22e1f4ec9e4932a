"""How many prompt tokens fit into a step: from what steps took so far. Pure Python, no clock of its own.

A running answer waits for the whole of a step, so a step is made as long as the inter-token target allows:
the decodes first, and prompt tokens for what is left of the time.
"""

from __future__ import annotations

from edgerun.llm.step import CallTiming, ModelRunnerOutput

# The estimates follow the last few steps: prompts get dearer with their length, other programs come and go.
_NEW_SHARE = 0.3
# A target below what the decodes alone take would leave nothing to prompts: they get this much time beside.
_STEP_OVER_DECODES = 2.7
# 16 prompts of 500 tokens at once, 2 cores: without it 1.24 of llama-server's CPU time (RESULTS.md).
_MAX_STRETCH = 6.0
_MARGIN = 0.9  # aim below the limit: the estimate is a mean
# Nobody's answer runs, so nobody waits for a token; but whoever arrives now waits for the step to end.
_IDLE_TARGETS = 4
# Before anything was measured: slow enough for the smallest board, corrected after one step.
_FIRST_PROMPT_TOKEN_S = 0.004
_FIRST_DECODE_S = 0.02
_FIRST_SWAP_TOKEN_S = 2e-5


class StepCost:
    """Measured durations of this model on this device. Owned by the engine thread."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # by the number of sequences that decode
        self._prompt_token_s: float | None = None
        self._swap_token_s = _FIRST_SWAP_TOKEN_S

    def see(self, result: ModelRunnerOutput) -> None:
        """Learn from one step."""
        for timing in result.timings:
            self._see_call(timing)
        if result.num_swapped_tokens:
            self._swap_token_s = _blend(self._swap_token_s, result.swap_s / result.num_swapped_tokens)

    def _see_call(self, timing: CallTiming) -> None:
        if timing.num_prompt_tokens == 0:
            before = self._decode_s.get(timing.num_decodes)
            self._decode_s[timing.num_decodes] = _blend(before, timing.duration_s)
            return
        prompt_s = timing.duration_s - self.fixed_s
        if timing.num_decodes:  # one call for both
            prompt_s = timing.duration_s - self.decode_s(timing.num_decodes)
        per_token = max(prompt_s, timing.duration_s * 0.1) / timing.num_prompt_tokens
        self._prompt_token_s = _blend(self._prompt_token_s, per_token)

    def decode_s(self, num_decodes: int) -> float:
        """Seconds of a step that only decodes; from the nearest number measured where this one was not."""
        if num_decodes == 0:
            return 0.0
        if not self._decode_s:
            return _FIRST_DECODE_S * (1 + 0.3 * (num_decodes - 1))
        nearest = min(self._decode_s, key=lambda known: abs(known - num_decodes))
        # A pass over the weights costs about as much as two sequences on top of it.
        return self._decode_s[nearest] * (num_decodes + 2) / (nearest + 2)

    @property
    def fixed_s(self) -> float:
        """What a call costs however few tokens it has."""
        return self.decode_s(1) * 0.5 if self._decode_s else 0.0

    @property
    def prompt_token_s(self) -> float:
        return self._prompt_token_s or _FIRST_PROMPT_TOKEN_S

    @property
    def prefill_tokens_per_s(self) -> float:
        """0.0 until a prompt was measured."""
        return 1 / self._prompt_token_s if self._prompt_token_s else 0.0

    def swapping_pays(self, num_swapped_tokens: int, num_recomputed_tokens: int) -> bool:
        """Out and in again, against computing them once more."""
        return 2 * num_swapped_tokens * self._swap_token_s < num_recomputed_tokens * self.prompt_token_s


class StepBudget:
    """The time, and max_tokens, that prompts may still take in one step. Made by StepPlanner."""

    def __init__(self, cost: StepCost, available_s: float, max_tokens: int) -> None:
        self._cost, self._available_s, self.max_tokens = cost, available_s, max_tokens
        self._lengths: set[int] = set()

    def tokens(self) -> int:
        """Prompt tokens that still fit."""
        left_s = self._available_s - self._cost.fixed_s
        return max(0, min(self.max_tokens, int(left_s / self._cost.prompt_token_s)))

    def fits(self, num_tokens: int) -> bool:
        """Also true for a chunk as long as one that is in the step already: they share a pass."""
        if num_tokens > self.max_tokens:
            return False
        fixed_s = 0.0 if num_tokens in self._lengths else self._cost.fixed_s
        return fixed_s + num_tokens * self._cost.prompt_token_s <= self._available_s

    def take(self, num_tokens: int) -> None:
        if num_tokens not in self._lengths:
            self._lengths.add(num_tokens)
            self._available_s -= self._cost.fixed_s
        self._available_s -= num_tokens * self._cost.prompt_token_s
        self.max_tokens -= num_tokens


class StepPlanner:
    """From a target and the measured cost to the budget of each step."""

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s, self._max_tokens = target_s, max_tokens
        self.cost = StepCost()

    def budget(self, num_decodes: int, num_prompts: int = 1) -> StepBudget:
        """What is left to prompts beside num_decodes running answers.

        num_prompts: requests that wait for their first token. For a single one the target holds; for several
        it is stretched, since longer steps serve them all sooner and cost less in all.
        """
        decode_s = self.cost.decode_s(num_decodes)
        if num_decodes:
            stretch = max(1.0, min(_MAX_STRETCH, (num_prompts + 1) / 2))
            limit_s = self._target_s * _MARGIN * stretch
        else:
            limit_s = self._target_s * _IDLE_TARGETS
        limit_s = max(limit_s, decode_s * _STEP_OVER_DECODES)
        return StepBudget(self.cost, limit_s - decode_s, self._max_tokens - num_decodes)


def _blend(before: float | None, now: float) -> float:
    return now if before is None else before + _NEW_SHARE * (now - before)
