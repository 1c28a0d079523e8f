"""How well a latency predictor does on micro-batches it was not made from, beside two that know less.

The rivals are those of arXiv 2604.13847, Fig. 6: time as a linear function of FLOPs, and of lengths alone.  They are
fitted to the very micro-batches on which they are judged (least squares of relative errors), which flatters them; the
profile's predictor has seen none of these.  Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_sparsebalance.latency import LatencyPredictor

__all__ = ["HeldOut", "PredictionError", "prediction_errors"]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A measured micro-batch.

    Attributes:
        lengths: tokens of its packed documents.
        density: kept / visible history blocks over all of them.
        dense: whether it ran with p = 1.
        flops: forward and backward, of the kept pairs and of everything else.
        times_ms: forward and backward together, once per round.
    """

    lengths: tuple[int, ...]
    density: float
    dense: bool
    flops: float
    times_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return float(np.median(self.times_ms))


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Errors of one predictor over all held-out micro-batches.

    Attributes:
        name: "profile", "flops" or "lengths".
        mape: mean of abs(predicted - measured) / measured.
        p95: 95th percentile of the same.
        ordered: share of the pairs whose order is predicted right, of those further apart than the noise.
        pairs: how many those are.
    """

    name: str
    mape: float
    p95: float
    ordered: float
    pairs: int


def prediction_errors(predictor: LatencyPredictor, held_out: Sequence[HeldOut]) -> list[PredictionError]:
    """Errors of the predictor, of FLOPs alone and of lengths alone.

    Two micro-batches count as a pair if their medians differ by more than twice the noise: the median, over the
    micro-batches, of how far the rounds lie from their median (relative, as a standard deviation).

    Raises:
        ValueError: fewer than four micro-batches.
    """
    if len(held_out) < 4:
        raise ValueError(f"at least 4 held-out micro-batches are needed, {len(held_out)} given")
    measured_N = np.array([entry.median_ms for entry in held_out])
    ours = [
        predictor.predict(entry.lengths, [entry.density] * len(entry.lengths), entry.dense).total_ms
        for entry in held_out
    ]
    tokens = [float(sum(entry.lengths)) for entry in held_out]
    squares = [float(sum(length**2 for length in entry.lengths)) for entry in held_out]
    predictions = {
        "profile": np.array(ours),
        "flops": _best_fit([[entry.flops for entry in held_out]], measured_N),
        "lengths": _best_fit([tokens, squares], measured_N),
    }
    noise = 1.4826 * float(
        np.median([np.median(np.abs(np.array(entry.times_ms) / entry.median_ms - 1.0)) for entry in held_out])
    )
    return [_error(name, predicted_N, measured_N, noise) for name, predicted_N in predictions.items()]


def _best_fit(columns: Sequence[Sequence[float]], measured_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Constant plus weighted columns, of least squared relative error."""
    design_NK = np.stack([np.ones(len(measured_N)), *map(np.asarray, columns)], axis=1)
    scales_K = np.abs(design_NK).max(axis=0)
    relative_NK = design_NK / scales_K / measured_N[:, None]
    weights_K = np.linalg.lstsq(relative_NK, np.ones(len(measured_N)), rcond=None)[0]
    fitted: NDArray[np.float64] = design_NK / scales_K @ weights_K
    return fitted


def _error(
    name: str, predicted_N: NDArray[np.float64], measured_N: NDArray[np.float64], noise: float
) -> PredictionError:
    errors_N = np.abs(predicted_N / measured_N - 1.0)
    right = pairs = 0
    for first, second in itertools.combinations(range(len(measured_N)), 2):
        apart = math.log(measured_N[second] / measured_N[first])
        if abs(apart) > 2.0 * noise:
            pairs += 1
            right += (predicted_N[second] - predicted_N[first]) * apart > 0.0
    ordered = right / pairs if pairs else 1.0
    return PredictionError(name, float(errors_N.mean()), float(np.quantile(errors_N, 0.95)), ordered, pairs)
