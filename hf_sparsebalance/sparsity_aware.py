"""Sparsity-aware batching (SAB): steps whose ranks take the same predicted time.

arXiv 2604.13847, Algorithm 2, evens one global batch at a time. Here `window` global batches, drawn at random, are
planned together:

1. Each step gets a *level*, the time its ranks should take: the mean over the window, or more where a single sample
   needs longer. Work beside such a sample is free, as the step lasts that long anyway.
2. Samples go, the costliest first, to the rank with most room below its level; all ranks get equally many.
3. Pairs of ranks, the most overfull with the emptiest, swap two samples as long as that evens them; first over the
   window, then, once ranks of like time are joined to steps, inside each step.
4. Each rank's samples are packed into its micro-batches.

With `least_ms` (the shortest time tuning can give a sample) the level of a step is what its longest sample can be
tuned down to. The other ranks' times at base meet that level, so it lies within every rank's reachable interval.
O(N log N) for the assignment and a bounded number of numpy passes over N * samples per rank for the swaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from hf_sparsebalance.epoch import Epoch, Rank, Step, greedy_partition, small_at_both_ends
from hf_sparsebalance.errors import UserError

__all__ = ["sparsity_aware"]

_MAX_ROUNDS = 64  # of swaps; heavy-tailed lengths need about ten
_EVEN = 1e-4  # relative spread of ranks below which a window or step is left alone
_CHUNK = 1 << 20  # differences tried at once: bounds the memory of a round


def sparsity_aware(
    epoch: Epoch, costs: Sequence[float], least: Sequence[float], window: int, num_stages: int
) -> list[Step]:
    """Plan an epoch.

    Args:
        epoch: samples and shape.
        costs: predicted milliseconds of each sample at the base budget.
        least: predicted milliseconds of each sample at the smallest budget that tuning may choose.
        window: global batches planned together; with 1 each step keeps the samples that `random` gives it.
        num_stages: pipeline stages; above 1 each rank's small micro-batches come first and last.

    Raises:
        UserError: a step's documents do not fit under max_tokens.
    """
    cost_N, least_N = np.asarray(costs, dtype=np.float64), np.asarray(least, dtype=np.float64)
    batches = epoch.global_batches(epoch.shuffled())
    ranks: list[list[Rank]] = []
    whole = len(batches) // window * window
    for members in (batches[:whole], batches[whole:]):
        if members:
            ranks += _compose(epoch, members, cost_N, least_N, min(window, len(members)))
    shuffle = Random(f"{epoch.seed}-{epoch.epoch}-steps").shuffle
    steps: list[Step] = []
    for first in range(0, len(ranks), window):
        packed = [_pack_step(step, epoch, costs, num_stages) for step in ranks[first : first + window]]
        shuffle(packed)
        steps += packed
    return steps


def _compose(
    epoch: Epoch,
    batches: list[tuple[list[int], list[int]]],
    cost_N: NDArray[np.float64],
    least_N: NDArray[np.float64],
    window: int,
) -> list[list[Rank]]:
    """[step][rank] samples of windows of one size, evened."""
    num_ranks = epoch.num_ranks
    per_rank = epoch.num_slots * epoch.batch_size
    ids, targets, small = [], [], []
    for first in range(0, len(batches), window):
        pool = np.array([s for batch, extras in batches[first : first + window] for s in (*batch, *extras)])
        pool = pool[np.argsort(-cost_N[pool], kind="stable")]
        size = window * num_ranks * per_rank
        level_S = _levels(cost_N[pool[:size]], least_N[pool[:size]], window, num_ranks, per_rank)
        target_B = np.repeat(level_S, num_ranks)
        ids.append(pool[:size][_assign(cost_N[pool[:size]].tolist(), target_B.tolist(), per_rank)])
        targets.append(target_B)
        small += pool[size:].tolist()  # the cheapest samples are the extra ones: they disturb the balance least
    ids_WBK, target_WB = np.array(ids), np.array(targets)
    _swap(ids_WBK, cost_N, target_WB)
    # Ranks of like time form a step; one that tuning must shorten counts with the time it can be brought to.
    sum_WB = cost_N[ids_WBK].sum(axis=2)
    reach_WB = np.where(
        sum_WB > target_WB, np.clip(least_N[ids_WBK].sum(axis=2), np.minimum(target_WB, sum_WB), sum_WB), sum_WB
    )
    order_WB = np.argsort(-reach_WB, axis=1, kind="stable")
    ids_SRK = np.take_along_axis(ids_WBK, order_WB[:, :, None], axis=1).reshape(len(batches), num_ranks, per_rank)
    _swap(ids_SRK, cost_N, np.zeros(ids_SRK.shape[:2]))
    ranks: list[list[Rank]] = ids_SRK.tolist()
    for step, sum_R, (_, extras) in zip(ranks, cost_N[ids_SRK].sum(axis=2), batches, strict=True):
        for sample in small[: len(extras)]:
            lightest = int(sum_R.argmin())
            step[lightest].append(sample)
            sum_R[lightest] += cost_N[sample]
        small = small[len(extras) :]
    return ranks


def _levels(
    cost_P: NDArray[np.float64], least_P: NDArray[np.float64], num_steps: int, num_ranks: int, per_rank: int
) -> NDArray[np.float64]:
    """Time each step's ranks should take, longest first, from the costs of a window in descending order."""
    done_P = np.concatenate(([0.0], np.cumsum(cost_P)))
    fill = float(cost_P[len(cost_P) - per_rank + 1 :].sum())  # the least that can join a sample on its rank
    rest = float(done_P[-1])
    level_S = np.empty(num_steps)
    for step in range(num_steps):
        first = step * num_ranks
        mean = rest / ((num_steps - step) * num_ranks)
        longest = float(least_P[first : first + num_ranks].max()) + fill
        if longest <= mean:
            level_S[step:] = mean
            break
        level_S[step] = longest
        # Beside the longest sample the step can take no more than the next samples hold.
        rest -= min(longest * num_ranks, float(done_P[first + num_ranks * per_rank] - done_P[first]))
    return level_S


def _assign(costs: list[float], targets: list[float], per_rank: int) -> NDArray[np.intp]:
    """[rank, k] positions of costs (descending): each to the rank with most room below its target."""
    heap = [(-target, b) for b, target in enumerate(targets)]
    heapq.heapify(heap)
    bins: list[list[int]] = [[] for _ in targets]
    for position, cost in enumerate(costs):
        room, b = heap[0]
        bins[b].append(position)
        if len(bins[b]) == per_rank:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (room + cost, b))
    return np.array(bins, dtype=np.intp)


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


def _pack_step(step: list[Rank], epoch: Epoch, costs: Sequence[float], num_stages: int) -> Step:
    """Pack each rank's samples into its slots, the costliest first so that slots of all ranks meet their like."""
    slots = [_pack(rank, epoch, costs) for rank in step]
    if any(rank is None for rank in slots):
        # Even cost can pile up tokens on one rank; even tokens over the same step is the best chance to fit.
        members = [s for rank in step for s in rank]
        slots = [_pack(rank, epoch, costs) for rank in greedy_partition(members, epoch.lengths, len(step))]
    filled = [rank for rank in slots if rank is not None]
    if len(filled) < len(slots):
        raise UserError(
            f"a step's documents do not fit into {epoch.num_slots} micro-batches per rank of at most "
            f"{epoch.max_tokens} tokens: raise max_tokens or gradient_accumulation_steps, or lower "
            "per_device_train_batch_size"
        )
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
