import collections
import itertools

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_kernels.triton_backend import indexing
from sparsebalance_kernels.triton_backend.layout import block_table, tiles_per_block

LENGTHS = [55, 16, 1, 0, 33, 5]
MANY = [1] * 6 + [0, 50] + [1] * 3


def blocks_of(lengths, size):
    """(start, stop, first block of the document, document) of every block, counted one by one."""
    blocks, start = [], 0
    for document, length in enumerate(lengths):
        first = len(blocks)
        for offset in range(0, length, size):
            blocks.append((start + offset, start + min(offset + size, length), first, document))
        start += length
    return blocks


def selection(lengths, size, heads, density, *, words=None, seed=0):
    """Random kept history: bool ``[H, T, words * 32]``, its bits and the block table."""
    generator = torch.Generator().manual_seed(seed)
    words = words or max(1, -(-max(length // size for length in lengths) // 32))
    kept = torch.rand(heads, sum(lengths), words * 32, generator=generator) < density
    visible = torch.cat([torch.arange(length) // size for length in lengths])
    kept &= torch.arange(words * 32) < visible[:, None]
    unsigned = (kept.unflatten(2, (words, 32)).long() << torch.arange(32)).sum(-1)
    bits = torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).int().transpose(1, 2).contiguous()
    return kept, bits, block_table(oracle.cumulative(lengths), size, sum(lengths))


class Counted:
    """What the lists of a selection must hold, by counting."""

    def __init__(self, kept, lengths, size, rows=None, is_gather=None):
        self.kept, self.blocks, self.size = kept, blocks_of(lengths, size), size
        self.rows, self.is_gather = rows, is_gather

    def indexed(self, head, block, token):
        """Whether the row is in a tile that counts."""
        if self.is_gather is None:
            return True
        tile = block * (self.size // self.rows) + (token - self.blocks[block][0]) // self.rows
        return bool(self.is_gather[head, tile])

    def history(self, head, block, token):
        """Global numbers of the blocks that the row keeps, ascending."""
        return [self.blocks[block][2] + int(i) for i in self.kept[head, token].nonzero()]

    def pairs(self, b0, b1, own=False):
        """(head, own block, token, kept block) of the indexed rows of own blocks [b0, b1)."""
        return [
            (head, block, token, target)
            for head in range(self.kept.shape[0])
            for block in range(b0, b1)
            for token in range(*self.blocks[block][:2])
            if self.indexed(head, block, token)
            for target in [*self.history(head, block, token), *([block] if own else [])]
        ]


def check_index(found, counted, group, own, b0, b1):
    """The gather index holds the pairs, in both orders, and nothing else."""
    heads, pairs = counted.kept.shape[0], counted.pairs(b0, b1, own)
    g0 = counted.blocks[b0][2]
    assert (found.g0, found.b0, found.b1) == (g0, b0, b1)
    in_order = sorted(pairs, key=lambda pair: (pair[0] // group, pair[3], pair[0] % group, pair[2]))
    assert found.rows.dtype == torch.int32
    assert found.rows.tolist() == [token * group + head % group for head, _, token, _ in in_order]
    lists = [(kv_head, block) for kv_head in range(heads // group) for block in range(g0, b1)]
    listed = collections.Counter((head // group, target) for head, _, _, target in pairs)
    counts = [listed[one] for one in lists]
    assert found.block_offsets.dtype == torch.int32
    assert found.block_offsets.tolist() == [0, *itertools.accumulate(counts)]
    if own:
        assert found.slots is None and found.row_offsets is None
        return
    number = {pair: position for position, pair in enumerate(in_order)}
    slots, counts = [], []
    for head in range(heads):
        for block in range(b0, b1):
            for offset in range(counted.size):
                token = counted.blocks[block][0] + offset
                here = []
                if token < counted.blocks[block][1] and counted.indexed(head, block, token):
                    here = [number[head, block, token, target] for target in counted.history(head, block, token)]
                slots += here
                counts.append(len(here))
    assert found.slots.dtype == found.row_offsets.dtype == torch.int32
    assert found.slots.tolist() == slots
    assert found.row_offsets.tolist() == [0, *itertools.accumulate(counts)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, MANY, [0, 0], [], [16], [17]], ids=str)
def test_block_table_numbers_every_block(dtype, lengths):
    """Blocks cover every document once, in packed order, aligned to the document's start; empty documents own none."""
    table = block_table(oracle.cumulative(lengths).to(dtype), 16, sum(lengths))
    expected = blocks_of(lengths, 16)
    columns = (table.starts, table.stops, table.firsts, table.documents)
    assert all(column.dtype == torch.int32 for column in (*columns, table.ends))
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    last = {block[3]: number + 1 for number, block in enumerate(expected)}
    assert table.ends.tolist() == [last[block[3]] for block in expected]
    assert table.num_blocks == len(expected)
    assert [table.first_of(number) for number in range(len(expected))] == [block[2] for block in expected]
    for b0, b1 in itertools.combinations(range(len(expected) + 1), 2):
        assert table.history_blocks(b0, b1) == sum(number - expected[number][2] for number in range(b0, b1))


def test_tiles_divide_their_block():
    """A query tile never crosses its own block."""
    assert tiles_per_block(48, 16) == 3
    with pytest.raises(ValueError, match="divide"):
        tiles_per_block(24, 16)


@pytest.mark.parametrize("density", [0.0, 0.04, 0.5, 1.0])
@pytest.mark.parametrize(("lengths", "size", "rows"), [(LENGTHS, 16, 4), (MANY, 24, 8), ([140, 3], 4, 4)], ids=str)
def test_tile_lists_are_the_unions_of_rows(lengths, size, rows, density):
    """A tile in tile mode lists each block that any of its rows keeps, once, ascending; the others list none."""
    kept, bits, table = selection(lengths, size, 2, density)
    counted, lists, modes = Counted(kept, lengths, size), [], []
    for head in range(2):
        for block, (start, stop, _, _) in enumerate(counted.blocks):
            for first in range(start, start + size, rows):
                each = [counted.history(head, block, token) for token in range(first, min(first + rows, stop))]
                union = sorted(set().union(*each))
                modes.append(len(union) * rows > indexing.TILE_RATIO * sum(map(len, each)))
                lists.append([] if modes[-1] else union)
    found = indexing.tile_lists(bits, table, rows)
    assert found.rows == rows and found.offsets.dtype == found.blocks.dtype == torch.int32
    assert found.is_gather.shape == (2, len(modes) // 2) and found.is_gather.flatten().tolist() == modes
    offsets = found.offsets.tolist()
    assert len(offsets) == len(lists) + 1 and offsets[-1] == found.blocks.numel()
    assert [found.blocks[one:two].tolist() for one, two in itertools.pairwise(offsets)] == lists


def test_the_ratio_itself_is_tile_mode():
    """A tile whose union costs exactly TILE_RATIO times the pairs walks its union; one pair less, and it gathers."""
    assert indexing.TILE_RATIO == 2.0
    _, _, table = selection([64], 16, 1, 0.0)
    bits = torch.zeros(1, 1, 64, dtype=torch.int32)
    bits[0, 0, 48:56] = 0b100  # one block, 8 of 16 rows
    bits[0, 0, 32:39] = 0b010  # one block, 7 of 16 rows
    found = indexing.tile_lists(bits, table, 16)
    assert found.is_gather.tolist() == [[False, False, True, False]]
    assert found.blocks.tolist() == [2] and found.offsets.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(("lengths", "size", "rows"), [(LENGTHS, 16, 4), (MANY, 24, 8), ([140], 4, 4)], ids=str)
def test_pairs_per_block(lengths, size, rows):
    """Pairs are counted per own block over all heads, all of them or those of tiles in gather mode."""
    kept, bits, table = selection(lengths, size, 2, 0.2)
    is_gather = indexing.tile_lists(bits, table, rows).is_gather
    assert is_gather.any() and not is_gather.all()
    for modes in (None, is_gather):
        counted = Counted(kept, lengths, size, rows, modes)
        found = indexing.pairs_per_block(bits, table, modes)
        assert found.dtype == torch.int32
        assert found.tolist() == [len(counted.pairs(block, block + 1)) for block in range(table.num_blocks)]


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(pairs=st.lists(st.integers(0, 9) | st.just(0), max_size=30), max_pairs=st.integers(1, 25))
def test_slabs_cover_the_pairs_within_the_bound(pairs, max_pairs):
    """Slabs ascend, hold every block that has pairs, begin and end with one, and keep to the bound or to one block."""
    slabs = indexing.plan_slabs(pairs, max_pairs)
    covered = [block for b0, b1 in slabs for block in range(b0, b1)]
    assert covered == sorted(set(covered))
    assert {block for block, count in enumerate(pairs) if count} <= set(covered)
    for b0, b1 in slabs:
        assert pairs[b0] and pairs[b1 - 1]
        assert sum(pairs[b0:b1]) <= max_pairs or b1 - b0 == 1
    # Each slab is as long as it may be: the next block that has pairs would not fit.
    for (b0, _), (following, _) in itertools.pairwise(slabs):
        assert sum(pairs[b0 : following + 1]) > max_pairs
    assert indexing.plan_slabs([0, 3, 0, 4, 9, 0], 7) == [(1, 4), (4, 5)]


@pytest.mark.parametrize("own", [False, True], ids=["history", "own"])
@pytest.mark.parametrize("some", [False, True], ids=["all", "gather"])
@pytest.mark.parametrize(
    ("lengths", "size", "rows", "heads", "group", "slab"),
    [
        (LENGTHS, 16, 16, 4, 2, (0, 10)),
        (LENGTHS, 16, 4, 2, 1, (2, 5)),
        (LENGTHS, 16, 8, 4, 4, (8, 9)),
        (MANY, 24, 8, 4, 2, (3, 9)),
        ([140, 3], 4, 4, 2, 2, (33, 36)),
    ],
    ids=str,
)
def test_gather_index_holds_every_pair_both_ways(lengths, size, rows, heads, group, slab, some, own):
    """Block-major and row-major lists hold just the pairs of the slab's rows, each in its order."""
    kept, bits, table = selection(lengths, size, heads, 0.3)
    tiles = table.num_blocks * tiles_per_block(size, rows)
    is_gather = torch.rand(heads, tiles, generator=torch.Generator().manual_seed(1)) < 0.5 if some else None
    counted = Counted(kept, lengths, size, rows, is_gather)
    options = {"num_pairs": len(counted.pairs(*slab, own)), "group": group, "include_own": own}
    found = indexing.gather_index(bits, table, *slab, is_gather=is_gather, **options)
    check_index(found, counted, group, own, *slab)


@pytest.mark.parametrize("own", [False, True], ids=["history", "own"])
def test_parts_of_a_block_change_nothing(monkeypatch, own):
    """However many programs share an own block, the index is the same, bit for bit."""
    _, bits, table = selection(LENGTHS, 24, 2, 0.4)
    own_rows = 2 * sum(LENGTHS) if own else 0
    options = {"num_pairs": int(indexing.pairs_per_block(bits, table).sum()) + own_rows, "group": 2}
    whole = indexing.gather_index(bits, table, 0, table.num_blocks, include_own=own, **options)
    monkeypatch.setattr(indexing, "INDEX_TOKENS", 8)
    parts = indexing.gather_index(bits, table, 0, table.num_blocks, include_own=own, **options)
    for name in ("rows", "block_offsets", "slots", "row_offsets"):
        one, two = getattr(whole, name), getattr(parts, name)
        assert (one is None and two is None and own) or torch.equal(one, two)


@pytest.mark.parametrize("density", [0.0, 1.0])
@pytest.mark.parametrize("own", [False, True], ids=["history", "own"])
def test_gather_index_of_nothing_and_of_everything(density, own):
    """A selection that keeps no history, or all of it, is indexed like any other; spare words are no matter."""
    kept, bits, table = selection(LENGTHS, 16, 2, density, words=2)
    counted, slab = Counted(kept, LENGTHS, 16), (0, len(blocks_of(LENGTHS, 16)))
    options = {"num_pairs": len(counted.pairs(*slab, own)), "group": 1, "include_own": own}
    check_index(indexing.gather_index(bits, table, *slab, **options), counted, 1, own, *slab)


def test_counting_space_follows_the_documents():
    """Counts are kept for blocks of one document only: a thousand documents need no million of them."""
    lengths = [2] * 1000
    table = block_table(oracle.cumulative(lengths), 1, 2000)
    assert table.history_blocks(0, 2000) == 1000
    assert table.history_blocks(1, 1999) == 999


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(counts=st.lists(st.integers(0, 40), max_size=12), rows=st.sampled_from([1, 3, 16, 64]))
def test_items_cut_every_list(counts, rows):
    """Items cover each list's pairs once, in order, at most so many each; surplus items name no list."""
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    table = indexing.item_table(offsets, rows, sum(counts))
    assert table.offsets.dtype == table.lists.dtype == torch.int32 and table.rows_per_item == rows
    assert table.lists.numel() == sum(counts) // rows + len(counts)
    items = int(table.offsets[-1])
    assert (table.lists[items:] == len(counts)).all()
    covered = []
    for item, number in enumerate(table.lists[:items].tolist()):
        first = int(offsets[number]) + (item - int(table.offsets[number])) * rows
        piece = range(first, min(first + rows, int(offsets[number + 1])))
        assert len(piece) > 0
        covered += piece
    assert covered == list(range(sum(counts)))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths):
    """A batch without tokens has no lists."""
    table = block_table(oracle.cumulative(lengths), 16, 0)
    bits = torch.zeros(2, 1, 0, dtype=torch.int32)
    lists = indexing.tile_lists(bits, table, 16)
    assert lists.offsets.tolist() == [0] and lists.blocks.numel() == 0 and lists.is_gather.shape == (2, 0)
    pairs = indexing.pairs_per_block(bits, table)
    assert pairs.tolist() == indexing.pairs_per_block(bits, table, lists.is_gather).tolist() == []
    assert indexing.plan_slabs(pairs.tolist(), 100) == []


def test_two_runs_give_the_same_bits():
    """Indexing twice gives the same lists."""
    _, bits, table = selection(LENGTHS, 16, 2, 0.3)
    pairs = int(indexing.pairs_per_block(bits, table).sum())
    first, second = (indexing.gather_index(bits, table, 0, 10, num_pairs=pairs, group=2) for _ in range(2))
    for name in ("rows", "block_offsets", "slots", "row_offsets"):
        assert torch.equal(getattr(first, name), getattr(second, name))
