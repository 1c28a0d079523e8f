"""Sparsity-aware batching (SAB) and its rivals: which sample runs in which step, rank and micro-batch.

arXiv 2604.13847, Algorithm 2, balances one global batch at a time by predicted time. `sparsity_aware`
does the same with `window=1` and plans several randomly drawn global batches together with a larger window. The
rivals share the interface: `random`, `length_partition` (the paper's length-based batching) and `length_group`
(Hugging Face's mega-batches sorted by length).

Every sample appears exactly once an epoch, and every rank has exactly `num_slots` non-empty micro-batches each step. A
plan is a pure function of the arguments: all ranks compute the same one without talking, a resumed run again.
Cost: O(N log N), for `sparsity_aware` plus a bounded number of swap searches per window, each linear in its samples.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from hf_sparsebalance.errors import UserError

__all__ = ["STRATEGIES", "BatchPlan", "plan_batches"]

STRATEGIES = ("random", "length_partition", "length_group", "sparsity_aware")
_MAX_SWAPS = 400  # of a window; more bring less than .1% and take long where hundreds of ranks share a window
_MIN_GAIN = 1e-9  # relative: swaps that win less are rounding and would never end

Rank = list[int]
Slots = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The order of one epoch: steps[step][rank][slot] is the tuple of sample indices packed into a micro-batch."""

    steps: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return len(self.steps)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.steps[0])

    @property
    def num_slots(self) -> int:
        """Micro-batches of each rank in each step."""
        return len(self.steps[0][0])

    def micro_batch(self, step: int, rank: int, slot: int) -> tuple[int, ...]:
        """Sample indices of one micro-batch."""
        return self.steps[step][rank][slot]


def plan_batches(
    lengths: Sequence[int],
    *,
    strategy: str,
    num_ranks: int,
    num_slots: int,
    batch_size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    window: int = 1,
    max_tokens: int | None = None,
    cost_ms: Sequence[float] | None = None,
) -> BatchPlan:
    """Plan one epoch.

    A global batch is num_ranks * num_slots * batch_size samples, and there are len(lengths) // that many steps. The
    remaining samples are spread evenly over the steps, as extra documents in micro-batches that hold few tokens: at
    most one a step unless there are more of them than steps.

    Args:
        lengths: tokens of each sample, >= 1.
        strategy: `random`: a seeded shuffle, dealt slot by slot and rank by rank. `length_partition`: the same global
            batches, each partitioned evenly by length over ranks, then slots. `length_group`: shuffled, cut into
            mega-batches, each sorted by length, dealt likewise. `sparsity_aware`: rank sums even by `cost_ms`.
        num_ranks: data-parallel ranks.
        num_slots: micro-batches per rank and step (gradient_accumulation_steps).
        batch_size: samples per micro-batch (per_device_train_batch_size).
        seed, epoch: what the shuffles depend on.
        window: global batches that `sparsity_aware` plans together; with 1 each step holds the same samples as
            `random` does, hence the same gradient. The other strategies take no notice of it.
        max_tokens: most tokens of a micro-batch (memory). With it `sparsity_aware` may put any number of documents
            into a micro-batch; without it each holds batch_size (and the extra ones), as the rivals' do. The rivals
            do not repack for it: a micro-batch above it is an error.
        cost_ms: predicted time of each sample at base budget, only needed by `sparsity_aware`.

    Raises:
        UserError: an argument is out of range, fewer samples than one global batch, no (or not one) cost per sample
            for `sparsity_aware`, or max_tokens cannot be kept.

    Example: lengths (5, 1, 4, 2), num_ranks 2, num_slots 2 and `length_partition` give one step whose ranks both hold
    6 tokens: {0, 1} and {2, 3}.
    """
    num_samples, global_batch = len(lengths), num_ranks * num_slots * batch_size
    if strategy not in STRATEGIES:
        raise UserError(f"batching strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    for name, value in (("num_ranks", num_ranks), ("num_slots", num_slots), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if window < 1:
        raise UserError(f"window must be at least 1, not {window}: 1 keeps the samples of each step")
    if num_samples < global_batch:
        raise UserError(
            f"{num_samples} samples are fewer than one global batch of {global_batch} ({num_ranks} ranks x "
            f"{num_slots} micro-batches x {batch_size}): lower per_device_train_batch_size or "
            "gradient_accumulation_steps, or add data"
        )
    if min(lengths) < 1:
        raise UserError("every sample needs at least one token: remove empty documents from the data")
    if max_tokens is not None and max(lengths) > max_tokens:
        raise UserError(
            f"max_tokens {max_tokens} is below the longest document ({max(lengths)} tokens): raise max_tokens or "
            "truncate the documents"
        )
    if strategy == "sparsity_aware":
        costs = _checked_costs(cost_ms, num_samples)
        steps = _sparsity_aware(lengths, costs, num_ranks, num_slots, batch_size, seed, epoch, window, max_tokens)
    else:
        order = list(range(num_samples))
        Random(f"{seed}-{epoch}").shuffle(order)
        if strategy == "length_group":
            order = _length_grouped(order, lengths, batch_size * num_slots)
        steps = []
        for batch, extras in _global_batches(order, global_batch):
            if strategy == "length_partition":
                ranks = _partition(batch, lengths, num_ranks)
                step = [[tuple(slot) for slot in _partition(rank, lengths, num_slots)] for rank in ranks]
            else:
                step = _deal(batch, num_ranks, num_slots, batch_size)
            _add_extras(step, extras, lengths)
            steps.append(step)
        _check_tokens(steps, lengths, max_tokens)
    return BatchPlan(tuple(tuple(tuple(rank) for rank in step) for step in steps))


def _checked_costs(cost_ms: Sequence[float] | None, num_samples: int) -> list[float]:
    if cost_ms is None or len(cost_ms) != num_samples:
        found = "none" if cost_ms is None else str(len(cost_ms))
        raise UserError(
            f"sparsity_aware batching needs one predicted cost_ms per sample ({num_samples}), {found} given: pass a "
            "latency profile, or use length_partition"
        )
    costs = [float(ms) for ms in cost_ms]
    if not all(math.isfinite(ms) and ms >= 0.0 for ms in costs):
        raise UserError("cost_ms must be finite and not negative: run `sparsebalance profile` to write a new profile")
    return costs


def _global_batches(order: list[int], global_batch: int) -> list[tuple[list[int], list[int]]]:
    """(samples, extra samples) of each step; the extras are the end of the order, spread evenly."""
    num_steps = len(order) // global_batch
    extras: list[list[int]] = [[] for _ in range(num_steps)]
    tail = order[num_steps * global_batch :]
    for i, sample in enumerate(tail):
        extras[i * num_steps // len(tail)].append(sample)
    return [(order[s * global_batch : (s + 1) * global_batch], extras[s]) for s in range(num_steps)]


def _deal(batch: list[int], num_ranks: int, num_slots: int, batch_size: int) -> list[Slots]:
    """Micro-batch after micro-batch: slot 0 of every rank, then slot 1, as accelerate's sampler shards do."""
    cut = [tuple(batch[i : i + batch_size]) for i in range(0, len(batch), batch_size)]
    return [[cut[slot * num_ranks + rank] for slot in range(num_slots)] for rank in range(num_ranks)]


def _length_grouped(order: list[int], lengths: Sequence[int], batch_size: int) -> list[int]:
    """Hugging Face's rule (get_length_grouped_indices): sorted mega-batches, the longest sample first."""
    size = max(min(len(order) // (batch_size * 4), 50), 1) * batch_size
    megas = [sorted(order[i : i + size], key=lambda s: -lengths[s]) for i in range(0, len(order), size)]
    longest = max(range(len(megas)), key=lambda m: lengths[megas[m][0]])
    megas[0][0], megas[longest][0] = megas[longest][0], megas[0][0]
    return [sample for mega in megas for sample in mega]


def _partition(samples: Sequence[int], weights: Sequence[float], num_bins: int) -> list[Rank]:
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


def _add_extras(step: list[Slots], extras: list[int], lengths: Sequence[int]) -> None:
    for sample in extras:
        tokens = {(sum(lengths[i] for i in slot), r, s) for r, rank in enumerate(step) for s, slot in enumerate(rank)}
        _, r, s = min(tokens)
        step[r][s] = (*step[r][s], sample)


def _check_tokens(steps: list[list[Slots]], lengths: Sequence[int], max_tokens: int | None) -> None:
    if max_tokens is None:
        return
    largest = max(sum(lengths[i] for i in slot) for step in steps for rank in step for slot in rank)
    if largest > max_tokens:
        raise UserError(
            f"a micro-batch of this strategy holds {largest} tokens, above max_tokens {max_tokens}: raise max_tokens, "
            "lower per_device_train_batch_size, or use sparsity_aware batching, which packs under it"
        )


def _sparsity_aware(
    lengths: Sequence[int],
    costs: list[float],
    num_ranks: int,
    num_slots: int,
    batch_size: int,
    seed: int,
    epoch: int,
    window: int,
    max_tokens: int | None,
) -> list[list[Slots]]:
    order = list(range(len(lengths)))
    Random(f"{seed}-{epoch}").shuffle(order)
    order_of_steps = Random(f"{seed}-{epoch}-steps")
    batches = _global_batches(order, num_ranks * num_slots * batch_size)
    steps: list[list[Slots]] = []
    for first in range(0, len(batches), window):
        members = batches[first : first + window]
        num_extras = [len(extras) for _, extras in members]
        pool = sorted((s for batch, extras in members for s in (*batch, *extras)), key=lambda s: -costs[s])
        # The cheapest samples are the extra ones: they disturb the balance least and can mend it.
        pool, small = pool[: len(pool) - sum(num_extras)], pool[len(pool) - sum(num_extras) :]
        per_rank = num_slots * batch_size
        plans = [_level(pool, costs, len(members), num_ranks)]
        plans.append(_peel(pool, costs, len(members), num_ranks, per_rank))
        ranks = min(plans, key=lambda plan: sum(max(_sums(step, costs)) for step in plan))
        for step, count in zip(ranks, num_extras, strict=True):
            for sample in small[:count]:
                sums = _sums(step, costs)
                step[sums.index(min(sums))].append(sample)
            small = small[count:]
        _swap(ranks, costs)
        packed = _pack_window(ranks, lengths, costs, num_slots, max_tokens)
        order_of_steps.shuffle(packed)
        steps += packed
    return steps


def _sums(step: list[Rank], costs: Sequence[float]) -> list[float]:
    return [sum(costs[s] for s in rank) for rank in step]


def _level(pool: list[int], costs: list[float], num_steps: int, num_ranks: int) -> list[list[Rank]]:
    """All bins of the window as even as possible, then neighbours in cost form a step."""
    bins = _partition(pool, costs, num_steps * num_ranks) if pool else []
    bins.sort(key=lambda b: -sum(costs[s] for s in b))
    return [bins[i : i + num_ranks] for i in range(0, len(bins), num_ranks)]


def _peel(pool: list[int], costs: list[float], num_steps: int, num_ranks: int, per_rank: int) -> list[list[Rank]]:
    """Step by step: where one sample outweighs an average bin, the ranks beside it are filled up to its level.

    That work is free, as the step lasts that long anyway. Once no sample stands out, the rest is levelled.
    """
    left = sorted(((costs[s], -i, s) for i, s in enumerate(pool)))  # ascending cost; ties: the pool's order
    steps: list[list[Rank]] = []
    while len(steps) < num_steps:
        num_bins = (num_steps - len(steps)) * num_ranks
        level = left[-1][0] + sum(entry[0] for entry in left[: per_rank - 1])
        if level * num_bins <= sum(entry[0] for entry in left):
            rest = [entry[2] for entry in reversed(left)]
            return steps + _level(rest, costs, num_steps - len(steps), num_ranks)
        seeds = [left.pop() for _ in range(num_ranks)]
        step: list[Rank] = []
        for total, _, sample in seeds:
            rank = [sample]
            for missing in range(per_rank - 1, 0, -1):
                room = level - total - sum(entry[0] for entry in left[: missing - 1])
                at = max(bisect_right(left, (room * (1 + 1e-12), 1, 0)) - 1, 0)
                cost, _, chosen = left.pop(at)
                total += cost
                rank.append(chosen)
            step.append(rank)
        steps.append(step)
    return steps


def _swap(ranks: list[list[Rank]], costs: list[float]) -> None:
    """Swap samples of a step's slowest rank against lighter ones of the window while the summed step time falls.

    Each search tries all pairs at once, O(samples of a rank * samples of the window); at most four swaps a rank, and
    400 in all.
    """
    owner_N = np.array([(s, r) for s, step in enumerate(ranks) for r, rank in enumerate(step) for _ in rank])
    place_N = np.array([k for step in ranks for rank in step for k in range(len(rank))])
    cost_N = np.array([costs[i] for step in ranks for rank in step for i in rank])
    sums_SR = np.array([_sums(step, costs) for step in ranks])
    steps_N, ranks_N = owner_N[:, 0], owner_N[:, 1]
    num_steps, num_ranks = sums_SR.shape
    if num_ranks == 1:
        return
    budget, step, idle = min(4 * num_steps * num_ranks, _MAX_SWAPS), 0, 0
    while budget > 0 and idle < num_steps:
        slowest = int(np.argmax(sums_SR[step]))
        now_S = sums_SR.max(axis=1)
        third = np.sort(np.delete(sums_SR[step], slowest))[::-1]
        second_rank = int(np.argmax(np.where(np.arange(num_ranks) == slowest, -1.0, sums_SR[step])))
        own_K = np.flatnonzero((steps_N == step) & (ranks_N == slowest))
        less_KN = cost_N[own_K][:, None] - cost_N[None, :]
        same_N = steps_N == step
        # Slowest rank this step keeps beside the pair: its second, or the third where the second is the partner.
        beside_N = np.where(same_N & (ranks_N == second_rank), third[1] if num_ranks > 2 else 0.0, third[0])
        partner_KN = sums_SR[steps_N, ranks_N][None, :] + less_KN
        here_KN = np.maximum(sums_SR[step, slowest] - less_KN, beside_N[None, :])
        new_KN = np.where(
            same_N[None, :],
            np.maximum(here_KN, partner_KN),
            here_KN + np.maximum(now_S[steps_N][None, :], partner_KN),
        )
        old_N = np.where(same_N, now_S[step], now_S[step] + now_S[steps_N])
        gain_KN = np.where(less_KN > 0.0, old_N[None, :] - new_KN, 0.0)
        k, other = divmod(int(np.argmax(gain_KN)), gain_KN.shape[1])
        if gain_KN[k, other] <= _MIN_GAIN * now_S[step]:
            step, idle = (step + 1) % num_steps, idle + 1
            continue
        own = int(own_K[k])
        a, b = ranks[step][slowest], ranks[steps_N[other]][ranks_N[other]]
        a[place_N[own]], b[place_N[other]] = b[place_N[other]], a[place_N[own]]
        sums_SR[step, slowest] -= less_KN[k, other]
        sums_SR[steps_N[other], ranks_N[other]] += less_KN[k, other]
        cost_N[own], cost_N[other] = cost_N[other], cost_N[own]
        budget, idle = budget - 1, 0


def _pack_window(
    ranks: list[list[Rank]], lengths: Sequence[int], costs: list[float], num_slots: int, max_tokens: int | None
) -> list[list[Slots]]:
    """Pack each rank's samples into its slots, the costliest first so that slots of all ranks meet their like."""
    packed: list[list[Slots]] = []
    for step in ranks:
        slots = [_pack(rank, lengths, costs, num_slots, max_tokens) for rank in step]
        if any(rank is None for rank in slots):
            # Even cost can pile up tokens on one rank; even tokens over the same step is the best chance to fit.
            members = [s for rank in step for s in rank]
            even = _partition(members, lengths, len(step))
            slots = [_pack(rank, lengths, costs, num_slots, max_tokens) for rank in even]
        filled = [rank for rank in slots if rank is not None]
        if len(filled) < len(slots):
            raise UserError(
                f"a step's documents do not fit into {num_slots} micro-batches per rank of at most {max_tokens} "
                "tokens: raise max_tokens or gradient_accumulation_steps, or lower per_device_train_batch_size"
            )
        packed.append(filled)
    return packed


def _pack(
    samples: Rank, lengths: Sequence[int], costs: list[float], num_slots: int, max_tokens: int | None
) -> Slots | None:
    """Exactly num_slots non-empty micro-batches, even by cost; None if the token budget cannot be kept."""
    if max_tokens is None:
        slots = _partition(samples, costs, num_slots)
    else:
        # Even cost first; then the tightest fit by tokens, which packs more.
        found = _greedy(samples, lengths, costs, num_slots, max_tokens, costs, tightest=False)
        if found is None:
            found = _greedy(samples, lengths, costs, num_slots, max_tokens, lengths, tightest=True)
        if found is None:
            return None
        slots = found
    slots.sort(key=lambda slot: -sum(costs[s] for s in slot))
    return [tuple(slot) for slot in slots]


def _greedy(
    samples: Rank,
    lengths: Sequence[int],
    costs: list[float],
    num_slots: int,
    max_tokens: int,
    keys: Sequence[float],
    *,
    tightest: bool,
) -> list[Rank] | None:
    slots: list[Rank] = [[] for _ in range(num_slots)]
    tokens, totals = [0] * num_slots, [0.0] * num_slots
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
