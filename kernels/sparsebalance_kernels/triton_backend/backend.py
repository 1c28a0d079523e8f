"""The Triton backend as ops.py calls it: selection, slabs, and the order of the kernels.

Forward: gather_forward writes a partial result for each (row, history block) pair of the tiles in gather mode, and
tile_forward merges them, adds the own block and the union list, and finishes the row.  Backward: the same two steps
for dq; dk and dv are summed per key block over all pairs.  Own blocks are taken in *slabs* whose pairs fit
``WORKSPACE_BYTES``; a slab never splits an own block.  Everything is a pure function of the inputs: no atomics, no
autotuning, fixed order of sums, so a second run gives the same bits.
"""

from __future__ import annotations

import torch

from sparsebalance_kernels import selector
from sparsebalance_kernels.selection import BlockSelection, Budget, StatsSums, count_bits
from sparsebalance_kernels.triton_backend import configs
from sparsebalance_kernels.triton_backend.backward_dkdv import dkdv, finish_dkdv
from sparsebalance_kernels.triton_backend.backward_dq import gather_dq, row_deltas, tile_dq
from sparsebalance_kernels.triton_backend.forward import addressable, gather_forward, tile_forward
from sparsebalance_kernels.triton_backend.indexing import (
    count_bytes,
    gather_index,
    item_table,
    pairs_per_block,
    plan_slabs,
    tile_lists,
)
from sparsebalance_kernels.triton_backend.layout import BlockTable, block_table
from sparsebalance_kernels.triton_backend.routing import MAX_HISTORY_BLOCKS, route


def select(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seqlens: torch.Tensor,
    budget: Budget,
    scale: float,
    words: int,
    with_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of a ``BlockSelection`` and the vector of ``AttentionStats.from_vector`` (empty unless wanted).

    Density, work and coverage are exact; a long document's curve is an estimate (``selector.estimate_curve``).
    Documents of more history blocks than one program holds go to the torch selector.
    """
    stats = StatsSums(top_k=budget.top_k is not None) if with_stats else None
    if words * 32 > MAX_HISTORY_BLOCKS:
        bits = selector.select_blocks(query, key, cu_seqlens.tolist(), budget, scale, words, stats)
        return bits, torch.empty(0, dtype=torch.float64) if stats is None else stats.finish()
    table = block_table(cu_seqlens, budget.block_size, query.shape[0])
    top_p = top_k = None
    if budget.top_p is not None:
        top_p = torch.tensor(budget.top_p, dtype=torch.float32, device=query.device)
    else:
        top_k = torch.tensor(budget.top_k, dtype=torch.int32, device=query.device)
    bits, coverage = route(
        query,
        key,
        table,
        cu_seqlens,
        words=words,
        top_p=top_p,
        top_k=top_k,
        min_blocks=budget.min_blocks,
        max_blocks=budget.max_blocks,
        sink_blocks=budget.sink_blocks,
        scale=scale,
    )
    if stats is None:
        return bits, torch.empty(0, dtype=torch.float64)
    boundaries = cu_seqlens.tolist()
    for first, stop in zip(boundaries[:-1], boundaries[1:], strict=True):
        stats.add_document(stop - first, budget.block_size, query.shape[1])
    kept = count_bits(bits).sum()
    stats.kept = kept
    stats.attended_pairs = stats.attended_pairs + kept * budget.block_size
    # Rows without history count as covered whole.
    stats.mass = coverage.sum(dtype=torch.float64) - (coverage.numel() - stats.rows_with_history)
    selector.estimate_curve(query, key, boundaries, budget, scale, stats)
    return bits, stats.finish()


def attend_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: BlockSelection, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[T, H, D]`` in query's dtype and fp32 log-sum-exp ``[H, T]``; arguments as in torch_backend."""
    num_tokens, num_heads, head_dim = query.shape
    group, size = num_heads // key.shape[1], selection.block_size
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=query.device)
    if not num_tokens:
        return out, lse
    # Here, or every slab would copy.
    query, key, value = (addressable(tensor) for tensor in (query, key, value))
    bits = selection.bits.contiguous()
    table = block_table(selection.cu_seqlens, size, num_tokens)
    lists = tile_lists(bits, table, configs.query_tile(query.dtype, head_dim, size))
    pairs = pairs_per_block(bits, table, lists.is_gather).tolist()
    rows_per_item = configs.gather_forward_config(query.dtype, head_dim, size).rows
    for b0, b1 in _slabs(pairs, _bytes_per_pair(query), table, num_heads):
        gathered = None
        if num_pairs := sum(pairs[b0:b1]):
            index = gather_index(bits, table, b0, b1, num_pairs=num_pairs, group=group, is_gather=lists.is_gather)
            items = item_table(index.block_offsets, rows_per_item, num_pairs)
            gathered = (index, *gather_forward(query, key, value, table, index, items, scale))
        tile_forward(query, key, value, bits, table, lists, scale, out, lse, b0=b0, b1=b1, gathered=gathered)
    return out, lse


def attend_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    selection: BlockSelection,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, contiguous, in their dtypes; ``out`` and ``lse`` from the forward pass."""
    num_tokens, num_heads, head_dim = query.shape
    group, size = num_heads // key.shape[1], selection.block_size
    dq = torch.empty_like(query, memory_format=torch.contiguous_format)
    dk_sums, dv_sums = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
    if not num_tokens:
        return dq, *finish_dkdv(dk_sums, dv_sums, scale, key.dtype)
    bits = selection.bits.contiguous()
    table = block_table(selection.cu_seqlens, size, num_tokens)
    lists = tile_lists(bits, table, configs.query_tile(query.dtype, head_dim, size))
    own_rows = (table.stops - table.starts) * num_heads
    # One host read for both plans.
    pairs, all_pairs = torch.stack(
        [pairs_per_block(bits, table, lists.is_gather), pairs_per_block(bits, table) + own_rows]
    ).tolist()
    grad_out, query, key, value = (addressable(tensor) for tensor in (grad_out, query, key, value))
    rows = (grad_out, query, key, value, lse, row_deltas(grad_out, out))

    rows_per_item = configs.gather_dq_config(query.dtype, head_dim, size).rows
    for b0, b1 in _slabs(pairs, _bytes_per_pair(query), table, num_heads):
        gathered = None
        if num_pairs := sum(pairs[b0:b1]):
            index = gather_index(bits, table, b0, b1, num_pairs=num_pairs, group=group, is_gather=lists.is_gather)
            items = item_table(index.block_offsets, rows_per_item, num_pairs)
            gathered = (index, gather_dq(*rows, table, index, items, scale))
        tile_dq(*rows, bits, table, lists, scale, dq, b0=b0, b1=b1, gathered=gathered)

    # A list's items beyond the first write their sums to memory: 2 * B * D numbers for so many pairs.
    rows_per_item = configs.dkdv_rows_per_item(sum(all_pairs))
    bytes_per_pair = 4 + 8 * size * head_dim // rows_per_item
    for b0, b1 in _slabs(all_pairs, bytes_per_pair, table, num_heads):
        num_pairs = sum(all_pairs[b0:b1])
        index = gather_index(bits, table, b0, b1, num_pairs=num_pairs, group=group, include_own=True)
        items = item_table(index.block_offsets, rows_per_item, num_pairs)
        dkdv(*rows, table, index, items, scale, dk_sums, dv_sums)
    return dq, *finish_dkdv(dk_sums, dv_sums, scale, key.dtype)


def _bytes_per_pair(query: torch.Tensor) -> int:
    """A partial result, its log-sum-exp, and its places in both directions of the index."""
    return query.shape[2] * configs.partial_dtype(query.dtype).itemsize + 4 + 8


def _slabs(pairs: list[int], bytes_per_pair: int, table: BlockTable, num_heads: int) -> list[tuple[int, int]]:
    """Consecutive ranges that cover all own blocks; the workspace of each is at most WORKSPACE_BYTES, or one block's.

    A block's workspace is ``pairs * bytes_per_pair`` and what ``gather_index`` takes to count them; ranges between
    slabs have no pairs and need none.
    """
    needed = [
        count and count * bytes_per_pair + count_bytes(table, block, num_heads) for block, count in enumerate(pairs)
    ]
    slabs = plan_slabs(needed, configs.WORKSPACE_BYTES)
    covered = []
    end = 0
    for b0, b1 in [*slabs, (table.num_blocks, table.num_blocks)]:
        if end < b0:
            covered.append((end, b0))
        if b0 < b1:
            covered.append((b0, b1))
        end = b1
    return covered
