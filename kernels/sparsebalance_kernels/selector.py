"""The selector in plain torch operations, on any device: from queries and keys to the bits of a ``BlockSelection``.

Formula, per query head and token at document position t, over the history blocks i with (i + 1) * B <= t:
    s_i = scale * q . mean(k in block i)        fp32
    top_p: w = softmax(s); in descending order a block is kept iff the sum of those before it is < p
    top_k: the k - 1 largest s
Ties go to the more recent block.  The own block is always attended and is no candidate: its mean holds future keys.

Only values are sorted: the count of kept blocks and the value of the last one say which blocks are kept, and equal
values at that border are the only place where order matters (MoBA, arXiv 2502.13189, leaves it open).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from sparsebalance_kernels.precision import cpu_matmul_precision
from sparsebalance_kernels.selection import Budget, StatsSums, pack_bits, visible_blocks

# 512 query tokens keep a slab of scores in the cache (14 heads, 128 blocks: 3.7 MB); more only adds memory traffic.
SELECT_TOKENS = 512

# A curve is a mean over many rows: 16 to 32 runs of 64 tokens, with all their heads, stand for a long document.
CURVE_TOKENS = 64
CURVE_RUNS = 16


def pooled_keys(key: torch.Tensor, block_size: int) -> torch.Tensor:
    """Mean key of each complete block of one document, accumulated in fp32: [L, Hkv, D] -> [L // B, Hkv, D]."""
    blocks = key.shape[0] // block_size
    return key[: blocks * block_size].unflatten(0, (blocks, block_size)).mean(dim=1, dtype=torch.float32)


@torch.no_grad()
def select_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    boundaries: Sequence[int],
    budget: Budget,
    scale: float,
    words: int,
    stats: StatsSums | None = None,
) -> torch.Tensor:
    """Select history blocks for every row.

    Args:
        query: ``[T, H, D]``; key: ``[T, Hkv, D]``, post-RoPE; any strides.
        boundaries: ``n + 1`` packed document starts as host integers; ``budget`` has one entry for each document.
        scale: factor of the scores (``D ** -0.5``); it shapes the softmax of top_p.
        words: int32 words per row, enough for the longest document (``words_for``).
        stats: when given, what was kept is added to it, the curve included (one more search per row).

    Returns:
        int32 ``[H, words, T]``, the ``bits`` of a ``BlockSelection``.
    """
    num_tokens, num_heads, _ = query.shape
    bits = torch.zeros(num_heads, words, num_tokens, dtype=torch.int32, device=query.device)
    for document in range(len(boundaries) - 1):
        first, stop = boundaries[document], boundaries[document + 1]
        if stats is not None:
            stats.add_document(stop - first, budget.block_size, num_heads)
        pooled = pooled_keys(key[first:stop], budget.block_size)
        for start in range(first + budget.block_size, stop, SELECT_TOKENS):
            end = min(start + SELECT_TOKENS, stop)
            blocks = (end - 1 - first) // budget.block_size
            scores = _scores(query[start:end], pooled[:blocks], scale)
            packed = pack_bits(_keep_rows(scores, start - first, document, budget, stats))
            bits[:, : packed.shape[-1], start:end] = packed.permute(0, 2, 3, 1).flatten(0, 1)
    return bits


def _scores(query: torch.Tensor, pooled: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32 gate scores ``[Hkv, S, G, blocks]``, all finite; query ``[S, H, D]``, pooled ``[blocks, Hkv, D]``."""
    num_tokens, num_kv_heads = query.shape[0], pooled.shape[1]
    grouped = query.float().unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    # Whatever the process allows elsewhere: the gate's scores are fp32 by definition.
    with cpu_matmul_precision("ieee" if query.device.type == "cpu" else None):
        scores = torch.bmm(grouped, pooled.permute(1, 2, 0) * scale)
    # Finite all of them: a row that is not a number would make the statistics of all rows one.
    scores = scores.nan_to_num_(nan=torch.finfo(torch.float32).min)
    # As they lie: another order of the dimensions would copy what is half of a short document's routing.
    return scores.unflatten(1, (num_tokens, -1))


@torch.no_grad()
def estimate_curve(
    query: torch.Tensor, key: torch.Tensor, boundaries: Sequence[int], budget: Budget, scale: float, stats: StatsSums
) -> None:
    """Add the density curve to ``stats`` from up to 2 * CURVE_RUNS runs of tokens of each document.

    Exact for documents of up to CURVE_RUNS runs beyond their first block; longer ones are sampled evenly.
    """
    num_heads, size = query.shape[1], budget.block_size
    for document, (first, stop) in enumerate(itertools.pairwise(boundaries)):
        starts = range(first + size, stop, CURVE_TOKENS)
        step = max(1, len(starts) // CURVE_RUNS)
        pooled = pooled_keys(key[first:stop], size)
        sample = StatsSums(stats.top_k, stats.points)
        rows = visible = 0
        for start in starts[step // 2 :: step]:
            end = min(start + CURVE_TOKENS, stop)
            scores = _scores(query[start:end], pooled[: (end - 1 - first) // size], scale)
            _rank_rows(scores, start - first, document, budget, sample)
            rows += num_heads * (end - start)
            visible += num_heads * (visible_blocks(end - first, size) - visible_blocks(start - first, size))
        if rows:
            share = rows / (num_heads * (stop - first - size))
            share = share if stats.top_k else visible / (num_heads * visible_blocks(stop - first, size))
            stats.curve = stats.curve + sample.curve.cpu() / share


def feasible_top_k(
    query: torch.Tensor,
    key: torch.Tensor,
    boundaries: Sequence[int],
    budget: Budget,
    base_top_k: int,
    tolerance: float,
    scale: float,
) -> int:
    """The smallest k, from ``budget.top_k`` up, that loses no more coverage against ``base_top_k`` than ``tolerance``.

    arXiv 2604.13847, FindFeasibleK of Algorithm 1: C(base) - C(k) <= tolerance, C the mean coverage over the rows of
    all documents that have history; every whole k is tried.  Rows are those of :func:`estimate_curve`: all of a
    document of less than 2 * CURVE_RUNS runs, an even sample of a longer one.

    Args:
        query, key, boundaries, scale: as in :func:`select_blocks`.
        budget: ``top_k`` holds the smallest k wanted, the same for every document.
        base_top_k: k >= 1 without tuning.
        tolerance: largest loss of coverage, in [0, 1].

    Raises:
        ValueError: a number is out of range.
    """
    assert budget.top_k is not None
    wanted = budget.top_k[0]
    if min(wanted, base_top_k) < 1 or not 0.0 <= tolerance <= 1.0:
        raise ValueError(
            f"top_k and base_top_k must be at least 1 and tolerance in [0, 1], got {wanted}, {base_top_k}, {tolerance}"
        )
    longest = max((stop - first for first, stop in itertools.pairwise(boundaries)), default=0)
    dense = 1 + max(0, longest - 1) // budget.block_size
    if wanted >= min(base_top_k, dense):
        return wanted
    stats = StatsSums(top_k=True, points=range(wanted, min(base_top_k, dense) + 1))
    for first, stop in itertools.pairwise(boundaries):
        stats.add_document(stop - first, budget.block_size, query.shape[1])
    estimate_curve(query, key, boundaries, budget, scale, stats)
    coverage = stats.finish()[3:]
    return wanted + int((coverage[-1] - coverage <= tolerance).nonzero()[0])


def _keep_rows(
    scores: torch.Tensor, position: int, document: int, budget: Budget, stats: StatsSums | None
) -> torch.Tensor:
    """Apply the budget to one slab of :func:`_scores`, of tokens from document position ``position`` on."""
    order, ranked, count, visible, hidden = _rank_rows(scores, position, document, budget, stats)
    last = ranked.gather(-1, (count - 1).clamp(min=0)[..., None])
    # NaN is below nothing: rows that keep no block.
    keep = order >= last.masked_fill(count[..., None] == 0, math.nan)
    following = ranked.gather(-1, count.clamp(max=ranked.shape[-1] - 1)[..., None])
    tied = ((following == last).squeeze(-1) & (count > 0) & (count < visible)).nonzero(as_tuple=True)
    if tied[0].numel():
        keep[tied] = _break_ties(order[tied], last[tied], count[tied], hidden[tied[1], 0])
    seen_by_all = position // budget.block_size
    keep[..., seen_by_all:].logical_and_(~hidden[..., seen_by_all:])
    return keep


def _rank_rows(
    scores: torch.Tensor, position: int, document: int, budget: Budget, stats: StatsSums | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What decides each row: the values that order its blocks, these sorted, how many are kept, visible, hidden."""
    num_tokens, blocks = scores.shape[1], scores.shape[3]
    visible = torch.arange(position, position + num_tokens, device=scores.device) // budget.block_size
    number = torch.arange(blocks, device=scores.device)
    hidden = (number >= visible[:, None])[:, None, :]
    seen_by_all = position // budget.block_size
    scores[..., seen_by_all:].masked_fill_(hidden[..., seen_by_all:], -math.inf)
    visible = visible[:, None].expand(scores.shape[:-1])
    if budget.sink_blocks:
        sinks = min(budget.sink_blocks, blocks)
        order = scores.clone()
        order[..., :sinks] = torch.where(hidden[..., :sinks], -math.inf, math.inf)
        ranked = _descending(order)
        ranked_scores = torch.cat([_descending(scores[..., :sinks].contiguous()), ranked[..., sinks:]], dim=-1)
    else:
        order = scores
        ranked = ranked_scores = _descending(scores)

    mass = None
    if stats is not None or (budget.top_p is not None and budget.top_p[document] < 1.0):
        mass = torch.softmax(ranked_scores, dim=-1).cumsum(-1)  # mass[j]: that of the j + 1 best
    if budget.top_p is None:
        assert budget.top_k is not None
        count = torch.full_like(visible, budget.top_k[document] - 1)
    elif budget.top_p[document] >= 1.0:
        count = visible
    else:
        assert mass is not None
        count = _blocks_within(mass, mass.new_tensor([budget.top_p[document]])).squeeze(-1)
    count = _clamp_count(count, visible, budget)
    if stats is not None:
        assert mass is not None
        _add_stats(stats, count, visible, mass, budget)

    return order, ranked, count, visible, hidden


def _descending(values: torch.Tensor) -> torch.Tensor:
    """Values sorted along the last dimension, largest first."""
    if values.device.type == "cpu":  # numpy sorts with AVX-512 or AVX2: 15 times faster than torch 2.13
        return torch.from_numpy(np.sort(-values.numpy(), axis=-1)).neg_()
    return torch.sort(values, dim=-1, descending=True).values


def _break_ties(order: torch.Tensor, last: torch.Tensor, count: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Bool ``[N, blocks]``: everything above ``last``, and the most recent of what equals it, ``count`` in all."""
    above = order > last
    equal = (order == last) & ~hidden
    rank_from_end = equal.flip(-1).cumsum(-1).flip(-1)
    return above | (equal & (rank_from_end <= (count - above.sum(-1))[:, None]))


def _blocks_within(mass: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """How many blocks have less than p before them, for each p of ``points``: [..., blocks] -> [..., points]."""
    wanted = points.expand(*mass.shape[:-1], -1).contiguous()
    return torch.searchsorted(mass, wanted) + 1


def _clamp_count(count: torch.Tensor, visible: torch.Tensor, budget: Budget) -> torch.Tensor:
    least = max(budget.min_blocks, budget.sink_blocks)
    count = count.clamp(min=least, max=budget.max_blocks)
    return torch.minimum(count, visible)


def _add_stats(
    stats: StatsSums, count: torch.Tensor, visible: torch.Tensor, mass: torch.Tensor, budget: Budget
) -> None:
    # Tensors are added up where they are: on a GPU a host read of each slab would wait for it.
    kept = count.sum()
    stats.kept = stats.kept + kept
    stats.attended_pairs = stats.attended_pairs + kept * budget.block_size
    with_history = visible > 0
    covered = torch.cat([mass.new_zeros(*mass.shape[:-1], 1), mass], dim=-1)
    # Kept everything: the mass is 1 by definition, whatever the rounding of the sum.
    covered = covered.masked_fill(torch.arange(covered.shape[-1], device=covered.device) >= visible[..., None], 1.0)
    kept_mass = covered.gather(-1, count[..., None]).squeeze(-1)
    stats.mass = stats.mass + (kept_mass * with_history).sum(dtype=torch.float64)
    if stats.top_k:
        grid = torch.tensor([k - 1 for k in stats.points], device=count.device).expand(*count.shape, -1)
        at = _clamp_count(grid, visible[..., None], budget)
        curve = (covered.gather(-1, at) * with_history[..., None]).sum((0, 1, 2), dtype=torch.float64)
    else:
        at = _blocks_within(mass, mass.new_tensor(stats.points))
        at[..., -1] = visible
        curve = _clamp_count(at, visible[..., None], budget).sum((0, 1, 2), dtype=torch.float64)
    stats.curve = stats.curve.to(curve.device) + curve
