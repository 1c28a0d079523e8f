"""Forward kernels: partial results of gathered rows, and the q tiles that finish every row.

A row is (query token, query head).  gather_forward runs first: for each (kv head, history block) it takes the listed
rows through the block and writes one partial result per pair.  tile_forward then starts the online softmax of each
row from its merged partials (ascending blocks), adds the own block, causally, and the history blocks of the tile's
union list, and writes output and log-sum-exp once.  A row's history is in one of the two, never in both.

The softmax is in base 2 with fp32 statistics: P = exp2(scale * score - m), m the running maximum.  Every row meets a
key that it keeps in its first key tile (padding rows too: their q is 0 and their scores finite), so m is finite from
then on; -inf - -inf can only come up where partials are merged, and is caught there.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sparsebalance_kernels.triton_backend.configs import (
    TileConfig,
    dot_precision,
    gather_forward_config,
    is_hopper,
    launch_options,
    padded_head_dim,
    partial_dtype,
    tile_forward_config,
)
from sparsebalance_kernels.triton_backend.indexing import GatherIndex, ItemTable, TileLists
from sparsebalance_kernels.triton_backend.layout import BlockTable, tiles_per_block

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def tile_offsets(index, stride, BLOCK_D: tl.constexpr):
    """int64 ``[rows, BLOCK_D]``: element offsets of the rows ``index`` of a tensor whose last stride is 1."""
    return index.to(tl.int64)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def near_offsets(stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[ROWS, BLOCK_D]``: offsets of the rows of a tile from its first row; int32, in half the registers of int64.

    :func:`addressable` keeps strides so small that they fit.
    """
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(pointers, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tile ``[rows, BLOCK_D]``; rows that are not ``valid`` and columns from HEAD_DIM on are 0."""
    return tl.load(pointers, mask=valid[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_all(pointers, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tile ``[rows, BLOCK_D]`` of which every row exists; columns from HEAD_DIM on are 0."""
    if HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(pointers, tile, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the ``valid`` rows and first HEAD_DIM columns of a tile, in the dtype of the buffer."""
    mask = valid[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_step(scores, keep, value, scale, acc, total, highest, PRECISION: tl.constexpr):
    """One key tile of the online softmax; ``keep`` says which rows keep its keys (None: all).

    Args:
        scores: fp32 ``[rows, keys]``, unscaled, -inf where hidden; ``scale`` is above 0, so that the largest score has
            the largest product, and includes log2(e).
        value: ``[keys, BLOCK_D]``.
        acc, total, highest: unnormalised output, sum and maximum (base 2) so far; None in a step that stands alone.
    """
    tile_highest = tl.max(scores, 1) * scale
    if acc is None:
        new_highest = tile_highest
        reference = new_highest
    elif keep is None:
        new_highest = tl.maximum(highest, tile_highest)
        reference = new_highest
    else:
        # exp2(score - inf) = 0: one select per row hides the tile, where a mask would take one per score.
        new_highest = tl.maximum(highest, tl.where(keep, tile_highest, float("-inf")))
        reference = tl.where(keep, new_highest, float("inf"))
    probabilities = tl.exp2(tl.fma(scores, scale, -reference[:, None]))
    tile_total = tl.sum(probabilities, 1)
    if acc is None:
        return tl.dot(probabilities.to(value.dtype), value, input_precision=PRECISION), tile_total, new_highest
    else:
        correction = tl.exp2(highest - new_highest)
        total = total * correction + tile_total
        acc = tl.dot(probabilities.to(value.dtype), value, acc * correction[:, None], input_precision=PRECISION)
        return acc, total, new_highest


@triton.jit(do_not_specialize=["first_block", "listed_blocks", "num_lists"])
def _gather_forward_kernel(
    query,
    key,
    value,
    starts,
    rows,
    block_offsets,
    item_offsets,
    item_lists,
    partial,
    partial_lse,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    scale,
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
):
    list_number = tl.load(item_lists + tl.program_id(0))
    if list_number >= num_lists:
        return
    piece = tl.program_id(0) - tl.load(item_offsets + list_number)
    first_pair = tl.load(block_offsets + list_number) + piece * ROWS
    count = tl.load(block_offsets + list_number + 1) - first_pair
    valid = tl.arange(0, ROWS) < count
    row = tl.load(rows + first_pair + tl.arange(0, ROWS), mask=valid, other=0)
    kv_head = (list_number // listed_blocks).to(tl.int64)
    start = tl.load(starts + first_block + list_number % listed_blocks).to(tl.int64)

    head_offset = (kv_head * GROUP + row % GROUP) * query_stride_h
    query_offsets = tile_offsets(row // GROUP, query_stride_t, BLOCK_D) + head_offset[:, None]
    q = load_rows(query + query_offsets, valid, HEAD_DIM, BLOCK_D)

    # A history block is complete and lies before every row that keeps it: no key is masked.
    first_key = key + kv_head * key_stride_h + start * key_stride_t
    first_value = value + kv_head * value_stride_h + start * value_stride_t
    key_offsets = near_offsets(key_stride_t, KEYS, BLOCK_D)
    value_offsets = near_offsets(value_stride_t, KEYS, BLOCK_D)
    if KEYS == BLOCK_SIZE:
        k = load_all(first_key + key_offsets, HEAD_DIM, BLOCK_D)
        v = load_all(first_value + value_offsets, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        acc, total, highest = _softmax_step(scores, None, v, scale, None, None, None, PRECISION)
    else:
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        for offset in range(0, BLOCK_SIZE, KEYS):
            k = load_all(first_key + tl.cast(offset, tl.int64) * key_stride_t + key_offsets, HEAD_DIM, BLOCK_D)
            v = load_all(first_value + tl.cast(offset, tl.int64) * value_stride_t + value_offsets, HEAD_DIM, BLOCK_D)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            acc, total, highest = _softmax_step(scores, None, v, scale, acc, total, highest, PRECISION)

    # The pairs of an item lie side by side.  Computed anew: kept from above, they would take registers from the loop.
    pair = first_pair + tl.arange(0, ROWS)
    valid = pair < first_pair + count
    partial_rows = partial + first_pair.to(tl.int64) * HEAD_DIM + near_offsets(HEAD_DIM, ROWS, BLOCK_D)
    store_rows(partial_rows, acc * (1.0 / total)[:, None], valid, HEAD_DIM, BLOCK_D)
    tl.store(partial_lse + pair, highest + tl.log2(total), mask=valid)


@triton.jit
def _merged_partials(
    partial, partial_lse, slots, row_offsets, row, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Unnormalised output, sum and maximum of each row's partials, in ascending block order; nothing: 0, 0, -inf."""
    slot = tl.load(row_offsets + row, mask=valid, other=0)
    stop = tl.load(row_offsets + row + 1, mask=valid, other=0)
    acc = tl.zeros([row.shape[0], BLOCK_D], tl.float32)
    total = tl.zeros([row.shape[0]], tl.float32)
    highest = tl.full([row.shape[0]], float("-inf"), tl.float32)
    pair = tl.load(slots + slot, mask=slot < stop, other=0)
    for _ in range(tl.max(stop - slot, 0)):
        present = slot < stop
        part_lse = tl.load(partial_lse + pair, mask=present, other=float("-inf"))
        part = load_rows(partial + tile_offsets(pair, HEAD_DIM, BLOCK_D), present, HEAD_DIM, BLOCK_D)
        # The next round's pair numbers are on their way while this round's partials are awaited.
        slot += 1
        pair = tl.load(slots + slot, mask=slot < stop, other=0)
        new_highest = tl.maximum(highest, part_lse)
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2(part_lse - reference)
        correction = tl.exp2(highest - reference)
        acc = acc * correction[:, None] + part.to(tl.float32) * weight[:, None]
        total = total * correction + weight
        highest = new_highest
    return acc, total, highest


@triton.jit(do_not_specialize=["num_tokens", "words", "num_tiles", "first_block", "slab_blocks"])
def _tile_forward_kernel(
    query,
    key,
    value,
    bits,
    starts,
    stops,
    firsts,
    list_offsets,
    list_blocks,
    partial,
    partial_lse,
    slots,
    row_offsets,
    out,
    lse,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    out_stride_t,
    out_stride_h,
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
    HAS_PARTIALS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TILES: tl.constexpr = BLOCK_SIZE // ROWS
    # The last tiles of a document have the most history: they go first, so that none of them ends alone.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    block = first_block + tile // TILES
    before = tile % TILES * ROWS  # keys of the own block before the tile
    block_start = tl.load(starts + block)
    stop = tl.load(stops + block)
    first = block_start + before
    if first >= stop:
        return
    valid = tl.arange(0, ROWS) < stop - first

    if HAS_PARTIALS:
        row = (head * slab_blocks + block - first_block) * BLOCK_SIZE + before + tl.arange(0, ROWS)
        acc, total, highest = _merged_partials(partial, partial_lse, slots, row_offsets, row, valid, HEAD_DIM, BLOCK_D)
    else:
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        highest = tl.full([ROWS], float("-inf"), tl.float32)

    query_tile = query + head.to(tl.int64) * query_stride_h + first.to(tl.int64) * query_stride_t
    query_tile = query_tile + near_offsets(query_stride_t, ROWS, BLOCK_D)
    q = load_rows(query_tile, valid, HEAD_DIM, BLOCK_D)
    kv_head = (head // GROUP).to(tl.int64)
    key_head = key + kv_head * key_stride_h
    value_head = value + kv_head * value_stride_h
    key_offsets = near_offsets(key_stride_t, KEYS, BLOCK_D)
    value_offsets = near_offsets(value_stride_t, KEYS, BLOCK_D)

    # Own block.  Its end is not known when compiling, so even a single step goes through the pipeline.
    for offset in range(0, tl.minimum(before + ROWS, stop - block_start), KEYS):
        position = (block_start + offset).to(tl.int64)
        exists = block_start + offset + tl.arange(0, KEYS) < stop
        k = load_rows(key_head + position * key_stride_t + key_offsets, exists, HEAD_DIM, BLOCK_D)
        v = load_rows(value_head + position * value_stride_t + value_offsets, exists, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        visible = offset + tl.arange(0, KEYS)[None, :] <= before + tl.arange(0, ROWS)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        acc, total, highest = _softmax_step(scores, None, v, scale, acc, total, highest, PRECISION)

    # Union list: block after block, KEYS keys at a time, as one loop that the compiler can pipeline.
    STEPS: tl.constexpr = BLOCK_SIZE // KEYS
    list_start = tl.load(list_offsets + head * num_tiles + block * TILES + tile % TILES)
    list_stop = tl.load(list_offsets + head * num_tiles + block * TILES + tile % TILES + 1)
    document_first = tl.load(firsts + block)
    document_start = block_start - (block - document_first) * BLOCK_SIZE
    word_rows = bits + head.to(tl.int64) * words * num_tokens + first + tl.arange(0, ROWS)
    for step in range(0, (list_stop - list_start) * STEPS):
        history = tl.load(list_blocks + list_start + step // STEPS) - document_first
        word = tl.load(word_rows + (history // 32).to(tl.int64) * num_tokens, mask=valid, other=0)
        keep = (word >> (history % 32)) & 1 != 0
        position = (document_start + history * BLOCK_SIZE + step % STEPS * KEYS).to(tl.int64)
        k = load_all(key_head + position * key_stride_t + key_offsets, HEAD_DIM, BLOCK_D)
        v = load_all(value_head + position * value_stride_t + value_offsets, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        acc, total, highest = _softmax_step(scores, keep, v, scale, acc, total, highest, PRECISION)

    token = first + tl.arange(0, ROWS)
    valid = token < stop
    out_tile = out + head.to(tl.int64) * out_stride_h + first.to(tl.int64) * out_stride_t
    out_tile = out_tile + near_offsets(out_stride_t, ROWS, BLOCK_D)
    store_rows(out_tile, acc * (1.0 / total)[:, None], valid, HEAD_DIM, BLOCK_D)
    tl.store(lse + head.to(tl.int64) * num_tokens + token, (highest + tl.log2(total)) * LN_2, mask=valid)


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy where the kernels cannot address it: they take any other strides.

    The last stride must be 1, and the rows of one tile (at most 128) must lie within 32-bit offsets of its first.
    """
    return tensor if tensor.stride(-1) == 1 and tensor.stride(0) <= 2**23 else tensor.contiguous()


def gather_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: BlockTable,
    index: GatherIndex,
    items: ItemTable,
    scale: float,
    *,
    config: TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every listed row to its one history block.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, Hkv, D]``.
        index: pairs of the rows of one slab of own blocks.
        items: pieces of its lists, ``gather_forward_config(...).rows`` pairs each.
        scale: factor of the scores.
        config: other tiles than the table's.

    Returns:
        (partial ``[pairs, D]`` in ``partial_dtype``: softmax-weighted mean of the block's values, partial_lse fp32
        ``[pairs]``: log-sum-exp to base 2), both by pair number.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, num_pairs = key.shape[1], index.rows.numel()
    config = config or gather_forward_config(query.dtype, head_dim, table.block_size, is_hopper(query.device))
    assert items.rows_per_item == config.rows, f"items of {items.rows_per_item} pairs, the kernel takes {config.rows}"
    query, factor = _positive_scale(query, scale)
    query, key, value = addressable(query), addressable(key), addressable(value)
    partial = torch.empty(num_pairs, head_dim, dtype=partial_dtype(query.dtype), device=query.device)
    partial_lse = torch.empty(num_pairs, dtype=torch.float32, device=query.device)
    lists = (index.rows, index.block_offsets, items.offsets, items.lists)
    _gather_forward_kernel[(items.lists.numel(),)](
        *(query, key, value, table.starts, *lists, partial, partial_lse),
        *(stride for tensor in (query, key, value) for stride in tensor.stride()[:2]),
        *(factor, index.g0, index.b1 - index.g0, index.block_offsets.numel() - 1),
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=table.block_size,
        BLOCK_D=padded_head_dim(head_dim),
        ROWS=config.rows,
        KEYS=config.keys,
        PRECISION=dot_precision(query.device),
        **launch_options(config, query.device),
    )
    return partial, partial_lse


def tile_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bits: torch.Tensor,
    table: BlockTable,
    lists: TileLists,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    b0: int,
    b1: int,
    gathered: tuple[GatherIndex, torch.Tensor, torch.Tensor] | None = None,
    config: TileConfig | None = None,
) -> None:
    """Finish the rows of the own blocks ``[b0, b1)``: write ``out`` and ``lse`` there, and nowhere else.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, Hkv, D]``.
        bits: the selection, int32 ``[H, words, T]``.
        lists: union lists of all q tiles of ``tile_forward_config(...).rows`` tokens.
        scale: factor of the scores.
        out: ``[T, H, D]`` in the dtype of ``query``, last stride 1; lse: fp32 ``[H, T]``, natural logarithm.
        gathered: index of ``[b0, b1)`` with what :func:`gather_forward` returned for it; None if no row of theirs is
            in gather mode.
        config: other tiles than the table's.
    """
    num_tokens, num_heads, head_dim = query.shape
    config = config or tile_forward_config(query.dtype, head_dim, table.block_size)
    assert lists.rows == config.rows, f"lists of tiles of {lists.rows} rows, the kernel takes {config.rows}"
    assert out.shape == query.shape and addressable(out) is out
    assert bits.is_contiguous() and lse.is_contiguous()
    index, partial, partial_lse = gathered if gathered is not None else (None, out, lse)
    slots, row_offsets = (table.starts, table.starts) if index is None else (index.slots, index.row_offsets)
    assert index is None or (index.b0, index.b1) == (b0, b1)
    tiles = tiles_per_block(table.block_size, config.rows)
    query, factor = _positive_scale(query, scale)
    query, key, value = addressable(query), addressable(key), addressable(value)
    where = (table.starts, table.stops, table.firsts, lists.offsets, lists.blocks)
    _tile_forward_kernel[((b1 - b0) * tiles, num_heads)](
        *(query, key, value, bits, *where, partial, partial_lse, slots, row_offsets, out, lse),
        *(stride for tensor in (query, key, value, out) for stride in tensor.stride()[:2]),
        *(factor, num_tokens, bits.shape[1], table.num_blocks * tiles, b0, b1 - b0),
        GROUP=num_heads // key.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=table.block_size,
        BLOCK_D=padded_head_dim(head_dim),
        ROWS=config.rows,
        KEYS=config.keys,
        HAS_PARTIALS=index is not None,
        PRECISION=dot_precision(query.device),
        **launch_options(config, query.device),
    )


def _positive_scale(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Queries and factor to base 2 that give the same scores, the factor above 0 (:func:`_softmax_step`).

    Zero becomes the smallest normal number: no score differs by it, but -inf times it is still -inf.
    """
    return (-query if scale < 0 else query), max(abs(scale) * LOG2_E.value, 2.0**-126)
