"""Backward kernels against the fp64 oracle, on an index that is made by loops from the masks of the selection."""

import math
import mmap
from dataclasses import dataclass
from types import SimpleNamespace

import harness
import oracle
import pytest
import torch
from cases import Case, gather_index, item_table, make_case, slabs_of, some_tiles, union_lists

from sparsebalance_kernels.triton_backend import configs, indexing
from sparsebalance_kernels.triton_backend.backward_dkdv import dkdv, finish_dkdv, most_parts
from sparsebalance_kernels.triton_backend.backward_dq import gather_dq, row_deltas, tile_dq
from sparsebalance_kernels.triton_backend.configs import TileConfig

# kv heads, group, head dim, block size; of many heads shorter documents
SHORT = (1, 15, 16, 17, 33)
SHAPES = [
    (2, 1, 64, 16),
    (1, 5, 80, 16, SHORT),
    (1, 6, 32, 16, SHORT),
    (1, 7, 64, 16, SHORT),
    (1, 8, 32, 16, SHORT),
    (1, 1, 64, 64),
    (1, 2, 96, 32),
    (1, 2, 32, 48),
]
SMALL = (1, 2, 32, 32, (1, 31, 0, 33, 99))
LOOPS = SimpleNamespace(union_lists=union_lists, gather_index=gather_index, item_table=item_table)


@dataclass(frozen=True)
class Options:
    """What may differ between runs without a difference in the result, beyond rounding."""

    gathered: float = 0.5
    blocks_per_slab: int | None = None
    rows_per_item: int = 1024
    list_rows: int | None = None
    tile: TileConfig | None = None
    gather: TileConfig | None = None
    keys: TileConfig | None = None


DEFAULT = Options()


def gradients(case, dtype, options=DEFAULT, place=lambda tensor: tensor, scale=oracle.SCALE, lists=LOOPS):
    """dq, dk, dv of the kernels in ``dtype``; output and log-sum-exp that they are given are the oracle's, rounded."""
    query, key, value, grad_out = (place(tensor.to(dtype)) for tensor in case.batch)
    out, lse, table = place(case.expected[0].to(dtype)), case.lse.float(), case.table
    list_rows = options.list_rows or configs.query_tile(dtype, query.shape[2], case.block_size)
    tiles = lists.union_lists(case, list_rows, some_tiles(case, list_rows, options.gathered))
    rows = (grad_out, query, key, value, lse, row_deltas(grad_out, out))
    gather = options.gather or configs.gather_dq_config(dtype, query.shape[2], case.block_size)
    dq = place(query.new_full(query.shape, math.nan))
    sums = torch.zeros(key.shape), torch.zeros(key.shape)
    for b0, b1 in slabs_of(case, options.blocks_per_slab):
        index = lists.gather_index(case, b0, b1, is_gather=tiles.is_gather)
        items = lists.item_table(index, gather.rows)
        partial = gather_dq(*rows, table, index, items, scale, config=options.gather)
        some = {"gathered": (index, partial)} if len(index.rows) else {}
        tile_dq(*rows, case.bits, table, tiles, scale, dq, b0=b0, b1=b1, config=options.tile, **some)
        index = lists.gather_index(case, b0, b1, include_own=True)
        items = lists.item_table(index, options.rows_per_item)
        dkdv(*rows, table, index, items, scale, *sums, config=options.keys)
    return dq, *finish_dkdv(*sums, scale, dtype)


def assert_right(case, found):
    """Gradients within the bounds of fp32 rounding around the oracle's."""
    harness.assert_within((case.expected[0], *found), case.expected, case.bounds)


def assert_same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "Hkv{}-G{}-D{}-B{}".format(*shape))
def test_gradients_equal_masked_dense(shape):
    """In fp32 all gradients equal those of dense attention under the mask; documents short, ragged, empty."""
    case = make_case(*shape)
    assert_right(case, gradients(case, torch.float32))


def rms(tensor):
    return float(tensor.double().square().mean().sqrt())


@pytest.mark.parametrize("gathered", [0.0, 1.0], ids=["tile-mode", "gather-mode"])
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[6]], ids=lambda shape: "Hkv{}-G{}-D{}-B{}".format(*shape))
def test_half_precision_is_as_good_as_dense(shape, gathered):
    """In fp16 the error of each gradient stays within 3 times that of dense attention in fp16.

    Errors are root mean squares, with one rounding of the result on top.
    """
    case = make_case(*shape)
    inputs = [tensor.half() for tensor in case.batch]
    rival = harness.run_dense(*inputs, case.selections, case.lengths, case.block_size)
    half_unit = torch.finfo(torch.float16).eps / 2
    found = gradients(case, torch.float16, Options(gathered=gathered))
    for name, one, other, right in zip(("dq", "dk", "dv"), found, rival[1:], case.expected[1:], strict=True):
        assert one.dtype == torch.float16
        assert rms(one.double() - right) <= 3 * rms(other.double() - right) + half_unit * rms(right), name


CUTS = {
    "tile-mode": Options(gathered=0.0),
    "gather-mode": Options(gathered=1.0),
    "slabs-of-3": Options(blocks_per_slab=3),
    "slabs-of-1": Options(blocks_per_slab=1, rows_per_item=16),
    "items-of-16": Options(rows_per_item=16),
    "items-of-50": Options(rows_per_item=50, blocks_per_slab=4),
    "small-tiles": Options(
        rows_per_item=40,
        tile=TileConfig(16, 16, 4, 3),
        gather=TileConfig(16, 16, 4, 2),
        keys=TileConfig(16, 16, 4, 3),
    ),
    "other-tiles": Options(
        list_rows=16, tile=TileConfig(16, 32, 4, 3), gather=TileConfig(32, 16, 4, 2), keys=TileConfig(64, 16, 4, 3)
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_every_way_of_cutting_the_work_is_right(name):
    """Modes of tiles, slabs, items and tile sizes change no gradient beyond the bounds of rounding."""
    case = make_case(*SMALL)
    assert_right(case, gradients(case, torch.float32, CUTS[name]))


def test_modes_leave_keys_and_values_alone():
    """dk and dv do not depend, not by a bit, on which tiles gather."""
    case = make_case(*SMALL)
    results = [gradients(case, torch.float32, Options(gathered=share))[1:] for share in (0.0, 1.0)]
    assert_same_bits(*results)


def test_slabs_and_split_lists_change_no_bit_of_dq():
    """A row's dq depends neither on the slab it is in nor on the place it has in a list."""
    case = make_case(*SMALL)
    whole = gradients(case, torch.float32, Options(gathered=1.0, gather=TileConfig(64, 32, 4, 2)))
    for blocks_per_slab, rows in ((2, 64), (3, 16)):
        options = Options(gathered=1.0, blocks_per_slab=blocks_per_slab, gather=TileConfig(rows, 32, 4, 2))
        assert_same_bits(gradients(case, torch.float32, options)[:1], whole[:1])


def test_keeping_everything_is_dense_attention():
    """With every visible block kept, and lists of several items, the gradients are those of causal attention."""
    case = make_case(1, 4, 32, 16, lengths=(70, 20), density=1.1)
    found = gradients(case, torch.float32, Options(rows_per_item=100))
    assert_right(case, found)
    leaves = [tensor.clone().requires_grad_() for tensor in case.batch[:3]]
    outs = []
    for q, k, v in zip(*(oracle.split(leaf, case.lengths) for leaf in leaves), strict=True):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=oracle.SCALE, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    dense = torch.autograd.grad(torch.cat(outs), leaves, case.batch[3])
    harness.assert_within((case.expected[0], *found), (case.expected[0], *dense), case.bounds)


def test_more_blocks_than_a_word_has_bits():
    """History block 31, whose bit is a sign bit, and 32, whose bit is in a second word, count like others."""
    case = make_case(1, 1, 32, 16, lengths=(33 * 16 + 1,), density=0.1, run=16)
    assert any({31, 32} & set(blocks) for _, blocks in case.rows.values())
    assert_right(case, gradients(case, torch.float32))


def test_two_runs_give_the_same_bits():
    """Running twice gives bit for bit the same gradients."""
    case = make_case(*SMALL)
    options = Options(blocks_per_slab=4, rows_per_item=40)
    assert_same_bits(gradients(case, torch.float16, options), gradients(case, torch.float16, options))


def test_the_index_made_from_bits_gives_the_same_bits():
    """With the lists of indexing.py in place of those by loops, every gradient stays the same to the bit."""
    case = make_case(*SMALL)
    table, heads = case.table, case.batch[0].shape[1]
    rows = configs.query_tile(torch.float32, SMALL[2], case.block_size)
    modes = indexing.tile_lists(case.bits, table, rows)
    assert modes.is_gather.any() and not modes.is_gather.all()

    def from_bits(case, b0, b1, *, is_gather=None, include_own=False):
        pairs = int(indexing.pairs_per_block(case.bits, table, is_gather)[b0:b1].sum())
        if include_own:
            pairs += int((table.stops - table.starts)[b0:b1].sum()) * heads
        options = {"is_gather": is_gather, "include_own": include_own}
        return indexing.gather_index(case.bits, table, b0, b1, num_pairs=pairs, group=case.group, **options)

    def items_of(index, rows_per_item):
        return indexing.item_table(index.block_offsets, rows_per_item, len(index.rows))

    loops = SimpleNamespace(**vars(LOOPS) | {"union_lists": lambda *_: union_lists(case, rows, modes.is_gather)})
    kernels = SimpleNamespace(union_lists=lambda *_: modes, gather_index=from_bits, item_table=items_of)
    options = Options(blocks_per_slab=5, rows_per_item=40)
    found = [gradients(case, torch.float32, options, lists=lists) for lists in (loops, kernels)]
    assert_same_bits(*found)


def test_only_the_asked_blocks_are_written():
    """tile_dq writes every row of its own blocks, and no other."""
    case = make_case(*SMALL)
    query, key, value, grad_out = (tensor.float() for tensor in case.batch)
    rows = configs.query_tile(torch.float32, 32, 32)
    lists = union_lists(case, rows, some_tiles(case, rows, 0.0))
    dq, delta = torch.full_like(query, 7.0), row_deltas(grad_out, case.expected[0].float())
    b0, b1 = 2, case.table.num_blocks - 2
    inputs = (grad_out, query, key, value, case.lse.float(), delta, case.bits, case.table, lists, oracle.SCALE)
    tile_dq(*inputs, dq, b0=b0, b1=b1)
    token = torch.arange(query.shape[0])
    inside = (token >= case.table.starts[b0]) & (token < case.table.stops[b1 - 1])
    assert bool((dq[~inside] == 7.0).all())
    assert float(((dq - case.expected[1]).abs() - case.bounds[1])[inside].amax()) <= 0


def in_a_wider_buffer(tensor):
    """The same numbers, head-major, with NaN on all sides."""
    tokens, heads, dim = tensor.shape
    buffer = tensor.new_full((heads + 3, tokens, dim + 7), math.nan)
    buffer[2:-1, :, 5:-2] = tensor.transpose(0, 1)
    return buffer[2:-1, :, 5:-2].transpose(0, 1)


def with_results_of(case, *batch):
    """Another batch whose output and log-sum-exp are those of ``case``."""
    other = Case(case.lengths, case.block_size, batch, case.selections)
    vars(other).update(expected=case.expected, lse=case.lse)
    return other


def columns_first(tensor):
    """The same numbers with another last stride than 1: the kernels take a copy."""
    return tensor.transpose(0, 2).contiguous().transpose(0, 2)


def test_strides_change_no_bit():
    """Views with other strides give bit for bit what packed tensors give; nothing beside them is read."""
    case = make_case(*SMALL)
    packed = gradients(case, torch.float32)
    assert_same_bits(gradients(case, torch.float32, place=in_a_wider_buffer), packed)
    assert columns_first(case.batch[0]).stride(-1) != 1
    turned = with_results_of(case, *map(columns_first, case.batch))
    assert_same_bits(gradients(turned, torch.float32), packed)


# Linux's value; Python knows the name from 3.13 on.
MAP_NORESERVE = 0x4000


def far_apart(tensor):
    """The same numbers in memory of which only touched pages exist: tokens 2^23 elements apart, heads over 2^31."""
    tokens, heads, dim = tensor.shape
    strides = (2**23, 2**31 + 2**22, 1)
    size = ((heads - 1) * strides[1] + tokens * strides[0]) * tensor.element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=tensor.dtype).as_strided((tokens, heads, dim), strides).copy_(tensor)


def test_offsets_beyond_32_bits():
    """Elements further than 2^31 from the start of a tensor are found, by every kernel and in every tensor."""
    case = make_case(1, 2, 16, 16, lengths=(16 * 16 + 3,), density=0.1)
    found = gradients(case, torch.float16, place=far_apart)
    assert found[0].stride()[:2] == (2**23, 2**31 + 2**22)
    assert_same_bits(found, gradients(case, torch.float16))


@pytest.mark.parametrize("gathered", [0.0, 1.0], ids=["tile-mode", "gather-mode"])
def test_hidden_scores_may_be_huge(gathered):
    """Keys whose scores overflow exp2 change no gradient of the rows that do not see them."""
    case = make_case(1, 2, 32, 16, lengths=(66,), density=0.5, run=4)
    query, key, value, grad = (tensor.clone() for tensor in case.batch)
    # The last key of the second block: no later row keeps the block, and of its own rows only the last sees the key.
    query[..., 0] = query[..., 0].abs() + 1.0
    key[31, :, 0] = 30000.0
    kept = case.selections[0].kept & (torch.arange(4) != 1)
    huge = Case(case.lengths, 16, (query, key, value, grad), [oracle.Selection(kept, torch.zeros(0))])
    found = gradients(huge, torch.float32, Options(gathered=gathered))
    assert all(tensor.isfinite().all() for tensor in found)
    assert_right(huge, found)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("gathered", [0.0, 1.0], ids=["tile-mode", "gather-mode"])
def test_a_bad_row_stays_alone(poison, gathered):
    """A row whose gradient is NaN or inf leaves the dq of every other row as it is, to the bit."""
    case = make_case(1, 2, 32, 16, lengths=(50, 17))
    options = Options(gathered=gathered)
    clean, *_ = gradients(case, torch.float32, options)
    grad = case.batch[3].clone()
    grad[40, 1] = poison
    bad = Case(case.lengths, 16, (*case.batch[:3], grad), case.selections)
    dq, *_ = gradients(bad, torch.float32, options)
    assert not dq[40, 1].isfinite().any()
    dq[40, 1] = clean[40, 1]
    assert_same_bits([dq], [clean])


def test_any_finite_scale():
    """A negative factor is that of negated queries, whose gradients turn too; by zero no query and no key moves."""
    case = make_case(*SMALL)
    query, *others = case.batch
    dq, dk, dv = gradients(with_results_of(case, -query, *others), torch.float32, scale=-oracle.SCALE)
    assert_right(case, (-dq, dk, dv))
    flat = Case(case.lengths, case.block_size, (0.0 * query, *others), case.selections)
    dq, dk, dv = gradients(with_results_of(flat, query, *others), torch.float32, scale=0.0)
    assert not dq.any() and not dk.any()
    assert float(((dv - flat.expected[3]).abs() - flat.bounds[3]).amax()) <= 0


def test_items_must_fit_the_tile():
    """Items cut for another tile are refused: rows would be left out."""
    case = make_case(*SMALL)
    index = gather_index(case, 0, case.table.num_blocks)
    query, key, value, grad = (tensor.float() for tensor in case.batch)
    rows = grad, query, key, value, case.lse.float(), row_deltas(grad, query)
    with pytest.raises(AssertionError, match="items of 17 pairs"):
        gather_dq(*rows, case.table, index, item_table(index, 17), oracle.SCALE)


@pytest.mark.parametrize("rows_per_item", [1, 16, 50, 1024])
def test_parts_fit_their_buffer(rows_per_item):
    """Items beside each list's first are never more than ``most_parts``, what the buffer holds."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths = torch.randint(0, 120, (8,), generator=generator).tolist()
        parts = sum(max(0, -(-length // rows_per_item) - 1) for length in lengths)
        assert parts <= most_parts(sum(lengths), rows_per_item)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 80, 96, 128, 192, 256, 512])
def test_tiles_divide_blocks(dtype, block_size):
    """Tiles divide the block, dq's divide those of the lists, and none is below what a tensor-core product takes."""
    for dim in (16, 32, 64, 80, 96, 128, 192, 256):
        tile, gather, keys = (
            config(dtype, dim, block_size)
            for config in (configs.tile_dq_config, configs.gather_dq_config, configs.dkdv_config)
        )
        assert configs.query_tile(dtype, dim, block_size) % tile.rows == 0
        for config in (tile, gather, keys):
            assert block_size % config.keys == 0 and config.keys >= configs.LEAST_TILE
            assert configs.LEAST_TILE <= config.rows <= 128 and config.keys <= 128, "addressable() counts on it"


def test_wide_heads_are_refused():
    """A head dim above the widest tile is refused by name."""
    with pytest.raises(ValueError, match="head_dim 257 is above 256"):
        configs.dkdv_config(torch.float16, 257, 64)
