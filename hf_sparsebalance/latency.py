"""Latency predictor: milliseconds of a packed micro-batch, from a table measured on the device at hand.

    t(micro-batch, budget) = layers x sum over documents of table(length, density) + ms/token x tokens + constant

forward and backward apart (arXiv 2604.13847 profiles one layer as a proxy too). `sparsebalance profile`
writes the table, `LatencyProfile` holds it, `LatencyPredictor` reads it. Between profiled lengths time follows the
power law through the two neighbours (a straight line in log length and log time: exact for t = c L^e, where a line in
plain time would overestimate a quadratic by up to 25% between lengths that differ by 2), at every density profiled
with either of them; between these densities it is linear. So a document's time over its density is a line of a dozen
pieces, made once for all its budgets. Pure numpy; O(lengths * profiled densities + predictions * log densities).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_sparsebalance.latency_profile import LatencyProfile, LengthRow

__all__ = ["Latency", "LatencyPredictor"]

_TINY_MS = 1e-12  # keeps the logarithm finite where a table holds 0
_PARTS = ("forward_ms", "backward_ms")


@dataclass(frozen=True, slots=True)
class Latency:
    """Predicted or measured time of a piece of work, forward and backward apart."""

    forward_ms: float
    backward_ms: float

    @property
    def total_ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms

    def __add__(self, other: Latency) -> Latency:
        return Latency(self.forward_ms + other.forward_ms, self.backward_ms + other.backward_ms)


@dataclass(frozen=True, slots=True)
class LatencyPredictor:
    """Predicts times from a profile and two re-fitted scales.

    Args:
        profile: the measured table.
        attention_scale: factor on the attention part (what the table gives), from `refit`.
        linear_scale: factor on the linear part and the constant, from `refit`.

    Documents no longer than a block are dense at every budget. Below the shortest and above the longest profiled
    length the power law of the two nearest rows goes on; no prediction is negative.
    """

    profile: LatencyProfile
    attention_scale: float = 1.0
    linear_scale: float = 1.0
    # E the ends of an interval between two neighbouring lengths, I the interval, K its knots: both rows' densities.
    _log_lengths_R: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _densities_D: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _knots_IK: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _piece_ID: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    _log_sparse_E2IK: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _log_dense_E2I: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = self.profile.attention
        pairs = list(pairwise(rows))
        own = [sorted({point.density for row in pair for point in row.points}) for pair in pairs]
        width = max(2, *map(len, own))
        # Knots beyond an interval's own make all equally many; no piece that ends there is ever taken.
        knots_IK = np.array([[*knots, *(knots[-1] + i for i in range(1, width - len(knots) + 1))] for knots in own])
        densities_D = np.array(sorted(set().union(*own)))
        # Which piece of an interval's line holds a density, from how many of all densities lie below it.
        piece_ID = [
            np.clip(np.searchsorted(knots, [-1.0, *densities_D], side="right") - 1, 0, max(0, len(knots) - 2))
            for knots in own
        ]
        sparse = [
            [[_line(pair[end], name, at) for pair, at in zip(pairs, knots_IK, strict=True)] for name in _PARTS]
            for end in (0, 1)
        ]
        dense = [[[getattr(pair[end], f"dense_{name}") for pair in pairs] for name in _PARTS] for end in (0, 1)]
        for name, value in (
            ("_log_lengths_R", np.log([row.length for row in rows])),
            ("_densities_D", densities_D),
            ("_knots_IK", knots_IK),
            ("_piece_ID", np.array(piece_ID)),
            ("_log_sparse_E2IK", np.log(np.maximum(sparse, _TINY_MS))),
            ("_log_dense_E2I", np.log(np.maximum(dense, _TINY_MS))),
        ):
            object.__setattr__(self, name, value)

    def attention_ms(self, lengths: ArrayLike, densities: ArrayLike, dense: ArrayLike = False) -> NDArray[np.float64]:
        """Attention of all layers for many documents at once.

        Args:
            lengths: tokens of each document, >= 1; any shape.
            densities: density of each document in [0, 1] in the layers that are not always dense; broadcast against
                `lengths`.
            dense: whether the dense kernel runs (p = 1, or a k that covers the document), in all or for each;
                densities are then ignored.

        Returns:
            [2, *shape] milliseconds, scaled: forward, backward.
        """
        # Lengths are not spread over the densities' shape: what depends on them alone is computed once for each.
        lengths_X, densities_X = np.asarray(lengths, dtype=np.float64), np.asarray(densities, dtype=np.float64)
        shape = np.broadcast_shapes(lengths_X.shape, densities_X.shape)
        lengths_X = lengths_X.reshape((1,) * (len(shape) - lengths_X.ndim) + lengths_X.shape)
        log_X = np.log(lengths_X)
        interval_X = np.clip(np.searchsorted(self._log_lengths_R, log_X), 1, len(self._log_lengths_R) - 1) - 1
        span_X = np.diff(self._log_lengths_R)[interval_X]
        reach_X = (log_X - self._log_lengths_R[interval_X]) / span_X
        context = self.profile.context
        scale = self.attention_scale * context.num_layers
        dense_2X = scale * _power_law(self._log_dense_E2I[:, :, interval_X], reach_X, span_X)
        if np.all(dense):
            return np.broadcast_to(dense_2X, (2, *shape))
        # A length's line over density: the power law at each knot.
        sparse_2XK = scale * _power_law(self._log_sparse_E2IK[:, :, interval_X], reach_X[..., None], span_X[..., None])
        dense_2X1, short_X1 = dense_2X[..., None], (lengths_X <= context.block_size)[..., None]
        share = context.num_dense_layers / context.num_layers
        line_2XK = np.where(short_X1, dense_2X1, share * dense_2X1 + (1.0 - share) * sparse_2XK)
        at_XK = self._knots_IK[interval_X]
        slope_2XP = np.diff(line_2XK) / np.diff(at_XK)
        start_2XP = line_2XK[..., :-1] - slope_2XP * at_XK[..., :-1]
        # The piece of its length's line that holds each density, and the density's place on it.
        cell_X = np.searchsorted(self._densities_D, densities_X) + self._piece_ID.shape[1] * interval_X
        piece_X = self._piece_ID.take(cell_X)
        piece_X += slope_2XP.shape[-1] * np.arange(lengths_X.size).reshape(lengths_X.shape)
        times_2X: NDArray[np.float64] = slope_2XP.reshape(2, -1).take(piece_X, axis=1)
        times_2X *= densities_X
        times_2X += start_2XP.reshape(2, -1).take(piece_X, axis=1)
        np.maximum(times_2X, 0.0, out=times_2X)
        if np.any(dense):
            np.copyto(times_2X, dense_2X, where=np.asarray(dense))
        return times_2X

    def document(self, length: int, density: float, dense: bool = False) -> Latency:
        """Attention of all layers for one document of `length` tokens.

        `dense=True` is the path taken at p = 1 (dense kernel); otherwise the sparse table is read at `density`.
        """
        forward_ms, backward_ms = self.attention_ms(length, density, dense).tolist()
        return Latency(forward_ms, backward_ms)

    def linear_ms(self, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """`linear` of many micro-batches at once: [2, *shape] milliseconds, forward and backward."""
        tokens_X, p = np.asarray(num_tokens, dtype=np.float64), self.profile
        forward_X = self.linear_scale * (p.forward_ms_per_token * tokens_X + p.forward_ms_constant)
        backward_X = self.linear_scale * (p.backward_ms_per_token * tokens_X + p.backward_ms_constant)
        return np.stack([forward_X, backward_X])

    def linear(self, num_tokens: int) -> Latency:
        """Everything but attention for a micro-batch of `num_tokens` tokens, constant included."""
        forward_ms, backward_ms = self.linear_ms(num_tokens).tolist()
        return Latency(forward_ms, backward_ms)

    def predict(self, lengths: Sequence[int], densities: Sequence[float], dense: ArrayLike = False) -> Latency:
        """Time of a packed micro-batch: its documents' attention, plus the linear part, plus the constant.

        Args:
            lengths: tokens of each document.
            densities: density of each document at the micro-batch's budget, in the same order.
            dense: whether the dense kernel runs, in all or for each document.

        Raises:
            ValueError: the two sequences differ in length.
        """
        if len(lengths) != len(densities):
            raise ValueError(f"one density per document: {len(lengths)} lengths and {len(densities)} densities given")
        forward_ms, backward_ms = self.attention_ms(lengths, densities, dense).sum(axis=1).tolist()
        return Latency(forward_ms, backward_ms) + self.linear(sum(lengths))

    def components(
        self, lengths: Sequence[int], densities: Sequence[float], dense: ArrayLike = False
    ) -> tuple[float, float]:
        """(attention_ms, linear_ms with constant) of a micro-batch, forward and backward, before the two scales.

        With the measured time beside them these are the observations `refit` takes.
        """
        linear_ms = self.linear(sum(lengths)).total_ms
        attention_ms = self.predict(lengths, densities, dense).total_ms - linear_ms
        return attention_ms / self.attention_scale, linear_ms / self.linear_scale

    def with_scales(self, attention_scale: float, linear_scale: float) -> LatencyPredictor:
        """The same predictor with other scales.

        Raises:
            ValueError: one is not a positive number.
        """
        if not (0.0 < attention_scale < math.inf and 0.0 < linear_scale < math.inf):
            raise ValueError(f"scales must be positive numbers, not {attention_scale} and {linear_scale}")
        return replace(self, attention_scale=attention_scale, linear_scale=linear_scale)

    def refit(self, steps: Sequence[Sequence[tuple[float, float, float]]]) -> LatencyPredictor:
        """Fit the two scales to measured times; the table's shape stays.

        Relative residuals (measured - attention_scale * attention - linear_scale * linear) / (attention + linear) are
        fitted by iteratively re-weighted least squares (Huber's weights, then Tukey's), so that neither long
        micro-batches nor a stalled one dominates. The leverage of each point bounds its weight too, since these alone
        do not protect against an outlier that is also an extreme mix. A step that was slow as a whole is left out.
        With fewer than 3 steps or 8 observations, or where all mix attention and linear work alike, one common ratio
        (the median) is taken for both, which moves no plan. Scales are clipped to [0.25, 4].

        Args:
            steps: of each step (attention_ms, linear_ms, measured_ms) of micro-batches, the first two from
                `components`. Entries that are not finite and positive in prediction and measurement are left out.

        Returns:
            A new predictor; the same one if no observation is usable.
        """
        usable = [
            (a, lin, m, number)
            for number, step in enumerate(steps)
            for a, lin, m in step
            if math.isfinite(a + lin + m) and a + lin > 0.0 and m > 0.0
        ]
        if not usable:
            return self
        attention_N, linear_N, measured_N, step_N = np.array(usable).T
        predicted_N = attention_N + linear_N
        share_N, ratio_N = attention_N / predicted_N, measured_N / predicted_N
        usual_N = _usual_steps(ratio_N, step_N)
        share_N, ratio_N = share_N[usual_N], ratio_N[usual_N]
        enough = len(set(step_N)) >= _MIN_STEPS and len(ratio_N) >= _MIN_OBSERVATIONS
        scales = _robust_line(share_N, ratio_N) if enough else None
        if scales is None:
            scales = (float(np.median(ratio_N)),) * 2
        attention_scale, linear_scale = (min(max(scale, 0.25), 4.0) for scale in scales)
        return LatencyPredictor(self.profile, attention_scale, linear_scale)


def _power_law(
    log_ms_EX: NDArray[np.float64], reach_X: NDArray[np.float64], span_X: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Time between two rows of log times, `reach` of the way in log length, `span` apart; on beyond 0 and 1."""
    low_X, high_X = log_ms_EX
    rise_X, inside_X = high_X - low_X, np.clip(reach_X, 0.0, 1.0)
    # Outside the table noise in the last two rows would be multiplied: attention grows between L^0 and L^3.
    beyond_X = np.clip(rise_X, 0.0, 3.0 * span_X) * (reach_X - inside_X)
    times_X: NDArray[np.float64] = np.exp(low_X + rise_X * inside_X + beyond_X)
    return times_X


_MIN_STEPS = 3  # of two nobody can say which one was slow
_MIN_OBSERVATIONS = 8
_SLOW = 0.25  # relative: steps that differ by less are not told apart
_MIN_SHARE_SPREAD = 0.02  # below this the slope is decided by noise


def _usual_steps(ratio_N: NDArray[np.float64], step_N: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which observations belong to steps whose median ratio is like those of the others."""
    numbers, which_N = np.unique(step_N, return_inverse=True)
    level_S = np.array([np.median(ratio_N[which_N == step]) for step in range(len(numbers))])
    off_S = np.abs(level_S - np.median(level_S))
    usual_S = off_S <= max(4.685 * 1.4826 * float(np.median(off_S)), _SLOW * float(np.median(level_S)))
    usual_N: NDArray[np.bool_] = usual_S[which_N] if len(numbers) >= _MIN_STEPS else np.ones(len(ratio_N), dtype=bool)
    return usual_N


def _robust_line(share_N: NDArray[np.float64], ratio_N: NDArray[np.float64]) -> tuple[float, float] | None:
    """(attention scale, linear scale) of ratio = linear + (attention - linear) * share; None if undetermined."""
    # Half of the points must differ, or one outlying mix alone would set the slope.
    low, high = np.quantile(share_N, (0.25, 0.75))
    if high - low < _MIN_SHARE_SPREAD:
        return None
    design_N2 = np.stack([share_N, 1.0 - share_N], axis=1)
    hat_N = np.einsum("ni,ij,nj->n", design_N2, np.linalg.inv(design_N2.T @ design_N2), design_N2)
    trust_N = np.sqrt(np.maximum(1.0 - hat_N, 0.0))
    scales = np.full(2, np.median(ratio_N))
    # Huber's weights find the line; Tukey's then leave out what lies far from it: a step that stalled is a quarter of
    # the observations after four steps, and would still pull where its influence is merely bounded.
    for weights in (_huber, _biweight):
        for _ in range(50):
            residual_N = ratio_N - design_N2 @ scales
            spread = max(1.4826 * float(np.median(np.abs(residual_N))), 1e-6 * float(np.median(ratio_N)))
            weight_N = trust_N * weights(residual_N / (spread * trust_N + 1e-300))
            normal_22 = design_N2.T @ (weight_N[:, None] * design_N2)
            if np.linalg.cond(normal_22) > 1e12:
                break  # what is left is of one mix
            updated = np.linalg.solve(normal_22, design_N2.T @ (weight_N * ratio_N))
            converged = float(np.max(np.abs(updated - scales))) <= 1e-9 * float(np.max(np.abs(updated)))
            scales = updated
            if converged:
                break
    return float(scales[0]), float(scales[1])


def _huber(residual_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weight 1 up to 1.345 standard deviations, then falling as 1 / distance."""
    weights: NDArray[np.float64] = np.minimum(1.0, 1.345 / np.maximum(np.abs(residual_N), 1e-300))
    return weights


def _biweight(residual_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weight falling to 0 at 4.685 standard deviations (Tukey)."""
    weights: NDArray[np.float64] = np.clip(1.0 - (residual_N / 4.685) ** 2, 0.0, 1.0) ** 2
    return weights


def _line(row: LengthRow, name: str, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """A row's times, piecewise linear through its points, the end pieces prolonged; constant for one point."""
    x = np.array([point.density for point in row.points])
    y = np.array([getattr(point, name) for point in row.points])
    if len(x) == 1:
        return np.full(len(at), y[0])
    upper = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    slope = (y[upper] - y[upper - 1]) / (x[upper] - x[upper - 1])
    values: NDArray[np.float64] = y[upper - 1] + slope * (at - x[upper - 1])
    return values
