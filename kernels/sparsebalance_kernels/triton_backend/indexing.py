"""From the bits of a selection to the lists that the attention kernels walk, by counting and prefix sums only.

Two forms of one selection: *union lists* (per query tile, the blocks that any of its rows keeps) and the *gather
index* (per kv head and block, the rows that keep it, and back).  No atomics and no sort: every position is a prefix
sum, so equal bits give equal lists.  ``bits`` are contiguous throughout, as :func:`routing.route` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsebalance_kernels.triton_backend.layout import BlockTable, tiles_per_block

# A tile that walks the union of its rows' blocks multiplies BM rows with each of them, U * BM (row, block) pairs,
# where P are wanted; gathering multiplies P but moves every row and its partial result through memory.
TILE_RATIO = 2.0

# Tokens and warps of one program of the gather index: with the 32 blocks of a word, 16 bits per thread at a time.
INDEX_TOKENS = 128
INDEX_WARPS = 8


@dataclass(frozen=True)
class TileLists:
    """Union lists of the query tiles in tile mode.

    Attributes:
        offsets: int32 [H * tiles + 1]; the list of tile t of head h is ``blocks[offsets[h * tiles + t] :
            offsets[h * tiles + t + 1]]``, empty for a tile in gather mode.
        blocks: int32 [total], global block numbers, ascending within a list.
        is_gather: bool [H, tiles], the tiles in gather mode.
        rows: BM, tokens per tile.
    """

    offsets: torch.Tensor
    blocks: torch.Tensor
    is_gather: torch.Tensor
    rows: int


@dataclass(frozen=True)
class GatherIndex:
    """The (row, block) pairs of the own blocks [b0, b1), both ways.  A pair's number is its position in ``rows``.

    Attributes:
        rows: int32 [pairs], packed token * G + head in group; sorted by (kv head, block, head in group, token).
        block_offsets: int32 [Hkv * nb + 1]; the pairs of kv head k and global block g0 + i are
            ``block_offsets[k * nb + i]`` up to the next.
        slots: int32 [pairs] or None, pair numbers sorted by (row number, block).
        row_offsets: int32 [H * (b1 - b0) * B + 1] or None; first position in ``slots`` of row number
            (h * (b1 - b0) + b - b0) * B + token - starts[b].
        g0: first block listed, the first block of b0's document; nb = b1 - g0.
        b0, b1: the own blocks.
    """

    rows: torch.Tensor
    block_offsets: torch.Tensor
    slots: torch.Tensor | None
    row_offsets: torch.Tensor | None
    g0: int
    b0: int
    b1: int


@dataclass(frozen=True)
class ItemTable:
    """Pieces of up to ``rows_per_item`` pairs of the lists of a GatherIndex, list after list.

    Item i covers pairs ``block_offsets[l] + (i - offsets[l]) * rows_per_item ...`` of its list l = ``lists[i]``.

    Attributes:
        offsets: int32 [lists + 1], number of each list's first item.
        lists: int32 [bound], the list of each item; surplus items, past ``offsets[-1]``, have the number of lists.
        rows_per_item: most pairs of one item.
    """

    offsets: torch.Tensor
    lists: torch.Tensor
    rows_per_item: int


def tile_lists(bits: torch.Tensor, table: BlockTable, rows: int) -> TileLists:
    """Mode of every query tile, and the union lists of those in tile mode.

    A tile of which U blocks are kept by any row, in P (row, block) pairs, is in tile mode iff
    U * rows <= TILE_RATIO * P: a pure function of the bits.  One host read (the total length of the lists).

    Args:
        bits: int32 ``[H, words, T]``.
        table: the blocks.
        rows: tokens per tile, a power of two that divides the block size.
    """
    per_block = tiles_per_block(table.block_size, rows)
    unions, pairs = _tile_counts(bits, table, rows)
    is_gather = unions * rows > TILE_RATIO * pairs
    offsets = _offsets(unions.masked_fill(is_gather, 0))
    blocks = torch.empty(int(offsets[-1]), dtype=torch.int32, device=bits.device)
    if blocks.numel():
        num_heads, words, num_tokens = bits.shape
        _fill_unions[(table.num_blocks * per_block, num_heads)](
            bits,
            table.starts,
            table.stops,
            table.firsts,
            offsets,
            is_gather,
            blocks,
            num_tokens,
            words,
            per_block,
            BLOCK_T=rows,
        )
    return TileLists(offsets, blocks, is_gather, rows)


def pairs_per_block(bits: torch.Tensor, table: BlockTable, is_gather: torch.Tensor | None = None) -> torch.Tensor:
    """int32 ``[N]``: the (row, history block) pairs of each own block's rows, over all heads.

    Args:
        bits: int32 ``[H, words, T]``.
        table: the blocks.
        is_gather: bool ``[H, tiles]`` of :class:`TileLists`; only the pairs of these tiles count.
    """
    if not table.num_blocks:
        return torch.zeros(0, dtype=torch.int32, device=bits.device)
    rows = _tokens_at_once(table)
    if is_gather is not None:
        rows = table.num_blocks * table.block_size // is_gather.shape[1]
    _, pairs = _tile_counts(bits, table, rows)
    if is_gather is not None:
        pairs = pairs.masked_fill(~is_gather, 0)
    return pairs.unflatten(1, (table.num_blocks, -1)).sum((0, 2), dtype=torch.int32)


def plan_slabs(pairs: list[int], max_pairs: int) -> list[tuple[int, int]]:
    """Cut the own blocks into consecutive ranges [b0, b1) with at most ``max_pairs`` pairs, or one block, each.

    Ranges begin and end with a block that has pairs; what lies between them has none.

    Example: pairs [0, 3, 0, 4, 9, 0], max_pairs 7 -> [(1, 4), (4, 5)].
    """
    slabs: list[tuple[int, int]] = []
    total = 0
    for block, count in enumerate(pairs):
        if not count:
            continue
        if slabs and total + count <= max_pairs:
            slabs[-1] = (slabs[-1][0], block + 1)
            total += count
        else:
            slabs.append((block, block + 1))
            total = count
    return slabs


def gather_index(
    bits: torch.Tensor,
    table: BlockTable,
    b0: int,
    b1: int,
    *,
    num_pairs: int,
    group: int,
    is_gather: torch.Tensor | None = None,
    include_own: bool = False,
) -> GatherIndex:
    """Index the kept pairs of the rows of own blocks [b0, b1), b0 < b1.  No host read.

    Pairs are counted per (kv head, block, head in group, own block, part of the own block); the prefix sum of these
    counts, in this order, is where a program puts what it has counted.  Workspace: 8 bytes for each of
    the H * parts * (own block, history block) counts, and 8 bytes per row.

    Args:
        bits: int32 ``[H, words, T]``.
        table: the blocks.
        num_pairs: pairs that there are, a sum over ``pairs_per_block``; with ``include_own`` one more for each row.
        group: query heads per kv head, G.
        is_gather: bool ``[H, tiles]``; only rows of these tiles are indexed.
        include_own: list every row under its own block too (first in the block's list of each head); no slots then.
    """
    num_heads, words, num_tokens = bits.shape
    num_kv_heads, own, device = num_heads // group, b1 - b0, bits.device
    rows_at_once = _tokens_at_once(table)
    parts = triton.cdiv(table.block_size, rows_at_once)
    g0 = table.first_of(b0)
    # Own blocks of the slab that may keep block g0 + i: those after it, or from it on, up to the document's end.
    number = torch.arange(g0, b1, dtype=torch.int32, device=device)
    earliest = (number + (0 if include_own else 1)).clamp(min=b0)
    consumers = _offsets((table.ends[g0:b1].clamp(max=b1) - earliest).clamp(min=0))
    combinations = table.history_blocks(b0, b1) + (own if include_own else 0)
    counts = torch.empty(num_heads * combinations * parts, dtype=torch.int32, device=device)
    row_counts = torch.empty(
        0 if include_own else num_heads * own * table.block_size, dtype=torch.int32, device=device
    )
    rows = torch.empty(num_pairs, dtype=torch.int32, device=device)
    slots = None if include_own else torch.empty(num_pairs, dtype=torch.int32, device=device)

    tiles = 1 if is_gather is None else is_gather.shape[1] // table.num_blocks
    inputs = (bits, table.starts, table.stops, table.firsts, is_gather, consumers)
    sizes = (num_tokens, words, tiles * table.num_blocks, tiles, table.block_size, parts, combinations, b0, g0, own)
    options = {
        "GROUP": group,
        "SOME": is_gather is not None,
        "OWN": include_own,
        "BLOCK_T": rows_at_once,
        "num_warps": INDEX_WARPS,
    }
    grid = (own * parts, num_heads)
    _count_pairs[grid](*inputs, counts, row_counts, *sizes, **options)
    offsets = _offsets(counts)
    row_offsets = None if include_own else _offsets(row_counts)
    _fill_pairs[grid](*inputs, offsets, row_offsets, rows, slots, *sizes, **options)
    heads = torch.arange(num_kv_heads, device=device)[:, None] * combinations
    first_counts = ((heads + consumers[:-1]) * (group * parts)).flatten()
    block_offsets = torch.cat([offsets[first_counts], offsets[-1:]])
    return GatherIndex(rows, block_offsets, slots, row_offsets, g0, b0, b1)


def count_bytes(table: BlockTable, block: int, num_heads: int) -> int:
    """Workspace of :func:`gather_index` for the counts of one own block: int32 counts and their prefix sums."""
    parts = triton.cdiv(table.block_size, _tokens_at_once(table))
    return 8 * num_heads * parts * (block - table.first_of(block) + 1)


def item_table(block_offsets: torch.Tensor, rows_per_item: int, num_pairs: int) -> ItemTable:
    """Cut every list into items; no host read, so the number of items is a bound.

    Args:
        block_offsets: int32 ``[lists + 1]``, rising from 0 to ``num_pairs``.
        rows_per_item: most pairs of one item.
        num_pairs: pairs of all lists.
    """
    lists = block_offsets.shape[0] - 1
    offsets = _offsets(torch.div(block_offsets.diff() + (rows_per_item - 1), rows_per_item, rounding_mode="floor"))
    item = torch.arange(num_pairs // rows_per_item + lists, dtype=torch.int32, device=block_offsets.device)
    return ItemTable(offsets, torch.searchsorted(offsets[1:], item, right=True, out_int32=True), rows_per_item)


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """int32 prefix sums with a zero first and the total last."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts.flatten(), 0, dtype=torch.int32, out=offsets[1:])
    return offsets


def _tokens_at_once(table: BlockTable) -> int:
    return min(INDEX_TOKENS, triton.next_power_of_2(table.block_size))


def _tile_counts(bits: torch.Tensor, table: BlockTable, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ``[H, N * parts]`` twice: blocks kept by any row, and (row, block) pairs, of tiles of ``rows`` tokens."""
    num_heads, words, num_tokens = bits.shape
    parts = triton.cdiv(table.block_size, rows)
    unions, pairs = torch.empty(2, num_heads, table.num_blocks * parts, dtype=torch.int32, device=bits.device).unbind()
    if unions.numel():
        _count_tiles[(unions.shape[1], num_heads)](
            bits, table.starts, table.stops, table.firsts, unions, pairs, num_tokens, words, parts, BLOCK_T=rows
        )
    return unions, pairs


@triton.jit
def _kept(bits_ptr, head, word, words, num_tokens, tokens, mask):
    """int32 [tokens, 32]: 1 where a row keeps the word's block."""
    row_ptrs = bits_ptr + (head.to(tl.int64) * words + word) * num_tokens + tokens
    packed = tl.load(row_ptrs, mask=mask, other=0)
    return (packed[:, None] >> tl.arange(0, 32)[None, :]) & 1


@triton.jit(do_not_specialize=["num_tokens", "words", "parts"])
def _count_tiles(
    bits_ptr,
    starts_ptr,
    stops_ptr,
    firsts_ptr,
    unions_ptr,
    pairs_ptr,
    num_tokens,
    words,
    parts,
    BLOCK_T: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    block = tile // parts
    tokens = tl.load(starts_ptr + block) + tile % parts * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < tl.load(stops_ptr + block)
    visible = block - tl.load(firsts_ptr + block)
    union = tl.zeros([32], dtype=tl.int32)
    pairs = tl.zeros([32], dtype=tl.int32)
    for word in range(0, tl.cdiv(visible, 32)):
        count = tl.sum(_kept(bits_ptr, head, word, words, num_tokens, tokens, mask), axis=0)
        union += (count > 0).to(tl.int32)
        pairs += count
    where = head.to(tl.int64) * tl.num_programs(0) + tile
    tl.store(unions_ptr + where, tl.sum(union, axis=0))
    tl.store(pairs_ptr + where, tl.sum(pairs, axis=0))


@triton.jit(do_not_specialize=["num_tokens", "words", "parts"])
def _fill_unions(
    bits_ptr,
    starts_ptr,
    stops_ptr,
    firsts_ptr,
    offsets_ptr,
    is_gather_ptr,
    blocks_ptr,
    num_tokens,
    words,
    parts,
    BLOCK_T: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    where = head.to(tl.int64) * tl.num_programs(0) + tile
    if tl.load(is_gather_ptr + where):
        return
    block = tile // parts
    tokens = tl.load(starts_ptr + block) + tile % parts * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < tl.load(stops_ptr + block)
    first = tl.load(firsts_ptr + block)
    position = tl.load(offsets_ptr + where)
    for word in range(0, tl.cdiv(block - first, 32)):
        kept = tl.max(_kept(bits_ptr, head, word, words, num_tokens, tokens, mask), axis=0)
        rank = tl.cumsum(kept, axis=0) - kept
        tl.store(blocks_ptr + position + rank, first + word * 32 + tl.arange(0, 32), mask=kept > 0)
        position += tl.sum(kept, axis=0)


@triton.jit
def _gathered(is_gather_ptr, head, num_tiles, tiles, block_size, block, offset, mask, SOME: tl.constexpr):
    """Which of the tokens at ``offset`` in their own block are indexed."""
    if SOME:
        tile = head.to(tl.int64) * num_tiles + block * tiles + offset * tiles // block_size
        mask = mask & (tl.load(is_gather_ptr + tile, mask=mask, other=0) != 0)
    return mask


@triton.jit
def _count_number(
    consumers_ptr, head, block, part, parts, target, seen, combinations, b0, g0, GROUP: tl.constexpr, OWN: tl.constexpr
):
    """Number of the count of (kv head, global block ``target``, head in group, own block, part), int64."""
    before = tl.load(consumers_ptr + target - g0, mask=seen, other=0).to(tl.int64)
    own_blocks = tl.load(consumers_ptr + target - g0 + 1, mask=seen, other=0) - before
    earliest = tl.maximum(target + (0 if OWN else 1), b0)
    of_head = (head // GROUP * combinations.to(tl.int64) + before) * GROUP + head % GROUP * own_blocks
    return (of_head + block - earliest) * parts + part


@triton.jit(
    do_not_specialize=[
        "num_tokens", "words", "num_tiles", "tiles", "block_size", "parts", "combinations", "b0", "g0", "own"
    ]
)  # fmt: skip
def _count_pairs(
    bits_ptr,
    starts_ptr,
    stops_ptr,
    firsts_ptr,
    is_gather_ptr,
    consumers_ptr,
    counts_ptr,
    row_counts_ptr,
    num_tokens,
    words,
    num_tiles,
    tiles,
    block_size,
    parts,
    combinations,
    b0,
    g0,
    own,
    GROUP: tl.constexpr,
    SOME: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    block, part, head = b0 + tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    offset = part * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens = tl.load(starts_ptr + block) + offset
    mask = tokens < tl.load(stops_ptr + block)
    mask = _gathered(is_gather_ptr, head, num_tiles, tiles, block_size, block, offset, mask, SOME)
    first = tl.load(firsts_ptr + block)
    row_count = tl.zeros([BLOCK_T], dtype=tl.int32)
    for word in range(0, tl.cdiv(block - first, 32)):
        kept = _kept(bits_ptr, head, word, words, num_tokens, tokens, mask)
        target = first + word * 32 + tl.arange(0, 32)
        seen = target < block
        number = _count_number(consumers_ptr, head, block, part, parts, target, seen, combinations, b0, g0, GROUP, OWN)
        tl.store(counts_ptr + number, tl.sum(kept, axis=0), mask=seen)
        row_count += tl.sum(kept, axis=1)
    if OWN:
        number = _count_number(consumers_ptr, head, block, part, parts, block, True, combinations, b0, g0, GROUP, OWN)
        tl.store(counts_ptr + number, tl.sum(mask.to(tl.int32), axis=0))
    else:
        row = (head.to(tl.int64) * own + block - b0) * block_size + offset
        tl.store(row_counts_ptr + row, row_count, mask=offset < block_size)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "words", "num_tiles", "tiles", "block_size", "parts", "combinations", "b0", "g0", "own"
    ]
)  # fmt: skip
def _fill_pairs(
    bits_ptr,
    starts_ptr,
    stops_ptr,
    firsts_ptr,
    is_gather_ptr,
    consumers_ptr,
    offsets_ptr,
    row_offsets_ptr,
    rows_ptr,
    slots_ptr,
    num_tokens,
    words,
    num_tiles,
    tiles,
    block_size,
    parts,
    combinations,
    b0,
    g0,
    own,
    GROUP: tl.constexpr,
    SOME: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    block, part, head = b0 + tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    offset = part * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens = tl.load(starts_ptr + block) + offset
    mask = tokens < tl.load(stops_ptr + block)
    mask = _gathered(is_gather_ptr, head, num_tiles, tiles, block_size, block, offset, mask, SOME)
    first = tl.load(firsts_ptr + block)
    row_entry = tokens * GROUP + head % GROUP
    if not OWN:
        row = (head.to(tl.int64) * own + block - b0) * block_size + offset
        slot = tl.load(row_offsets_ptr + row, mask=mask, other=0)
    for word in range(0, tl.cdiv(block - first, 32)):
        kept = _kept(bits_ptr, head, word, words, num_tokens, tokens, mask)
        target = first + word * 32 + tl.arange(0, 32)
        seen = target < block
        number = _count_number(consumers_ptr, head, block, part, parts, target, seen, combinations, b0, g0, GROUP, OWN)
        pair = tl.load(offsets_ptr + number, mask=seen, other=0)[None, :] + tl.cumsum(kept, axis=0) - kept
        tl.store(rows_ptr + pair, tl.broadcast_to(row_entry[:, None], [BLOCK_T, 32]), mask=kept > 0)
        if not OWN:
            tl.store(slots_ptr + slot[:, None] + tl.cumsum(kept, axis=1) - kept, pair, mask=kept > 0)
            slot += tl.sum(kept, axis=1)
    if OWN:
        number = _count_number(consumers_ptr, head, block, part, parts, block, True, combinations, b0, g0, GROUP, OWN)
        listed = mask.to(tl.int32)
        pair = tl.load(offsets_ptr + number) + tl.cumsum(listed, axis=0) - listed
        tl.store(rows_ptr + pair, row_entry, mask=mask)
