"""Block-sparse attention in plain torch operations, forward and backward, on any device.

Own blocks are batched causal products.  History is key-block-major: for each key block the rows that keep it are
gathered, multiplied, and their partial results (unnormalised output, maximum, sum) written to one slot per pair; an
``embedding_bag`` then sums each row's slots.  Work is done for kept pairs only; nothing of size T x T exists.

Workspace per tile of TILE_TOKENS queries: pairs * (D + 3) floats, plus inputs in the compute dtype.
Compute dtype is fp32 (fp64 for fp64 inputs); bf16 and fp16 are converted once per call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sparsebalance_kernels.selection import BlockSelection, Tile

# 64 own blocks of 128 tokens and two heads hold 8 MiB of scores; more at once only leaves the cache.
OWN_BLOCKS_AT_ONCE = 64

# A product of fewer rows takes another path in MKL and rounds otherwise; how many rows keep a block depends on later
# tokens, and their change must not move one bit of an earlier output.
LEAST_ROWS = 16


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: BlockSelection, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over own blocks and the selected history.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, Hkv, D]``.  Every token belongs to one own block of ``selection``.
        selection: kept blocks; a constant of the gradient.

    Returns:
        (output ``[T, H, D]`` in the dtype of ``query``, log-sum-exp ``[T, H]`` in the compute dtype, no gradient).
    """
    return _Attend.apply(query, key, value, selection, scale)  # type: ignore[no-any-return, no-untyped-call]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, selection, scale):  # type: ignore[no-untyped-def]
        dtype = _compute_dtype(query.dtype)
        num_kv_heads = key.shape[1]
        # [Hkv, T, G, D]: the rows of one kv head are contiguous, as the tiles number them.
        q = query.to(dtype).unflatten(1, (num_kv_heads, -1)).transpose(0, 1) * scale
        k, v = key.to(dtype).transpose(0, 1).contiguous(), value.to(dtype).transpose(0, 1).contiguous()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
        _own_blocks_forward(q, k, v, selection, out, lse)
        for tile in selection.tiles:
            _history_forward(q, k, v, selection.block_size, tile, out, lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.selection, ctx.scale = selection, scale
        # Copies: with one kv head a reshape would hand out the very tensors that the backward pass reads.
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
        result.unflatten(1, (num_kv_heads, -1)).copy_(out.transpose(0, 1))
        lse_by_token = lse.new_empty(query.shape[:2])
        lse_by_token.unflatten(1, (num_kv_heads, -1)).copy_(lse.transpose(0, 1))
        ctx.mark_non_differentiable(lse_by_token)
        return result, lse_by_token

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, _grad_lse):  # type: ignore[no-untyped-def]
        query, key, value, out, lse = ctx.saved_tensors
        selection, scale, dtype = ctx.selection, ctx.scale, out.dtype
        num_kv_heads = key.shape[1]
        q = (query.to(dtype).unflatten(1, (num_kv_heads, -1)).transpose(0, 1) * scale).contiguous()
        k, v = key.to(dtype).transpose(0, 1).contiguous(), value.to(dtype).transpose(0, 1).contiguous()
        d_out = grad_out.to(dtype).unflatten(1, (num_kv_heads, -1)).transpose(0, 1).contiguous()
        delta = (d_out * out).sum(-1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # backward() may be called under autocast, which the forward pass's caller has turned off only for itself.
        with torch.autocast(q.device.type, enabled=False):
            _own_blocks_backward(q, k, v, selection, lse, delta, d_out, dq, dk, dv)
            for tile in selection.tiles:
                _history_backward(q, k, v, selection.block_size, tile, lse, delta, d_out, dq, dk, dv)
        dq = dq.mul_(scale).transpose(0, 1).flatten(1, 2)
        return dq.to(query.dtype), dk.transpose(0, 1).to(key.dtype), dv.transpose(0, 1).to(value.dtype), None, None


def _block_index(
    selection: BlockSelection, first: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token indices ``[N, W]`` of up to OWN_BLOCKS_AT_ONCE own blocks, which of them are real, and the causal mask.

    W is the longest of these blocks; padding repeats the block's last token and is masked.
    """
    blocks = selection.own_blocks[first : first + OWN_BLOCKS_AT_ONCE]
    starts = torch.tensor([start for start, _ in blocks], device=device)
    lengths = torch.tensor([length for _, length in blocks], device=device)
    offset = torch.arange(max(length for _, length in blocks), device=device)
    real = offset < lengths[:, None]
    index = starts[:, None] + torch.minimum(offset, lengths[:, None] - 1)
    visible = (offset[:, None] >= offset) & real[:, None, :]
    return index, real, visible


def _own_blocks_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: BlockSelection,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Causal attention inside each own block; writes every row of out ``[Hkv, T, G, D]`` and lse ``[Hkv, T, G]``."""
    group = q.shape[2]
    for first in range(0, len(selection.own_blocks), OWN_BLOCKS_AT_ONCE):
        index, real, visible = _block_index(selection, first, q.device)
        queries = q[:, index].flatten(2, 3)
        hidden = ~visible.repeat_interleave(group, dim=1)
        scores = torch.matmul(queries, k[:, index].transpose(-1, -2)).masked_fill_(hidden, -torch.inf)
        block_lse = torch.logsumexp(scores, dim=-1)
        probabilities = scores.sub_(block_lse[..., None]).exp_()
        block_out = torch.matmul(probabilities, v[:, index]).unflatten(2, (-1, group))
        out[:, index[real]] = block_out[:, real]
        lse[:, index[real]] = block_lse.unflatten(2, (-1, group))[:, real]


def _own_blocks_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: BlockSelection,
    lse: torch.Tensor,
    delta: torch.Tensor,
    d_out: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Gradients of the own-block part under the whole row's log-sum-exp; overwrites dq, dk and dv of every token."""
    group = q.shape[2]
    for first in range(0, len(selection.own_blocks), OWN_BLOCKS_AT_ONCE):
        index, real, visible = _block_index(selection, first, q.device)
        hidden = ~(visible & real[:, :, None]).repeat_interleave(group, dim=1)
        queries, grads = q[:, index].flatten(2, 3), d_out[:, index].flatten(2, 3)
        keys, values = k[:, index], v[:, index]
        scores = torch.matmul(queries, keys.transpose(-1, -2)).sub_(lse[:, index].flatten(2, 3)[..., None])
        # Masked after exp as well: a hidden score may exceed the log-sum-exp and overflow.
        probabilities = scores.masked_fill_(hidden, -torch.inf).exp_()
        d_scores = torch.matmul(grads, values.transpose(-1, -2)).sub_(delta[:, index].flatten(2, 3)[..., None])
        d_scores.mul_(probabilities)
        where = index[real]
        dq[:, where] = torch.matmul(d_scores, keys).unflatten(2, (-1, group))[:, real]
        dk[:, where] = torch.matmul(d_scores.transpose(-1, -2), queries)[:, real]
        dv[:, where] = torch.matmul(probabilities.transpose(-1, -2), grads)[:, real]


def _history_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_size: int,
    tile: Tile,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge one tile's kept history into out and lse."""
    num_kv_heads, _, _, dim = q.shape
    rows_of_head = q[:, tile.start : tile.stop].flatten(1, 2)
    num_rows, num_pairs = rows_of_head.shape[1], tile.rows.numel()
    partial = q.new_empty(num_pairs, dim)
    maximum, total = q.new_empty(num_pairs), q.new_empty(num_pairs)
    scores = q.new_empty(max(LEAST_ROWS, *map(max, tile.pair_counts)), block_size)
    first_pair = 0
    for head, counts in enumerate(tile.pair_counts):
        for block, count in enumerate(counts):
            if not count:
                continue
            pairs = slice(first_pair, first_pair + count)
            first_pair += count
            start = tile.document_start + block * block_size
            queries = rows_of_head[head].index_select(0, tile.rows[pairs])
            if count < LEAST_ROWS:
                queries = F.pad(queries, (0, 0, 0, LEAST_ROWS - count))
            all_scores = torch.mm(queries, k[head, start : start + block_size].T, out=scores[: len(queries)])
            block_scores = all_scores[:count]
            block_maximum = torch.amax(block_scores, dim=-1, out=maximum[pairs])
            block_scores.sub_(block_maximum[:, None]).exp_()
            torch.sum(block_scores, dim=-1, out=total[pairs])
            if count < LEAST_ROWS:
                partial[pairs] = torch.mm(all_scores, v[head, start : start + block_size])[:count]
            else:
                torch.mm(all_scores, v[head, start : start + block_size], out=partial[pairs])

    row_of_pair = _global_rows(tile, num_rows)
    own_lse = lse[:, tile.start : tile.stop].reshape(num_kv_heads * num_rows)
    reference = own_lse.scatter_reduce(0, row_of_pair, maximum, "amax")
    weight = maximum.sub_(reference.index_select(0, row_of_pair)).exp_()
    own_weight = (own_lse - reference).exp_()
    row_total = own_weight.index_add(0, row_of_pair, total.mul_(weight))
    history = F.embedding_bag(
        tile.slots,
        partial,
        tile.row_offsets,
        mode="sum",
        per_sample_weights=weight.index_select(0, tile.slots),
        include_last_offset=True,
    )
    own_out = out[:, tile.start : tile.stop].reshape(num_kv_heads * num_rows, dim)
    merged = history.addcmul_(own_out, own_weight[:, None]).div_(row_total[:, None])
    out[:, tile.start : tile.stop] = merged.view(num_kv_heads, -1, q.shape[2], dim)
    lse[:, tile.start : tile.stop] = row_total.log_().add_(reference).view(num_kv_heads, -1, q.shape[2])


def _history_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_size: int,
    tile: Tile,
    lse: torch.Tensor,
    delta: torch.Tensor,
    d_out: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Add one tile's kept history to dq, dk and dv; probabilities are recomputed from the saved log-sum-exp."""
    dim = q.shape[-1]
    tokens = slice(tile.start, tile.stop)
    rows_of_head, grads_of_head = q[:, tokens].flatten(1, 2), d_out[:, tokens].flatten(1, 2)
    lse_of_head, delta_of_head = lse[:, tokens].flatten(1, 2), delta[:, tokens].flatten(1, 2)
    partial = q.new_empty(tile.rows.numel(), dim)
    most = max(map(max, tile.pair_counts))
    scores, d_scores = q.new_empty(most, block_size), q.new_empty(most, block_size)
    first_pair = 0
    for head, counts in enumerate(tile.pair_counts):
        for block, count in enumerate(counts):
            if not count:
                continue
            rows = tile.rows[first_pair : first_pair + count]
            start = tile.document_start + block * block_size
            keys, values = k[head, start : start + block_size], v[head, start : start + block_size]
            queries, grads = rows_of_head[head].index_select(0, rows), grads_of_head[head].index_select(0, rows)
            row_lse = lse_of_head[head].index_select(0, rows)[:, None]
            row_delta = delta_of_head[head].index_select(0, rows)[:, None]
            probabilities = torch.addmm(row_lse, queries, keys.T, beta=-1, out=scores[:count]).exp_()
            dv[head, start : start + block_size].addmm_(probabilities.T, grads)
            block_d = torch.addmm(row_delta, grads, values.T, beta=-1, out=d_scores[:count]).mul_(probabilities)
            dk[head, start : start + block_size].addmm_(block_d.T, queries)
            torch.mm(block_d, keys, out=partial[first_pair : first_pair + count])
            first_pair += count
    history = F.embedding_bag(tile.slots, partial, tile.row_offsets, mode="sum", include_last_offset=True)
    dq[:, tokens] += history.view(q.shape[0], -1, q.shape[2], dim)


def _global_rows(tile: Tile, num_rows: int) -> torch.Tensor:
    """int64 [pairs]: each pair's row over all kv heads, head * num_rows + local row."""
    per_head = torch.tensor([sum(counts) for counts in tile.pair_counts], device=tile.rows.device)
    first_row = torch.arange(0, len(tile.pair_counts) * num_rows, num_rows, device=tile.rows.device)
    return tile.rows + torch.repeat_interleave(first_row, per_head)
