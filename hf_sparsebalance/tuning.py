"""Dynamic sparsity tuning (DST): a coverage budget for every micro-batch of one optimizer step.

arXiv 2604.13847, Algorithm 1, with the budget `top_p` of this project: each micro-batch's predicted
time is moved toward a common anchor (Eq. 3), the bound on lost coverage is p >= p_base - tolerance (Eq. 5) and wins
over the anchor, and among the budgets that fit the largest is taken (Eq. 6-7). Anchor `optimal` is this project's own:
the least predicted step time whose token-weighted mean budget is no less than the base.

Every micro-batch may take any budget of one fixed grid. Time need not grow with p (the dense kernel at p = 1 can be
faster than the sparse one at p = .95), so all choices go over the whole grid, never over an inverse function.
Cost: O(documents * grid) for the times, and O(micro-batches * grid * log) for the choice; pure numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hf_sparsebalance.density import DensityCurve
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor

__all__ = ["ANCHORS", "SCOPES", "MicroBatch", "Tuning", "candidate_budgets", "tune_sparsity"]

ANCHORS = ("min", "mean", "max", "optimal")
SCOPES = ("microbatch", "slot", "rank")
_GRID_STEP = 0.01
_ROUNDING = 1e-9  # relative: a mean of equal times may round below each of them

Floats: TypeAlias = NDArray[np.float64]


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
    if not micro_batches or any(not m.lengths or len(m.lengths) != len(m.curves) for m in micro_batches):
        raise ValueError("every step needs micro-batches, and each of them documents with one curve each")
    budgets = candidate_budgets(base_top_p, tolerance)
    budgets_C = np.array(budgets)
    times_MC = _times_ms(micro_batches, predictor, budgets_C)
    gains_MC = np.array([float(m.num_tokens) for m in micro_batches])[:, None] * budgets_C
    base = budgets.index(base_top_p)
    base_M = times_MC[:, base]
    groups = _groups(micro_batches, scope)
    if anchor == "optimal":
        choice, anchor_ms = _optimal(times_MC, gains_MC, base, groups, scope)
        missed = 0
    else:
        if scope == "rank":
            anchor_ms = _anchor(anchor, [float(base_M[group].sum()) for group in groups])
            caps = [anchor_ms] * len(groups)
            parts = groups
        else:
            per_group = [_anchor(anchor, base_M[group].tolist()) for group in groups]
            anchor_ms = sum(per_group)
            parts = [np.array([m]) for group in groups for m in group]
            caps = [ms for ms, group in zip(per_group, groups, strict=True) for _ in group]
        choice = np.full(len(micro_batches), base)
        missed = 0
        for part, cap in zip(parts, caps, strict=True):
            choice[part] = _fill(_Ladder(times_MC[part], gains_MC[part]), cap, base)
            missed += bool(times_MC[part, choice[part]].sum() > cap * (1 + _ROUNDING))
    chosen_M = times_MC[np.arange(len(choice)), choice]
    return Tuning(
        top_p=tuple(budgets[c] for c in choice.tolist()),
        predicted_ms=tuple(chosen_M.tolist()),
        base_ms=tuple(base_M.tolist()),
        anchor_ms=anchor_ms,
        num_missed=missed,
    )


def _times_ms(micro_batches: Sequence[MicroBatch], predictor: LatencyPredictor, budgets_C: Floats) -> Floats:
    """[micro-batch, candidate] predicted time; the last candidate is p = 1, the dense kernel."""
    lengths_N = np.array([length for m in micro_batches for length in m.lengths])
    first_M = np.cumsum([0, *(len(m.lengths) for m in micro_batches[:-1])])
    densities_NC = np.array([curve.at_many(budgets_C) for m in micro_batches for curve in m.curves])
    attention_NC = predictor.attention_ms(lengths_N[:, None], densities_NC).sum(axis=0)
    attention_NC[:, -1] = predictor.attention_ms(lengths_N, 1.0, dense=True).sum(axis=0)
    linear_M = np.array([predictor.linear(m.num_tokens).total_ms for m in micro_batches])
    times_MC: Floats = np.add.reduceat(attention_NC, first_M, axis=0) + linear_M[:, None]
    return times_MC


def _anchor(anchor: str, values: list[float]) -> float:
    return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}[anchor]


def _groups(micro_batches: Sequence[MicroBatch], scope: str) -> list[NDArray[np.intp]]:
    """Micro-batches that share an anchor (all, or those of a slot), or whose sum does (those of a rank)."""
    keys = [{"microbatch": 0, "slot": m.slot, "rank": m.rank}[scope] for m in micro_batches]
    return [np.flatnonzero(np.array(keys) == key) for key in sorted(set(keys))]


def _hull(times: Floats, gains: Floats) -> list[int]:
    """Options on the upper concave hull of (time, gain), from the fastest (of these the best) to the best."""
    order = sorted(range(len(times)), key=lambda c: (times[c], -gains[c]))
    hull: list[int] = []
    for c in order:
        if hull and gains[c] <= gains[hull[-1]]:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (gains[b] - gains[a]) * (times[c] - times[a]) > (gains[c] - gains[a]) * (times[b] - times[a]):
                break
            hull.pop()
        hull.append(c)
    return hull


class _Ladder:
    """The hulls of several items as one list of upward moves, best gain per time first.

    Moves of one item stay in their order, since its slopes fall along the hull. After the first n moves the items sit
    at a solution of the relaxed problem (most gain for that total time), which is what makes bisection exact.
    """

    def __init__(self, times: Floats, gains: Floats) -> None:
        self.times, self.gains = times, gains
        moves = []
        start = []
        for item in range(len(times)):
            hull = _hull(times[item], gains[item])
            start.append(hull[0])
            for a, b in pairwise(hull):
                more_ms, more_gain = times[item, b] - times[item, a], gains[item, b] - gains[item, a]
                moves.append((-more_gain / max(more_ms, 1e-300), item, b, more_ms, more_gain))
        moves.sort(key=lambda move: move[:2])  # stable: equal slopes of one item stay in order
        self.start: NDArray[np.intp] = np.array(start, dtype=np.intp)
        rows = np.arange(len(times))
        self.item = [move[1] for move in moves]
        self.option = [move[2] for move in moves]
        self.total_ms = np.cumsum([float(times[rows, self.start].sum()), *(move[3] for move in moves)])
        self.total_gain = np.cumsum([float(gains[rows, self.start].sum()), *(move[4] for move in moves)])

    def after(self, num_moves: int) -> NDArray[np.intp]:
        """Option of each item after the first moves."""
        choice = self.start.copy()
        for move in range(num_moves):
            choice[self.item[move]] = self.option[move]
        return choice


def _fill(ladder: _Ladder, cap_ms: float, base: int | None) -> NDArray[np.intp]:
    """Most gain whose total time is within the cap; the fastest options if none is (the bound wins)."""
    times, gains = ladder.times, ladder.gains
    limit = cap_ms * (1 + _ROUNDING)
    if len(times) == 1:  # a single micro-batch: exact, no hull needed
        fits = times[0] <= limit
        return np.array([int(np.argmax(np.where(fits, gains[0], -1.0)))]) if fits.any() else ladder.start
    num_moves = int(np.searchsorted(ladder.total_ms, limit, side="right")) - 1
    if num_moves < 0:
        return ladder.start
    rows = np.arange(len(times))
    best = _top_up(times, gains, ladder.after(num_moves), limit)
    if base is not None and times[:, base].sum() <= limit:
        # The hull's corners can leave a gap; never give less than the untouched base budget would.
        plain = _top_up(times, gains, np.full(len(times), base), limit)
        if gains[rows, plain].sum() > gains[rows, best].sum():
            best = plain
    return best


def _top_up(times: Floats, gains: Floats, choice: NDArray[np.intp], limit: float) -> NDArray[np.intp]:
    """Raise single items, largest gain first, while the total still fits."""
    rows = np.arange(len(times))
    choice = choice.copy()
    while True:
        now_ms, now_gain = times[rows, choice], gains[rows, choice]
        more = np.where(times - now_ms[:, None] <= limit - now_ms.sum(), gains - now_gain[:, None], 0.0)
        item, option = divmod(int(np.argmax(more)), times.shape[1])
        if more[item, option] <= 0.0:
            return choice
        choice[item] = option


def _optimal(
    times: Floats, gains: Floats, base: int, groups: list[NDArray[np.intp]], scope: str
) -> tuple[NDArray[np.intp], float]:
    """Budgets of the least step time with enough total gain, and that time."""
    target = float(gains[:, base].sum()) * (1 - 1e-12)
    plain = np.full(len(times), base)
    if scope == "rank":
        choice, parts = _optimal_rank(times, gains, base, groups, target), groups
        caps = [max(float(times[group, choice[group]].sum()) for group in groups)] * len(groups)
    else:
        choice = _optimal_slot(times, gains, groups, target)
        parts = [np.array([m]) for group in groups for m in group]
        caps = [float(times[group, choice[group]].max()) for group in groups for _ in group]
    if _step_ms(times, choice, groups, scope) > _step_ms(times, plain, groups, scope):
        choice = plain
        per_group = [times[group, base].sum() if scope == "rank" else times[group, base].max() for group in groups]
        if scope == "rank":
            caps = [float(max(per_group))] * len(groups)
        else:
            caps = [float(ms) for ms, group in zip(per_group, groups, strict=True) for _ in group]
    choice = _least_work(times, gains, choice, parts, caps, target)
    return choice, _step_ms(times, choice, groups, scope)


def _step_ms(times: Floats, choice: NDArray[np.intp], groups: list[NDArray[np.intp]], scope: str) -> float:
    """Step time the scope stands for: the slowest rank's sum, or the sum of the slots' slowest micro-batches."""
    if scope == "rank":
        return max(float(times[group, choice[group]].sum()) for group in groups)
    return sum(float(times[group, choice[group]].max()) for group in groups)


def _optimal_slot(times: Floats, gains: Floats, groups: list[NDArray[np.intp]], target: float) -> NDArray[np.intp]:
    """Least sum of slot times: each slot is an item whose options are its possible times (one slot: exact)."""
    slot_ms: list[Floats] = []
    slot_gain: list[Floats] = []
    for group in groups:
        limits = np.unique(times[group])
        limits = limits[limits >= times[group].min(axis=1).max()]
        # Best gain of each micro-batch within each limit: running maximum over its options in order of time.
        gain_L = np.zeros(len(limits))
        for m in group:
            order = np.argsort(times[m], kind="stable")
            best = np.maximum.accumulate(gains[m, order])
            gain_L += best[np.searchsorted(times[m, order], limits, side="right") - 1]
        slot_ms.append(limits)
        slot_gain.append(gain_L)
    width = max(len(limits) for limits in slot_ms)
    padded_ms = np.array([np.pad(ms, (0, width - len(ms)), mode="edge") for ms in slot_ms])
    padded_gain = np.array([np.pad(gain, (0, width - len(gain)), mode="edge") for gain in slot_gain])
    option = _cheapest(_Ladder(padded_ms, padded_gain), target)
    choice: NDArray[np.intp] = np.zeros(len(times), dtype=np.intp)
    for slot, group in enumerate(groups):
        fits = times[group] <= padded_ms[slot, option[slot]]
        choice[group] = np.argmax(np.where(fits, gains[group], -1.0), axis=1)
    return choice


def _cheapest(ladder: _Ladder, target: float) -> NDArray[np.intp]:
    """Least total time whose gain reaches the target, up to the last move of the hull."""
    num_moves = min(int(np.searchsorted(ladder.total_gain, target)), len(ladder.item))
    choice = ladder.after(num_moves)
    # The summed prefix may differ from the target by rounding only.
    rows = np.arange(len(ladder.times))
    while num_moves < len(ladder.item) and ladder.gains[rows, choice].sum() < target:
        num_moves += 1
        choice = ladder.after(num_moves)
    return _trim(ladder.times, ladder.gains, choice, target)


def _trim(times: Floats, gains: Floats, choice: NDArray[np.intp], target: float) -> NDArray[np.intp]:
    """Lower single items, largest saving first, while the gain still reaches the target."""
    rows = np.arange(len(times))
    choice = choice.copy()
    while True:
        now_ms, now_gain = times[rows, choice], gains[rows, choice]
        spare = now_gain.sum() - target
        saved = np.where(now_gain[:, None] - gains <= spare, now_ms[:, None] - times, 0.0)
        item, option = divmod(int(np.argmax(saved)), times.shape[1])
        if saved[item, option] <= 0.0:
            return choice
        choice[item] = option


def _optimal_rank(
    times: Floats, gains: Floats, base: int, groups: list[NDArray[np.intp]], target: float
) -> NDArray[np.intp]:
    """Least T such that ranks filled up to T reach the target: bisection on the relaxed, then the real filling."""
    ladders = [_Ladder(times[group], gains[group]) for group in groups]
    low = max(float(ladder.total_ms[0]) for ladder in ladders)
    high = max(low, max(float(times[group, base].sum()) for group in groups))

    def relaxed_gain(limit: float) -> float:
        return sum(float(np.interp(limit, ladder.total_ms, ladder.total_gain)) for ladder in ladders)

    def fill(limit: float) -> NDArray[np.intp]:
        choice = np.full(len(times), base)
        for group, ladder in zip(groups, ladders, strict=True):
            choice[group] = _fill(ladder, limit, base)
        return choice

    def enough(choice: NDArray[np.intp]) -> bool:
        return float(gains[np.arange(len(times)), choice].sum()) >= target

    relaxed_low, relaxed_high = low, high
    for _ in range(50):
        middle = (relaxed_low + relaxed_high) / 2
        if relaxed_gain(middle) >= target:
            relaxed_high = middle
        else:
            relaxed_low = middle
    # Whole moves need at most one move per rank more than fractions of them.
    longest = max((float(np.diff(ladder.total_ms).max(initial=0.0)) for ladder in ladders), default=0.0)
    low, best_ms = relaxed_low, min(high, relaxed_high + longest)
    best = fill(best_ms)
    if not enough(best):
        best_ms, best = high, fill(high)
        if not enough(best):
            return np.full(len(times), base)
    for _ in range(12):
        middle = (low + best_ms) / 2
        trial = fill(middle)
        if enough(trial):
            best_ms, best = middle, trial
        else:
            low = middle
    return best


def _least_work(
    times: Floats,
    gains: Floats,
    choice: NDArray[np.intp],
    parts: list[NDArray[np.intp]],
    caps: list[float],
    target: float,
) -> NDArray[np.intp]:
    """Less total time without raising any part above its cap; the given choice where that is not found."""
    rows = np.arange(len(times))
    part_of: NDArray[np.intp] = np.zeros(len(times), dtype=np.intp)
    for index, part in enumerate(parts):
        part_of[part] = index
    caps_P = np.array(caps)
    allowed = np.where(times <= caps_P[part_of][:, None] * (1 + 1e-12), times, math.inf)
    ladder = _Ladder(np.where(np.isinf(allowed), times.max() * 2 + 1, times), np.where(np.isinf(allowed), -1.0, gains))
    cheap = ladder.start.copy()
    sums_P = np.bincount(part_of, weights=times[rows, cheap], minlength=len(parts))
    total_gain = float(gains[rows, cheap].sum())
    blocked: NDArray[np.bool_] = np.zeros(len(times), dtype=bool)
    for item, option in zip(ladder.item, ladder.option, strict=True):
        if total_gain >= target:
            break
        more_ms = times[item, option] - times[item, cheap[item]]
        if blocked[item] or sums_P[part_of[item]] + more_ms > caps_P[part_of[item]] * (1 + 1e-12):
            blocked[item] = True
            continue
        total_gain += gains[item, option] - gains[item, cheap[item]]
        sums_P[part_of[item]] += more_ms
        cheap[item] = option
    trimmed = _trim(times, gains, choice, target)
    if float(gains[rows, cheap].sum()) >= target:
        cheap = _trim(times, gains, cheap, target)
        if times[rows, cheap].sum() < times[rows, trimmed].sum():
            return cheap
    return trimmed
