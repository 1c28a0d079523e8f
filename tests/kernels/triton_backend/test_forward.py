"""Forward kernels against the fp64 oracle, on an index that is made by loops from the masks of the selection."""

import itertools
import math
import mmap
from dataclasses import dataclass

import oracle
import pytest
import torch
from cases import FP32_ROUNDOFF, Case, gather_index, item_table, make_case, slabs_of, some_tiles, union_lists

from sparsebalance_kernels.triton_backend import configs
from sparsebalance_kernels.triton_backend.configs import TileConfig
from sparsebalance_kernels.triton_backend.forward import addressable, gather_forward, tile_forward

# kv heads, group, head dim, block size; with fp32 the last two have two and three tiles per block
SHAPES = [
    (2, 1, 64, 16),
    (1, 5, 80, 16),
    (1, 6, 96, 16),
    (1, 7, 64, 32),
    (1, 8, 32, 16),
    (1, 1, 64, 64),
    (1, 2, 32, 48),
]
HALF_SHAPES = SHAPES[3:6]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """What may differ between runs without a difference in the result, beyond rounding."""

    gathered: float = 0.5
    blocks_per_slab: int | None = None
    tile: TileConfig | None = None
    gather: TileConfig | None = None


DEFAULT = Options()


def attend(case, dtype, options=DEFAULT, place=lambda tensor: tensor, scale=oracle.SCALE):
    """Output [T, H, D] and log-sum-exp [H, T] of the kernels in ``dtype``."""
    query, key, value = (place(tensor.to(dtype)) for tensor in case.batch[:3])
    dim, table = query.shape[2], case.table
    tile = options.tile or configs.tile_forward_config(dtype, dim, case.block_size)
    gather = options.gather or configs.gather_forward_config(dtype, dim, case.block_size)
    tiles = union_lists(case, tile.rows, some_tiles(case, tile.rows, options.gathered))
    out = place(query.new_full(query.shape, math.nan))
    lse = torch.full((query.shape[1], query.shape[0]), math.nan)
    for b0, b1 in slabs_of(case, options.blocks_per_slab):
        index = gather_index(case, b0, b1, is_gather=tiles.is_gather)
        items = item_table(index, gather.rows)
        partials = gather_forward(query, key, value, table, index, items, scale, config=options.gather)
        some = {"gathered": (index, *partials)} if len(index.rows) else {}
        row_tiles = (case.bits, table, tiles, scale, out, lse)
        tile_forward(query, key, value, *row_tiles, b0=b0, b1=b1, config=options.tile, **some)
    return out, lse


def lse_bound(case):
    """[H, T]: how far a log-sum-exp in fp32 may be off, by the terms that ``oracle.rounding_bounds`` adds up."""
    bounds = []
    for length, scores, q, k in zip(
        case.lengths, case.scores, *(oracle.split(t.abs(), case.lengths) for t in case.batch[:2]), strict=True
    ):
        products = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(case.group, dim=1)) * oracle.SCALE
        magnitude = products.masked_fill(scores.isinf(), 0.0).amax(-1) if length else products.sum(-1)
        attended = scores.isfinite().sum(-1).clamp(min=1)
        roundings = (q.shape[2] + 1) * magnitude + attended + attended.log() + 2 * (magnitude + attended.log()) + 12
        bounds.append(roundings * FP32_ROUNDOFF)
    return torch.cat(bounds, dim=1)


def assert_right(case, found):
    """Output and log-sum-exp within the bounds of fp32 rounding around the oracle's."""
    out, lse = found
    assert out.shape == case.expected[0].shape and lse.shape == case.lse.shape and lse.dtype == torch.float32
    if out.numel():
        assert float(((out - case.expected[0]).abs() - case.bounds[0]).amax()) <= 0
        assert float(((lse - case.lse).abs() - lse_bound(case)).amax()) <= 0


def assert_same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "Hkv{}-G{}-D{}-B{}".format(*shape))
def test_output_equals_masked_dense(shape):
    """In fp32 output and log-sum-exp equal those of dense attention under the mask; documents short, ragged, empty."""
    case = make_case(*shape)
    assert_right(case, attend(case, torch.float32))


@pytest.mark.parametrize("gathered", [0.0, 1.0], ids=["tile-mode", "gather-mode"])
@pytest.mark.parametrize("shape", HALF_SHAPES, ids=lambda shape: "Hkv{}-G{}-D{}-B{}".format(*shape))
def test_half_precision_is_as_good_as_dense(shape, gathered):
    """In fp16 the largest error of the output is at most twice that of dense attention in fp16."""
    case = make_case(*shape)
    inputs = [tensor.half() for tensor in case.batch[:3]]
    rival = oracle.dense(*inputs, case.selections, case.lengths, case.block_size)
    found, _ = attend(case, torch.float16, Options(gathered=gathered))
    assert found.dtype == torch.float16
    errors = [float((out.double() - case.expected[0]).abs().amax()) for out in (found, rival)]
    assert errors[0] <= 2 * errors[1]


SMALL = (1, 2, 32, 32)
CUTS = {
    "tile-mode": Options(gathered=0.0),
    "gather-mode": Options(gathered=1.0),
    "slabs-of-3": Options(blocks_per_slab=3),
    "slabs-of-1": Options(blocks_per_slab=1),
    "split-lists": Options(gathered=1.0, gather=TileConfig(16, 32, 4, 2)),
    "small-tiles": Options(tile=TileConfig(16, 16, 4, 2), gather=TileConfig(16, 16, 4, 2)),
}


@pytest.mark.parametrize("name", CUTS)
def test_every_way_of_cutting_the_work_is_right(name):
    """Modes of tiles, slabs, split lists and tile sizes change no output beyond the bounds of rounding."""
    case = make_case(*SMALL)
    assert_right(case, attend(case, torch.float32, CUTS[name]))


def test_slabs_and_split_lists_change_no_bit():
    """A row's bits depend neither on the slab it is in nor on the place it has in a list."""
    case = make_case(*SMALL)
    whole = attend(case, torch.float32, Options(gathered=1.0))
    for blocks_per_slab, rows in ((2, 128), (None, 16)):
        options = Options(gathered=1.0, blocks_per_slab=blocks_per_slab, gather=TileConfig(rows, 32, 4, 2))
        assert_same_bits(attend(case, torch.float32, options), whole)


def test_modes_of_other_tiles_change_no_bit():
    """A tile's rows have the same bits whichever tiles beside it are in gather mode."""
    case = make_case(*SMALL)
    rows = configs.query_tile(torch.float32, 32, 32)
    mixed, lse = attend(case, torch.float32)
    whole = [attend(case, torch.float32, Options(gathered=share)) for share in (0.0, 1.0)]
    modes = some_tiles(case, rows)
    for (head, token), (own, _) in case.rows.items():
        tile = (own * 32 + token - int(case.table.starts[own])) // rows
        out_then, lse_then = whole[int(modes[head, tile])]
        assert torch.equal(mixed[token, head], out_then[token, head]) and lse[head, token] == lse_then[head, token]


def test_other_rows_of_a_tile_change_no_bit():
    """In tile mode a block that only other rows of the tile keep leaves a row's bits as they are."""
    case = make_case(1, 1, 32, 16, lengths=(83,), density=0.4)
    alone = attend(case, torch.float32, Options(gathered=0.0))
    kept = case.selections[0].kept.clone()
    even = torch.arange(83) % 2 == 0
    kept[even] |= torch.arange(83)[even, None, None] // 16 > torch.arange(5)
    fuller = Case(case.lengths, 16, case.batch, [oracle.Selection(kept, torch.zeros(0))])
    out, lse = attend(fuller, torch.float32, Options(gathered=0.0))
    assert_right(fuller, (out, lse))
    assert_same_bits((out[~even], lse[:, ~even]), (alone[0][~even], alone[1][:, ~even]))


def test_keeping_everything_is_dense_attention():
    """With every visible block kept, lists of hundreds of rows, the output is that of causal attention."""
    case = make_case(1, 3, 32, 16, lengths=(70, 20), density=1.1)
    for gathered in (0.0, 1.0):
        found = attend(case, torch.float32, Options(gathered=gathered))
        assert_right(case, found)
        for q, k, v, out in zip(*(oracle.split(t, case.lengths) for t in (*case.batch[:3], found[0])), strict=True):
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
            dense = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=oracle.SCALE, enable_gqa=True
            )
            bound = case.bounds[0].amax()
            assert float((dense[0].transpose(0, 1) - out).abs().amax()) <= bound


def test_more_blocks_than_a_word_has_bits():
    """History block 31, whose bit is a sign bit, and 32, whose bit is in a second word, count like others."""
    case = make_case(1, 1, 32, 16, lengths=(37 * 16,), density=0.2, run=4)
    assert {31, 32} <= {block for _, blocks in case.rows.values() for block in blocks}
    assert_right(case, attend(case, torch.float32, Options(gathered=0.0)))


def test_two_runs_give_the_same_bits():
    """Running twice gives bit for bit the same output."""
    case = make_case(*SMALL)
    options = Options(blocks_per_slab=4)
    assert_same_bits(attend(case, torch.float16, options), attend(case, torch.float16, options))


def test_only_the_asked_blocks_are_written():
    """tile_forward writes every row of its own blocks, and no other."""
    case = make_case(*SMALL)
    query, key, value = (tensor.float() for tensor in case.batch[:3])
    tile = configs.tile_forward_config(torch.float32, 32, 32)
    lists = union_lists(case, tile.rows, some_tiles(case, tile.rows, 0.0))
    out, lse = torch.full_like(query, 7.0), query.new_full((2, query.shape[0]), 7.0)
    b0, b1 = 2, case.table.num_blocks - 2
    tile_forward(query, key, value, case.bits, case.table, lists, oracle.SCALE, out, lse, b0=b0, b1=b1)
    token = torch.arange(query.shape[0])
    inside = (token >= case.table.starts[b0]) & (token < case.table.stops[b1 - 1])
    assert bool((out[~inside] == 7.0).all()) and bool((lse[:, ~inside] == 7.0).all())
    assert float(((out - case.expected[0]).abs() - case.bounds[0])[inside].amax()) <= 0


def head_major(tensor):
    """The same numbers with heads outermost."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def between_others(tensor):
    """The same numbers as a part of a wider buffer, with NaN on all sides."""
    tokens, heads, dim = tensor.shape
    buffer = tensor.new_full((tokens + 64, heads + 3, dim + 7), math.nan)
    buffer[32:-32, 2:-1, 5:-2] = tensor
    return buffer[32:-32, 2:-1, 5:-2]


@pytest.mark.parametrize("place", [head_major, between_others])
def test_strides_change_no_bit(place):
    """Views with other strides, packed head-major or inside a wider buffer, give the bits of packed tensors."""
    case = make_case(1, 2, 24, 32)
    assert_same_bits(attend(case, torch.float32, place=place), attend(case, torch.float32))


def test_inputs_that_cannot_be_addressed_are_copied():
    """Inputs with another last stride than 1 give the bits of packed tensors; other strides are never copied."""
    case = make_case(*SMALL)
    query, key, value = (tensor.float() for tensor in case.batch[:3])
    columns_first = [tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in (query, key, value)]
    assert all(tensor.stride(-1) != 1 and addressable(tensor).stride(-1) == 1 for tensor in columns_first)
    assert all(addressable(tensor) is tensor for tensor in (query, head_major(query), between_others(query)))
    found = attend(Case(case.lengths, 32, (*columns_first, case.batch[3]), case.selections), torch.float32)
    assert_same_bits(found, attend(case, torch.float32))


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
    case = make_case(2, 1, 16, 128, lengths=(3 * 128 + 3,), density=0.7, run=32)
    for gathered in (0.0, 1.0):
        found = attend(case, torch.float16, Options(gathered=gathered), place=far_apart)
        assert found[0].stride()[:2] == (2**23, 2**31 + 2**22)
        assert_same_bits(found, attend(case, torch.float16, Options(gathered=gathered)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("gathered", [0.0, 1.0], ids=["tile-mode", "gather-mode"])
def test_a_bad_row_stays_alone(poison, gathered):
    """A query row of NaN or inf leaves every other row's bits as they are."""
    case = make_case(1, 2, 32, 16, lengths=(83, 40))
    options = Options(gathered=gathered)
    clean = attend(case, torch.float32, options)
    query = case.batch[0].clone()
    query[70, 1] = poison
    out, lse = attend(Case(case.lengths, 16, (query, *case.batch[1:]), case.selections), torch.float32, options)
    assert not out[70, 1].isfinite().any()
    assert not lse[1, 70].isfinite()
    out[70, 1], lse[1, 70] = clean[0][70, 1], clean[1][1, 70]
    assert_same_bits((out, lse), clean)


@pytest.mark.parametrize("scale", [-oracle.SCALE, 0.0])
def test_any_finite_scale(scale):
    """A negative factor is that of negated queries; a factor of zero gives every kept key the same weight."""
    case = make_case(*SMALL)
    turned = -case.batch[0] if scale else torch.zeros_like(case.batch[0])
    other = Case(case.lengths, 32, (turned, *case.batch[1:]), case.selections)
    assert_right(other, attend(case, torch.float32, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 80, 96, 128, 192, 256, 512])
def test_tiles_divide_blocks(dtype, block_size):
    """Keys divide rows, rows divide the block, and neither is below what a tensor-core product takes."""
    for dim, hopper in itertools.product((16, 32, 64, 80, 96, 128, 192, 256), (False, True)):
        tile = configs.tile_forward_config(dtype, dim, block_size)
        gather = configs.gather_forward_config(dtype, dim, block_size, hopper)
        assert block_size % tile.rows == 0 and tile.rows % tile.keys == 0 and tile.keys >= configs.LEAST_TILE
        assert block_size % gather.keys == 0 and gather.keys >= configs.LEAST_TILE
        # Lists and items do not depend on the device.
        assert configs.query_tile(dtype, dim, block_size) == tile.rows
        assert configs.gather_forward_config(dtype, dim, block_size).rows == gather.rows
        assert tile.rows <= 128 and gather.rows <= 128, "addressable() counts on it"


def test_odd_block_sizes_are_refused():
    """A block size that is no multiple of 16 is refused by name."""
    with pytest.raises(ValueError, match="block_size must be a multiple of 16.*got 24"):
        configs.query_tile(torch.float16, 64, 24)
