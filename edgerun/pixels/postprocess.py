"""A classifier's raw output to scores, and scores to named predictions. Knows no model runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgerun.errors import InvalidRequest, ModelError
from edgerun.repository.spec import OutputKind

# float16 probabilities of 1000 classes add to 1 within about 0.005; logits miss it by far.
_SUM_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Prediction:
    """One class of one picture. label is the index as text where the model has no labels; score is 0..1."""

    label: str
    index: int
    score: float


def scores(raw: NDArray[Any], kind: OutputKind) -> NDArray[np.float64]:
    """One score per class, (num_classes,), adding to 1.

    raw: one picture's output, with at most one axis longer than 1. "logits" go through softmax;
    "probabilities" are passed through after a check, so that softmax is never taken twice nor left out.
    Raises ModelError when the output is not a list of finite numbers, or is not what `kind` says.
    """
    if raw.size == 0 or max(raw.shape, default=1) != raw.size:
        raise ModelError(f"the output has shape {raw.shape}: one score for each class is needed")
    values = raw.reshape(-1).astype(np.float64)
    if not np.isfinite(values).all():
        raise ModelError("the model's output is not finite (NaN or infinity): the file or its input is wrong")
    if kind == "logits":
        powers = np.exp(values - values.max())  # the largest is exp(0): no overflow
        return np.asarray(powers / powers.sum(), dtype=np.float64)
    total, low = float(values.sum()), float(values.min())
    if abs(total - 1.0) > _SUM_TOLERANCE or low < -_SUM_TOLERANCE:
        raise ModelError(
            f"the output is declared as probabilities but adds to {total:.4g} (least {low:.4g}):"
            ' set output_kind = "logits" in the model\'s config'
        )
    return values


def top_k(scores: NDArray[np.float64], labels: Sequence[str], k: int) -> list[Prediction]:
    """The k best, best first; equal scores keep the order of their indices. k beyond the classes gives all.

    labels: empty, or one for each class. Raises InvalidRequest for k < 1, ModelError for another number of
    labels.
    """
    if k < 1:
        raise InvalidRequest(f"top_k is {k}: 1 or more is needed", param="top_k")
    if labels and len(labels) != scores.size:
        raise ModelError(f"{len(labels)} labels for {scores.size} scores: give one label for each output")
    best = np.argsort(-scores, kind="stable")[:k]
    return [
        Prediction(label=labels[i] if labels else str(i), index=int(i), score=float(scores[i])) for i in best
    ]
