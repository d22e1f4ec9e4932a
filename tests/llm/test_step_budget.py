"""Prompt tokens that fit into a step, from what steps took: with made-up durations, without a clock."""

from __future__ import annotations

import pytest

from edgerun.llm.step import CallTiming, ModelRunnerOutput
from edgerun.llm.step_budget import StepCost, StepPlanner

FIXED_S, PROMPT_TOKEN_S = 0.005, 0.001


def decode_s(num_decodes: int) -> float:
    return 0.008 + 0.002 * num_decodes


def learn(cost: StepCost, num_decodes: int, num_prompt_tokens: int = 64, count: int = 20) -> None:
    prompt = CallTiming(0, num_prompt_tokens, FIXED_S + PROMPT_TOKEN_S * num_prompt_tokens)
    timings = (CallTiming(1, 0, decode_s(1)), CallTiming(num_decodes, 0, decode_s(num_decodes)), prompt)
    for _ in range(count):
        cost.see(ModelRunnerOutput((), (), timings=timings))


def planner(target_s: float = 0.1, num_decodes: int = 8) -> StepPlanner:
    made = StepPlanner(target_s, max_tokens=512)
    learn(made.cost, num_decodes)
    return made


def test_estimates_settle_at_what_was_measured() -> None:
    cost = planner().cost
    assert cost.decode_s(8) == pytest.approx(decode_s(8))
    assert cost.prompt_token_s == pytest.approx(PROMPT_TOKEN_S, rel=0.05)
    assert cost.prefill_tokens_per_s == pytest.approx(1000, rel=0.05)


def test_an_unknown_number_of_decodes_is_guessed_from_the_nearest_known() -> None:
    cost = planner().cost
    assert decode_s(8) < cost.decode_s(16) < 2 * decode_s(8)


def test_a_step_with_running_answers_stays_within_the_target() -> None:
    made = planner()
    tokens = made.budget(8).tokens()
    assert decode_s(8) + FIXED_S + tokens * PROMPT_TOKEN_S <= 0.1
    assert tokens > 50


def test_prompts_go_on_where_the_decodes_alone_take_the_target() -> None:
    made = planner(target_s=0.01)
    assert made.budget(8).tokens() * PROMPT_TOKEN_S > 0.5 * decode_s(8)


def test_nobody_waits_for_a_token_so_the_step_may_be_longer() -> None:
    made = planner()
    assert made.budget(0).tokens() > 3 * made.budget(8).tokens()


def test_the_target_holds_for_one_newcomer_and_is_stretched_for_several() -> None:
    made = planner()
    assert made.budget(4, 0).tokens() == made.budget(4, 1).tokens()
    assert made.budget(4, 3).tokens() > 1.8 * made.budget(4, 1).tokens()
    assert made.budget(4, 100).tokens() == made.budget(4, 11).tokens()


def test_a_budget_shrinks_by_what_is_taken_and_equal_lengths_share_a_pass() -> None:
    budget = planner().budget(8)
    before = budget.tokens()
    budget.take(20)
    assert budget.tokens() <= before - 20
    left_after_first = budget.tokens()
    budget.take(20)
    assert left_after_first - budget.tokens() <= 21


def test_the_number_of_tokens_is_bounded_too() -> None:
    made = StepPlanner(100.0, max_tokens=64)
    assert made.budget(4).tokens() == 60
    assert not made.budget(4).fits(61)


def test_swapping_pays_when_computing_again_is_dearer() -> None:
    cost = planner().cost
    cost.see(ModelRunnerOutput((), (), num_swapped_tokens=1000, swap_s=0.01))
    assert cost.swapping_pays(500, 500)
    for _ in range(40):
        cost.see(ModelRunnerOutput((), (), num_swapped_tokens=10, swap_s=1.0))
    assert not cost.swapping_pays(500, 500)
