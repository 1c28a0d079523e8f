"""Dynamic sparsity tuning (DST): a budget for every micro-batch of one optimizer step.

arXiv 2604.13847, Algorithm 1: each micro-batch's predicted time is moved toward a common anchor (Eq. 3), the bound on
lost coverage (Eq. 5) wins over the anchor, and among the budgets that fit the largest is taken (Eq. 6-7). With the
budget `top_p` the bound is p >= p_base - tolerance. With `top_k`, the paper's own, coverage is known only where the
scores are: the k chosen here is the anchor's, which each layer raises in its forward pass. Anchor `optimal` is this
project's own: the least predicted step time whose mean budget over tokens is no less than the base. Only tokens with
history count: those of a document's first block keep all they see at any budget.

Every micro-batch may take any budget of one grid, coarser where there are thousands of them. Time need not grow with
p (the dense kernel at p = 1 can be faster than the sparse one at p = .95), so all choices go over the whole grid,
never over an inverse function.
Cost: O(documents * grid) for the times, and O(micro-batches * grid * log) for the choice (`ladder`); pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from hf_sparsebalance.density import DensityCurve, densities, history_tokens, top_k_coverage, top_k_density
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.ladder import Booleans, Floats, Indices, Ladder, fastest, group_sums, last, pick, top_up
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.optimal import optimal, optimal_pipelined

__all__ = [
    "ANCHORS",
    "SCOPES",
    "MicroBatch",
    "Tuning",
    "candidate_budgets",
    "candidate_top_k",
    "tune_sparsity",
    "tune_top_k",
]

ANCHORS = ("min", "mean", "max", "optimal")
SCOPES = ("microbatch", "slot", "rank")
OPTIMAL_NEEDS_TOP_P = (
    "--anchor optimal weighs coverage before the forward pass, and that of a top_k is known only in it: give --anchor "
    "mean, min or max, or --base_top_p"
)
_GRID_STEP = 0.01
_MANY = 4096  # micro-batches from which on every second budget will do: each is a small part of the step
_ROUNDING = 1e-9  # relative: a mean of equal times may round below each of them
_TOP_K_STEP = 1.06  # between neighbours, where that is more than one block
_TILE = 512  # documents whose times are predicted together


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed micro-batch: where it runs, its documents' lengths in tokens, and their density curves (top_p)."""

    rank: int
    slot: int
    lengths: tuple[int, ...]
    curves: tuple[DensityCurve, ...] = ()


@dataclass(frozen=True, slots=True)
class Tuning:
    """Budgets of one step, in the order of the micro-batches given.

    Attributes:
        top_p: chosen budget of each micro-batch, 1.0 means the dense kernel; empty with top_k.
        predicted_ms: predicted time at that budget.
        base_ms: predicted time at the base budget.
        anchor_ms: the time aimed at: of a micro-batch (scope microbatch), of a rank's sum (scope rank), or of the
            step as the sum over slots of each slot's anchor (scope slot). With anchor optimal, the time reached.
        num_missed: how many stayed above their anchor because the coverage bound wins: micro-batches, or ranks
            (scope rank).
        top_k: chosen anchor's k of each micro-batch; empty with top_p.
    """

    top_p: tuple[float, ...]
    predicted_ms: tuple[float, ...]
    base_ms: tuple[float, ...]
    anchor_ms: float
    num_missed: int
    top_k: tuple[int, ...] = ()


def candidate_budgets(base_top_p: float, tolerance: float, every: float = _GRID_STEP) -> tuple[float, ...]:
    """The budgets DST may choose: every .01, or as told, from the bound to 1, and exactly the bound, the base and 1.

    The bound is base_top_p - tolerance, or the smallest step above 0 where that is not positive.
    """
    lowest = base_top_p - tolerance
    if lowest <= 0.0:
        lowest = min(base_top_p, every)
    exact = {lowest, base_top_p, 1.0}
    steps = (round(i * every, 10) for i in range(1, round(1 / every)))
    return tuple(sorted(exact | {p for p in steps if p > lowest and all(abs(p - q) > 1e-6 for q in exact)}))


def candidate_top_k(base_top_k: int, least_top_k: int, longest: int, block_size: int) -> tuple[int, ...]:
    """The k DST may choose: every one, later every 6 %, from the least to what makes `longest` tokens dense.

    The base is among them, unless it is larger than that last one.
    """
    dense = max(least_top_k, 1 + (longest - 1) // block_size)
    budgets, k = {min(base_top_k, dense), dense}, least_top_k
    while k < dense:
        budgets.add(k)
        k = max(k + 1, int(k * _TOP_K_STEP))
    return tuple(sorted(budgets))


def tune_sparsity(
    micro_batches: Sequence[MicroBatch],
    predictor: LatencyPredictor,
    *,
    base_top_p: float,
    tolerance: float,
    anchor: str = "mean",
    scope: str = "rank",
    num_stages: int = 1,
    slowness: Sequence[float] = (),
) -> Tuning:
    """Choose a budget for each micro-batch of one optimizer step (all ranks, all slots).

    Args:
        micro_batches: the step's micro-batches.
        predictor: predicts the time of a micro-batch at a budget.
        base_top_p: the budget without tuning, in (0, 1].
        tolerance: largest allowed loss of coverage, in [0, 1]: no budget falls below base_top_p - tolerance.
        anchor: `min`, `mean` or `max` of the times at base, taken over all micro-batches (scope microbatch), within
            each slot (scope slot), or over the ranks' sums (scope rank); or `optimal`: least predicted step time
            with mean budget >= base_top_p over the tokens with history, and little work among equals.
        scope: where the step waits: "microbatch" (pipelines), "slot" (FSDP, ZeRO-3), "rank" (plain DDP).
        num_stages: stages of each rank's pipeline, for `optimal` with scope microbatch: the step is then the slowest
            rank's makespan under 1F1B, a third of each micro-batch's time its forward pass.
        slowness: how many times as long as predicted each rank takes; default: all as predicted.

    Returns:
        The budgets and their predicted times. With `optimal` the predicted step time is never above that of the base
        budget everywhere. Over the grid it is the exact minimum for scope microbatch; for scope slot and rank it is at
        most one move longer (a move: between neighbouring corners of the concave hull of time and budget).

    Raises:
        UserError: base_top_p, tolerance, anchor or scope out of range.
        ValueError: no micro-batches, or one without exactly one curve per document; for pipelines also ranks with
            unequally many micro-batches.

    Example: with two ranks of 2 and 4 ms at base and anchor mean, rank 0 gets a larger and rank 1 a smaller budget,
    each so that its sum comes as near as it may to 3 ms from below.
    """
    if not 0.0 < base_top_p <= 1.0:
        raise UserError(f"top_p must be in (0, 1], not {base_top_p}: .5 to .9 are usual")
    if not 0.0 <= tolerance <= 1.0:
        raise UserError(f"tolerance must be in [0, 1], not {tolerance}: .1 or .2 are usual, 0 never lowers a budget")
    if num_stages < 1:
        raise UserError(f"num_stages must be at least 1, not {num_stages}: use 1 without pipelines")
    _check_step(micro_batches, anchor, scope)
    if [len(m.lengths) for m in micro_batches] != [len(m.curves) for m in micro_batches]:
        raise ValueError("every document needs one curve")
    every = _GRID_STEP if len(micro_batches) < _MANY else 2 * _GRID_STEP
    budgets = candidate_budgets(base_top_p, tolerance, every)
    budgets_C = np.array(budgets)
    density_NC = densities(list(chain.from_iterable([m.curves for m in micro_batches])), budgets_C)
    lengths_N, first_M = _documents(micro_batches)
    times_MC = _times_ms(predictor, lengths_N, first_M, density_NC, budgets_C == 1.0)
    _slow_down(times_MC, micro_batches, slowness)
    history_N = history_tokens(lengths_N, predictor.profile.context.block_size)
    gains_MC = np.add.reduceat(history_N, first_M)[:, None] * budgets_C
    choice_M, tuning = _choose(micro_batches, times_MC, gains_MC, budgets.index(base_top_p), anchor, scope, num_stages)
    return replace(tuning, top_p=tuple(budgets_C[choice_M].tolist()))


def tune_top_k(
    micro_batches: Sequence[MicroBatch],
    predictor: LatencyPredictor,
    *,
    base_top_k: int,
    anchor: str = "mean",
    scope: str = "rank",
    least_top_k: int = 1,
    slowness: Sequence[float] = (),
) -> Tuning:
    """Choose the anchor's k for each micro-batch of one optimizer step: the paper's k_anchor (Eq. 7).

    Lengths alone give the density at each k. What a smaller k loses of coverage each layer sees in its forward pass,
    where it raises the k until the tolerance is kept. Within a rank's anchor a change therefore goes where coverage
    would cost least under a uniform gate, the prior of unseen documents.

    Args:
        micro_batches: the step's micro-batches; curves are not needed.
        predictor: predicts the time of a micro-batch at a density; its profile holds the block size.
        base_top_k: blocks per row without tuning, the own one included.
        anchor: `min`, `mean` or `max`, as in :func:`tune_sparsity`.
        scope: as in :func:`tune_sparsity`.
        least_top_k: the smallest k that makes a difference, in [1, base_top_k]; 1 + sink_blocks, say.
        slowness: as in :func:`tune_sparsity`.

    Returns:
        `top_k` and its predicted times; no k is larger than what makes its micro-batch dense.

    Raises:
        UserError: base_top_k, least_top_k, anchor or scope out of range; `optimal` needs coverage before the pass.
        ValueError: no micro-batches, or one without documents.
    """
    if not 1 <= least_top_k <= base_top_k:
        raise UserError(f"top_k must be at least {max(1, least_top_k)}, not {base_top_k}: k counts the own block")
    if anchor == "optimal":
        raise UserError(OPTIMAL_NEEDS_TOP_P)
    _check_step(micro_batches, anchor, scope)
    lengths_N, first_M = _documents(micro_batches)
    block_size = predictor.profile.context.block_size
    dense_M = np.array([1 + (max(m.lengths) - 1) // block_size for m in micro_batches])
    budgets = candidate_top_k(base_top_k, least_top_k, int(lengths_N.max()), block_size)
    budgets_C = np.array(budgets)
    density_NC = top_k_density(lengths_N[:, None], budgets_C, block_size)
    times_MC = _times_ms(predictor, lengths_N, first_M, density_NC, density_NC == 1.0)
    _slow_down(times_MC, micro_batches, slowness)
    gains_MC = np.add.reduceat(top_k_coverage(lengths_N[:, None], budgets_C, block_size), first_M, axis=0)
    base = budgets.index(min(base_top_k, budgets[-1]))
    choice_M, tuning = _choose(micro_batches, times_MC, gains_MC, base, anchor, scope)
    return replace(tuning, top_k=tuple(np.minimum(budgets_C[choice_M], dense_M).tolist()))


def _check_step(micro_batches: Sequence[MicroBatch], anchor: str, scope: str) -> None:
    if anchor not in ANCHORS:
        raise UserError(f"anchor must be one of {', '.join(ANCHORS)}, not {anchor!r}")
    if scope not in SCOPES:
        raise UserError(f"scope must be one of {', '.join(SCOPES)}, not {scope!r}")
    if not micro_batches or any(not m.lengths for m in micro_batches):
        raise ValueError("every step needs micro-batches, and each of them documents")


def _choose(
    micro_batches: Sequence[MicroBatch],
    times_MC: Floats,
    gains_MC: Floats,
    base: int,
    anchor: str,
    scope: str,
    num_stages: int = 1,
) -> tuple[Indices, Tuning]:
    """Option of each micro-batch, and the :class:`Tuning` without its budgets."""
    base_M = times_MC[:, base]
    group_M = _groups(micro_batches, scope)
    missed = 0
    if anchor == "optimal":
        if scope == "microbatch" and num_stages > 1:
            choice_M, anchor_ms = optimal_pipelined(times_MC, gains_MC, base, _grid(micro_batches), num_stages)
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
    return choice_M, Tuning(
        top_p=(),
        predicted_ms=tuple(pick(times_MC, choice_M).tolist()),
        base_ms=tuple(base_M.tolist()),
        anchor_ms=anchor_ms,
        num_missed=missed,
    )


def _documents(micro_batches: Sequence[MicroBatch]) -> tuple[Indices, Indices]:
    """Lengths of all documents, and the number of each micro-batch's first."""
    lengths_N = np.fromiter(chain.from_iterable([m.lengths for m in micro_batches]), np.intp)
    first_M: Indices = np.cumsum([0, *[len(m.lengths) for m in micro_batches[:-1]]])
    return lengths_N, first_M


def _times_ms(
    predictor: LatencyPredictor, lengths_N: Indices, first_M: Indices, density_NC: Floats, is_dense_NC: Booleans
) -> Floats:
    """[micro-batch, candidate] predicted time, from each document's density at each candidate.

    `is_dense_NC`, where the dense kernel runs, is broadcast against the densities.
    """
    attention_NC = np.empty_like(density_NC)
    # A few documents at a time: intermediate results stay in the cache.
    for start in range(0, len(lengths_N), _TILE):
        tile = slice(start, start + _TILE)
        forward_TC, backward_TC = predictor.attention_ms(lengths_N[tile, None], density_NC[tile])
        np.add(forward_TC, backward_TC, out=attention_NC[tile])
    dense_N = predictor.attention_ms(lengths_N, 1.0, dense=True).sum(axis=0)
    np.copyto(attention_NC, dense_N[:, None], where=is_dense_NC)
    # One document each needs no sums.
    single = len(lengths_N) == len(first_M)
    times_MC: Floats = attention_NC if single else np.add.reduceat(attention_NC, first_M, axis=0)
    constant_ms, tokens_M = predictor.linear(0).total_ms, np.add.reduceat(lengths_N, first_M)
    times_MC += constant_ms + (predictor.linear(1).total_ms - constant_ms) * tokens_M[:, None]
    return times_MC


def _slow_down(times_MC: Floats, micro_batches: Sequence[MicroBatch], slowness: Sequence[float]) -> None:
    """Predicted times as the ranks will take them, in place."""
    if slowness:
        times_MC *= np.array([slowness[m.rank] for m in micro_batches])[:, None]


def _anchor(anchor: str, values: Floats) -> float:
    return float({"min": values.min(), "mean": values.mean(), "max": values.max()}[anchor])


def _groups(micro_batches: Sequence[MicroBatch], scope: str) -> Indices:
    """Group number of each micro-batch: all, a slot's or a rank's share an anchor."""
    if scope == "microbatch":
        return np.zeros(len(micro_batches), dtype=np.intp)
    keys = [m.slot if scope == "slot" else m.rank for m in micro_batches]
    group_M: Indices = np.unique(keys, return_inverse=True)[1]
    return group_M


def _grid(micro_batches: Sequence[MicroBatch]) -> Indices:
    """[rank, slot] numbers of the micro-batches."""
    number_M = sorted(range(len(micro_batches)), key=lambda m: (micro_batches[m].rank, micro_batches[m].slot))
    counts = np.unique([m.rank for m in micro_batches], return_counts=True)[1]
    if counts.min() < counts.max():
        raise ValueError("pipelines need equally many micro-batches on every rank")
    return np.array(number_M, dtype=np.intp).reshape(len(counts), -1)


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
