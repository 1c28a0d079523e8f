"""Density curves: how much of its history a document keeps at each coverage budget.

A curve gives, for one document, the density (kept / visible history blocks) as a non-decreasing function of the
coverage budget `top_p`. The planner needs it before the forward pass, so `CurveStore` answers from the best source it
has: what was seen of that very sample, the moving average of its length bucket, or an analytic prior.
Pure: plain data in and out, no torch. A lookup costs O(1); a copy of the store shares the immutable curves.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_sparsebalance.errors import UserError

__all__ = [
    "TOP_P_GRID",
    "CurveStore",
    "DensityCurve",
    "densities",
    "history_tokens",
    "share_curve",
    "share_density",
    "top_k_coverage",
    "top_k_density",
    "uniform_curve",
]

# Dense enough that linear interpolation costs less than the spread between documents of one length.
TOP_P_GRID: tuple[float, ...] = (*(round(0.05 * i, 2) for i in range(1, 20)), 0.99, 1.0)
_GRID = np.asarray(TOP_P_GRID)
# Lengths of unseen documents are told apart to 9 %; a doubling changes the density by a quarter to a third.
_STEPS_PER_OCTAVE = 8
# Observations x octaves^2 that say "no slope": two documents of nearly the same length must not set one.
_SLOPE_RIDGE = 0.05
_LEAST_RATIO = 1e-6  # keeps logarithms finite


@dataclass(frozen=True, slots=True)
class DensityCurve:
    """Density of one document as a function of the coverage budget.

    Attributes:
        top_p: grid of budgets, strictly increasing in (0, 1], ending in 1.0.
        density: kept / visible (token, head, history block) triples at each budget, non-decreasing in [0, 1], ending
            in 1.0 (at p = 1 nothing is dropped).

    Raises:
        ValueError: if a field breaks its promise; use `from_measured` for noisy values.

    Example: DensityCurve((0.5, 1.0), (0.2, 1.0)).at(0.75) -> 0.6.
    """

    top_p: tuple[float, ...]
    density: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.top_p) != len(self.density) or not self.top_p:
            raise ValueError(f"a curve needs one density per top_p: {len(self.top_p)} and {len(self.density)} given")
        if self.top_p[-1] != 1.0 or self.density[-1] != 1.0:
            raise ValueError("a curve must end in top_p 1.0 with density 1.0")
        previous_p, previous_density = 0.0, 0.0
        for p, density in zip(self.top_p, self.density, strict=True):
            if not previous_p < p:
                raise ValueError(f"top_p must be strictly increasing and positive: {self.top_p}")
            if not previous_density <= density:
                raise ValueError(f"density must be non-decreasing and not negative: {self.density}")
            previous_p, previous_density = p, density

    @classmethod
    def from_measured(cls, top_p: Sequence[float], density: Sequence[float]) -> DensityCurve:
        """Clean a measured curve: clip to [0, 1], running maximum over p, (1, 1) set or appended.

        Args:
            top_p: strictly increasing budgets in (0, 1].
            density: measured densities, one per budget; noise may make them decrease.

        Raises:
            ValueError: lengths differ, top_p not increasing inside (0, 1], or a density is not finite.

        Example: from_measured((0.5, 0.9), (0.3, 0.2)) -> DensityCurve((0.5, 0.9, 1.0), (0.3, 0.3, 1.0)).
        """
        if len(top_p) != len(density):
            raise ValueError(f"a curve needs one density per top_p: {len(top_p)} and {len(density)} given")
        budgets = [float(p) for p in top_p]
        cleaned: list[float] = []
        highest = 0.0
        for value in density:
            if not math.isfinite(value):
                raise ValueError(f"a measured density is not finite: {value}")
            highest = max(highest, min(float(value), 1.0))
            cleaned.append(highest)
        if budgets and budgets[-1] == 1.0:
            cleaned[-1] = 1.0
        else:
            budgets.append(1.0)
            cleaned.append(1.0)
        return cls(tuple(budgets), tuple(cleaned))

    def at(self, p: float) -> float:
        """Density at budget p in [0, 1]: linear between grid points, from (0, 0) below the first, exactly 1 at p 1."""
        return float(self.at_many(np.array([p]))[0])

    def at_many(self, p: NDArray[np.float64]) -> NDArray[np.float64]:
        """`at` for an array of budgets of any shape; returns the same shape."""
        values: NDArray[np.float64] = np.interp(p, (0.0, *self.top_p), (0.0, *self.density))
        return values


def densities(curves: Sequence[DensityCurve], p: NDArray[np.float64]) -> NDArray[np.float64]:
    """[curve, budget] density of many curves at the same budgets; quick where, as usual, all share one grid."""
    grid = curves[0].top_p
    if any(curve.top_p is not grid and curve.top_p != grid for curve in curves):
        return np.array([curve.at_many(p) for curve in curves])
    values = chain.from_iterable([curve.density for curve in curves])
    density_NG = np.fromiter(values, np.float64, len(curves) * len(grid)).reshape(len(curves), len(grid))
    # Linear interpolation as a product: a budget's weights on the grid are two, and the origin's is no matter.
    weights_GC = np.array([np.interp(p, (0.0, *grid), (0.0, *unit)) for unit in np.eye(len(grid))])
    density_NC: NDArray[np.float64] = density_NG @ weights_GC
    return density_NC


def uniform_curve(length: int, block_size: int, top_p: tuple[float, ...] = TOP_P_GRID) -> DensityCurve:
    """Analytic prior: the curve of a document whose gate is uniform over its history blocks.

    A token at position t sees n = floor(t / block_size) history blocks; a uniform gate gives each 1/n, so ceil(p*n)
    are kept. The density is sum(ceil(p*n)) / sum(n) over the tokens that have history. A randomly initialised model
    is close to this; a trained one lies far below (its gate is peaked), so the prior is an upper estimate that the
    first observations replace. Documents no longer than a block have no history: density 1 everywhere.

    Args:
        length: tokens of the document, >= 1.
        block_size: tokens of a block, >= 1.
        top_p: grid of the returned curve, ending in 1.0.

    Raises:
        ValueError: length or block_size below 1.

    Cost: O(length / block_size * len(top_p)).
    """
    if length < 1 or block_size < 1:
        raise ValueError(f"length and block_size must be at least 1: {length} and {block_size} given")
    num_history = (length - 1) // block_size
    if num_history == 0:
        return DensityCurve(top_p, (1.0,) * len(top_p))
    blocks_N: NDArray[np.float64] = np.arange(1, num_history + 1, dtype=np.float64)
    tokens_N = np.minimum(float(block_size), length - blocks_N * block_size)
    # The small shift keeps p * n = 7.000000000000001 (p .7, n 10) from being rounded up to 8 blocks.
    kept_PN = np.ceil(np.asarray(top_p)[:, None] * blocks_N[None, :] - 1e-9)
    density_P = (kept_PN @ tokens_N) / float(blocks_N @ tokens_N)
    return DensityCurve.from_measured(top_p, density_P.tolist())


def top_k_density(lengths: ArrayLike, top_k: ArrayLike, block_size: int) -> NDArray[np.float64]:
    """Density of documents at a budget of k blocks, the own one included: known from the lengths alone.

    A token at position t keeps min(k - 1, floor(t / block_size)) of its history blocks.

    Args:
        lengths: tokens of each document, >= 1; any shape.
        top_k: whole numbers >= 1, broadcast against `lengths`.
        block_size: tokens of a block.

    Returns:
        Kept / visible (token, history block) pairs; exactly 1.0 where k covers the document.

    Example: 3 blocks of 2 tokens see 0, 0, 1, 1, 2, 2 blocks; with k = 2 they keep 4 of 6: top_k_density(6, 2, 2) is
    2 / 3.
    """
    blocks, tail = np.divmod(np.asarray(lengths), block_size)
    kept = np.minimum(np.asarray(top_k) - 1, blocks)
    kept_pairs = block_size * (kept * blocks - kept * (kept + 1) // 2) + tail * kept
    visible_pairs = _visible_pairs(lengths, block_size)
    density: NDArray[np.float64] = np.where(visible_pairs > 0, kept_pairs / np.maximum(visible_pairs, 1), 1.0)
    return density


def share_density(lengths: ArrayLike, density: float, block_size: int) -> NDArray[np.float64]:
    """Density of each document of a packed micro-batch whose layers took one k each and kept `density` on the whole.

    Between the two whole k that the density lies between, it is shared in proportion.

    Args:
        lengths: `[N]` tokens of each document, >= 1.
        density: kept / visible (token, history block) pairs of the micro-batch.
        block_size: tokens of a block.

    Returns:
        `[N]`, 1.0 for documents without history; averaged over the visible pairs they give `density`.
    """
    lengths_N = np.asarray(lengths)
    k_K = np.arange(1, 2 + (int(lengths_N.max()) - 1) // block_size)
    density_NK, visible_N = top_k_density(lengths_N[:, None], k_K, block_size), _visible_pairs(lengths_N, block_size)
    total_K = visible_N @ density_NK / max(int(visible_N.sum()), 1)
    return np.array([np.interp(density, total_K, density_K) for density_K in density_NK])


def share_curve(
    curve: DensityCurve, known: Sequence[DensityCurve], lengths: Sequence[int], block_size: int
) -> list[DensityCurve]:
    """Curve of each document of a packed micro-batch from the curve of the whole.

    At each p all densities known before are off by the same factor, so that averaged over the visible pairs they give
    what was seen (where none is beyond 1). Documents without history keep theirs.

    Args:
        curve: of the micro-batch.
        known: of each document, as known before.
        lengths: tokens of each document.
        block_size: tokens of a block.
    """
    pairs_N = _visible_pairs(lengths, block_size)
    if not pairs_N.any():
        return list(known)
    at_P = np.array(curve.top_p)
    known_NP = densities(known, at_P)
    ratio_P = np.array(curve.density) * pairs_N.sum() / np.maximum(pairs_N @ known_NP, _LEAST_RATIO)
    return [
        DensityCurve.from_measured(curve.top_p, (known_P * ratio_P).tolist()) if pairs else before
        for known_P, pairs, before in zip(known_NP, pairs_N, known, strict=True)
    ]


def history_tokens(lengths: ArrayLike, block_size: int) -> NDArray[np.intp]:
    """Tokens of each document that have blocks before their own, of which a budget keeps some."""
    history_N: NDArray[np.intp] = np.maximum(np.asarray(lengths) - block_size, 0)
    return history_N


def _visible_pairs(lengths: ArrayLike, block_size: int) -> NDArray[np.intp]:
    """(token, history block) pairs of one head of each document."""
    blocks, tail = np.divmod(np.asarray(lengths), block_size)
    pairs: NDArray[np.intp] = block_size * (blocks * (blocks - 1) // 2) + tail * blocks
    return pairs


def top_k_coverage(lengths: ArrayLike, top_k: ArrayLike, block_size: int) -> NDArray[np.float64]:
    """Coverage at a budget of k blocks, summed over a document's tokens that have history, if the gate were uniform.

    A token at position t covers min(k - 1, n) / n of its n = floor(t / block_size) history blocks.  Arguments as in
    :func:`top_k_density`.

    Example: top_k_coverage(6, 2, 2) is 2 * 1 + 2 * 1 / 2 = 3.
    """
    blocks, tail = np.divmod(np.asarray(lengths), block_size)
    kept = np.minimum(np.asarray(top_k) - 1, blocks)
    harmonic = np.cumsum(np.concatenate([[0.0], 1.0 / np.arange(1, max(2, int(blocks.max()) + 1))]))
    last = np.maximum(blocks - 1, 0)  # history of the last complete block's tokens
    whole = np.minimum(kept, last)
    coverage: NDArray[np.float64] = block_size * (whole + kept * (harmonic[last] - harmonic[whole]))
    coverage += tail * kept / np.maximum(blocks, 1)
    return coverage


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Moving averages over the documents of one power of two of lengths.

    Attributes:
        count: documents seen.
        octave: log2 of the length.
        ratio: density over the prior's at each p of TOP_P_GRID.
    """

    count: int
    octave: float
    ratio: tuple[float, ...]


class CurveStore:
    """Density curves of the samples of one run, with a fall-back for samples not seen yet.

    Sources, best first: the curve of the micro-batch that the sample was last seen in (its own, where it was alone
    there); the analytic prior at the sample's length, times the ratio of seen to prior density that its length bucket
    (powers of two) showed on average, or else the nearest bucket; the prior.  The ratio is brought to the sample's
    length: at each p it follows about a power of the length (on a pretrained model; it is 1 for random weights), which
    is fitted over the buckets.
    The state depends on the order of `observe` calls, so ranks that must plan alike have to report the same
    observations in the same order.

    Args:
        block_size: tokens of an attention block; documents no longer than it always get density 1.
        average_weight: weight of a new curve in its bucket's moving average, in (0, 1]; the first 1 / average_weight
            observations are averaged evenly, so that the first one does not stick.
    """

    def __init__(self, block_size: int, average_weight: float = 0.1) -> None:
        if block_size < 1:
            raise UserError(f"block_size must be at least 1, not {block_size}: pass a positive number of tokens")
        if not 0.0 < average_weight <= 1.0:
            raise ValueError(f"average_weight must be in (0, 1], not {average_weight}")
        self.block_size = block_size
        self.average_weight = average_weight
        self._samples: dict[int, DensityCurve] = {}
        self._buckets: dict[int, _Bucket] = {}
        # By step of length; both only remember what follows from the rest.
        self._priors: dict[int, DensityCurve] = {}
        self._typical: dict[int, DensityCurve] = {}

    def lookup(self, sample: int, length: int) -> DensityCurve:
        """The best known curve of a sample of `length` tokens (see the class for the order of sources)."""
        own = self._samples.get(sample)
        if own is not None:
            return own
        step = self._step(length)
        curve = self._typical.get(step)
        if curve is None:
            curve = self._typical[step] = self._typical_curve(step)
        return curve

    def observe(self, sample: int, length: int, curve: DensityCurve) -> None:
        """Remember the curve seen of a sample and move its length bucket's averages toward it."""
        if length <= self.block_size:
            return  # no history: its constant curve would only disturb the bucket
        self._samples[sample] = curve
        octave = math.log2(length)
        ratio = curve.at_many(_GRID) / np.asarray(self._prior(self._step(length)).density)
        average = self._buckets.get(int(octave), _Bucket(0, octave, tuple(ratio.tolist())))
        weight = max(self.average_weight, 1.0 / (average.count + 1))
        self._buckets[int(octave)] = _Bucket(
            average.count + 1,
            (1.0 - weight) * average.octave + weight * octave,
            tuple(((1.0 - weight) * np.asarray(average.ratio) + weight * ratio).tolist()),
        )
        self._typical.clear()

    def state_dict(self) -> dict[str, object]:
        """Everything learnt, as plain JSON-able data; curves by their grid, as nearly all share one.

        Densities are base64 of little-endian doubles: as decimal digits 100,000 curves take seconds to write.
        """
        grids: dict[tuple[float, ...], list[int]] = {}
        for sample, curve in sorted(self._samples.items()):
            grids.setdefault(curve.top_p, []).append(sample)
        curves = [
            {
                "top_p": list(grid),
                "samples": samples,
                "densities": b64encode(
                    np.array([self._samples[sample].density for sample in samples], dtype="<f8").tobytes()
                ).decode("ascii"),
            }
            for grid, samples in grids.items()
        ]
        buckets = [[key, each.count, each.octave, list(each.ratio)] for key, each in sorted(self._buckets.items())]
        return {
            "block_size": self.block_size,
            "average_weight": self.average_weight,
            "curves": curves,
            "buckets": buckets,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, object]) -> CurveStore:
        """Rebuild a store from `state_dict()`, also after a round trip through JSON.

        Raises:
            UserError: the data is not what `state_dict` writes (a damaged checkpoint).
        """
        try:
            store = cls(int(_as(int, state["block_size"])), float(_as(float, state["average_weight"])))
            for group in _as(list, state["curves"]):
                grid, samples = tuple(float(p) for p in _as(list, group["top_p"])), _as(list, group["samples"])
                values = np.frombuffer(b64decode(_as(str, group["densities"]), validate=True), dtype="<f8")
                for sample, density in zip(samples, values.reshape(-1, len(grid)).tolist(), strict=True):
                    store._samples[int(sample)] = DensityCurve(grid, tuple(density))
            for key, count, octave, ratio in _as(list, state["buckets"]):
                if len(ratio) != len(TOP_P_GRID):
                    raise ValueError(f"{len(ratio)} ratios in a bucket, not {len(TOP_P_GRID)}")
                bucket = _Bucket(int(count), float(octave), tuple(float(each) for each in ratio))
                if bucket.count < 1 or not all(0.0 <= each < math.inf for each in (bucket.octave, *bucket.ratio)):
                    raise ValueError(f"bucket {key} of {count} observations")
                store._buckets[int(key)] = bucket
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"the density curves of the checkpoint are damaged ({error}): resume from another checkpoint"
            ) from error
        return store

    def _step(self, length: int) -> int:
        """Which step of lengths it lies in; -1 without history.  Lookups within a step share one curve."""
        return round(_STEPS_PER_OCTAVE * math.log2(length)) if length > self.block_size else -1

    def _prior(self, step: int) -> DensityCurve:
        """The analytic prior at the middle of a step of lengths."""
        curve = self._priors.get(step)
        if curve is None:
            middle = 1 if step < 0 else max(round(2.0 ** (step / _STEPS_PER_OCTAVE)), self.block_size + 1)
            curve = self._priors[step] = uniform_curve(middle, self.block_size)
        return curve

    def _typical_curve(self, step: int) -> DensityCurve:
        """The curve of an unseen document at the middle of a step of lengths."""
        prior, octave = self._prior(step), step / _STEPS_PER_OCTAVE
        if step < 0 or not self._buckets:
            return prior
        _, key = min((abs(bucket.octave - octave), key) for key, bucket in self._buckets.items())
        nearest = self._buckets.get(int(octave), self._buckets[key])
        ratio = np.asarray(nearest.ratio) * 2.0 ** (self._slopes() * (octave - nearest.octave))
        return DensityCurve.from_measured(TOP_P_GRID, (ratio * prior.density).tolist())

    def _slopes(self) -> NDArray[np.float64]:
        """Change of log2 ratio per octave of length at each p: weighted least squares over the buckets."""
        buckets = [bucket for _, bucket in sorted(self._buckets.items())]
        # A moving average forgets: beyond 1 / average_weight observations a bucket is no better known.
        weight_N = np.array([min(bucket.count, 1.0 / self.average_weight) for bucket in buckets])
        octave_N = np.array([bucket.octave for bucket in buckets])
        log_ratio_NP = np.log2(np.maximum([bucket.ratio for bucket in buckets], _LEAST_RATIO))
        weighted_N = weight_N * (octave_N - weight_N @ octave_N / weight_N.sum())
        slopes: NDArray[np.float64] = weighted_N @ log_ratio_NP / (weighted_N @ octave_N + _SLOPE_RIDGE)
        return slopes


def _as(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
