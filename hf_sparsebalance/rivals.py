"""The batching strategies that sparsity-aware batching is measured against.

Each takes an epoch and returns its steps. `random` and `length_partition` (the length-based batching of
arXiv 2604.13847), `length_group` and `batch_rebalance` (transformers' two samplers), `karmarkar_karp` (verl's
seqlen_balancing) and `wlb` (WLB-LLM, arXiv 2503.17924, Algorithm 1). Where the original drops samples or leaves
micro-batches empty, the rule is bent as each docstring says: here every sample runs once an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hf_sparsebalance.epoch import Epoch, Step, add_extras, differencing_partition, greedy_partition
from hf_sparsebalance.errors import UserError

__all__ = ["batch_rebalance", "karmarkar_karp", "length_group", "length_partition", "random_order", "wlb"]

_VERL_LINEAR = 24_576  # 6 x hidden size 4096: verl weighs s tokens as 24576 s + s^2
_REBALANCE_QUADRATIC = 0.001  # transformers weighs n padded samples of L tokens as n L + .001 n L^2
_OUTLIER_SHARES = (0.9, 0.97)  # length quantiles where an outlier queue begins; the paper tunes two or three


def random_order(epoch: Epoch) -> list[Step]:
    """A seeded shuffle, dealt slot by slot and rank by rank."""
    return _dealt(epoch, epoch.shuffled())


def length_group(epoch: Epoch) -> list[Step]:
    """Shuffled mega-batches, each sorted by length, dealt like `random` (transformers' group_by_length)."""
    batch_size, lengths, order = epoch.batch_size * epoch.num_slots, epoch.lengths, epoch.shuffled()
    size = max(min(len(order) // (batch_size * 4), 50), 1) * batch_size
    megas = [sorted(order[i : i + size], key=lambda s: -lengths[s]) for i in range(0, len(order), size)]
    longest = max(range(len(megas)), key=lambda m: lengths[megas[m][0]])
    megas[0][0], megas[longest][0] = megas[longest][0], megas[0][0]
    return _dealt(epoch, [sample for mega in megas for sample in mega])


def length_partition(epoch: Epoch) -> list[Step]:
    """The global batches of `random`, each partitioned evenly by length over ranks, then over slots."""
    steps = []
    for batch, extras in epoch.global_batches(epoch.shuffled()):
        ranks = greedy_partition(batch, epoch.lengths, epoch.num_ranks)
        step: Step = [
            [tuple(slot) for slot in greedy_partition(rank, epoch.lengths, epoch.num_slots)] for rank in ranks
        ]
        add_extras(step, extras, epoch.lengths)
        steps.append(step)
    return steps


def karmarkar_karp(epoch: Epoch) -> list[Step]:
    """The global batches of `random`, each differenced into equally large ranks, then slots, by 24576 s + s^2."""
    weights = [float(_VERL_LINEAR * n + n * n) for n in epoch.lengths]
    steps = []
    for batch, extras in epoch.global_batches(epoch.shuffled()):
        ranks = differencing_partition(batch, weights, epoch.num_ranks)
        step: Step = [
            [tuple(slot) for slot in differencing_partition(rank, weights, epoch.num_slots)] for rank in ranks
        ]
        add_extras(step, extras, epoch.lengths)
        steps.append(step)
    return steps


def batch_rebalance(epoch: Epoch) -> list[Step]:
    """transformers' `batch_rebalance`: runs of the length-sorted global batch as micro-batches of like padded cost.

    The extra samples join their step's batch before it is cut, where transformers makes a smaller last batch of them.
    """
    steps = []
    for batch, extras in epoch.global_batches(epoch.shuffled()):
        ordered = sorted((*batch, *extras), key=lambda s: -epoch.lengths[s])
        sorted_lengths = [epoch.lengths[s] for s in ordered]
        counts = _rebalanced_counts(sorted_lengths, epoch.num_ranks, epoch.num_micro_batches)
        ends = np.cumsum(counts).tolist()
        costs = _padded_costs(sorted_lengths, counts)
        groups = [
            tuple(ordered[ends[g] - counts[g] : ends[g]]) for g in sorted(range(len(counts)), key=lambda g: -costs[g])
        ]
        steps.append([groups[rank :: epoch.num_ranks] for rank in range(epoch.num_ranks)])
    return steps


def wlb(epoch: Epoch, costs: Sequence[float]) -> list[Step]:
    """WLB-LLM's outlier delay queues, then greedy by predicted cost under the token limit.

    Samples beyond a length threshold wait in a queue until every micro-batch of a step can have one. The others come
    in the order of `random`, each into the micro-batch of least cost if it fits there, else into the shortest, else it
    is carried over. Every step draws as many samples as one global batch, so those behind a delayed sample move up;
    what still waits at the end of the epoch is flushed. Thresholds: the 90% and 97% quantiles of the lengths. The
    paper leaves open which rank runs which micro-batch; here ranks are evened greedily by cost.

    Raises:
        UserError: carried-over samples are left at the end of the epoch.
    """
    lengths, num_bins = epoch.lengths, epoch.num_micro_batches
    thresholds = np.quantile(lengths, _OUTLIER_SHARES)
    level_N = np.searchsorted(thresholds, lengths, side="right").tolist()  # 0: no outlier
    queues: list[deque[int]] = [deque() for _ in thresholds]
    stream, carried = deque(epoch.shuffled()), list[int]()
    steps = []
    for batch, extras in epoch.global_batches(range(len(lengths))):
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        totals, tokens = [0.0] * num_bins, [0] * num_bins
        wanted = len(batch) + len(extras)
        ready = next((queue for queue in reversed(queues) if len(queue) >= num_bins), None)
        if ready is not None:
            bins = [[ready.popleft()] for _ in range(num_bins)]
            totals, tokens = [costs[s] for (s,) in bins], [lengths[s] for (s,) in bins]
            wanted -= num_bins
        fresh: list[int] = []
        while len(fresh) < wanted:
            if not stream:  # the end of the epoch: nothing to wait for any more
                fresh.append(next(queue for queue in reversed(queues) if queue).popleft())
                continue
            sample = stream.popleft()
            if level_N[sample]:
                queues[level_N[sample] - 1].append(sample)
            else:
                fresh.append(sample)
        waiting, carried = carried + sorted(fresh, key=lambda s: -lengths[s]), []
        for sample in waiting:
            room = epoch.max_tokens - lengths[sample] if epoch.max_tokens is not None else float("inf")
            lightest = min(range(num_bins), key=lambda b: (totals[b], len(bins[b])))
            shortest = min(range(num_bins), key=tokens.__getitem__)
            chosen = next((b for b in (lightest, shortest) if tokens[b] <= room), None)
            if chosen is None:
                carried.append(sample)
            else:
                bins[chosen].append(sample)
                totals[chosen] += costs[sample]
                tokens[chosen] += lengths[sample]
        ranks = greedy_partition(range(num_bins), totals, epoch.num_ranks)
        steps.append([[tuple(bins[b]) for b in rank] for rank in ranks])
    if carried or not all(slot for step in steps for rank in step for slot in rank):
        raise UserError(
            f"wlb batching cannot place all documents under max_tokens {epoch.max_tokens}: raise max_tokens, or use "
            "sparsity_aware batching"
        )
    return steps


def _dealt(epoch: Epoch, order: Sequence[int]) -> list[Step]:
    """Micro-batch after micro-batch: slot 0 of every rank, then slot 1, as accelerate's sampler shards do."""
    steps = []
    for batch, extras in epoch.global_batches(order):
        cut = [tuple(batch[i : i + epoch.batch_size]) for i in range(0, len(batch), epoch.batch_size)]
        step: Step = [cut[rank :: epoch.num_ranks] for rank in range(epoch.num_ranks)]
        add_extras(step, extras, epoch.lengths)
        steps.append(step)
    return steps


def _padded_costs(lengths: Sequence[int], counts: Sequence[int]) -> list[float]:
    """Cost of each run of samples, all padded to its first, the longest."""
    costs, first = [], 0
    for count in counts:
        costs.append(_padded_cost(count, lengths[first]))
        first += count
    return costs


def _padded_cost(count: int, longest: int) -> float:
    return count * longest + _REBALANCE_QUADRATIC * count * longest * longest


def _rebalanced_counts(lengths: Sequence[int], num_ranks: int, num_groups: int) -> list[int]:
    """Sizes of the runs: a sample goes from the costliest run to the cheapest until the sizes repeat.

    A costliest run of one sample can give nothing: the runs that will share its slot take samples up to its cost from
    the cheapest others, and the search goes on without them. The evenest sizes seen win.
    """
    small, num_larger = divmod(len(lengths), num_groups)
    counts = [small + (g < num_larger) for g in range(num_groups)]
    best, least_spread = counts, float("inf")
    seen: set[tuple[int, ...]] = set()
    settled: set[int] = set()
    for _ in range(max(30 * num_groups, len(lengths))):
        active = [g for g in range(num_groups) if g not in settled]
        if tuple(counts) in seen or len(active) <= 1:
            break
        seen.add(tuple(counts))
        costs = _padded_costs(lengths, counts)
        dearest, cheapest = max(active, key=costs.__getitem__), min(active, key=costs.__getitem__)
        spread = costs[dearest] - costs[cheapest]
        if spread < least_spread:
            best, least_spread = counts.copy(), spread
        if spread == 0.0:
            break
        if counts[dearest] > 1:
            counts[dearest] -= 1
            counts[cheapest] += 1
            continue
        by_cost = sorted(range(num_groups), key=lambda g: -costs[g])
        first = by_cost.index(dearest) // num_ranks * num_ranks
        slot = set(by_cost[first : first + num_ranks])
        for group in slot - settled - {dearest}:
            while _padded_cost(counts[group] + 1, lengths[sum(counts[:group])]) <= costs[dearest]:
                donors = [g for g in active if g not in slot and counts[g] > 1]
                if not donors:
                    break
                now = _padded_costs(lengths, counts)
                counts[min(donors, key=now.__getitem__)] -= 1
                counts[group] += 1
        settled |= slot
    return best
