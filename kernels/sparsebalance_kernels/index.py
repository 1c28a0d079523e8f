"""Both directions of a selection's index, for one tile of query tokens: a block's rows, and a row's slots.

Made by counting, prefix sums and one stable sort of small integers; a pure function of the bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsebalance_kernels.selection import WORD, BlockSelection, unpack_bits

# Bounds the workspace: 2048 tokens of 14 heads that keep 10 of 128 blocks hold 73 MB of partial outputs.
TILE_TOKENS = 2048

# A product of fewer than 16 rows takes another path in MKL and rounds otherwise; how many rows keep a block depends on
# later tokens, and their change must not move one bit of an earlier output.  More than 512 rows leave the cache.
LEAST_ROWS, MOST_ROWS = 16, 512


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
class HistoryIndex:
    """The kept history of a tile, by key block and by row.

    A row is (kv head, token, head in group), numbered (hk * tokens + token) * G + g; there are ``num_rows`` of them.
    A list holds the rows that keep one (kv head, block), numbered hk * num_blocks + block.  Lists are cut into items
    of ``rows_per_item`` rows, the last one filled up with the row number ``num_rows``, which stands for nothing.

    Attributes:
        rows: int32 [items * rows_per_item], row at each slot, items in order of their lists.
        lists: int64 [items], list of each item.
        slots: int32 [pairs], slots in row-major order (ascending block within a row).
        row_offsets: int32 [num_rows + 1], first position in ``slots`` of each row.
        num_blocks: key blocks of the document that the tile can see.
        rows_per_item: power of two between LEAST_ROWS and MOST_ROWS.
    """

    rows: torch.Tensor
    lists: torch.Tensor
    slots: torch.Tensor
    row_offsets: torch.Tensor
    num_blocks: int
    rows_per_item: int


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
    pair = kept.flatten().nonzero().squeeze(1)
    row = pair // width
    list_of_pair = pair - row * width + row // (num_rows // num_kv_heads) * num_blocks

    num_lists = num_kv_heads * num_blocks
    counts = torch.bincount(list_of_pair, minlength=num_lists)
    rows_per_item = _rows_per_item(pair.numel(), int((counts > 0).sum()))
    items = (counts + rows_per_item - 1) // rows_per_item
    # How far the padding of earlier lists moves a list's slots.
    shift = (items.cumsum(0) - items) * rows_per_item - (counts.cumsum(0) - counts)
    # A stable sort of 16-bit integers is a radix sort: 5 ns a pair.
    key = list_of_pair.short() if num_lists <= torch.iinfo(torch.int16).max else list_of_pair
    list_by_block, order = torch.sort(key, stable=True)
    slot = torch.arange(pair.numel(), device=pair.device) + shift.index_select(0, list_by_block.int())

    rows = torch.full((int(items.sum()) * rows_per_item,), num_rows, dtype=torch.int32, device=pair.device)
    rows[slot] = row.int().index_select(0, order)
    slots = torch.empty(pair.numel(), dtype=torch.int32, device=pair.device)
    slots[order] = slot.int()
    row_offsets = torch.zeros(num_rows + 1, dtype=torch.int32, device=pair.device)
    row_offsets[1:] = torch.bincount(row, minlength=num_rows).cumsum(0)
    lists = torch.repeat_interleave(torch.arange(num_lists, device=pair.device), items)
    return HistoryIndex(rows, lists, slots, row_offsets, num_blocks, rows_per_item)


def _rows_per_item(num_pairs: int, num_lists: int) -> int:
    """The largest power of two that fills up its lists by about an eighth."""
    wanted = num_pairs // (4 * max(1, num_lists))
    return max(LEAST_ROWS, min(MOST_ROWS, 1 << max(0, wanted.bit_length() - 1)))
