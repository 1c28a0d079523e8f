"""Latency predictor: milliseconds of a packed micro-batch, from a table measured on the device at hand.

    t(micro-batch, budget) = layers x sum over documents of table(length, density) + ms/token x tokens + constant

forward and backward apart (arXiv 2604.13847 profiles one layer as a proxy too). `sparsebalance profile`
writes the table, `LatencyProfile` holds it, `LatencyPredictor` reads it. Between profiled lengths time follows the
power law through the two neighbours (a straight line in log length and log time: exact for t = c L^e, where a line in
plain time would overestimate a quadratic by up to 25% between lengths that differ by 2); between densities it is
linear. Pure numpy; a prediction for n documents costs O(n log rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_sparsebalance.latency_profile import LatencyProfile

__all__ = ["Latency", "LatencyPredictor"]

_TINY_MS = 1e-12  # keeps the logarithm finite where a table holds 0


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
    _log_lengths_R: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _densities_D: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _sparse_2RD: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _dense_2R: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = self.profile.attention
        # All rows on the union of their density grids: exact for piecewise linear rows, and it lets one gather serve
        # documents of any length at once.
        densities_D = np.array(sorted({point.density for row in rows for point in row.points}))
        sparse = [
            [
                _line([p.density for p in row.points], [getattr(p, name) for p in row.points], densities_D)
                for row in rows
            ]
            for name in ("forward_ms", "backward_ms")
        ]
        dense = [[row.dense_forward_ms for row in rows], [row.dense_backward_ms for row in rows]]
        object.__setattr__(self, "_log_lengths_R", np.log([row.length for row in rows]))
        object.__setattr__(self, "_densities_D", densities_D)
        object.__setattr__(self, "_sparse_2RD", np.array(sparse))
        object.__setattr__(self, "_dense_2R", np.array(dense))

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
        upper_X = np.clip(np.searchsorted(self._log_lengths_R, log_X), 1, len(self._log_lengths_R) - 1)
        lower_X = upper_X - 1
        time_2X = self._power_law(log_X, lower_X, upper_X, self._dense_2R[:, lower_X], self._dense_2R[:, upper_X])
        if not np.all(dense):
            low_2X, high_2X = self._sparse_rows(lower_X, densities_X)
            sparse_2X = self._power_law(log_X, lower_X, upper_X, low_2X, high_2X)
            context = self.profile.context
            dense_X = (lengths_X <= context.block_size) | np.asarray(dense)
            if dense_X.any():
                sparse_2X = np.where(dense_X, time_2X, sparse_2X)
            always_dense = context.num_dense_layers / context.num_layers
            time_2X = always_dense * time_2X + (1.0 - always_dense) * sparse_2X if always_dense else sparse_2X
        scaled: NDArray[np.float64] = time_2X * (self.attention_scale * self.profile.context.num_layers)
        return np.broadcast_to(scaled, (2, *shape))

    def document(self, length: int, density: float, dense: bool = False) -> Latency:
        """Attention of all layers for one document of `length` tokens.

        `dense=True` is the path taken at p = 1 (dense kernel); otherwise the sparse table is read at `density`.
        """
        forward_ms, backward_ms = self.attention_ms(length, density, dense).tolist()
        return Latency(forward_ms, backward_ms)

    def linear(self, num_tokens: int) -> Latency:
        """Everything but attention for a micro-batch of `num_tokens` tokens, constant included."""
        p = self.profile
        return Latency(
            self.linear_scale * (p.forward_ms_per_token * num_tokens + p.forward_ms_constant),
            self.linear_scale * (p.backward_ms_per_token * num_tokens + p.backward_ms_constant),
        )

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
        plain = LatencyPredictor(self.profile)
        linear_ms = plain.linear(sum(lengths)).total_ms
        return plain.predict(lengths, densities, dense).total_ms - linear_ms, linear_ms

    def refit(self, observations: Sequence[tuple[float, float, float]]) -> LatencyPredictor:
        """Fit the two scales to measured times; the table's shape stays.

        Relative residuals (measured - attention_scale * attention - linear_scale * linear) / (attention + linear) are
        fitted by iteratively re-weighted least squares (Huber's weights, then Tukey's), so that neither long
        micro-batches nor a stalled step dominates. The leverage of each point bounds its weight too, since these alone
        do not protect against an outlier that is also an extreme mix. With fewer than 8 observations, or where all mix
        attention and linear work alike, one common ratio (the median) is taken for both. Scales are clipped to
        [0.25, 4].

        Args:
            observations: (attention_ms, linear_ms, measured_ms) per micro-batch, the first two from `components`.
                Entries that are not finite and positive in prediction and measurement are left out.

        Returns:
            A new predictor; the same one if no observation is usable.
        """
        usable = [
            (a, lin, m) for a, lin, m in observations if math.isfinite(a + lin + m) and a + lin > 0.0 and m > 0.0
        ]
        if not usable:
            return self
        attention_N, linear_N, measured_N = np.array(usable).T
        predicted_N = attention_N + linear_N
        share_N, ratio_N = attention_N / predicted_N, measured_N / predicted_N
        scales = _robust_line(share_N, ratio_N) if len(usable) >= _MIN_OBSERVATIONS else None
        if scales is None:
            scales = (float(np.median(ratio_N)),) * 2
        attention_scale, linear_scale = (min(max(scale, 0.25), 4.0) for scale in scales)
        return LatencyPredictor(self.profile, attention_scale, linear_scale)

    def _sparse_rows(
        self, lower_X: NDArray[np.intp], density_X: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times at a density in the table's rows `lower_X` and the next ones, each [2, *shape]."""
        grid_D = self._densities_D
        num_rows, num_points = self._sparse_2RD.shape[1:]
        flat_2P = self._sparse_2RD.reshape(2, num_rows * num_points)
        if num_points == 1:
            return flat_2P[:, lower_X], flat_2P[:, lower_X + 1]
        point_X = np.clip(np.searchsorted(grid_D, density_X), 1, num_points - 1)
        weight_X = (density_X - grid_D[point_X - 1]) / (grid_D[point_X] - grid_D[point_X - 1])
        at_X = lower_X * num_points + point_X

        def row(at_X: NDArray[np.intp]) -> NDArray[np.float64]:
            left_2X = flat_2P.take(at_X - 1, axis=1)
            times_2X = flat_2P.take(at_X, axis=1)
            times_2X -= left_2X
            times_2X *= weight_X
            times_2X += left_2X
            return np.maximum(times_2X, 0.0, out=times_2X)

        return row(at_X), row(at_X + num_points)

    def _power_law(
        self,
        log_X: NDArray[np.float64],
        lower_X: NDArray[np.intp],
        upper_X: NDArray[np.intp],
        low_2X: NDArray[np.float64],
        high_2X: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        log_low_2X, log_high_2X = np.log(np.maximum(low_2X, _TINY_MS)), np.log(np.maximum(high_2X, _TINY_MS))
        start_X = self._log_lengths_R[lower_X]
        exponent_2X = (log_high_2X - log_low_2X) / (self._log_lengths_R[upper_X] - start_X)
        # Outside the table noise in the last two rows would be multiplied: attention grows between L^0 and L^3.
        above_X = log_X > self._log_lengths_R[-1]
        outside_X = (log_X < self._log_lengths_R[0]) | above_X
        if outside_X.any():
            exponent_2X = np.where(outside_X, np.clip(exponent_2X, 0.0, 3.0), exponent_2X)
            log_low_2X = np.where(above_X, log_high_2X, log_low_2X)
            start_X = np.where(above_X, self._log_lengths_R[upper_X], start_X)
        return np.exp(log_low_2X + exponent_2X * (log_X - start_X))


_MIN_OBSERVATIONS = 8
_MIN_SHARE_SPREAD = 0.02  # below this the slope is decided by noise


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


def _line(xs: Sequence[float], ys: Sequence[float], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Piecewise linear through (xs, ys), its end pieces prolonged, never negative; constant for one point."""
    if len(xs) == 1:
        return np.full(len(at), ys[0])
    x, y = np.asarray(xs), np.asarray(ys)
    upper = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    slope = (y[upper] - y[upper - 1]) / (x[upper] - x[upper - 1])
    values: NDArray[np.float64] = np.maximum(y[upper - 1] + slope * (at - x[upper - 1]), 0.0)
    return values
