"""The torch backend's index of a tile: block-major lists and row-major slots of the same pairs."""

import itertools

import harness
import oracle
import pytest
import torch

from sparsebalance_kernels import index
from sparsebalance_kernels.index import document_blocks, history_tiles, index_tile

LENGTHS = [1, 15, 16, 17, 33, 0, 40, 101]


def kept_pairs(selection, tile, heads, kv_heads):
    """(row, kv head, block) of every kept pair of a tile in row-major order, read from the decoded masks."""
    starts = oracle.cumulative(LENGTHS).tolist()
    document = max(number for number, start in enumerate(starts[:-1]) if start == tile.document_start)
    mask = harness.decode(selection, LENGTHS)[document]
    group, tokens = heads // kv_heads, tile.stop - tile.start
    pairs = []
    for kv_head, token, member in itertools.product(range(kv_heads), range(tokens), range(group)):
        row = (kv_head * tokens + token) * group + member
        position = tile.start - tile.document_start + token
        for block in mask[position, kv_head * group + member].nonzero().flatten().tolist():
            pairs.append((row, kv_head, block))
    return pairs


def check_batches(found, scores):
    """The list of every slot; batches follow each other, are even or single, and hold at most ``scores`` scores."""
    list_of_slot = []
    for batch in found.batches:
        count, end = len(batch.lists), len(list_of_slot)
        assert batch.rows >= 16 and (count == 1 or count % 2 == 0)
        assert batch.slots == slice(end, end + count * batch.rows)
        assert count * batch.rows * 16 <= max(scores, 16 * 16)
        list_of_slot += [number for number in batch.lists for _ in range(batch.rows)]
    assert len(list_of_slot) == len(found.rows)
    return list_of_slot


@pytest.mark.parametrize("count", [*range(1, 70), 1000, 1024, 1025, 2047, 2048, 14336])
def test_items_are_filled_up_by_a_sixteenth_at_most(count):
    """An item has room for its list and wastes at most a sixteenth of it, or 15 rows."""
    one = torch.tensor([count])
    rows = int(index._item_rows(one, torch.ones_like(one)))
    assert rows % 16 == 0 and 0 <= rows - count <= max(15, count / 16)


@pytest.mark.parametrize("tile_tokens", [24, 4096])
@pytest.mark.parametrize("scores", [1, 2**10, 2**19])
@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 1}, {"top_k": 3}, {"top_p": 1.0}])
def test_both_directions_hold_the_kept_pairs(monkeypatch, tile_tokens, scores, options):
    """Every kept pair has one slot, in its block's list and in its row's slots, both ascending; the rest is empty."""
    monkeypatch.setattr(index, "TILE_TOKENS", tile_tokens)
    monkeypatch.setattr(index, "SCORES_AT_ONCE", scores)
    query, key, _, _ = oracle.grid_batch(LENGTHS, block_size=16, kv_heads=2, group=3, seed=3)
    selection = harness.select(query.float(), key.float(), LENGTHS, 16, **options)
    for tile in history_tiles(selection.cu_seqlens.tolist(), 16):
        found = index_tile(selection, tile, 2)
        pairs = kept_pairs(selection, tile, 6, 2)
        num_rows = (tile.stop - tile.start) * 6
        assert found.rows.dtype == found.slots.dtype == found.row_offsets.dtype == torch.int32
        list_of_slot = check_batches(found, scores)
        assert found.row_offsets.tolist() == [sum(p[0] < row for p in pairs) for row in range(num_rows + 1)]
        lists = [list_of_slot[slot] for slot in found.slots.tolist()]
        rows = [int(found.rows[slot]) for slot in found.slots.tolist()]
        in_slots = [(row, *divmod(which, found.num_blocks)) for row, which in zip(rows, lists, strict=True)]
        assert in_slots == pairs
        assert len(set(found.slots.tolist())) == len(pairs)
        filled = set(found.slots.tolist())
        assert all(int(row) == num_rows for slot, row in enumerate(found.rows) if slot not in filled)
        by_block = sorted((kv_head * found.num_blocks + block, row) for row, kv_head, block in pairs)
        # Stable: slots of one list are ascending rows.
        real = sorted(filled, key=lambda slot: (list_of_slot[slot], slot))
        assert [(list_of_slot[slot], int(found.rows[slot])) for slot in real] == by_block


def test_tiles_cover_every_token_with_history_once(monkeypatch):
    """Tiles are the tokens beyond each document's first block, in order, none longer than TILE_TOKENS."""
    monkeypatch.setattr(index, "TILE_TOKENS", 24)
    boundaries = oracle.cumulative(LENGTHS).tolist()
    tiles = list(history_tiles(boundaries, 16))
    covered = [token for tile in tiles for token in range(tile.start, tile.stop)]
    expected = [t for a, b in itertools.pairwise(boundaries) for t in range(a + 16, b)]
    assert covered == expected and max(tile.stop - tile.start for tile in tiles) == 24


def test_lists_longer_than_16_bits_are_sorted_too(monkeypatch):
    """More lists than 16 bits can number are indexed the same way."""
    length, heads = 40, 6
    query, key, _, _ = oracle.grid_batch([length], block_size=16, kv_heads=heads, group=1)
    selection = harness.select(query.float(), key.float(), [length], 16, top_p=1.0)
    (tile,) = history_tiles([0, length], 16)
    expected = index_tile(selection, tile, heads)

    class Narrow:
        max = 3

    monkeypatch.setattr(index.torch, "iinfo", lambda dtype: Narrow)
    found = index_tile(selection, tile, heads)
    assert torch.equal(found.rows, expected.rows) and torch.equal(found.slots, expected.slots)


def test_own_blocks_partition_the_tokens():
    """Own blocks cover every token of every document once and never cross a document's end."""
    boundaries = oracle.cumulative(LENGTHS).tolist()
    blocks = document_blocks(boundaries, 16)
    assert [token for start, length in blocks for token in range(start, start + length)] == list(range(sum(LENGTHS)))
    ends = set(boundaries)
    assert all(length == 16 or start + length in ends for start, length in blocks)
    assert document_blocks((0, 5, 5, 6), 4) == [(0, 4), (4, 1), (5, 1)]
