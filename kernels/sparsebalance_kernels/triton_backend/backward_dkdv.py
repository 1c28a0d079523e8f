"""Gradients of keys and values: each key block against the list of its rows, cut into items.

Over the rows i that keep key j, own rows from key j on among them, p and delta as in backward_dq.py:
    dv_j = sum_i p_ij * grad_out_i        dk_j = scale * sum_i p_ij * (grad_out_i.v_j - delta_i) * q_i
The sums are kept in fp32 over all slabs.  A list's first item starts from them and writes them back: no other program
touches these rows in the same launch.  Every further item writes a part of its own, and a second kernel adds the parts
in order.  So nothing is atomic, and a list however long delays no other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsebalance_kernels.triton_backend.configs import (
    TileConfig,
    dkdv_config,
    dot_precision,
    is_sm90,
    largest_tile,
    launch_options,
    padded_head_dim,
)
from sparsebalance_kernels.triton_backend.forward import (
    LOG2_E,
    addressable,
    load_rows,
    near_offsets,
    store_rows,
    tile_offsets,
)
from sparsebalance_kernels.triton_backend.indexing import GatherIndex, ItemTable
from sparsebalance_kernels.triton_backend.layout import BlockTable, tiles_per_block

# Keys per program that adds up parts: 16 rows of 128 fp32 numbers twice are 32 registers of a thread.
ADD_KEYS = 16


@triton.jit(do_not_specialize=["num_tokens", "first_block", "listed_blocks", "num_lists", "rows_per_item"])
def _dkdv_kernel(
    grad_out,
    query,
    key,
    value,
    lse,
    delta,
    starts,
    stops,
    rows,
    block_offsets,
    item_offsets,
    item_lists,
    part_offsets,
    parts,
    dk_sums,
    dv_sums,
    grad_stride_t,
    grad_stride_h,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    factor,
    num_tokens,
    first_block,
    listed_blocks,
    num_lists,
    rows_per_item,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The key tiles of one item are neighbours: they gather the same rows while these are in cache.
    item = tl.program_id(0) // (BLOCK_SIZE // KEYS)
    list_number = tl.load(item_lists + item)
    if list_number >= num_lists:
        return
    block = first_block + list_number % listed_blocks
    offset = tl.program_id(0) % (BLOCK_SIZE // KEYS) * KEYS  # keys of the block before the tile
    first = tl.load(starts + block) + offset
    length = tl.load(stops + block) - first
    if length <= 0:
        return
    kv_head = (list_number // listed_blocks).to(tl.int64)
    number = item - tl.load(item_offsets + list_number)
    list_start = tl.load(block_offsets + list_number) + number * rows_per_item
    list_stop = tl.minimum(list_start + rows_per_item, tl.load(block_offsets + list_number + 1))

    exists = tl.arange(0, KEYS) < length
    key_tile = key + kv_head * key_stride_h + first.to(tl.int64) * key_stride_t
    k = load_rows(key_tile + near_offsets(key_stride_t, KEYS, BLOCK_D), exists, HEAD_DIM, BLOCK_D)
    value_tile = value + kv_head * value_stride_h + first.to(tl.int64) * value_stride_t
    v = load_rows(value_tile + near_offsets(value_stride_t, KEYS, BLOCK_D), exists, HEAD_DIM, BLOCK_D)
    # The products start from the sums: added at the end these would not fit in registers beside them.
    sums_start = (first.to(tl.int64) * KV_HEADS + kv_head) * HEAD_DIM
    sums_tile = near_offsets(KV_HEADS * HEAD_DIM, KEYS, BLOCK_D)
    summed = tl.arange(0, KEYS) < tl.where(number == 0, length, 0)
    dk = load_rows(dk_sums + sums_start + sums_tile, summed, HEAD_DIM, BLOCK_D)
    dv = load_rows(dv_sums + sums_start + sums_tile, summed, HEAD_DIM, BLOCK_D)
    for first_pair in tl.range(list_start, list_stop, ROWS, num_stages=STAGES):
        pair = first_pair + tl.arange(0, ROWS)
        valid = pair < list_stop
        row = tl.load(rows + pair, mask=valid, other=0)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        query_rows = tile_offsets(token, query_stride_t, BLOCK_D) + (head * query_stride_h)[:, None]
        grad_rows = tile_offsets(token, grad_stride_t, BLOCK_D) + (head * grad_stride_h)[:, None]
        q = load_rows(query + query_rows, valid, HEAD_DIM, BLOCK_D)
        g = load_rows(grad_out + grad_rows, valid, HEAD_DIM, BLOCK_D)
        row_lse = tl.load(lse + head * num_tokens + token, mask=valid, other=0.0) * LOG2_E
        row_delta = tl.load(delta + head * num_tokens + token, mask=valid, other=0.0)

        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        probabilities = tl.exp2(tl.fma(scores, factor, -row_lse[None, :]))
        # Own rows do not see later keys; rows past the end of the list see none.
        visible = tl.arange(0, KEYS)[:, None] <= tl.where(valid, token - first, -1)[None, :]
        probabilities = tl.where(visible, probabilities, 0.0)
        dv = tl.dot(probabilities.to(g.dtype), g, dv, input_precision=PRECISION)
        d_probabilities = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        d_scores = probabilities * (d_probabilities - row_delta[None, :])
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)

    if number == 0:
        store_rows(dk_sums + sums_start + sums_tile, dk, exists, HEAD_DIM, BLOCK_D)
        store_rows(dv_sums + sums_start + sums_tile, dv, exists, HEAD_DIM, BLOCK_D)
    else:
        part = parts + ((tl.load(part_offsets + list_number) + number - 1) * (2 * BLOCK_SIZE) + offset) * HEAD_DIM
        part_tile = near_offsets(HEAD_DIM, KEYS, BLOCK_D)
        store_rows(part + part_tile, dk, exists, HEAD_DIM, BLOCK_D)
        store_rows(part + BLOCK_SIZE * HEAD_DIM + part_tile, dv, exists, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["first_block", "listed_blocks"])
def _add_parts_kernel(
    starts,
    stops,
    part_offsets,
    parts,
    dk_sums,
    dv_sums,
    first_block,
    listed_blocks,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
):
    list_number = tl.program_id(0)
    first_part = tl.load(part_offsets + list_number)
    stop_part = tl.load(part_offsets + list_number + 1)
    if first_part == stop_part:
        return
    block = first_block + list_number % listed_blocks
    block_start = tl.load(starts + block).to(tl.int64)
    offset = tl.program_id(1) * KEYS
    exists = offset + tl.arange(0, KEYS) < tl.load(stops + block) - block_start
    sums_start = ((block_start + offset) * KV_HEADS + list_number // listed_blocks) * HEAD_DIM
    sums_tile = near_offsets(KV_HEADS * HEAD_DIM, KEYS, BLOCK_D)
    dk = load_rows(dk_sums + sums_start + sums_tile, exists, HEAD_DIM, BLOCK_D)
    dv = load_rows(dv_sums + sums_start + sums_tile, exists, HEAD_DIM, BLOCK_D)
    part_tile = parts + offset * HEAD_DIM + near_offsets(HEAD_DIM, KEYS, BLOCK_D)
    for number in range(first_part, stop_part):
        part = part_tile + tl.cast(number, tl.int64) * (2 * BLOCK_SIZE * HEAD_DIM)
        dk += load_rows(part, exists, HEAD_DIM, BLOCK_D)
        dv += load_rows(part + BLOCK_SIZE * HEAD_DIM, exists, HEAD_DIM, BLOCK_D)
    store_rows(dk_sums + sums_start + sums_tile, dk, exists, HEAD_DIM, BLOCK_D)
    store_rows(dv_sums + sums_start + sums_tile, dv, exists, HEAD_DIM, BLOCK_D)


def most_parts(num_pairs: int, rows_per_item: int) -> int:
    """Most items beside each list's first one: lists of n pairs have (n - 1) // rows_per_item of them."""
    return num_pairs // rows_per_item


def dkdv(
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
    dk_sums: torch.Tensor,
    dv_sums: torch.Tensor,
    *,
    config: TileConfig | None = None,
) -> None:
    """Add what the rows of the slab give to the sums of dk (without the factor ``scale``) and dv.

    Workspace: ``most_parts(pairs, items.rows_per_item) * 2 * B * D`` fp32 numbers.

    Args:
        grad_out, query: ``[T, H, D]``; key, value: ``[T, Hkv, D]``; last stride 1.
        lse: fp32 ``[H, T]``, natural log-sum-exp over all keys of the row; delta: fp32 ``[H, T]``, ``row_deltas``.
        index: all pairs of the slab's rows, own blocks included.
        items: pieces of ``dkdv_rows_per_item`` pairs (any number is right; it decides the order of summation).
        scale: factor of the scores.
        dk_sums, dv_sums: fp32 ``[T, Hkv, D]``, contiguous, zero before the first slab; see :func:`finish_dkdv`.
        config: tiles other than those of ``dkdv_config``.
    """
    num_pairs = index.rows.numel()
    if not num_pairs:
        return
    _, num_kv_heads, head_dim = key.shape
    config = config or dkdv_config(query.dtype, head_dim, table.block_size, is_sm90(query.device))
    assert lse.is_contiguous() and delta.is_contiguous()
    assert dk_sums.is_contiguous() and dv_sums.is_contiguous()
    grad_out, query, key, value = addressable(grad_out), addressable(query), addressable(key), addressable(value)
    num_lists, listed_blocks = index.block_offsets.numel() - 1, index.b1 - index.g0
    part_offsets = torch.zeros(num_lists + 1, dtype=torch.int64, device=key.device)
    torch.cumsum((items.offsets.diff() - 1).clamp_min(0), 0, out=part_offsets[1:])
    num_parts = most_parts(num_pairs, items.rows_per_item)
    parts = torch.empty(num_parts, 2, table.block_size, head_dim, dtype=torch.float32, device=key.device)
    tiles = tiles_per_block(table.block_size, config.keys)
    _dkdv_kernel[(items.lists.numel() * tiles,)](
        grad_out,
        query,
        key,
        value,
        lse,
        delta,
        table.starts,
        table.stops,
        index.rows,
        index.block_offsets,
        items.offsets,
        items.lists,
        part_offsets,
        parts,
        dk_sums,
        dv_sums,
        *grad_out.stride()[:2],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        scale * LOG2_E.value,
        query.shape[0],
        index.g0,
        listed_blocks,
        num_lists,
        items.rows_per_item,
        GROUP=query.shape[1] // num_kv_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=table.block_size,
        BLOCK_D=padded_head_dim(head_dim),
        ROWS=config.rows,
        KEYS=config.keys,
        PRECISION=dot_precision(query.device),
        STAGES=config.num_stages,
        **launch_options(config, query.device),
    )
    if num_parts:
        keys = largest_tile(table.block_size, ADD_KEYS)
        _add_parts_kernel[(num_lists, table.block_size // keys)](
            table.starts,
            table.stops,
            part_offsets,
            parts,
            dk_sums,
            dv_sums,
            index.g0,
            listed_blocks,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=table.block_size,
            BLOCK_D=padded_head_dim(head_dim),
            KEYS=keys,
            num_warps=4,
        )


def finish_dkdv(
    dk_sums: torch.Tensor, dv_sums: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv in ``dtype`` from the sums over all slabs; ``dk_sums`` is overwritten."""
    return dk_sums.mul_(scale).to(dtype), dv_sums.to(dtype)
