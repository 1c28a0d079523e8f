"""What every batching strategy starts from: one epoch's shuffled samples, cut into global batches.

Beside it the two partitions that the strategies share: greedy (largest first) and Karmarkar-Karp with equal sizes.
Pure; all ranks that pass the same arguments get the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

__all__ = ["Epoch", "Rank", "Step", "add_extras", "differencing_partition", "greedy_partition", "small_at_both_ends"]

Rank: TypeAlias = list[int]  # sample indices
Step: TypeAlias = list[list[tuple[int, ...]]]  # [rank][slot] -> sample indices of a micro-batch


@dataclass(frozen=True, slots=True)
class Epoch:
    """The samples of one epoch and the shape of a step.

    Attributes:
        lengths: tokens of each sample.
        num_ranks, num_slots: data-parallel ranks, and micro-batches of each in a step.
        batch_size: samples of a micro-batch.
        seed, epoch: what the shuffles depend on.
        max_tokens: most tokens of a micro-batch, or None.
    """

    lengths: Sequence[int]
    num_ranks: int
    num_slots: int
    batch_size: int
    seed: int
    epoch: int
    max_tokens: int | None

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, all ranks together."""
        return self.num_ranks * self.num_slots

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.num_micro_batches * self.batch_size

    def shuffled(self) -> list[int]:
        """The order that `random` deals."""
        order = list(range(len(self.lengths)))
        Random(f"{self.seed}-{self.epoch}").shuffle(order)
        return order

    def global_batches(self, order: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """(samples, extra samples) of each step; the extras are the end of the order, spread evenly."""
        size = self.global_batch
        num_steps = len(order) // size
        extras: list[list[int]] = [[] for _ in range(num_steps)]
        tail = order[num_steps * size :]
        for i, sample in enumerate(tail):
            extras[i * num_steps // len(tail)].append(sample)
        return [(list(order[s * size : (s + 1) * size]), extras[s]) for s in range(num_steps)]


def greedy_partition(samples: Sequence[int], weights: Sequence[float], num_bins: int) -> list[Rank]:
    """Largest first onto the lightest bin that has room; counts differ by one at most. Ties: lower bin, order."""
    bins: list[Rank] = [[] for _ in range(num_bins)]
    heap = [(0.0, b) for b in range(num_bins)]
    small, num_larger = divmod(len(samples), num_bins)
    for sample in sorted(samples, key=lambda s: -weights[s]):
        total, b = heapq.heappop(heap)
        while len(bins[b]) > small or (len(bins[b]) == small and num_larger == 0):
            total, b = heapq.heappop(heap)
        num_larger -= len(bins[b]) == small
        bins[b].append(sample)
        heapq.heappush(heap, (total + weights[sample], b))
    return bins


def differencing_partition(samples: Sequence[int], weights: Sequence[float], num_bins: int) -> list[Rank]:
    """Karmarkar and Karp's largest differencing method for bins of equal size (num_bins divides the samples).

    Consecutive samples by weight form partial partitions of one sample a bin. The two whose bins differ most are
    joined, the heaviest bin of one with the lightest of the other, until one is left. O(n log n * log num_bins).
    """
    ordered = sorted(samples, key=lambda s: -weights[s])
    heap: list[tuple[float, int, list[tuple[float, Rank]]]] = []
    for first in range(0, len(ordered), num_bins):
        bins = [(float(weights[s]), [s]) for s in ordered[first : first + num_bins]]
        heap.append((bins[-1][0] - bins[0][0], first, bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [(a + b, [*mine, *theirs]) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], first, joined))
    return [members for _, members in heap[0][2]]


def add_extras(step: Step, extras: Sequence[int], lengths: Sequence[int]) -> None:
    """Put each extra sample into the micro-batch that holds the fewest tokens."""
    for sample in extras:
        tokens = {(sum(lengths[i] for i in slot), r, s) for r, rank in enumerate(step) for s, slot in enumerate(rank)}
        _, r, s = min(tokens)
        step[r][s] = (*step[r][s], sample)


def small_at_both_ends(descending: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Reorder micro-batches of falling cost so that the cheapest come first and last, the costliest in the middle.

    A pipeline fills and drains with its first and last micro-batches while other stages idle, so these should be
    short. Example: costs 5 4 3 2 1 become 1 3 5 4 2.
    """
    ascending = descending[::-1]
    return ascending[::2] + ascending[1::2][::-1]
