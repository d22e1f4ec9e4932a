from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgerun.errors import ModelError
from edgerun.llm.sampling import Sampler
from edgerun.text.prompt import SamplingParams

VOCAB = 50


def logits_of(*probabilities: float) -> NDArray[np.float32]:
    return np.log(np.array(probabilities, dtype=np.float32))


def draws(params: SamplingParams, logits: NDArray[np.float32], count: int = 4000) -> NDArray[np.int64]:
    """How often each token came."""
    sampler = Sampler(params, len(logits), [])
    return np.bincount([sampler.sample(logits, [0], 1) for _ in range(count)], minlength=len(logits))


def test_temperature_zero_is_the_largest_logit() -> None:
    sampler = Sampler(SamplingParams(temperature=0), 4, [])
    assert sampler.sample(np.array([1, 5, 2, 4], dtype=np.float32), [0], 1) == 1


def test_draws_follow_the_distribution() -> None:
    counts = draws(SamplingParams(seed=1), logits_of(0.5, 0.3, 0.2))
    # 4,000 draws: a standard deviation is at most 32, five of them are allowed
    assert np.abs(counts - np.array([2000, 1200, 800])).max() < 160


def test_temperature_sharpens_as_the_formula_says() -> None:
    counts = draws(SamplingParams(seed=2, temperature=0.5), logits_of(0.6, 0.4))
    share = 0.6**2 / (0.6**2 + 0.4**2)  # p ** (1 / T), normalised
    assert abs(counts[0] / counts.sum() - share) < 0.04


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(seed=3, top_k=2), {0, 1}),
        (SamplingParams(seed=3, top_k=-1), {0, 1, 2, 3}),
        (SamplingParams(seed=3, top_p=0.7), {0, 1}),  # 0.4 + 0.3 reaches 0.7
        (SamplingParams(seed=3, top_p=0.71), {0, 1, 2}),
        (SamplingParams(seed=3, top_p=0.01), {0}),
        (SamplingParams(seed=3, min_p=0.6), {0, 1}),  # 0.6 * 0.4 = 0.24
        (SamplingParams(seed=3, top_k=3, top_p=0.5), {0, 1}),  # 0.4 / 0.9 < 0.5
    ],
)
def test_filters_keep_what_they_should(params: SamplingParams, kept: set[int]) -> None:
    counts = draws(params, logits_of(0.4, 0.3, 0.2, 0.1))
    assert set(np.flatnonzero(counts)) == kept


def test_top_p_over_a_flat_large_vocabulary_looks_at_all_of_it() -> None:
    counts = draws(SamplingParams(seed=4, top_p=0.9), np.zeros(2000, dtype=np.float32), count=6000)
    # 1,800 tokens are in the nucleus; 6,000 draws miss a fraction exp(-6000/1800) of them
    assert 1600 < np.count_nonzero(counts) <= 1800


def test_the_same_seed_repeats_and_another_does_not() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    one, two, other = (Sampler(SamplingParams(seed=s), VOCAB, []) for s in (7, 7, 8))
    first = [one.sample(logits, [0], 1) for _ in range(20)]
    assert first == [two.sample(logits, [0], 1) for _ in range(20)]
    assert first != [other.sample(logits, [0], 1) for _ in range(20)]


def test_without_a_seed_two_samplers_differ() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    a, b = (Sampler(SamplingParams(), VOCAB, []) for _ in range(2))
    assert [a.sample(logits, [0], 1) for _ in range(30)] != [b.sample(logits, [0], 1) for _ in range(30)]


def test_logit_bias_forces_and_forbids() -> None:
    logits = np.zeros(4, dtype=np.float32)
    params = SamplingParams(seed=1, logit_bias={2: 100.0, 99: 5.0})
    assert Sampler(params, 4, []).sample(logits, [0], 1) == 2
    counts = draws(SamplingParams(seed=1, logit_bias={0: -100.0}), logits)
    assert counts[0] == 0


def test_frequency_and_presence_count_the_answer_alone() -> None:
    logits = np.array([1.0, 0.9], dtype=np.float32)
    params = SamplingParams(temperature=0, frequency_penalty=0.06)
    sampler = Sampler(params, 2, [])
    assert sampler.sample(logits, [0, 0, 0], 3) == 0  # three times in the prompt: no penalty
    assert sampler.sample(logits, [1, 0], 1) == 0  # once: 1.0 - 0.06
    assert sampler.sample(logits, [1, 0, 0], 1) == 1  # twice: 1.0 - 0.12
    presence = Sampler(SamplingParams(temperature=0, presence_penalty=0.2), 2, [])
    assert presence.sample(logits, [1, 0], 1) == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), 3, [])
    assert sampler.sample(np.array([3.0, 2.0, 0.0], dtype=np.float32), [0], 1) == 1  # 3/2 < 2
    assert sampler.sample(np.array([-1.0, -1.5, -9.0], dtype=np.float32), [0], 1) == 1  # -2 < -1.5


def test_min_tokens_holds_the_end_back() -> None:
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=2), 3, [0])
    logits = np.array([5.0, 1.0, 0.0], dtype=np.float32)
    assert sampler.sample(logits, [9, 1], 1) == 1
    assert sampler.sample(logits, [9, 1, 1], 1) == 0


def test_the_callers_logits_are_left_as_they_are() -> None:
    logits = np.linspace(0, 1, VOCAB, dtype=np.float32)
    before = logits.copy()
    params = SamplingParams(seed=1, logit_bias={1: 9}, repetition_penalty=1.5, top_k=5, min_tokens=3)
    Sampler(params, VOCAB, [2]).sample(logits, [1, 2, 3], 1)
    assert np.array_equal(logits, before)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40),
    st.floats(0.05, 2),
    st.integers(-1, 50),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_any_parameters_give_a_token_that_the_filters_allow(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(values, dtype=np.float32)
    params = SamplingParams(seed=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token = Sampler(params, len(values), []).sample(logits, [0], 1)
    assert 0 <= token < len(values)
    if top_k > 0:
        assert int((logits > logits[token]).sum()) < top_k


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_are_an_error_of_the_model(bad: float, temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, min_p=0.1, top_p=0.9), 4, [])
    with pytest.raises(ModelError, match="not finite"):
        sampler.sample(np.array([1, bad, 2, 4], dtype=np.float32), [0], 1)


def test_the_smallest_temperature_is_greedy_and_does_not_overflow() -> None:
    sampler = Sampler(SamplingParams(temperature=1e-320), 4, [])
    assert sampler.sample(np.array([1, 5, 2, 4], dtype=np.float32), [0], 1) == 1
