"""Choosing the history blocks of every query row: scores and selection in one kernel, kept blocks as bits.

A program scores BM tokens of one own block and one query head against the mean keys of all history blocks of the
document; the scores never leave the registers.  There is no sort.  In the order "larger score, then more recent
block" a budget keeps a prefix, and a prefix is a threshold y with some of the blocks that score just y.  With a
weight w per block (its softmax mass for top_p, 1 for top_k), M(x) = sum of w over scores above x, and a target
(p, or k - 1), y is the smallest score present with M(y) < target.  It is found by halving [a, b], both ends moved to
scores that are present: exact, without tolerance, and over when the ends meet.  M sums in a fixed tree, and rounding
is monotone: a larger p keeps a superset, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsebalance_kernels.triton_backend.layout import BlockTable
from sparsebalance_kernels.triton_backend.pooling import pooled_keys

# History blocks of the longest document that one program can hold; beyond, the caller takes another selector.
MAX_HISTORY_BLOCKS = 1024

# Query tokens of a program: the least rows of a tensor-core product, so that wide rows of scores fit the registers.
ROUTE_TOKENS = 16

# Head dims multiplied at once: the mean keys of all columns pass through shared memory in slices of this depth.
ROUTE_DEPTH = 16


def route(
    query: torch.Tensor,
    key: torch.Tensor,
    table: BlockTable,
    cu_seqlens: torch.Tensor,
    *,
    words: int,
    top_p: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select history blocks for every row.  Selection rules: ``block_sparse_attention``.

    A row whose scores are not numbers is selected as if they were the lowest finite one, and touches no other row.

    Args:
        query: ``[T, H, D]``; key: ``[T, Hkv, D]``, post-RoPE, any strides.
        table: the blocks of ``cu_seqlens``.
        words: 32-bit words per row, enough for the complete blocks of any document and at most
            ``MAX_HISTORY_BLOCKS // 32``.
        top_p: float32 ``[n]``, p of each document; exactly one of top_p and top_k.
        top_k: int32 ``[n]``, k >= 1 of each document, the own block included.
        min_blocks, max_blocks: bounds on the history blocks kept per row, ``max_blocks`` None for no bound.
        sink_blocks: so many first blocks of each document are kept in any case and fill the budget first.
        scale: factor of the scores.

    Returns:
        (bits int32 ``[H, words, T]``: bit j of word w is history block 32 * w + j of the token's own document,
        coverage float32 ``[H, T]``: gate mass of the kept blocks, 1 where all visible ones are kept).
    """
    num_tokens, num_heads, dim = query.shape
    budgets = top_p if top_p is not None else top_k
    assert budgets is not None and (top_p is None or top_k is None), "give exactly one of top_p and top_k"
    assert budgets.shape == (len(cu_seqlens) - 1,)
    columns = 32 * triton.next_power_of_2(words)
    if columns > MAX_HISTORY_BLOCKS:
        raise ValueError(f"{32 * words} history blocks exceed what one program holds ({MAX_HISTORY_BLOCKS})")
    bits = torch.empty(num_heads, words, num_tokens, dtype=torch.int32, device=query.device)
    coverage = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=query.device)
    if not num_tokens:
        return bits, coverage
    pooled = pooled_keys(key, table)
    num_warps, num_stages = _resources(columns)
    parts = triton.cdiv(table.block_size, ROUTE_TOKENS)
    _route[(table.num_blocks * parts, num_heads)](
        query,
        pooled,
        table.starts,
        table.stops,
        table.firsts,
        table.documents,
        budgets,
        bits,
        coverage,
        *query.stride(),
        num_tokens,
        words,
        parts,
        scale,
        min(max(min_blocks, sink_blocks), MAX_HISTORY_BLOCKS),
        MAX_HISTORY_BLOCKS if max_blocks is None else min(max_blocks, MAX_HISTORY_BLOCKS),
        min(sink_blocks, MAX_HISTORY_BLOCKS),
        NUM_KV_HEADS=key.shape[1],
        GROUP=num_heads // key.shape[1],
        DIM=dim,
        TOP_P=top_p is not None,
        BOUNDED=max(min_blocks, sink_blocks) > 0 or max_blocks is not None,
        SINKS=sink_blocks > 0,
        BM=ROUTE_TOKENS,
        NB=columns,
        BLOCK_D=ROUTE_DEPTH,
        PRECISION="tf32x3" if query.is_cuda and torch.version.hip is None else "ieee",
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return bits, coverage


def _resources(columns: int) -> tuple[int, int]:
    """(warps, stages) for so many columns of scores.

    With these nothing spills.  1024 columns take 66 KB of shared memory in two stages, over the 64 KB of gfx942.
    """
    stages = 1 if columns == 1024 and torch.version.hip else 2
    return {32: 2, 64: 2, 128: 8, 256: 4, 512: 16, 1024: 16}[columns], stages


LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit(do_not_specialize=["num_tokens", "words", "parts", "scale", "least", "most", "sinks"])
def _route(
    query_ptr,
    pooled_ptr,
    starts_ptr,
    stops_ptr,
    firsts_ptr,
    documents_ptr,
    budgets_ptr,
    bits_ptr,
    coverage_ptr,
    stride_t,
    stride_h,
    stride_d,
    num_tokens,
    words,
    parts,
    scale,
    least,
    most,
    sinks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TOP_P: tl.constexpr,
    BOUNDED: tl.constexpr,
    SINKS: tl.constexpr,
    BM: tl.constexpr,
    NB: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, head = tl.program_id(0) // parts, tl.program_id(1)
    start = tl.load(starts_ptr + block) + tl.program_id(0) % parts * BM
    stop = tl.load(stops_ptr + block)
    if start >= stop:
        return
    first = tl.load(firsts_ptr + block)
    visible = block - first
    if visible == 0:
        nothing, everything = tl.zeros([BM, NB // 32], dtype=tl.int32), tl.full([BM], 1.0, tl.float32)
        _store(bits_ptr, coverage_ptr, nothing, everything, head, start, stop, num_tokens, words, BM, NB)
        return
    tokens = start + tl.arange(0, BM)

    column = tl.arange(0, NB)
    seen = column < visible
    # Rows beyond the block and hidden blocks read the last real ones: masks would take registers of their own.
    query_ptrs = query_ptr + tl.minimum(tokens, stop - 1).to(tl.int64) * stride_t + head.to(tl.int64) * stride_h
    # One document's offsets fit 32 bits (1024 blocks); wider ones would double the registers of the addresses.
    mean_ptr = pooled_ptr + (first.to(tl.int64) * NUM_KV_HEADS + head // GROUP) * DIM
    mean_offset = tl.minimum(column, visible - 1) * (NUM_KV_HEADS * DIM)
    scores = tl.zeros([BM, NB], dtype=tl.float32)
    for offset in range(0, DIM, BLOCK_D):
        depth = offset + tl.arange(0, BLOCK_D)
        inside = depth < DIM
        query_offset = depth.to(tl.int64) * stride_d
        queries = tl.load(query_ptrs[:, None] + query_offset[None, :], mask=inside[None, :], other=0.0)
        means = tl.load(mean_ptr + depth[:, None] + mean_offset[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(queries.to(tl.float32), means, scores, input_precision=PRECISION)
    scores *= scale
    # Every visible score becomes a finite number: the search must end, and hidden blocks must stay below all.
    scores = tl.where(scores == scores, tl.minimum(tl.maximum(scores, -LARGEST), LARGEST), -LARGEST)
    scores = tl.where(seen[None, :], scores, -float("inf"))

    highest = tl.max(scores, axis=1)
    weight = tl.exp(scores - highest[:, None])
    budget = tl.load(budgets_ptr + tl.load(documents_ptr + block))
    order = scores
    if SINKS:
        order = tl.where((column < tl.minimum(sinks, visible))[None, :], float("inf"), scores)
        highest = tl.max(order, axis=1)
    lowest = tl.min(tl.where(order == -float("inf"), float("inf"), order), axis=1)
    if TOP_P:
        # Masses are compared undivided; p = 1 is decided without summing, since rounding would drop blocks.
        target = tl.where(budget >= 1.0, float("inf"), budget * tl.sum(weight, axis=1))
        threshold, cut = _prefix(order, weight, target, lowest, highest, BM, NB)
    else:
        target = tl.zeros([BM], dtype=tl.float32) + (budget - 1).to(tl.float32)
        ones = tl.full([BM, NB], 1.0, tl.float32)
        threshold, cut = _prefix(order, ones, target, lowest, highest, BM, NB)
    count = tl.sum(_keep(order, threshold, cut, NB).to(tl.int32), axis=1)
    if BOUNDED:
        wanted = tl.minimum(tl.minimum(tl.maximum(count, least), most), visible)
        if tl.max((wanted != count).to(tl.int32), axis=0) > 0:
            ones = tl.full([BM, NB], 1.0, tl.float32)
            threshold, cut = _prefix(order, ones, wanted.to(tl.float32), lowest, highest, BM, NB)
        count = wanted
    keep = _keep(order, threshold, cut, NB)
    kept = tl.sum(tl.where(keep, weight, 0.0), axis=1)
    # The total anew: kept in registers over the search it would spill.
    dropped = tl.sum(tl.where(keep, 0.0, weight), axis=1)
    coverage = tl.where(count >= visible, 1.0, kept / (kept + dropped))
    bit = tl.reshape(keep.to(tl.int32), [BM, NB // 32, 32]) << tl.arange(0, 32)[None, None, :]
    _store(bits_ptr, coverage_ptr, tl.sum(bit, axis=2), coverage, head, start, stop, num_tokens, words, BM, NB)


@triton.jit
def _store(
    bits_ptr, coverage_ptr, bits, coverage, head, start, stop, num_tokens, words, BM: tl.constexpr, NB: tl.constexpr
):
    """Write words [BM, NB // 32] and coverage [BM] of one head's tokens from ``start`` on, below ``stop``."""
    tokens, word = start + tl.arange(0, BM), tl.arange(0, NB // 32)
    real = tokens < stop
    word_ptrs = bits_ptr + (head.to(tl.int64) * words + word[None, :]) * num_tokens + tokens[:, None]
    tl.store(word_ptrs, bits, mask=real[:, None] & (word < words)[None, :])
    tl.store(coverage_ptr + head.to(tl.int64) * num_tokens + tokens, coverage, mask=real)


@triton.jit
def _prefix(order, weight, target, low, high, BM: tl.constexpr, NB: tl.constexpr):
    """What the budget keeps, for :func:`_keep`: (threshold fp32, cut int32), both [BM].

    order [BM, NB]: what ranks the blocks, -inf where hidden, +inf for sinks; weight [BM, NB], 0 where hidden;
    target [BM]; low and high [BM]: the least and the largest ``order`` of the visible blocks.
    """
    everything = tl.sum(tl.where(order > low[:, None], weight, 0.0), axis=1) < target
    high = tl.where(everything, low, high)
    low = tl.where(target <= 0.0, high, low)
    while tl.max((low < high).to(tl.int32), axis=0) > 0:
        middle = tl.minimum(0.5 * low + 0.5 * high, LARGEST)
        # Rounding may take the middle out of [low, high); the low end does as well.
        middle = tl.where((middle >= low) & (middle < high), middle, low)
        above = order > middle[:, None]
        less = tl.sum(tl.where(above, weight, 0.0), axis=1) < target
        # The nearest score present: the largest not above the middle, or the smallest above it.
        sign = tl.where(less, 1.0, -1.0)
        nearest = sign * tl.max(tl.where(above != less[:, None], order * sign[:, None], -float("inf")), axis=1)
        # A row whose search is over finds its own end again, or, without a budget, infinity above it.
        low = tl.where(less, low, nearest)
        high = tl.where(less, nearest, high)
    # Of the blocks that score just the threshold the most recent are kept: those from ``cut`` on.  Also by halving: a
    # running sum along the row would spill at 1024 columns.
    column = tl.arange(0, NB)
    tied_weight = tl.max(tl.where(order == high[:, None], weight, 0.0), axis=1)
    above = tl.sum(tl.where(order > high[:, None], weight, 0.0), axis=1)
    first = tl.zeros([BM], dtype=tl.int32)
    cut = first + NB
    middle = first
    while tl.max((first < cut).to(tl.int32), axis=0) > 0:
        tied = tl.sum(((order == high[:, None]) & (column[None, :] >= middle[:, None])).to(tl.int32), axis=1)
        # Sinks tie at infinity with unequal weights; all of them are kept.
        fits = (above + (tied - 1).to(tl.float32) * tied_weight < target) | (high == float("inf"))
        cut = tl.where(fits, tl.minimum(cut, middle), cut)
        first = tl.where(fits, first, tl.maximum(first, middle + 1))
        middle = (first + cut) // 2
    return high, cut


@triton.jit
def _keep(order, threshold, cut, NB: tl.constexpr):
    """Bool [BM, NB]: what ranks above the threshold, and just at it from column ``cut`` on."""
    tied = (order == threshold[:, None]) & (tl.arange(0, NB)[None, :] >= cut[:, None])
    return (order > threshold[:, None]) | tied
