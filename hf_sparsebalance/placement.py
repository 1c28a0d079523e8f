"""Three ways to place a window's samples on the ranks of its steps, before swaps even them.

Each takes a window's samples in descending order of predicted time and names them by their position. `dealt` and
`filled` give each step a *level*, the time its ranks should take: the mean, or more where a single sample needs
longer. `dealt` deals to all ranks at once and is quick; `filled` composes one step after the other and wastes less
beside outliers; `alike` serves pipelines. Pure.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Window", "alike", "dealt", "filled"]

_PERCENT_ABOVE = (0, 1, 2, 4, 7, 10, 15, 20, 30)  # levels that `filled` tries
_WASTE = 1e-3  # of a step's time: no higher level is tried below it


@dataclass(frozen=True, slots=True)
class Window:
    """What is placed: num_steps * num_ranks * per_rank samples.

    Attributes:
        costs: predicted milliseconds in descending order.
        least: predicted milliseconds at the smallest budget that tuning may choose.
        num_ranks: data-parallel ranks.
        per_rank: samples of each rank in a step.
    """

    costs: Sequence[float]
    least: Sequence[float]
    num_ranks: int
    per_rank: int

    @property
    def num_steps(self) -> int:
        """Global batches in the window."""
        return len(self.costs) // (self.num_ranks * self.per_rank)


def dealt(window: Window) -> tuple[list[list[int]], list[float]]:
    """(positions of each rank's samples, each rank's level): the longest first, each where most room is left."""
    costs, least, num_ranks, per_rank = window.costs, window.least, window.num_ranks, window.per_rank
    done = [0.0, *accumulate(costs)]
    fill = sum(costs[len(costs) - per_rank + 1 :])  # the least that can join a sample on its rank
    rest = done[-1]
    levels: list[float] = []
    for steps_left in range(window.num_steps, 0, -1):
        first = len(levels) * num_ranks
        mean = rest / (steps_left * num_ranks)
        longest = max(least[first : first + num_ranks]) + fill
        if longest <= mean:
            levels += [mean] * steps_left
            break
        levels.append(longest)
        # Beside the longest sample the step can take no more than the next samples hold.
        rest -= min(longest * num_ranks, done[first + num_ranks * per_rank] - done[first])
    targets = [level for level in levels for _ in range(num_ranks)]
    return _deal(costs, range(len(costs)), targets, per_rank), targets


def alike(window: Window) -> tuple[list[list[int]], list[float]]:
    """The same with neighbours in time in each step: its slowest micro-batch is as short as may be."""
    size = window.num_ranks * window.per_rank
    bins: list[list[int]] = []
    for first in range(0, len(window.costs), size):
        bins += _deal(window.costs, range(first, first + size), [0.0] * window.num_ranks, window.per_rank)
    return bins, [0.0] * len(bins)


def filled(window: Window) -> tuple[list[list[int]], list[float]]:
    """The same, but each step with an outlier is filled by first fit decreasing before the next is looked at.

    As in MULTIFIT (Coffman, Garey and Johnson 1978) several levels are tried. The one is taken that wastes the least
    time: of this step's ranks, and of the next ones', which may have to wait for the longest sample left to them.
    """
    costs, least, num_ranks, per_rank = window.costs, window.least, window.num_ranks, window.per_rank
    left = list(range(len(costs)))[::-1]  # ascending by time
    rest = sum(costs)
    bins: list[list[int]] = []
    targets: list[float] = []

    def longest_ms(left: list[int]) -> float:
        return max(least[p] for p in left[-num_ranks:]) + sum(costs[p] for p in left[: per_rank - 1])

    def time_ms(ranks: list[list[int]], level: float) -> float:
        """Time of a step; tuning can bring ranks above the level down to it, as far as `least` allows."""
        return max(min(sum(costs[p] for p in rank), max(sum(least[p] for p in rank), level)) for rank in ranks)

    for steps_left in range(window.num_steps, 0, -1):
        longest, mean = longest_ms(left), rest / (steps_left * num_ranks)
        if longest <= mean and steps_left > 1:
            others = [mean] * (steps_left * num_ranks)
            return bins + _deal(costs, left[::-1], others, per_rank), targets + others
        least_waste = math.inf
        for percent in _PERCENT_ABOVE:
            ranks, after = _first_fit(window, left, max(longest, mean) * (1 + percent / 100))
            step_ms, work = time_ms(ranks, longest), sum(costs[p] for rank in ranks for p in rank)
            waste = num_ranks * step_ms - work
            if after:
                beside = sum(costs[p] for p in after[-1 - (num_ranks - 1) * per_rank : -1])
                waste += max((num_ranks - 1) * longest_ms(after) - beside, 0.0)
            if waste < least_waste:
                least_waste, found = waste, (ranks, after, step_ms, work)
            if waste <= _WASTE * num_ranks * step_ms:
                break
        ranks, left, step_ms, work = found
        rest -= work
        bins += ranks
        targets += [step_ms] * num_ranks
    return bins, targets


def _first_fit(window: Window, left: list[int], level: float) -> tuple[list[list[int]], list[int]]:
    """One step's ranks, filled in turn up to the level with the largest samples that fit; and what is left."""
    costs, least = window.costs, window.least
    left = left.copy()
    ranks = []
    for _ in range(window.num_ranks):
        smallest_ms = [0.0, *accumulate(costs[p] for p in left[: window.per_rank - 1])]
        rank: list[int] = []
        room = level
        for missing in range(window.per_rank - 1, -1, -1):
            most = room - smallest_ms[missing]
            if not rank and least[left[-1]] <= most:
                at = len(left) - 1  # tuning can bring it down to the level
            else:
                at = max(bisect_right(left, most, key=costs.__getitem__) - 1, 0)
            position = left.pop(at)
            room = max(room - costs[position], smallest_ms[missing])
            rank.append(position)
        ranks.append(rank)
    return ranks, left


def _deal(costs: Sequence[float], descending: Sequence[int], targets: list[float], per_rank: int) -> list[list[int]]:
    """Each sample in turn to the rank with most room below its target; all ranks get per_rank."""
    heap = [(-target, b) for b, target in enumerate(targets)]
    heapq.heapify(heap)
    bins: list[list[int]] = [[] for _ in targets]
    for position in descending:
        room, b = heap[0]
        bins[b].append(position)
        if len(bins[b]) == per_rank:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (room + costs[position], b))
    return bins
