"""Batches with a selection, and the lists that the attention kernels walk, made by loops from the selection's masks.

Shares no code with indexing.py: only the dataclasses, which say what the kernels take.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import harness
import oracle
import torch

from sparsebalance_kernels.triton_backend.indexing import GatherIndex, ItemTable, TileLists
from sparsebalance_kernels.triton_backend.layout import block_table

FP32_ROUNDOFF = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class Case:
    """fp64 batch (query, key, value, output gradient), the kept blocks of its rows, and the oracle's results."""

    lengths: tuple[int, ...]
    block_size: int
    batch: tuple[torch.Tensor, ...]
    selections: list[oracle.Selection]

    @property
    def group(self):
        return self.batch[0].shape[1] // self.batch[1].shape[1]

    @functools.cached_property
    def expected(self):
        """fp64 output, dq, dk, dv."""
        return harness.run_dense(*self.batch, self.selections, self.lengths, self.block_size)

    @functools.cached_property
    def bounds(self):
        return oracle.rounding_bounds(*self.batch, self.selections, self.lengths, self.block_size, FP32_ROUNDOFF)

    @functools.cached_property
    def scores(self):
        """fp64 [H, L, L] of each document, -inf where hidden."""
        scores = []
        for q, k, one in zip(*(oracle.split(t, self.lengths) for t in self.batch[:2]), self.selections, strict=True):
            dense = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(self.group, dim=1)) * oracle.SCALE
            scores.append(dense.masked_fill(~oracle.token_mask(one.kept, self.block_size), -math.inf))
        return scores

    @functools.cached_property
    def lse(self):
        """fp64 [H, T]."""
        return torch.cat([torch.logsumexp(one, dim=-1) for one in self.scores], dim=1)

    @functools.cached_property
    def table(self):
        return block_table(oracle.cumulative(self.lengths), self.block_size, sum(self.lengths))

    @functools.cached_property
    def rows(self):
        """(head, token) -> (own block, kept blocks), in global numbers, by token within head."""
        rows, token, first = {}, 0, 0
        for length, one in zip(self.lengths, self.selections, strict=True):
            kept = one.kept.tolist()
            for position in range(length):
                for head in range(one.kept.shape[1]):
                    blocks = [first + block for block, keep in enumerate(kept[position][head]) if keep]
                    rows[head, token + position] = first + position // self.block_size, blocks
            token, first = token + length, first + -(-length // self.block_size)
        return rows

    @functools.cached_property
    def bits(self):
        """int32 [H, words, T], with one word more than any document needs."""
        heads, words = self.batch[0].shape[1], max(self.lengths) // self.block_size // 32 + 2
        bits = torch.zeros(heads, words, sum(self.lengths), dtype=torch.int64)
        for (head, token), (own, blocks) in self.rows.items():
            for block in blocks:
                word, bit = divmod(block - self.table.first_of(own), 32)
                bits[head, word, token] += 1 << bit
        return torch.where(bits < 2**31, bits, bits - 2**32).int()


@functools.cache
def make_case(kv_heads, group, dim, block_size, lengths=None, density=0.5, run=8, seed=0):
    """Rows keep visible blocks at random, each block with probability ``density``, ``run`` tokens on end alike."""
    size = block_size
    lengths = lengths or (1, size - 1, 0, size, size + 1, 2 * size + 1, 3 * size + 3)
    batch = oracle.grid_batch(lengths, block_size=size, kv_heads=kv_heads, group=group, dim=dim, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    selections = []
    for length in lengths:
        shape = (-(-length // run), kv_heads * group, length // size)
        kept = (torch.rand(shape, generator=generator) < density).repeat_interleave(run, dim=0)[:length]
        visible = torch.arange(length)[:, None] // size > torch.arange(length // size)
        selections.append(oracle.Selection(kept & visible[:, None], torch.zeros(0)))
    return Case(lengths, size, batch, selections)


def offsets_of(lists):
    return torch.tensor([0, *itertools.accumulate(map(len, lists))], dtype=torch.int32)


def flat(lists):
    return torch.tensor(list(itertools.chain.from_iterable(lists)), dtype=torch.int32)


def union_lists(case, rows, is_gather):
    """TileLists of tiles of ``rows`` tokens."""
    heads, per_block = case.batch[0].shape[1], case.block_size // rows
    unions = [set() for _ in range(heads * case.table.num_blocks * per_block)]
    for (head, token), (own, blocks) in case.rows.items():
        tile = own * per_block + (token - int(case.table.starts[own])) // rows
        if not is_gather[head, tile]:
            unions[head * is_gather.shape[1] + tile].update(blocks)
    unions = [sorted(union) for union in unions]
    return TileLists(offsets_of(unions), flat(unions), is_gather, rows)


def gather_index(case, b0, b1, *, is_gather=None, include_own=False):
    """GatherIndex of the rows of own blocks [b0, b1)."""
    heads, size, g0 = case.batch[0].shape[1], case.block_size, case.table.first_of(b0)
    lists = {(kv_head, block): [] for kv_head in range(heads // case.group) for block in range(g0, b1)}
    row_pairs = [[] for _ in range(heads * (b1 - b0) * size)]
    for (head, token), (own, blocks) in sorted(case.rows.items()):
        if not b0 <= own < b1:
            continue
        offset = token - int(case.table.starts[own])
        if is_gather is not None:
            tile_rows = case.table.num_blocks * size // is_gather.shape[1]
            if not is_gather[head, (own * size + offset) // tile_rows]:
                continue
        row = (head * (b1 - b0) + own - b0) * size + offset
        for block in [*blocks, own] if include_own else blocks:
            lists[head // case.group, block].append((token * case.group + head % case.group, row))
    for number, (_, row) in enumerate(itertools.chain.from_iterable(lists.values())):
        row_pairs[row].append(number)
    rows = flat([[entry for entry, _ in one] for one in lists.values()])
    if include_own:
        return GatherIndex(rows, offsets_of(lists.values()), None, None, g0, b0, b1)
    return GatherIndex(rows, offsets_of(lists.values()), flat(row_pairs), offsets_of(row_pairs), g0, b0, b1)


def item_table(index, rows_per_item):
    """ItemTable with three surplus items."""
    lengths = index.block_offsets.diff().tolist()
    items = [[number] * -(-length // rows_per_item) for number, length in enumerate(lengths)]
    return ItemTable(offsets_of(items), flat([*items, [len(lengths)] * 3]), rows_per_item)


def some_tiles(case, rows, share=0.5):
    """bool [H, tiles]: so many tiles in gather mode, at random."""
    tiles = case.table.num_blocks * case.block_size // rows
    return torch.rand(case.batch[0].shape[1], tiles, generator=torch.Generator().manual_seed(1)) < share


def slabs_of(case, blocks):
    """Own blocks in ranges of so many; None: all in one."""
    count = case.table.num_blocks
    return [(b0, min(b0 + (blocks or count), count)) for b0 in range(0, count, blocks or count)]
