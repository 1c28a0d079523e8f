"""Dynamic sparsity tuning (DST): a coverage budget for every micro-batch of one optimizer step.

arXiv 2604.13847, Algorithm 1, with the budget `top_p` of this project: each micro-batch's predicted
time is moved toward a common anchor (Eq. 3), the bound on lost coverage is p >= p_base - tolerance (Eq. 5) and wins
over the anchor, and among the budgets that fit the largest is taken (Eq. 6-7). Anchor `optimal` is this project's own:
the least predicted step time whose token-weighted mean budget is no less than the base.

Every micro-batch may take any budget of one fixed grid. Time need not grow with p (the dense kernel at p = 1 can be
faster than the sparse one at p = .95), so all choices go over the whole grid, never over an inverse function.
Cost: O(documents * grid) for the times, and O(micro-batches * grid * log) for the choice (`ladder`); pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hf_sparsebalance.density import DensityCurve, densities
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.ladder import Floats, Indices, Ladder, fastest, group_sums, last, pick, top_up
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.optimal import optimal, optimal_pipelined

__all__ = ["ANCHORS", "SCOPES", "MicroBatch", "Tuning", "candidate_budgets", "tune_sparsity"]

ANCHORS = ("min", "mean", "max", "optimal")
SCOPES = ("microbatch", "slot", "rank")
_GRID_STEP = 0.01
_ROUNDING = 1e-9  # relative: a mean of equal times may round below each of them
_TILE = 512  # documents whose times are predicted together


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed micro-batch: where it runs, its documents' lengths in tokens, and their density curves."""

    rank: int
    slot: int
    lengths: tuple[int, ...]
    curves: tuple[DensityCurve, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Budgets of one step, in the order of the micro-batches given.

    Attributes:
        top_p: chosen budget of each micro-batch; 1.0 means the dense kernel.
        predicted_ms: predicted time at that budget.
        base_ms: predicted time at the base budget.
        anchor_ms: the time aimed at: of a micro-batch (scope microbatch), of a rank's sum (scope rank), or of the
            step as the sum over slots of each slot's anchor (scope slot). With anchor optimal, the time reached.
        num_missed: how many stayed above their anchor because the coverage bound wins: micro-batches, or ranks
            (scope rank).
    """

    top_p: tuple[float, ...]
    predicted_ms: tuple[float, ...]
    base_ms: tuple[float, ...]
    anchor_ms: float
    num_missed: int


def candidate_budgets(base_top_p: float, tolerance: float) -> tuple[float, ...]:
    """The budgets DST may choose: every .01 between the bound and 1, and exactly the bound, the base and 1.

    The bound is base_top_p - tolerance, or the smallest step above 0 where that is not positive.
    """
    lowest = base_top_p - tolerance
    if lowest <= 0.0:
        lowest = min(base_top_p, _GRID_STEP)
    exact = {lowest, base_top_p, 1.0}
    steps = (round(i * _GRID_STEP, 10) for i in range(1, round(1 / _GRID_STEP)))
    return tuple(sorted(exact | {p for p in steps if p > lowest and all(abs(p - q) > 1e-6 for q in exact)}))


def tune_sparsity(
    micro_batches: Sequence[MicroBatch],
    predictor: LatencyPredictor,
    *,
    base_top_p: float,
    tolerance: float,
    anchor: str = "mean",
    scope: str = "rank",
    num_stages: int = 1,
) -> Tuning:
    """Choose a budget for each micro-batch of one optimizer step (all ranks, all slots).

    Args:
        micro_batches: the step's micro-batches.
        predictor: predicts the time of a micro-batch at a budget.
        base_top_p: the budget without tuning, in (0, 1].
        tolerance: largest allowed loss of coverage, in [0, 1]: no budget falls below base_top_p - tolerance.
        anchor: `min`, `mean` or `max` of the times at base, taken over all micro-batches (scope microbatch), within
            each slot (scope slot), or over the ranks' sums (scope rank); or `optimal`: least predicted step time
            with token-weighted mean budget >= base_top_p, and little work among equals.
        scope: where the step waits: "microbatch" (pipelines), "slot" (FSDP, ZeRO-3), "rank" (plain DDP).
        num_stages: stages of each rank's pipeline, for `optimal` with scope microbatch: the step is then the slowest
            rank's (sum + (num_stages - 1) * slowest micro-batch) / num_stages.

    Returns:
        The budgets and their predicted times. With `optimal` the predicted step time is never above that of the base
        budget everywhere. Over the grid it is the exact minimum for scope microbatch; for scope slot and rank it is at
        most one move longer (a move: between neighbouring corners of the concave hull of time and budget).

    Raises:
        UserError: base_top_p, tolerance, anchor or scope out of range.
        ValueError: no micro-batches, or one without exactly one curve per document.

    Example: with two ranks of 2 and 4 ms at base and anchor mean, rank 0 gets a larger and rank 1 a smaller budget,
    each so that its sum comes as near as it may to 3 ms from below.
    """
    if not 0.0 < base_top_p <= 1.0:
        raise UserError(f"top_p must be in (0, 1], not {base_top_p}: .5 to .9 are usual")
    if not 0.0 <= tolerance <= 1.0:
        raise UserError(f"tolerance must be in [0, 1], not {tolerance}: .1 or .2 are usual, 0 never lowers a budget")
    if anchor not in ANCHORS:
        raise UserError(f"anchor must be one of {', '.join(ANCHORS)}, not {anchor!r}")
    if scope not in SCOPES:
        raise UserError(f"scope must be one of {', '.join(SCOPES)}, not {scope!r}")
    if num_stages < 1:
        raise UserError(f"num_stages must be at least 1, not {num_stages}: use 1 without pipelines")
    counts = [len(m.lengths) for m in micro_batches]
    if not counts or 0 in counts or counts != [len(m.curves) for m in micro_batches]:
        raise ValueError("every step needs micro-batches, and each of them documents with one curve each")
    budgets = candidate_budgets(base_top_p, tolerance)
    budgets_C = np.array(budgets)
    times_MC, tokens_M = _times_ms(micro_batches, predictor, budgets_C)
    gains_MC = tokens_M[:, None] * budgets_C
    base = budgets.index(base_top_p)
    base_M = times_MC[:, base]
    group_M = _groups(micro_batches, scope)
    missed = 0
    if anchor == "optimal":
        if scope == "microbatch" and num_stages > 1:
            rank_M = _groups(micro_batches, "rank")
            choice_M, anchor_ms = optimal_pipelined(times_MC, gains_MC, base, rank_M, num_stages)
        else:
            choice_M, anchor_ms = optimal(times_MC, gains_MC, base, group_M, scope == "rank")
    else:
        if scope == "rank":
            part_M = group_M
            anchor_ms = _anchor(anchor, group_sums(base_M, group_M, int(group_M.max()) + 1))
            cap_P = np.full(int(group_M.max()) + 1, anchor_ms)
        else:
            part_M = np.arange(len(micro_batches))
            anchor_G = np.array([_anchor(anchor, base_M[group_M == group]) for group in range(int(group_M.max()) + 1)])
            anchor_ms, cap_P = float(anchor_G.sum()), anchor_G[group_M]
        choice_M = _fill(times_MC, gains_MC, part_M, cap_P, base)
        part_ms = group_sums(pick(times_MC, choice_M), part_M, len(cap_P))
        missed = int((part_ms > cap_P * (1 + _ROUNDING)).sum())
    return Tuning(
        top_p=tuple(budgets_C[choice_M].tolist()),
        predicted_ms=tuple(pick(times_MC, choice_M).tolist()),
        base_ms=tuple(base_M.tolist()),
        anchor_ms=anchor_ms,
        num_missed=missed,
    )


def _times_ms(
    micro_batches: Sequence[MicroBatch], predictor: LatencyPredictor, budgets_C: Floats
) -> tuple[Floats, Floats]:
    """[micro-batch, candidate] predicted time, the last candidate p = 1 by the dense kernel; tokens of each."""
    lengths_N = np.fromiter(chain.from_iterable([m.lengths for m in micro_batches]), np.float64)
    first_M = np.cumsum([0, *[len(m.lengths) for m in micro_batches[:-1]]])
    attention_NC = densities(list(chain.from_iterable([m.curves for m in micro_batches])), budgets_C)
    # A few documents at a time, in place: intermediate results stay in the cache.
    for start in range(0, len(lengths_N), _TILE):
        tile = slice(start, start + _TILE)
        forward_TC, backward_TC = predictor.attention_ms(lengths_N[tile, None], attention_NC[tile])
        np.add(forward_TC, backward_TC, out=attention_NC[tile])
    attention_NC[:, -1] = predictor.attention_ms(lengths_N, 1.0, dense=True).sum(axis=0)
    # One document each needs no sums.
    single = len(lengths_N) == len(micro_batches)
    times_MC: Floats = attention_NC if single else np.add.reduceat(attention_NC, first_M, axis=0)
    constant_ms, tokens_M = predictor.linear(0).total_ms, np.add.reduceat(lengths_N, first_M)
    times_MC += constant_ms + (predictor.linear(1).total_ms - constant_ms) * tokens_M[:, None]
    return times_MC, tokens_M


def _anchor(anchor: str, values: Floats) -> float:
    return float({"min": values.min(), "mean": values.mean(), "max": values.max()}[anchor])


def _groups(micro_batches: Sequence[MicroBatch], scope: str) -> Indices:
    """Group number of each micro-batch: all, a slot's or a rank's share an anchor."""
    if scope == "microbatch":
        return np.zeros(len(micro_batches), dtype=np.intp)
    keys = [m.slot if scope == "slot" else m.rank for m in micro_batches]
    group_M: Indices = np.unique(keys, return_inverse=True)[1]
    return group_M


def _fill(times_MC: Floats, gains_MC: Floats, part_M: Indices, cap_P: Floats, base: int) -> Indices:
    """Most gain whose time is within each part's cap; the fastest options if none is (the bound wins)."""
    limit_P = cap_P * (1 + _ROUNDING)
    if len(limit_P) == len(part_M):  # single micro-batches: exact, no hull needed
        fits_MC = times_MC <= limit_P[part_M][:, None]
        return np.where(fits_MC.any(axis=1), last(fits_MC), fastest(times_MC))
    ladder = Ladder(times_MC, gains_MC, part_M, len(limit_P))
    best_M = ladder.after(ladder.moves_within(limit_P))
    # The hull's corners can leave a gap; never give less than the untouched base budget would.
    fits_P = group_sums(times_MC[:, base], part_M, len(limit_P)) <= limit_P
    more_P = group_sums(gains_MC[:, base] - pick(gains_MC, best_M), part_M, len(limit_P)) > 0.0
    return top_up(times_MC, gains_MC, np.where((fits_P & more_P)[part_M], base, best_M), part_M, limit_P)
