from __future__ import annotations

import math

import numpy as np
import pytest

from edgerun.errors import InvalidRequest, ModelError
from edgerun.pixels.postprocess import Prediction, scores, top_k


def test_softmax_by_hand() -> None:
    result = scores(np.array([0.0, math.log(2.0), math.log(5.0)], dtype=np.float32), "logits")
    np.testing.assert_allclose(result, [1 / 8, 2 / 8, 5 / 8], rtol=1e-6)


def test_huge_logits_do_not_overflow() -> None:
    np.testing.assert_allclose(scores(np.array([10_000.0, -10_000.0]), "logits"), [1.0, 0.0])


def test_softmax_inside_and_outside_the_model_agree() -> None:
    logits = np.random.default_rng(3).normal(0, 4, 1000).astype(np.float32)
    inside = np.exp(logits - logits.max())
    inside /= inside.sum()
    # float32's rounding of a probability
    np.testing.assert_allclose(scores(inside, "probabilities"), scores(logits, "logits"), rtol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1, 1)])
def test_axes_of_one_do_not_matter(shape: tuple[int, ...]) -> None:
    assert scores(np.zeros(shape), "logits").shape == (3,)


@pytest.mark.parametrize("shape", [(2, 3), (0,)])
def test_output_that_is_no_list_of_scores_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="shape"):
        scores(np.zeros(shape), "logits")


@pytest.mark.parametrize("values", [[3.0, 1.0, -2.0], [0.9, 0.9, 0.9], [1.5, -0.5, 0.0]])
def test_logits_declared_as_probabilities_are_refused(values: list[float]) -> None:
    with pytest.raises(ModelError, match='output_kind = "logits"'):
        scores(np.array(values), "probabilities")


def test_float16_probabilities_pass() -> None:
    values = np.full(1000, 1 / 1000, dtype=np.float16)
    np.testing.assert_array_equal(scores(values, "probabilities"), values.astype(np.float64))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_output_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ModelError, match="not finite"):
        scores(np.array([0.0, value]), "logits")


def test_top_k_is_ordered_named_and_keeps_the_order_of_equals() -> None:
    result = top_k(np.array([0.2, 0.3, 0.2, 0.3]), ["a", "b", "c", "d"], 3)
    assert result == [Prediction("b", 1, 0.3), Prediction("d", 3, 0.3), Prediction("a", 0, 0.2)]


def test_top_k_beyond_the_classes_gives_all_and_without_labels_the_index() -> None:
    assert [row.label for row in top_k(np.array([0.4, 0.6]), (), 50)] == ["1", "0"]


def test_top_k_below_one_and_another_number_of_labels_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="top_k is 0"):
        top_k(np.array([1.0]), (), 0)
    with pytest.raises(ModelError, match="2 labels for 3 scores"):
        top_k(np.array([0.1, 0.2, 0.7]), ("a", "b"), 1)
