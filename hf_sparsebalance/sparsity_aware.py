"""Sparsity-aware batching (SAB): steps whose ranks take the same predicted time.

arXiv 2604.13847, Algorithm 2, evens one global batch at a time. Here `window` global batches, drawn at random, are
planned together:

1. Each step gets a *level*, the time its ranks should take: the mean over the window, or more where a single sample
   needs longer. Work beside such a sample is free, as the step lasts that long anyway.
2. Samples are dealt, the costliest first, to the rank with most room below its level; all ranks get equally many.
3. Pairs of ranks, the most overfull with the emptiest, swap two samples as long as that evens them; first over the
   window, then, once ranks of like time are joined to steps, inside each step.
4. Each rank's samples are packed into its micro-batches.
5. A window that still wastes time is placed in other ways too (`placement`), and the quickest is kept: step by step
   beside outliers, and for pipelines, which wait for a step's slowest micro-batch, neighbours in time step by step.

With `least_ms` (the shortest time tuning can give a sample) the level of a step is what its longest sample can be
tuned down to. The other ranks' times at base meet that level, so it lies within every rank's reachable interval.
O(N log N) for the assignment and a bounded number of numpy passes over N * samples per rank for the swaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hf_sparsebalance.epoch import Epoch, Rank, Step, greedy_partition, small_at_both_ends
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.pipeline_schedule import makespans_1f1b
from hf_sparsebalance.placement import Window, alike, dealt, filled

__all__ = ["sparsity_aware"]

Batch: TypeAlias = tuple[list[int], list[int]]  # samples, extra samples

_MAX_ROUNDS = 64  # of swaps; heavy-tailed lengths need about ten
_EVEN = 1e-4  # relative spread of ranks below which a window or step is left alone
_WASTE = 2e-3  # relative: a window that loses no more is not placed again
_MOST_FILLED = 8192  # samples of a window; with more the deal is even enough, and filling slow
_CHUNK = 1 << 20  # differences tried at once: bounds the memory of a round


def sparsity_aware(
    epoch: Epoch,
    costs: Sequence[float],
    least: Sequence[float],
    window: int,
    num_stages: int,
    slowness: Sequence[float] = (),
) -> list[Step]:
    """Plan an epoch.

    Args:
        epoch: samples and shape.
        costs: predicted milliseconds of each sample at the base budget.
        least: predicted milliseconds of each sample at the smallest budget that tuning may choose.
        window: global batches planned together; with 1 each step keeps the samples that `random` gives it.
        num_stages: pipeline stages; above 1 a rank lasts as long as its 1F1B pipeline, and its small micro-batches
            come first and last.
        slowness: how many times as long as predicted each rank takes; where given, each step's ranks are evened by
            what they will take.

    Raises:
        UserError: a step's documents do not fit under max_tokens.
    """
    cost_N, least_N = np.asarray(costs, dtype=np.float64), np.asarray(least, dtype=np.float64)
    batches = epoch.global_batches(epoch.shuffled())
    shuffle = Random(f"{epoch.seed}-{epoch.epoch}-steps").shuffle
    whole = len(batches) // window * window
    steps: list[Step] = []
    for members, size in ((batches[:whole], window), (batches[whole:], len(batches) - whole)):
        windows = [members[first : first + size] for first in range(0, len(members), max(size, 1))]
        plans = _plan_windows(epoch, windows, cost_N, least_N, num_stages)
        if slowness:
            plans = [_suited(plan, epoch, cost_N, slowness, num_stages) for plan in plans]
        for plan in plans:
            shuffle(plan)
            steps += plan
    return steps


def _plan_windows(
    epoch: Epoch,
    windows: list[list[Batch]],
    cost_N: NDArray[np.float64],
    least_N: NDArray[np.float64],
    num_stages: int,
) -> list[list[Step]]:
    """The steps of each window; those that waste time as dealt are placed in other ways too, and the quickest kept."""
    costs, least = cost_N.tolist(), least_N.tolist()
    plans: list[list[Step] | None] = [None] * len(windows)
    times = [(math.inf, 0.0)] * len(windows)
    ways = [dealt]
    if windows and len(windows[0]) * epoch.global_batch <= _MOST_FILLED:
        ways.append(filled)
    if num_stages > 1:
        ways.append(alike)
    for place in ways:
        # A pipeline of uneven micro-batches may be quicker than an even one, so there all ways are tried.
        again = [w for w, (ms, even_ms) in enumerate(times) if num_stages > 1 or ms > even_ms * (1 + _WASTE)]
        for w, ranks in zip(again, _compose(epoch, [windows[w] for w in again], cost_N, least_N, place), strict=True):
            packed = (_pack_step(step, epoch, costs, num_stages) for step in ranks)
            plan = [step for step in packed if step is not None]
            if len(plan) == len(ranks):
                time = _time_ms(plan, costs, least, num_stages)
                if time < times[w]:
                    plans[w], times[w] = plan, time
    fitting = [plan for plan in plans if plan is not None]
    if len(fitting) < len(plans):
        raise UserError(
            f"a step's documents do not fit into {epoch.num_slots} micro-batches per rank of at most "
            f"{epoch.max_tokens} tokens: raise max_tokens or gradient_accumulation_steps, or lower "
            "per_device_train_batch_size"
        )
    return fitting


def _compose(
    epoch: Epoch,
    windows: list[list[Batch]],
    cost_N: NDArray[np.float64],
    least_N: NDArray[np.float64],
    place: Callable[[Window], tuple[list[Rank], list[float]]],
) -> list[list[list[Rank]]]:
    """[window][step][rank] samples of windows of one size, placed and evened."""
    if not windows:
        return []
    num_ranks, num_steps = epoch.num_ranks, len(windows[0])
    per_rank = epoch.num_slots * epoch.batch_size
    ids, targets, small = [], [], []
    for window in windows:
        pool = np.array([s for batch, extras in window for s in (*batch, *extras)])
        pool = pool[np.argsort(-cost_N[pool], kind="stable")]
        kept = pool[: num_steps * num_ranks * per_rank]
        bins, target_B = place(Window(cost_N[kept].tolist(), least_N[kept].tolist(), num_ranks, per_rank))
        ids.append(kept[bins])
        targets.append(target_B)
        small.append(pool[len(kept) :].tolist())  # the cheapest are the extra ones: they disturb the balance least
    ids_WBK, target_WB = np.array(ids), np.array(targets)
    if place is not alike:
        _swap(ids_WBK, cost_N, target_WB)
        # Ranks of like time form a step; one that tuning must shorten counts with the time it can be brought to.
        sum_WB = cost_N[ids_WBK].sum(axis=2)
        reach_WB = np.where(
            sum_WB > target_WB, np.clip(least_N[ids_WBK].sum(axis=2), np.minimum(target_WB, sum_WB), sum_WB), sum_WB
        )
        order_WB = np.argsort(-reach_WB, axis=1, kind="stable")
        ids_WBK = np.take_along_axis(ids_WBK, order_WB[:, :, None], axis=1)
    ids_SRK = ids_WBK.reshape(-1, num_ranks, per_rank)
    _swap(ids_SRK, cost_N, np.zeros(ids_SRK.shape[:2]))
    composed: list[list[list[Rank]]] = ids_SRK.reshape(-1, num_steps, num_ranks, per_rank).tolist()
    for steps, window, spare in zip(composed, windows, small, strict=True):
        for step, (_, extras) in zip(steps, window, strict=True):
            sums = cost_N[step].sum(axis=1)
            for _ in extras:
                lightest = int(sums.argmin())
                step[lightest].append(spare.pop(0))
                sums[lightest] += cost_N[step[lightest][-1]]
    return composed


def _suited(
    plan: list[Step], epoch: Epoch, cost_N: NDArray[np.float64], slowness: Sequence[float], num_stages: int
) -> list[Step]:
    """Steps of even ranks, made to last equally long on ranks of unlike speed: a slow one gets shorter samples."""
    suited: list[Step] = []
    costs, speed_R = cost_N.tolist(), 1.0 / np.asarray(slowness)
    for step in plan:
        ranks = [sorted((s for slot in rank for s in slot), key=lambda s: -costs[s]) for rank in step]
        ranks.sort(key=lambda samples: sum(costs[s] for s in samples))
        # The fastest rank takes the largest of those that are there; then pairs swap until each has its share.
        by_rank = [ranks[place] for place in np.argsort(np.argsort(speed_R, kind="stable"))]
        per_rank = min(map(len, by_rank))
        extra = [samples[per_rank:] for samples in by_rank]  # the cheapest of those that hold more stay
        spare_R = np.array([sum(costs[s] for s in samples) for samples in extra])
        ids_1RK = np.array([[samples[:per_rank] for samples in by_rank]])
        share_R = (cost_N[ids_1RK].sum() + spare_R.sum()) * speed_R / speed_R.sum()
        _swap(ids_1RK, cost_N, (share_R - spare_R)[None])
        moved = [[*own, *more] for own, more in zip(ids_1RK[0].tolist(), extra, strict=True)]
        packed = _pack_step(moved, epoch, costs, num_stages)
        suited.append(step if packed is None else packed)
    return suited


def _swap(ids_GBK: NDArray[np.intp], cost_N: NDArray[np.float64], target_GB: NDArray[np.float64]) -> None:
    """Even the ranks of each group about their targets, in place, by swaps of two samples; no maximum ever rises.

    In each round the upper half of a group's ranks, by time above target, is paired with the lower half, the pairing
    turned by one from round to round, and each pair makes the swap that evens it best. A group is done once even, or
    when a whole turn has found nothing.
    """
    num_ranks, per_rank = ids_GBK.shape[1:]
    half = num_ranks // 2
    live_L = np.arange(len(ids_GBK))
    idle_G = np.zeros(len(ids_GBK), dtype=np.intp)
    even_G = _EVEN * cost_N[ids_GBK].sum(axis=(1, 2)) / num_ranks
    for turn in range(_MAX_ROUNDS if half else 0):
        sum_LB = cost_N[ids_GBK[live_L]].sum(axis=2) - target_GB[live_L]
        live = (np.ptp(sum_LB, axis=1) > even_G[live_L]) & (idle_G[live_L] < half)
        live_L, sum_LB = live_L[live], sum_LB[live]
        if not len(live_L):
            return
        order_LB = np.argsort(-sum_LB, axis=1, kind="stable")
        high_LP = order_LB[:, :half]
        low_LP = np.roll(order_LB[:, ::-1][:, :half], turn % half, axis=1)
        gap_LP = np.take_along_axis(sum_LB, high_LP, axis=1) - np.take_along_axis(sum_LB, low_LP, axis=1)
        # Only ranks above the mean make a step longer, and only by what they are above it.
        above_LP = np.take_along_axis(sum_LB, high_LP, axis=1) - sum_LB.mean(axis=1, keepdims=True)
        group_C, pair_C = np.nonzero(np.minimum(gap_LP, 2 * above_LP) > even_G[live_L][:, None])
        better_L = np.zeros(len(live_L), dtype=bool)
        size = max(_CHUNK // per_rank**2, 1)
        for first in range(0, len(group_C), size):
            l_C, p_C = group_C[first : first + size], pair_C[first : first + size]
            better_C = _swap_pairs(ids_GBK, cost_N, live_L[l_C], high_LP[l_C, p_C], low_LP[l_C, p_C], gap_LP[l_C, p_C])
            better_L[l_C[better_C]] = True
        idle_G[live_L] = np.where(better_L, 0, idle_G[live_L] + 1)


def _swap_pairs(
    ids_GBK: NDArray[np.intp],
    cost_N: NDArray[np.float64],
    group_C: NDArray[np.intp],
    high_C: NDArray[np.intp],
    low_C: NDArray[np.intp],
    gap_C: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Make the best swap of each pair of ranks, whose times differ by gap_C; returns which pairs gained."""
    high_CK, low_CK = ids_GBK[group_C, high_C], ids_GBK[group_C, low_C]
    less_CKK = cost_N[high_CK][:, :, None] - cost_N[low_CK][:, None, :]
    off_CX = np.abs(less_CKK - gap_C[:, None, None] / 2).reshape(len(group_C), -1)
    best_C = off_CX.argmin(axis=1)
    # A swap that takes x off the upper rank leaves a gap of |gap - 2x|; tiny gains are rounding and would never end.
    better_C = np.take_along_axis(off_CX, best_C[:, None], axis=1)[:, 0] < gap_C * (0.5 - 1e-9)
    group_G, row_G = group_C[better_C], np.flatnonzero(better_C)
    i_G, j_G = np.divmod(best_C[better_C], high_CK.shape[1])
    ids_GBK[group_G, high_C[better_C], i_G] = low_CK[row_G, j_G]
    ids_GBK[group_G, low_C[better_C], j_G] = high_CK[row_G, i_G]
    return better_C


def _time_ms(plan: list[Step], costs: Sequence[float], least: Sequence[float], num_stages: int) -> tuple[float, float]:
    """(predicted time of some steps, the same if each were even).

    A rank takes its sum, or the makespan of its pipeline. Tuning can bring all ranks of a step down to their mean, or
    as far as `least` allows.
    """

    def ranks_ms(times: Sequence[float]) -> tuple[NDArray[np.float64], float]:
        slots_SRK = np.array([[[sum(times[s] for s in slot) for slot in rank] for rank in step] for step in plan])
        sums_SR = slots_SRK.sum(axis=2)
        even_ms = float(sums_SR.mean(axis=1).sum())
        if num_stages == 1:
            return sums_SR, even_ms
        num_slots = slots_SRK.shape[2]
        makespan_B = makespans_1f1b(slots_SRK.reshape(-1, num_slots), num_stages)
        return makespan_B.reshape(sums_SR.shape), even_ms * (1 + (num_stages - 1) / num_slots) / num_stages

    base_SR, even_ms = ranks_ms(costs)
    return float(np.maximum(base_SR.mean(axis=1), ranks_ms(least)[0].max(axis=1)).sum()), even_ms


def _pack_step(step: list[Rank], epoch: Epoch, costs: Sequence[float], num_stages: int) -> Step | None:
    """Pack each rank's samples into its slots, the costliest first so that slots of all ranks meet their like.

    Pipelines get small ones at both ends. None if a rank does not fit under max_tokens.
    """
    slots = [_pack(rank, epoch, costs) for rank in step]
    if any(rank is None for rank in slots):
        # Even cost can pile up tokens on one rank; even tokens over the same step is the best chance to fit.
        members = [s for rank in step for s in rank]
        slots = [_pack(rank, epoch, costs) for rank in greedy_partition(members, epoch.lengths, len(step))]
    filled = [rank for rank in slots if rank is not None]
    if len(filled) < len(slots):
        return None
    return [small_at_both_ends(rank) for rank in filled] if num_stages > 1 else filled


def _pack(samples: Rank, epoch: Epoch, costs: Sequence[float]) -> list[tuple[int, ...]] | None:
    """Exactly num_slots non-empty micro-batches, even by cost; None if the token budget cannot be kept."""
    if len(samples) == epoch.num_slots:  # one each; no sample alone is above max_tokens
        return [(s,) for s in sorted(samples, key=lambda s: -costs[s])]
    if epoch.max_tokens is None:
        slots = greedy_partition(samples, costs, epoch.num_slots)
    else:
        # Even cost first; then the tightest fit by tokens, which packs more.
        found = _greedy(samples, epoch, costs, epoch.max_tokens, tightest=False)
        if found is None:
            found = _greedy(samples, epoch, costs, epoch.max_tokens, tightest=True)
        if found is None:
            return None
        slots = found
    slots.sort(key=lambda slot: -sum(costs[s] for s in slot))
    return [tuple(slot) for slot in slots]


def _greedy(
    samples: Rank, epoch: Epoch, costs: Sequence[float], max_tokens: int, *, tightest: bool
) -> list[Rank] | None:
    """Largest first into the slot of least cost, or with `tightest` by tokens into the fullest that has room."""
    num_slots, lengths = epoch.num_slots, epoch.lengths
    slots: list[Rank] = [[] for _ in range(num_slots)]
    tokens, totals = [0] * num_slots, [0.0] * num_slots
    keys: Sequence[float] = lengths if tightest else costs
    ordered = sorted(samples, key=lambda s: -keys[s])
    for position, sample in enumerate(ordered):
        open_slots = [k for k in range(num_slots) if tokens[k] + lengths[sample] <= max_tokens]
        empty = [k for k in range(num_slots) if not slots[k]]
        if len(ordered) - position <= len(empty):
            open_slots = empty  # the last samples must fill what is still empty
        if not open_slots:
            return None
        chosen = min(open_slots, key=lambda k: (-tokens[k] if tightest else totals[k], k))
        slots[chosen].append(sample)
        tokens[chosen] += lengths[sample]
        totals[chosen] += costs[sample]
    return slots
