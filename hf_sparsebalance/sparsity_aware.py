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
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import numpy as np
from numpy.typing import NDArray

from hf_sparsebalance.epoch import Epoch, Rank, Step, greedy_partition, small_at_both_ends
from hf_sparsebalance.errors import UserError

__all__ = ["sparsity_aware"]

_MAX_ROUNDS = 64  # of swaps; heavy-tailed lengths need about ten
_EVEN = 1e-4  # relative spread of ranks below which a window or step is left alone
_LEVELS = (0, 1, 2, 4, 7, 10, 15, 20, 30)  # percent above the least level that are tried
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
    shuffle = Random(f"{epoch.seed}-{epoch.epoch}-steps").shuffle
    whole = len(batches) // window * window
    steps: list[Step] = []
    for members in (batches[:whole], batches[whole:]):
        size = min(window, len(members))
        # A pipeline gains where samples of like cost meet in a step, unless an even mix is quicker: both are tried.
        ways = [
            [_pack_step(ranks, epoch, costs) for ranks in _compose(epoch, members, cost_N, least_N, size, alike)]
            for alike in ((False, True) if num_stages > 1 and size > 1 else (False,))
        ]
        for first in range(0, len(members), max(size, 1)):
            fitting = [
                [step for step in way[first : first + size] if step is not None]
                for way in ways
                if None not in way[first : first + size]
            ]
            if not fitting:
                raise UserError(
                    f"a step's documents do not fit into {epoch.num_slots} micro-batches per rank of at most "
                    f"{epoch.max_tokens} tokens: raise max_tokens or gradient_accumulation_steps, or lower "
                    "per_device_train_batch_size"
                )
            planned = min(fitting, key=lambda way: sum(_step_ms(step, costs, num_stages) for step in way))
            shuffle(planned)
            steps += planned
    if num_stages > 1:
        steps = [[small_at_both_ends(rank) for rank in step] for step in steps]
    return steps


def _compose(
    epoch: Epoch,
    batches: list[tuple[list[int], list[int]]],
    cost_N: NDArray[np.float64],
    least_N: NDArray[np.float64],
    window: int,
    alike: bool,
) -> list[list[Rank]]:
    """[step][rank] samples of windows of one size, evened; with `alike` each step of neighbours in cost."""
    if not batches:
        return []
    num_ranks = epoch.num_ranks
    per_rank = epoch.num_slots * epoch.batch_size
    ids, targets, small = [], [], []
    for first in range(0, len(batches), window):
        pool = np.array([s for batch, extras in batches[first : first + window] for s in (*batch, *extras)])
        pool = pool[np.argsort(-cost_N[pool], kind="stable")]
        kept = pool[: window * num_ranks * per_rank]
        samples = _Window(cost_N[kept].tolist(), least_N[kept].tolist(), num_ranks, per_rank)
        bins, target_B = samples.place_alike() if alike else samples.place()
        ids.append(kept[bins])
        targets.append(target_B)
        small += pool[len(kept) :].tolist()  # the cheapest samples are the extra ones: they disturb the balance least
    ids_WBK, target_WB = np.array(ids), np.array(targets)
    if not alike:
        _swap(ids_WBK, cost_N, target_WB)
        # Ranks of like time form a step; one that tuning must shorten counts with the time it can be brought to.
        sum_WB = cost_N[ids_WBK].sum(axis=2)
        reach_WB = np.where(
            sum_WB > target_WB, np.clip(least_N[ids_WBK].sum(axis=2), np.minimum(target_WB, sum_WB), sum_WB), sum_WB
        )
        order_WB = np.argsort(-reach_WB, axis=1, kind="stable")
        ids_WBK = np.take_along_axis(ids_WBK, order_WB[:, :, None], axis=1)
    ids_SRK = ids_WBK.reshape(len(batches), num_ranks, per_rank)
    _swap(ids_SRK, cost_N, np.zeros(ids_SRK.shape[:2]))
    ranks: list[list[Rank]] = ids_SRK.tolist()
    for step, sum_R, (_, extras) in zip(ranks, cost_N[ids_SRK].sum(axis=2), batches, strict=True):
        for sample in small[: len(extras)]:
            lightest = int(sum_R.argmin())
            step[lightest].append(sample)
            sum_R[lightest] += cost_N[sample]
        small = small[len(extras) :]
    return ranks


@dataclass(frozen=True, slots=True)
class _Window:
    """A window's samples in descending order of cost, named by their position; `least` as in `sparsity_aware`."""

    costs: list[float]
    least: list[float]
    num_ranks: int
    per_rank: int

    def place(self) -> tuple[list[Rank], list[float]]:
        """Positions of each rank's samples, step by step, and the time each rank should take.

        Steps that their longest sample makes longer than the mean come first, each filled up to its level. The ranks
        of all others are dealt together.
        """
        left = list(range(len(self.costs)))
        bins: list[Rank] = []
        targets: list[float] = []
        for num_steps in range(len(left) // (self.num_ranks * self.per_rank), 0, -1):
            level, mean_ms = self._level(left), self._mean_ms(left)
            if level <= mean_ms and num_steps > 1:
                break
            trials = [self._fill(left, max(level, mean_ms) * (1 + percent / 100)) for percent in _LEVELS]
            if num_steps == 1:
                trials.append((self._deal(left, mean_ms), []))
            step_ms, filled, left = self._best(trials, level)
            bins += filled
            targets += [step_ms] * self.num_ranks
        if left:
            mean_ms = self._mean_ms(left)
            dealt = self._deal(left, mean_ms)
            bins += dealt
            targets += [mean_ms] * len(dealt)
        return bins, targets

    def place_alike(self) -> tuple[list[Rank], list[float]]:
        """The same with neighbours in cost in each step: its slowest micro-batch is as short as it can be."""
        size = self.num_ranks * self.per_rank
        groups = [list(range(first, first + size)) for first in range(0, len(self.costs), size)]
        bins = [rank for group in groups for rank in self._deal(group, self._mean_ms(group))]
        return bins, [0.0] * len(bins)

    def _best(self, trials: list[tuple[list[Rank], list[int]]], level: float) -> tuple[float, list[Rank], list[int]]:
        """(time, ranks, samples left) of the step that leaves the least time in all, as far as can be told."""

        def step_ms(ranks: list[Rank]) -> float:
            return max(
                min(sum(self.costs[p] for p in rank), max(sum(self.least[p] for p in rank), level)) for rank in ranks
            )

        def excess_ms(trial: tuple[list[Rank], list[int]]) -> float:
            """This step's time, less the work it takes off the others, plus what they must wait for their longest."""
            ranks, left = trial
            idle = -sum(self.costs[p] for rank in ranks for p in rank)
            if left:
                beside = sum(self.costs[p] for p in left[1 : 1 + (self.num_ranks - 1) * self.per_rank])
                idle += max((self.num_ranks - 1) * self._level(left) - beside, 0.0)
            return step_ms(ranks) + idle / self.num_ranks

        filled, left = min(trials, key=excess_ms)
        return step_ms(filled), filled, left

    def _level(self, left: list[int]) -> float:
        """The least time of the step that gets the longest sample left: beside it the smallest ones on its rank."""
        fill = sum(self.costs[p] for p in left[len(left) - self.per_rank + 1 :])
        return max(self.least[p] for p in left[: self.num_ranks]) + fill

    def _mean_ms(self, left: list[int]) -> float:
        return sum(self.costs[p] for p in left) * self.per_rank / len(left)

    def _fill(self, left: list[int], level: float) -> tuple[list[Rank], list[int]]:
        """One step's ranks, filled in turn up to the level with the largest samples that fit; and what is left.

        First fit decreasing, as in MULTIFIT (Coffman, Garey and Johnson 1978), with equally many samples on each rank.
        """
        left = left.copy()
        ranks = []
        for _ in range(self.num_ranks):
            tail_ms = [0.0, *accumulate(self.costs[p] for p in left[: -self.per_rank : -1])]
            rank: list[int] = []
            room = level
            for missing in range(self.per_rank - 1, -1, -1):
                most = room - tail_ms[missing]  # the smallest samples must fit beside it
                if not rank and self.least[left[0]] <= most:
                    at = 0  # what tuning can shorten to the level fits
                else:
                    at = bisect_left(left, -most, key=lambda p: -self.costs[p])
                position = left.pop(min(at, len(left) - 1))
                room = max(room - self.costs[position], tail_ms[missing])
                rank.append(position)
            ranks.append(rank)
        return ranks, left

    def _deal(self, left: list[int], target: float) -> list[Rank]:
        """The largest first, each to the rank with most room below the target; all ranks get equally many."""
        heap = [(-target, b) for b in range(len(left) // self.per_rank)]
        bins: list[Rank] = [[] for _ in heap]
        for position in left:
            room, b = heap[0]
            bins[b].append(position)
            if len(bins[b]) == self.per_rank:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (room + self.costs[position], b))
        return bins


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


def _step_ms(step: Step, costs: Sequence[float], num_stages: int) -> float:
    """Time of the slowest rank: its sum, and its slowest micro-batch once more for each other pipeline stage."""
    times = [[sum(costs[s] for s in slot) for slot in rank] for rank in step]
    return max(sum(rank) + (num_stages - 1) * max(rank) for rank in times)


def _pack_step(step: list[Rank], epoch: Epoch, costs: Sequence[float]) -> Step | None:
    """Pack each rank's samples into its slots, the costliest first so that slots of all ranks meet their like."""
    slots = [_pack(rank, epoch, costs) for rank in step]
    if any(rank is None for rank in slots):
        # Even cost can pile up tokens on one rank; even tokens over the same step is the best chance to fit.
        members = [s for rank in step for s in rank]
        slots = [_pack(rank, epoch, costs) for rank in greedy_partition(members, epoch.lengths, len(step))]
    filled = [rank for rank in slots if rank is not None]
    return filled if len(filled) == len(slots) else None


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
