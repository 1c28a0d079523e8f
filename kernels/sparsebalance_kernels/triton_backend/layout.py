"""The blocks of a packed batch under one numbering, and the arithmetic of query tiles.  Plain torch, no kernels.

Blocks of all documents, in packed order, carry *global block numbers* 0 .. N - 1.  History block i of a document is
global block ``firsts[b] + i`` for every block b of that document, and the tokens of block b see the ``b - firsts[b]``
blocks before it.

A *query tile* is up to ``rows`` consecutive tokens of one own block and one query head; tile number
``b * tiles_per_block(block_size, rows) + part``.  Tiles at the end of a document may be short or empty.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockTable:
    """Every block of a packed batch.

    Attributes:
        starts, stops: int32 [N], packed range of tokens; the last block of a document may be short, none is empty.
        firsts, ends: int32 [N], global number of the first block of the block's document, and one past its last.
        documents: int32 [N], number of the block's document (empty documents count but own no block).
        document_ends: on the host, per document the number of blocks of all documents up to and including it.
        block_size: tokens per block.
        num_tokens: T.
    """

    starts: torch.Tensor
    stops: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor
    documents: torch.Tensor
    document_ends: tuple[int, ...]
    block_size: int
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.document_ends[-1] if self.document_ends else 0

    def first_of(self, block: int) -> int:
        """``firsts[block]`` without asking the device."""
        document = bisect.bisect_right(self.document_ends, block)
        return self.document_ends[document - 1] if document else 0

    def history_blocks(self, b0: int, b1: int) -> int:
        """Sum of ``b - firsts[b]`` over the blocks b of [b0, b1): (own block, history block) combinations."""
        total = 0
        while b0 < b1:
            document = bisect.bisect_right(self.document_ends, b0)
            first, end = self.first_of(b0), min(self.document_ends[document], b1)
            low, high = b0 - first, end - first
            total += (high * (high - 1) - low * (low - 1)) // 2
            b0 = end
        return total


def block_table(cu_seqlens: torch.Tensor, block_size: int, num_tokens: int) -> BlockTable:
    """Number the blocks of all documents.

    One host read (blocks per document), so that grids are exact and slabs need no further one.

    Args:
        cu_seqlens: int32 or int64 ``[n + 1]``, document starts in tokens, rising from 0 to ``num_tokens``.
        block_size: tokens per block.
        num_tokens: T.
    """
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    counts = torch.div(lengths + (block_size - 1), block_size, rounding_mode="floor")
    ends = counts.cumsum(0)
    document_ends = tuple(ends.tolist())
    number = torch.arange(document_ends[-1] if document_ends else 0, device=cu_seqlens.device)
    document = torch.searchsorted(ends, number, right=True)
    firsts = (ends - counts)[document]
    starts = bounds[document] + (number - firsts) * block_size
    stops = torch.minimum(starts + block_size, bounds[document + 1])
    return BlockTable(
        starts.int(),
        stops.int(),
        firsts.int(),
        ends[document].int(),
        document.int(),
        document_ends,
        block_size,
        num_tokens,
    )


def tiles_per_block(block_size: int, rows: int) -> int:
    """Query tiles of one own block; ``rows`` divides ``block_size``."""
    if block_size % rows:
        raise ValueError(f"a query tile of {rows} rows does not divide a block of {block_size} tokens")
    return block_size // rows
