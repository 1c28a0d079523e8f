"""Both directions of a selection's index, for one tile of query tokens: a block's rows, and a row's slots.

Made by counting, prefix sums and one stable sort of small integers; a pure function of the bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsebalance_kernels.selection import WORD, BlockSelection, count_bits, unpack_bits

# Bounds the workspace: 2048 tokens of 14 heads that keep 10 of 128 blocks hold 73 MB of partial outputs.
TILE_TOKENS = 2048

# A product of fewer than 16 rows takes another path in MKL and rounds otherwise; how many rows keep a block depends on
# later tokens, and their change must not move one bit of an earlier output.
LEAST_ROWS = 16

# Scores in flight: 2 MiB of fp32 stay in the second-level caches of two cores, where passes over them cost little.
SCORES_AT_ONCE = 2**19


@dataclass(frozen=True)
class Tile:
    """Consecutive query tokens of one document, all beyond its first block.

    Attributes:
        document_start: packed index of the document's first token.
        start, stop: packed range of the query tokens.
    """

    document_start: int
    start: int
    stop: int


@dataclass(frozen=True)
class ItemBatch:
    """Items of equal length: the operands of one batched product.

    Attributes:
        lists: the list of each item, ascending; a long list has several items.
        rows: slots of each item.
        first_slot: where the first item begins; the others follow.
    """

    lists: tuple[int, ...]
    rows: int
    first_slot: int

    @property
    def slots(self) -> slice:
        """The batch's slots."""
        return slice(self.first_slot, self.first_slot + len(self.lists) * self.rows)


@dataclass(frozen=True)
class HistoryIndex:
    """The kept history of a tile, by key block and by row.

    A row is (kv head, token, head in group), numbered (hk * tokens + token) * G + g; there are ``num_rows`` of them.
    A list holds the rows that keep one (kv head, block), numbered hk * num_blocks + block.  A list is one item, filled
    up with the row number ``num_rows``, which stands for nothing; a long one is cut into several of equal length.

    Attributes:
        rows: int32 [slots], row at each slot, in the order of ``batches``.
        batches: cover all slots.
        slots: int32 [pairs], slots in row-major order (ascending block within a row).
        row_offsets: int32 [num_rows + 1], first position in ``slots`` of each row.
        num_blocks: key blocks of the document that the tile can see.
    """

    rows: torch.Tensor
    batches: tuple[ItemBatch, ...]
    slots: torch.Tensor
    row_offsets: torch.Tensor
    num_blocks: int


def document_blocks(boundaries: Sequence[int], block_size: int) -> list[tuple[int, int]]:
    """(packed start, tokens) of every block of every document; the last block of a document may be short.

    Example: boundaries (0, 5, 6), block_size 4 -> [(0, 4), (4, 1), (5, 1)].
    """
    return [
        (start, min(block_size, stop - start))
        for first, stop in itertools.pairwise(boundaries)
        for start in range(first, stop, block_size)
    ]


def history_tiles(boundaries: Sequence[int], block_size: int) -> list[Tile]:
    """Tiles of up to TILE_TOKENS tokens that cover every token with history."""
    return [
        Tile(first, start, min(start + TILE_TOKENS, stop))
        for first, stop in itertools.pairwise(boundaries)
        for start in range(first + block_size, stop, TILE_TOKENS)
    ]


def index_tile(selection: BlockSelection, tile: Tile, num_kv_heads: int) -> HistoryIndex:
    """Index the bits of one tile."""
    num_blocks = (tile.stop - 1 - tile.document_start) // selection.block_size
    words = selection.bits[:, : -(-num_blocks // WORD), tile.start : tile.stop]
    by_row = words.unflatten(0, (num_kv_heads, -1)).permute(0, 3, 1, 2)
    kept = unpack_bits(by_row).flatten(0, 2)
    num_rows, width = kept.shape
    device, num_lists = kept.device, num_kv_heads * num_blocks
    pair = kept.flatten().nonzero().squeeze(1)
    counts_of_rows = count_bits(by_row).sum(-1).flatten()
    numbers = torch.arange(num_rows, device=device)
    row = numbers.repeat_interleave(counts_of_rows, output_size=len(pair))
    first_list = numbers // (num_rows // num_kv_heads) * num_blocks - numbers * width
    list_of_pair = pair.add_(first_list.index_select(0, row))

    counts = torch.bincount(list_of_pair, minlength=num_lists)
    most_rows = max(LEAST_ROWS, SCORES_AT_ONCE // (2 * selection.block_size))
    items = (counts + most_rows - 1) // most_rows
    length = _item_rows(counts, items)
    # Lists in the order of their items' length, so that many items make one product.
    by_length = torch.sort(length, stable=True).indices
    slots_of_list = (items * length).index_select(0, by_length)
    begins = torch.empty_like(counts).index_copy_(0, by_length, slots_of_list.cumsum(0) - slots_of_list)
    shift = begins - (counts.cumsum(0) - counts)
    # A stable sort of 16-bit integers is a radix sort: 5 ns a pair.
    key = list_of_pair.short() if num_lists <= torch.iinfo(torch.int16).max else list_of_pair
    list_by_block, order = torch.sort(key, stable=True)
    slot = torch.arange(pair.numel(), device=device) + shift.index_select(0, list_by_block.int())

    rows = torch.full((int(slots_of_list.sum()),), num_rows, dtype=torch.int32, device=device)
    rows[slot] = row.int().index_select(0, order)
    slots = torch.empty(pair.numel(), dtype=torch.int32, device=device)
    slots[order] = slot.int()
    row_offsets = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
    row_offsets[1:] = counts_of_rows.cumsum(0)
    lists = torch.repeat_interleave(by_length, items.index_select(0, by_length))
    batches = _batches(lists.tolist(), length.index_select(0, lists).tolist(), selection.block_size)
    return HistoryIndex(rows, batches, slots, row_offsets, num_blocks)


def _item_rows(counts: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Rows of each list's items: its share of the count, filled up by at most a sixteenth or to LEAST_ROWS.

    Example: 1000 -> 1024, 1025 -> 1088, 17 -> 32; so the lists of a tile have few different lengths.
    """
    share = (counts + items - 1) // items.clamp_min(1)
    bits = torch.frexp(share.double()).exponent.long()
    step = torch.ones_like(share) << (bits - 5).clamp_min(LEAST_ROWS.bit_length() - 1)
    return (share + step - 1) // step * step


def _batches(lists: list[int], lengths: list[int], block_size: int) -> tuple[ItemBatch, ...]:
    """Consecutive items of equal length, as many as keep their scores in the cache.

    An even number or a single one: MKL gives whole products to threads, but shares a single one out.
    """
    batches = []
    first = first_slot = 0
    for rows, group in itertools.groupby(lengths):
        left = len(list(group))
        while left:
            count = min(left, max(1, SCORES_AT_ONCE // (block_size * rows)))
            count -= count % 2 if count > 1 else 0
            batches.append(ItemBatch(tuple(lists[first : first + count]), rows, first_slot))
            first, first_slot, left = first + count, first_slot + count * rows, left - count
    return tuple(batches)
