"""Gradient of the queries: partial results of gathered rows, and the q tiles that finish every row.

A row is (query token, query head).  With its log-sum-exp L over all keys that it keeps, and delta = grad_out . out:
    p_j = exp(scale * q.k_j - L)        dq = scale * sum_j p_j * (grad_out.v_j - delta) * k_j
The two kernels mirror those of forward.py.  gather_dq writes one partial dq per (row, history block) pair; tile_dq
takes each row through its own block and the tile's union list, adds the row's partials in ascending block order and
writes dq once.  Every number has one writer and one order of summation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsebalance_kernels.triton_backend.configs import (
    TileConfig,
    dot_precision,
    gather_dq_config,
    launch_options,
    padded_head_dim,
    partial_dtype,
    tile_dq_config,
)
from sparsebalance_kernels.triton_backend.forward import (
    LOG2_E,
    addressable,
    load_all,
    load_rows,
    near_offsets,
    store_rows,
    tile_offsets,
)
from sparsebalance_kernels.triton_backend.indexing import GatherIndex, ItemTable, TileLists
from sparsebalance_kernels.triton_backend.layout import BlockTable, tiles_per_block

# Tokens per program of row_deltas, which only reads.
DELTA_ROWS = 32


@triton.jit(do_not_specialize=["num_tokens"])
def _row_deltas_kernel(
    grad_out,
    out,
    delta,
    grad_stride_t,
    grad_stride_h,
    out_stride_t,
    out_stride_h,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = (tl.program_id(0) * ROWS).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = first + tl.arange(0, ROWS)
    valid = token < num_tokens
    grad_tile = grad_out + head * grad_stride_h + first * grad_stride_t + near_offsets(grad_stride_t, ROWS, BLOCK_D)
    out_tile = out + head * out_stride_h + first * out_stride_t + near_offsets(out_stride_t, ROWS, BLOCK_D)
    grads = load_rows(grad_tile, valid, HEAD_DIM, BLOCK_D).to(tl.float32)
    product = grads * load_rows(out_tile, valid, HEAD_DIM, BLOCK_D).to(tl.float32)
    tl.store(delta + head * num_tokens + token, tl.sum(product, 1), mask=valid)


@triton.jit
def _dq_step(grad, query, key, value, lse, delta, dq, factor, PRECISION: tl.constexpr, keep=None):
    """Add one key tile to dq, still without the scale; ``lse`` and ``factor``, that of scores, are to base 2."""
    scores = tl.fma(tl.dot(query, tl.trans(key), input_precision=PRECISION), factor, -lse[:, None])
    probabilities = tl.exp2(scores)
    if keep is not None:
        # After exp2, never before: a hidden score may exceed the log-sum-exp and overflow.
        probabilities = tl.where(keep, probabilities, 0.0)
    d_scores = probabilities * (tl.dot(grad, tl.trans(value), input_precision=PRECISION) - delta[:, None])
    return tl.dot(d_scores.to(key.dtype), key, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "first_block", "listed_blocks", "num_lists"])
def _gather_dq_kernel(
    grad_out,
    query,
    key,
    value,
    lse,
    delta,
    starts,
    rows,
    block_offsets,
    item_offsets,
    item_lists,
    partial,
    grad_stride_t,
    grad_stride_h,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    factor,
    scale,
    num_tokens,
    first_block,
    listed_blocks,
    num_lists,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    list_number = tl.load(item_lists + tl.program_id(0))
    if list_number >= num_lists:
        return
    piece = tl.program_id(0) - tl.load(item_offsets + list_number)
    first_pair = tl.load(block_offsets + list_number) + piece * ROWS
    pair = first_pair + tl.arange(0, ROWS)
    valid = pair < tl.load(block_offsets + list_number + 1)
    row = tl.load(rows + pair, mask=valid, other=0)
    kv_head = (list_number // listed_blocks).to(tl.int64)
    start = tl.load(starts + first_block + list_number % listed_blocks).to(tl.int64)

    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    query_rows = tile_offsets(token, query_stride_t, BLOCK_D) + (head * query_stride_h)[:, None]
    grad_rows = tile_offsets(token, grad_stride_t, BLOCK_D) + (head * grad_stride_h)[:, None]
    q = load_rows(query + query_rows, valid, HEAD_DIM, BLOCK_D)
    g = load_rows(grad_out + grad_rows, valid, HEAD_DIM, BLOCK_D)
    row_lse = tl.load(lse + head * num_tokens + token, mask=valid, other=0.0) * LOG2_E
    row_delta = tl.load(delta + head * num_tokens + token, mask=valid, other=0.0)

    # A history block is complete and lies before every row that keeps it: no key is masked.
    key_tile = key + kv_head * key_stride_h + start * key_stride_t + near_offsets(key_stride_t, KEYS, BLOCK_D)
    value_tile = value + kv_head * value_stride_h + start * value_stride_t
    value_tile = value_tile + near_offsets(value_stride_t, KEYS, BLOCK_D)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for offset in tl.range(0, BLOCK_SIZE, KEYS, num_stages=STAGES):
        k = load_all(key_tile + tl.cast(offset, tl.int64) * key_stride_t, HEAD_DIM, BLOCK_D)
        v = load_all(value_tile + tl.cast(offset, tl.int64) * value_stride_t, HEAD_DIM, BLOCK_D)
        dq = _dq_step(g, q, k, v, row_lse, row_delta, dq, factor, PRECISION)

    # The pairs of an item lie side by side.
    partial_rows = partial + first_pair.to(tl.int64) * HEAD_DIM + near_offsets(HEAD_DIM, ROWS, BLOCK_D)
    store_rows(partial_rows, dq * scale, valid, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_tokens", "words", "num_tiles", "first_block", "slab_blocks"])
def _tile_dq_kernel(
    grad_out,
    query,
    key,
    value,
    lse,
    delta,
    bits,
    starts,
    stops,
    firsts,
    list_offsets,
    list_blocks,
    partial,
    slots,
    row_offsets,
    dq_out,
    grad_stride_t,
    grad_stride_h,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    dq_stride_t,
    dq_stride_h,
    factor,
    scale,
    num_tokens,
    words,
    num_tiles,
    first_block,
    slab_blocks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LIST_ROWS: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The last tiles of a document have the most history: they go first, so that none of them ends alone.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    block = first_block + tile // (BLOCK_SIZE // ROWS)
    before = tile % (BLOCK_SIZE // ROWS) * ROWS  # keys of the own block before the tile
    block_start = tl.load(starts + block)
    stop = tl.load(stops + block)
    first = block_start + before
    if first >= stop:
        return
    # Rows past the end of the document repeat its last one; they are not stored.
    token = tl.minimum(first + tl.arange(0, ROWS), stop - 1)
    query_head = query + head.to(tl.int64) * query_stride_h
    q = load_all(query_head + tile_offsets(token, query_stride_t, BLOCK_D), HEAD_DIM, BLOCK_D)
    grad_head = grad_out + head.to(tl.int64) * grad_stride_h
    g = load_all(grad_head + tile_offsets(token, grad_stride_t, BLOCK_D), HEAD_DIM, BLOCK_D)
    row_lse = tl.load(lse + head.to(tl.int64) * num_tokens + token) * LOG2_E
    row_delta = tl.load(delta + head.to(tl.int64) * num_tokens + token)
    kv_head = (head // GROUP).to(tl.int64)
    key_tile = key + kv_head * key_stride_h + near_offsets(key_stride_t, KEYS, BLOCK_D)
    value_tile = value + kv_head * value_stride_h + near_offsets(value_stride_t, KEYS, BLOCK_D)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)

    # Own block, up to the tile's last token.
    for offset in tl.range(0, tl.minimum(before + ROWS, stop - block_start), KEYS, num_stages=STAGES - 1):
        position = (block_start + offset).to(tl.int64)
        exists = block_start + offset + tl.arange(0, KEYS) < stop
        k = load_rows(key_tile + position * key_stride_t, exists, HEAD_DIM, BLOCK_D)
        v = load_rows(value_tile + position * value_stride_t, exists, HEAD_DIM, BLOCK_D)
        visible = offset + tl.arange(0, KEYS)[None, :] <= before + tl.arange(0, ROWS)[:, None]
        dq = _dq_step(g, q, k, v, row_lse, row_delta, dq, factor, PRECISION, keep=visible)

    # Union list: block after block, KEYS keys at a time, as one loop that the compiler can pipeline.  One stage more:
    # where the keys lie must be loaded before them.
    STEPS: tl.constexpr = BLOCK_SIZE // KEYS
    list_number = head * num_tiles + block * (BLOCK_SIZE // LIST_ROWS) + before // LIST_ROWS
    list_start = tl.load(list_offsets + list_number)
    list_stop = tl.load(list_offsets + list_number + 1)
    document_first = tl.load(firsts + block)
    document_start = block_start - (block - document_first) * BLOCK_SIZE
    words_of_head = bits + head.to(tl.int64) * words * num_tokens
    for step in tl.range(0, (list_stop - list_start) * STEPS, num_stages=STAGES):
        history = tl.load(list_blocks + list_start + step // STEPS) - document_first
        word = tl.load(words_of_head + (history // 32).to(tl.int64) * num_tokens + token)
        kept = (word >> (history % 32)) & 1 != 0
        position = (document_start + history * BLOCK_SIZE + step % STEPS * KEYS).to(tl.int64)
        k = load_all(key_tile + position * key_stride_t, HEAD_DIM, BLOCK_D)
        v = load_all(value_tile + position * value_stride_t, HEAD_DIM, BLOCK_D)
        # exp2(score - inf) = 0: one select per row hides the tile, where a mask would take one per score.
        reference = tl.where(kept, row_lse, float("inf"))
        dq = _dq_step(g, q, k, v, reference, row_delta, dq, factor, PRECISION)
    dq *= scale

    if HAS_PARTIALS:
        # From the start again: ``token`` would be held in registers through the loops.
        offset = tl.minimum(tl.arange(0, ROWS), stop - first - 1)
        row = (head * slab_blocks + block - first_block) * BLOCK_SIZE + before + offset
        slot = tl.load(row_offsets + row)
        slot_stop = tl.load(row_offsets + row + 1)
        pair = tl.load(slots + slot, mask=slot < slot_stop, other=0)
        for _ in range(tl.max(slot_stop - slot, 0)):
            part = load_rows(partial + tile_offsets(pair, HEAD_DIM, BLOCK_D), slot < slot_stop, HEAD_DIM, BLOCK_D)
            # The next round's pair numbers are on their way while this round's partials are awaited.
            slot += 1
            pair = tl.load(slots + slot, mask=slot < slot_stop, other=0)
            dq += part.to(tl.float32)
    dq_tile = dq_out + head.to(tl.int64) * dq_stride_h + first.to(tl.int64) * dq_stride_t
    valid = tl.arange(0, ROWS) < stop - first
    store_rows(dq_tile + near_offsets(dq_stride_t, ROWS, BLOCK_D), dq, valid, HEAD_DIM, BLOCK_D)


def row_deltas(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """fp32 ``[H, T]``: sum over the head dim of grad_out * out, both ``[T, H, D]``, products and sum in fp32."""
    num_tokens, num_heads, head_dim = out.shape
    grad_out, out = addressable(grad_out), addressable(out)
    delta = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=out.device)
    if num_tokens:
        _row_deltas_kernel[(triton.cdiv(num_tokens, DELTA_ROWS), num_heads)](
            grad_out,
            out,
            delta,
            *grad_out.stride()[:2],
            *out.stride()[:2],
            num_tokens,
            HEAD_DIM=head_dim,
            BLOCK_D=padded_head_dim(head_dim),
            ROWS=DELTA_ROWS,
            num_warps=8,
        )
    return delta


def gather_dq(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    table: BlockTable,
    index: GatherIndex,
    items: ItemTable,
    scale: float,
    *,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """What every listed row gets from its one history block.

    Args:
        grad_out, query: ``[T, H, D]``; key, value: ``[T, Hkv, D]``.
        lse: fp32 ``[H, T]``, natural log-sum-exp over all keys of a row; delta: fp32 ``[H, T]``, :func:`row_deltas`.
        index: pairs of the rows in gather mode of one slab of own blocks.
        items: pieces of its lists, ``gather_dq_config(...).rows`` pairs each.
        scale: factor of the scores.
        config: other tiles than the table's.

    Returns:
        partial dq ``[pairs, D]`` in ``partial_dtype``, by pair number.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_pairs = key.shape[1], index.rows.numel()
    config = config or gather_dq_config(query.dtype, head_dim, table.block_size)
    assert items.rows_per_item == config.rows, f"items of {items.rows_per_item} pairs, the kernel takes {config.rows}"
    assert lse.is_contiguous() and delta.is_contiguous()
    grad_out, query, key, value = addressable(grad_out), addressable(query), addressable(key), addressable(value)
    partial = torch.empty(num_pairs, head_dim, dtype=partial_dtype(query.dtype), device=query.device)
    _gather_dq_kernel[(items.lists.numel(),)](
        grad_out,
        query,
        key,
        value,
        lse,
        delta,
        table.starts,
        index.rows,
        index.block_offsets,
        items.offsets,
        items.lists,
        partial,
        *grad_out.stride()[:2],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        scale * LOG2_E.value,
        scale,
        num_tokens,
        index.g0,
        index.b1 - index.g0,
        index.block_offsets.numel() - 1,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=table.block_size,
        BLOCK_D=padded_head_dim(head_dim),
        ROWS=config.rows,
        KEYS=config.keys,
        PRECISION=dot_precision(query.device),
        STAGES=config.num_stages,
        **launch_options(config, query.device),
    )
    return partial


def tile_dq(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    bits: torch.Tensor,
    table: BlockTable,
    lists: TileLists,
    scale: float,
    dq: torch.Tensor,
    *,
    b0: int,
    b1: int,
    gathered: tuple[GatherIndex, torch.Tensor] | None = None,
    config: TileConfig | None = None,
) -> None:
    """Finish the rows of the own blocks ``[b0, b1)``: write ``dq`` there, and nowhere else.

    Args:
        grad_out, query, key, value, lse, delta, scale: as for :func:`gather_dq`.
        bits: the selection, int32 ``[H, words, T]``.
        lists: union lists of all q tiles, of ``config.rows`` tokens or a multiple.
        dq: ``[T, H, D]`` in the dtype of ``query``, last stride 1.
        gathered: index of ``[b0, b1)`` with what :func:`gather_dq` returned for it; None if no row of theirs is in
            gather mode.
        config: other tiles than the table's.
    """
    num_tokens, num_heads, head_dim = query.shape
    config = config or tile_dq_config(query.dtype, head_dim, table.block_size)
    assert lists.rows % config.rows == 0, f"lists of tiles of {lists.rows} rows, the kernel takes {config.rows}"
    assert dq.shape == query.shape and addressable(dq) is dq
    assert bits.is_contiguous() and lse.is_contiguous() and delta.is_contiguous()
    index, partial = gathered if gathered is not None else (None, dq)
    slots, row_offsets = (table.starts, table.starts) if index is None else (index.slots, index.row_offsets)
    assert index is None or (index.b0, index.b1) == (b0, b1)
    grad_out, query, key, value = addressable(grad_out), addressable(query), addressable(key), addressable(value)
    _tile_dq_kernel[((b1 - b0) * tiles_per_block(table.block_size, config.rows), num_heads)](
        grad_out,
        query,
        key,
        value,
        lse,
        delta,
        bits,
        table.starts,
        table.stops,
        table.firsts,
        lists.offsets,
        lists.blocks,
        partial,
        slots,
        row_offsets,
        dq,
        *grad_out.stride()[:2],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *dq.stride()[:2],
        scale * LOG2_E.value,
        scale,
        num_tokens,
        bits.shape[1],
        table.num_blocks * tiles_per_block(table.block_size, lists.rows),
        b0,
        b1 - b0,
        GROUP=num_heads // key.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=table.block_size,
        BLOCK_D=padded_head_dim(head_dim),
        ROWS=config.rows,
        KEYS=config.keys,
        LIST_ROWS=lists.rows,
        HAS_PARTIALS=index is not None,
        PRECISION=dot_precision(query.device),
        STAGES=config.num_stages,
        **launch_options(config, query.device),
    )
