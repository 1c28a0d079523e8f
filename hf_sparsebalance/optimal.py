"""Anchor `optimal` of dynamic sparsity tuning: the least step time whose total gain is no less than the base budget's.

This project's own; arXiv 2604.13847 has `min`, `mean` and `max`. Where ranks meet at every micro-batch a slot is one
item whose options are its possible times; where only the ranks' sums meet, bisection finds the least time up to which
all ranks, filled with the most gain, reach the target. Pure numpy; see `ladder` for the letters.
"""

from __future__ import annotations

import numpy as np

from hf_sparsebalance.ladder import Floats, Indices, Ladder, group_sums, last, pareto, pick, top_up, trim
from hf_sparsebalance.pipeline_schedule import makespans_1f1b

__all__ = ["optimal", "optimal_pipelined"]

_SETTLED = 1e-5  # relative width at which the search for a rank's time ends
_CAPS = 8  # most times of a micro-batch that are tried with pipelines


def optimal(times_MC: Floats, gains_MC: Floats, base: int, group_M: Indices, sums: bool) -> tuple[Indices, float]:
    """Option of each micro-batch, and the step time reached.

    Args:
        times_MC, gains_MC: milliseconds and gain of each micro-batch at each option.
        base: the option whose total gain is the target.
        group_M: the rank (`sums`) or slot of each micro-batch, 0, 1, ...
        sums: whether the step lasts as long as the largest sum of a group, or as the sum of the groups' slowest.
    """
    num_groups = int(group_M.max()) + 1
    target = float(gains_MC[:, base].sum()) * (1 - 1e-12)
    plain_M = np.full(len(times_MC), base)
    if sums:
        ladder = Ladder(times_MC, gains_MC, group_M, num_groups)
        choice_M = _least_largest_sum(ladder, times_MC, gains_MC, plain_M, group_M, num_groups, target)
    else:
        choice_M = _least_sum_of_slowest(times_MC, gains_MC, group_M, num_groups, target)
    before_ms, after_ms = (
        _group_ms(times_MC, chosen_M, group_M, num_groups, sums) for chosen_M in (plain_M, choice_M)
    )
    if _step_ms(after_ms, sums) > _step_ms(before_ms, sums):
        choice_M, after_ms = plain_M, before_ms
    if sums:
        part_M, cap_P = group_M, np.full(num_groups, after_ms.max())
    else:
        part_M, cap_P = np.arange(len(times_MC)), after_ms[group_M]
        ladder = Ladder(np.where(times_MC <= cap_P[:, None], times_MC, np.inf), gains_MC, part_M, len(cap_P))
    choice_M = _least_work(ladder, times_MC, gains_MC, choice_M, part_M, cap_P, target)
    return choice_M, _step_ms(_group_ms(times_MC, choice_M, group_M, num_groups, sums), sums)


def optimal_pipelined(
    times_MC: Floats, gains_MC: Floats, base: int, at_RS: Indices, num_stages: int
) -> tuple[Indices, float]:
    """`optimal` where each rank is a pipeline that runs 1F1B: the step lasts as long as the slowest rank's.

    A pipeline takes about its micro-batches' sum, and the slowest once more for each other stage. The least slowest
    micro-batch and the least sum exclude each other; a few times between them are tried, and the quickest is taken
    by the event recursion.

    Args:
        times_MC, gains_MC, base: as in :func:`optimal`.
        at_RS: the micro-batch of each rank and slot.
        num_stages: stages of each pipeline.
    """
    num_ranks = len(at_RS)
    rank_M = np.empty(len(times_MC), dtype=np.intp)
    rank_M[at_RS] = np.arange(num_ranks)[:, None]
    target = float(gains_MC[:, base].sum()) * (1 - 1e-12)
    plain_M, together_M = np.full(len(times_MC), base), np.zeros(len(times_MC), dtype=np.intp)

    def step_ms(choice_M: Indices) -> float:
        return float(makespans_1f1b(pick(times_MC, choice_M)[at_RS], num_stages).max())

    even_M = _least_sum_of_slowest(times_MC, gains_MC, together_M, 1, target)
    ladder = Ladder(times_MC, gains_MC, rank_M, num_ranks)
    light_M = _least_largest_sum(ladder, times_MC, gains_MC, plain_M, rank_M, num_ranks, target)
    trials = [plain_M, even_M, light_M]
    for cap_ms in np.linspace(pick(times_MC, even_M).max(), pick(times_MC, light_M).max(), _CAPS)[:-1]:
        capped_MC = np.where(times_MC <= cap_ms * (1 + 1e-12), times_MC, np.inf)
        ladder = Ladder(capped_MC, gains_MC, rank_M, num_ranks)
        trials.append(_least_largest_sum(ladder, capped_MC, gains_MC, even_M, rank_M, num_ranks, target))
    choice_M = min(trials, key=step_ms)
    reached_ms = step_ms(choice_M)
    capped_MC = np.where(times_MC <= pick(times_MC, choice_M).max(), times_MC, np.inf)
    cap_P = np.full(num_ranks, group_sums(pick(times_MC, choice_M), rank_M, num_ranks).max())
    ladder = Ladder(capped_MC, gains_MC, rank_M, num_ranks)
    less_M = _least_work(ladder, capped_MC, gains_MC, choice_M, rank_M, cap_P, target)
    less_ms = step_ms(less_M)
    return (less_M, less_ms) if less_ms <= reached_ms * (1 + 1e-12) else (choice_M, reached_ms)


def _group_ms(times_MC: Floats, choice_M: Indices, group_M: Indices, num_groups: int, sums: bool) -> Floats:
    if sums:
        return group_sums(pick(times_MC, choice_M), group_M, num_groups)
    slowest_G = np.zeros(num_groups)
    np.maximum.at(slowest_G, group_M, pick(times_MC, choice_M))
    return slowest_G


def _step_ms(group_ms: Floats, sums: bool) -> float:
    return float(group_ms.max() if sums else group_ms.sum())


def _least_sum_of_slowest(
    times_MC: Floats, gains_MC: Floats, group_M: Indices, num_groups: int, target: float
) -> Indices:
    """Least sum of slot times: each slot is an item whose options are its possible times (one slot: exact)."""
    # No slot is faster than its slowest micro-batch at its fastest.  Most others are within that at any budget.
    floor_G = np.zeros(num_groups)
    np.maximum.at(floor_G, group_M, times_MC.min(axis=1))
    gain_M = pick(gains_MC, last(times_MC <= floor_G[group_M][:, None]))
    slow = np.flatnonzero(times_MC.max(axis=1) > floor_G[group_M])
    item_H, option_H = pareto(times_MC[slow], gains_MC[slow])
    time_H, gain_H = times_MC[slow[item_H], option_H], gains_MC[slow[item_H], option_H]
    group_H, more_H = group_M[slow[item_H]], np.diff(gain_H, prepend=0.0)
    beyond = time_H > floor_G[group_H]  # never an item's first option, so that `more` is against its own
    slots = []
    for group in range(num_groups):
        members = np.flatnonzero(beyond & (group_H == group))
        members = members[np.argsort(time_H[members], kind="stable")]
        limits = np.append(floor_G[group], time_H[members])
        gain_L = gain_M[group_M == group].sum() + np.append(0.0, np.cumsum(more_H[members]))
        final = np.append(np.diff(limits) > 0.0, True)  # of equal times all count
        slots.append((limits[final], gain_L[final]))
    width = max(len(limits) for limits, _ in slots)
    limits_GL = np.array([np.pad(limits, (0, width - len(limits)), mode="edge") for limits, _ in slots])
    gains_GL = np.array([np.pad(gains, (0, width - len(gains)), mode="edge") for _, gains in slots])
    ladder = Ladder(limits_GL, gains_GL, np.zeros(num_groups, dtype=np.intp), 1)
    moves = min(int(np.searchsorted(ladder.total_gain_V, target)), ladder.num_moves)
    limit_G = ladder.after(np.array([moves]))
    while moves < ladder.num_moves and pick(gains_GL, limit_G).sum() < target:
        moves += 1  # a running total may differ from the sum by rounding
        limit_G = ladder.after(np.array([moves]))
    limit_G = trim(limits_GL, gains_GL, limit_G, target)
    return last(times_MC <= pick(limits_GL, limit_G)[group_M][:, None])


def _least_largest_sum(
    ladder: Ladder,
    times_MC: Floats,
    gains_MC: Floats,
    plain_M: Indices,
    group_M: Indices,
    num_groups: int,
    target: float,
) -> Indices:
    """Least T such that ranks filled up to T reach the target: by fractions of moves, whole ones, topped up.

    `plain_M`, which reaches the target, is the answer where nothing better is found.
    """
    least = float(ladder.start_ms_G.max())
    high = max(least, float(group_sums(pick(times_MC, plain_M), group_M, num_groups).max()))

    def topped_up(limit: float) -> Indices:
        limit_G = np.full(num_groups, limit)
        return top_up(times_MC, gains_MC, ladder.after(ladder.moves_within(limit_G)), group_M, limit_G)

    def bisect(low: float, high: float, relaxed: bool) -> tuple[float, float]:
        while high - low > 0.1 * _SETTLED * high:
            middle = (low + high) / 2
            if ladder.gain_within(np.full(num_groups, middle), relaxed=relaxed) >= target:
                high = middle
            else:
                low = middle
        return low, high

    low, enough = bisect(least, high, True)
    # Whole moves need at most one move per rank more than fractions of them.
    _, enough = bisect(low, min(high, enough + ladder.longest_ms), False)
    best_M = topped_up(enough)
    if pick(gains_MC, best_M).sum() < target:
        enough, best_M = high, topped_up(high)
        if pick(gains_MC, best_M).sum() < target:
            return plain_M
    while enough - low > _SETTLED * enough:
        middle = (low + enough) / 2
        trial_M = topped_up(middle)
        if pick(gains_MC, trial_M).sum() >= target:
            enough, best_M = middle, trial_M
        else:
            low = middle
    return best_M


def _least_work(
    ladder: Ladder,
    times_MC: Floats,
    gains_MC: Floats,
    choice_M: Indices,
    part_M: Indices,
    cap_P: Floats,
    target: float,
) -> Indices:
    """Less total time without raising any part above its cap; the given choice, trimmed, where that is not found."""
    cap_P = cap_P * (1 + 1e-12)
    # Of all moves that fit their part, the best gain per time first, until the target is reached.
    cheap_M = ladder.best_moves(ladder.moves_within(cap_P), target)
    if pick(gains_MC, cheap_M).sum() < target:
        cheap_M = top_up(times_MC, gains_MC, cheap_M, part_M, cap_P)
    if pick(gains_MC, cheap_M).sum() >= target and pick(times_MC, cheap_M).sum() < pick(times_MC, choice_M).sum():
        choice_M = cheap_M
    return trim(times_MC, gains_MC, choice_M, target)
