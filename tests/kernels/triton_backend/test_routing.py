import itertools
import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparsebalance_kernels.triton_backend import layout, routing
from sparsebalance_kernels.triton_backend.pooling import pooled_keys

LENGTHS = [1, 15, 16, 17, 33, 101, 0, 5]
BUDGETS = {
    "p.02": {"top_p": 0.02},
    "p.35": {"top_p": 0.35},
    "p.8": {"top_p": 0.8},
    "p.999": {"top_p": 0.999},
    "p1": {"top_p": 1.0},
    "p1-max2": {"top_p": 1.0, "max_blocks": 2},
    "p.3-min2": {"top_p": 0.3, "min_blocks": 2},
    "p.9-max2": {"top_p": 0.9, "max_blocks": 2},
    "p.5-max0": {"top_p": 0.5, "max_blocks": 0},
    "p.5-sink1": {"top_p": 0.5, "sink_blocks": 1},
    "p.02-sink3": {"top_p": 0.02, "sink_blocks": 3},
    "p.7-sink2-max3": {"top_p": 0.7, "sink_blocks": 2, "max_blocks": 3},
    "p-documents": {"top_p": [0.1, 0.2, 1.0, 0.4, 0.6, 0.5, 0.7, 1.0]},
    "k1": {"top_k": 1},
    "k3": {"top_k": 3},
    "k20": {"top_k": 20},
    "k3-min3": {"top_k": 3, "min_blocks": 3},
    "k6-max2": {"top_k": 6, "max_blocks": 2},
    "k1-sink2": {"top_k": 1, "sink_blocks": 2},
    "k4-sink2": {"top_k": 4, "sink_blocks": 2},
    "k-documents": {"top_k": [1, 2, 3, 1, 2, 4, 9, 1]},
}


def route(query, key, lengths, block_size, *, top_p=None, top_k=None, scale=oracle.SCALE, words=None, **bounds):
    """The kernel's bits and coverage; budgets are numbers or one number per document."""
    cu_seqlens = bounds.pop("cu_seqlens", None)
    cu_seqlens = oracle.cumulative(lengths) if cu_seqlens is None else cu_seqlens
    bounds = {"min_blocks": 0, "max_blocks": None, "sink_blocks": 0} | bounds
    table = layout.block_table(cu_seqlens, block_size, sum(lengths))
    words = words or max(1, math.ceil(max([length // block_size for length in lengths], default=0) / 32))

    def per_document(value, dtype):
        if value is None:
            return None
        return torch.tensor(value if isinstance(value, list) else [value] * len(lengths), dtype=dtype)

    budgets = {"top_p": per_document(top_p, torch.float32), "top_k": per_document(top_k, torch.int32)}
    return routing.route(query, key, table, cu_seqlens, words=words, scale=scale, **budgets, **bounds)


def decode(bits, lengths, block_size):
    """Bool ``[L, H, complete blocks]`` per document; no other bit is set."""
    assert bits.dtype == torch.int32 and bits.shape[2] == sum(lengths)
    unpacked = ((bits[:, :, None] >> torch.arange(32, dtype=torch.int32)[:, None]) & 1).bool().flatten(1, 2)
    masks = [part.permute(2, 0, 1) for part in unpacked.split(list(lengths), dim=2)]
    for mask, length in zip(masks, lengths, strict=True):
        assert not mask[..., length // block_size :].any()
    return [mask[..., : length // block_size] for mask, length in zip(masks, lengths, strict=True)]


def select(query, key, lengths, block_size, **options):
    """The kernel's selection, decoded."""
    return decode(route(query, key, lengths, block_size, **options)[0], lengths, block_size)


def grid_case(lengths=LENGTHS, block_size=16, kv_heads=2, group=1, dim=32, seed=1):
    """fp32 query and key on the oracle's grid."""
    options = {"block_size": block_size, "kv_heads": kv_heads, "group": group, "dim": dim, "seed": seed}
    query, key, _, _ = oracle.grid_batch(lengths, **options)
    return query.float(), key.float()


def score_case(scores):
    """Query and key of a document with blocks of one token: every row's score of block i is just ``scores[i]``."""
    key = torch.zeros(len(scores), 1, 16)
    key[:, 0, 0] = torch.tensor(scores, dtype=torch.float32)
    query = torch.zeros_like(key)
    query[..., 0] = 1.0
    return query, key


def assert_same(masks, expected):
    assert len(masks) == len(expected)
    for mask, right in zip(masks, expected, strict=True):
        assert torch.equal(mask, right.kept)


@pytest.mark.parametrize("options", BUDGETS.values(), ids=BUDGETS.keys())
def test_selection_follows_the_definition(options):
    """The kernel keeps exactly the blocks of the definition under every kind of budget, and counts their mass."""
    query, key = grid_case()
    bits, coverage = route(query, key, LENGTHS, 16, **options)
    expected = oracle.select(query.double(), key.double(), LENGTHS, 16, **options)
    assert_same(decode(bits, LENGTHS, 16), expected)
    assert coverage.dtype == torch.float32 and coverage.shape == (2, sum(LENGTHS))
    masses = []
    for length, one in zip(LENGTHS, expected, strict=True):
        everything = one.kept.sum(-1) == torch.arange(length)[:, None] // 16
        masses.append((one.kept * one.mass).sum(-1).masked_fill(everything, 1.0))
    right = torch.cat(masses).T
    assert ((coverage.double() - right).abs() <= oracle.mass_error(6)).all()
    assert (coverage[right == 1.0] == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_selection_is_the_same_in_every_dtype(dtype):
    """Scores are accumulated in fp32: inputs that all dtypes hold exactly give the same bits."""
    query, key = grid_case()
    expected = route(query, key, LENGTHS, 16, top_p=0.6)
    found = route(query.to(dtype), key.to(dtype), LENGTHS, 16, top_p=0.6)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [{"top_p": 0.6}, {"top_k": 3}], ids=["p.6", "k3"])
@pytest.mark.parametrize("dim", [20, 80])
def test_selection_of_arbitrary_inputs_follows_the_definition(dim, options):
    """Gaussian inputs, odd head dims and a scale that is no power of two are selected as defined."""
    generator = torch.Generator().manual_seed(2)
    lengths, scale = [70, 33], dim**-0.5
    query, key = (torch.randn(sum(lengths), heads, dim, generator=generator) for heads in (2, 1))
    # |fl(q . mean k) - q . mean k| <= (D + B + 3) roundings of scale * sum |q| |k|, with |q| |k| by Cauchy-Schwarz.
    largest = float(query.norm(dim=-1).amax() * key.norm(dim=-1).amax()) * scale
    score_error = (dim + 16 + 3) * oracle.FP32_ROUNDOFF * largest
    expected = oracle.select(query, key, lengths, 16, scale=scale, score_error=score_error, **options)
    assert_same(select(query, key, lengths, 16, scale=scale, **options), expected)


@settings(derandomize=True, deadline=None, max_examples=10, database=None)
@given(
    lengths=st.lists(st.integers(0, 24), min_size=1, max_size=3),
    block_size=st.sampled_from([2, 3, 4, 8]),
    budget=st.one_of(
        st.fixed_dictionaries({"top_p": st.floats(0.001, 1.0)}), st.fixed_dictionaries({"top_k": st.integers(1, 9)})
    ),
    sink_blocks=st.integers(0, 2),
    min_blocks=st.integers(0, 3),
    spare=st.one_of(st.none(), st.integers(0, 3)),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 1)]),
    seed=st.integers(0, 1000),
)
def test_selection_follows_the_definition_everywhere(
    lengths, block_size, budget, sink_blocks, min_blocks, spare, heads, seed
):
    """Any documents, any block size and any combination of bounds are selected as defined."""
    query, key = grid_case(lengths, block_size, *heads, 8, seed)
    bounds = {"sink_blocks": sink_blocks, "min_blocks": min_blocks}
    bounds["max_blocks"] = None if spare is None else max(sink_blocks, min_blocks) + spare
    try:
        expected = oracle.select(query.double(), key.double(), lengths, block_size, **budget, **bounds)
    except oracle.Undecided:
        assume(False)
    assert_same(select(query, key, lengths, block_size, **budget, **bounds), expected)


def test_more_than_64_blocks():
    """Documents of 75 blocks are selected as defined: nothing is limited to a word of blocks, or to two."""
    lengths = [150, 3]
    query, key = grid_case(lengths, block_size=2, kv_heads=1, group=1, dim=16)
    # Sharp gates: with flat ones the running sum of 75 masses would meet any p within its rounding bound.
    query = query * 8
    for options in ({"top_p": 0.6, "min_blocks": 40}, {"top_k": 70}):
        found = select(query, key, lengths, 2, **options)
        assert_same(found, oracle.select(query.double(), key.double(), lengths, 2, **options))
        assert found[0][:, 0, 64:].any()


@pytest.mark.parametrize(("blocks", "words"), [(32, 1), (33, 3), (64, 2)])
def test_words_of_a_selection_end_where_asked(blocks, words):
    """Up to the last bit of the last word blocks are kept, and spare words are written."""
    query, key = score_case([float(number % 7) for number in range(blocks)])
    (mask,) = select(query, key, [blocks], 1, top_p=1.0, words=words)
    position = torch.arange(blocks)
    assert torch.equal(mask[:, 0], position < position[:, None])


def test_too_many_blocks_are_refused():
    """More history blocks than a program holds raise; nothing is cut off."""
    query, key = grid_case([40])
    assert routing.MAX_HISTORY_BLOCKS >= 1024
    with pytest.raises(ValueError, match="history blocks"):
        route(query, key, [40], 16, top_k=2, words=routing.MAX_HISTORY_BLOCKS // 32 + 1)


def test_ties_go_to_the_more_recent_block():
    """Identical keys, or zero queries, keep the most recent history blocks."""
    length, size = 100, 16
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(length, 1, 32, generator=generator)
    same_keys = torch.full((length, 1, 32), 0.5)
    keys = torch.randn(length, 1, 32, generator=generator)
    for options, kept_of in (
        ({"top_k": 4}, lambda visible: min(3, visible)),
        # Every mass is 1 / visible: the rank-th block (from 0) is kept iff rank / visible < .55.
        ({"top_p": 0.55}, lambda visible: math.ceil(0.55 * visible)),
    ):
        for q, k in ((query, same_keys), (torch.zeros_like(query), keys)):
            (mask,) = select(q, k, [length], size, **options)
            for position in range(length):
                visible = position // size
                expected = [block >= visible - kept_of(visible) and block < visible for block in range(length // size)]
                assert mask[position].tolist() == [expected]


HARD_SCORES = {
    "zeros of both signs": [0.0, -0.0, 0.0, -0.0, 1.0, -0.0, 0.0],
    "subnormal": [2.0**-149, -(2.0**-149), 0.0, 2.0**-148, -(2.0**-148), 2.0**-149, 0.0, 2.0**-126],
    "neighbours": [1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 1.0 + 2.0**-22, 1.0, 1.0 - 2.0**-24, 1.0 + 2.0**-23],
    "all magnitudes": [(-1.0) ** n * 2.0 ** (9 * n - 140) for n in range(0, 30, 2)],
    "largest": [3.4028234663852886e38, -3.4028234663852886e38, 0.0, 3.4028232635611926e38, -3.4e38, 3.4e38, 1.0],
    "infinite": [math.inf, 1.0, -math.inf, math.inf, 0.0, -math.inf, 3.4e38, math.inf],
    "not a number": [math.nan, 1.0, math.nan, -2.0, 1.0, math.inf, math.nan, -math.inf, 0.0],
    "nothing else": [math.nan] * 6,
    "ties": [float(number * number % 5) for number in range(14)],
}


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("scores", HARD_SCORES.values(), ids=HARD_SCORES.keys())
def test_the_search_ends_and_is_exact_for_any_scores(scores, sinks):
    """Ties, neighbouring numbers, infinities and NaN (as the lowest number) are ranked as a sort ranks them."""
    largest = torch.finfo(torch.float32).max
    values = torch.tensor(scores, dtype=torch.float32).nan_to_num(nan=-largest, posinf=largest, neginf=-largest)
    order = [
        [*range(min(sinks, row)), *sorted(range(min(sinks, row), row), key=lambda block: (-values[block], -block))]
        for row in range(len(scores))
    ]
    query, key = score_case(scores)
    for top_k in (2, 4):
        bits, coverage = route(query, key, [len(scores)], 1, top_k=top_k, sink_blocks=sinks, scale=1.0)
        (mask,) = decode(bits, [len(scores)], 1)
        for row, ranked in enumerate(order):
            assert mask[row, 0].nonzero().flatten().tolist() == sorted(ranked[: max(top_k - 1, sinks)])
        assert ((coverage >= 0) & (coverage <= 1)).all()
    for top_p in (0.7,):
        (mask,) = select(query, key, [len(scores)], 1, top_p=top_p, sink_blocks=sinks, scale=1.0)
        for row, ranked in enumerate(order):
            kept = mask[row, 0].nonzero().flatten().tolist()
            assert kept == sorted(ranked[: len(kept)]) and (kept or not row)


def test_smaller_p_keeps_a_subset():
    """S(p1) is a subset of S(p2) for p1 <= p2, bit for bit, on scores that round, and right up to p = 1."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(48, 1, 32, generator=generator) for _ in range(2))
    fine = [1e-6, *(number / 8 for number in range(1, 8)), 0.999, 1 - 1e-6, 1 - 2**-24, 1.0]
    for sinks, grid in ((0, fine), (2, [0.1, 0.3, 0.6])):
        masks = [select(query, key, [48], 4, top_p=p, scale=0.3, sink_blocks=sinks)[0] for p in grid]
        for smaller, larger in itertools.pairwise(masks):
            assert not (smaller & ~larger).any()
        assert masks[0].sum() < masks[-1].sum()


@pytest.mark.parametrize("p", [0.05, 0.61, 0.99])
def test_top_p_is_minimal_and_covers(p):
    """What is kept has mass at least p, and without its last block less than p."""
    query, key = grid_case()
    expected = oracle.select(query.double(), key.double(), LENGTHS, 16, top_p=1.0)
    for length, mask, full in zip(LENGTHS, select(query, key, LENGTHS, 16, top_p=p), expected, strict=True):
        rounding = oracle.mass_error(max(1, length // 16))
        mass = (full.mass * mask)[16:]
        smallest = full.mass[16:].masked_fill(~mask[16:], math.inf)
        assert (mass.sum(-1) >= p - rounding).all()
        if mass.numel():
            assert (mass.sum(-1) - smallest.amin(-1) < p + rounding).all()


def test_p_one_is_decided_without_summing():
    """p = 1 keeps every visible block even where the rounded mass of fewer is 1 already."""
    query, key = grid_case([101])
    (half,) = select(query * 64, key, [101], 16, top_p=1 - 2**-24)
    (full,) = select(query * 64, key, [101], 16, top_p=1.0)
    visible = torch.arange(101) // 16
    assert torch.equal(full.sum(-1), visible[:, None].expand(101, 2)) and half.sum() < full.sum()


def test_heads_of_one_group_choose_separately():
    """Query heads that share a kv head keep different blocks when their queries differ."""
    query, key = grid_case([101], kv_heads=1, group=3)
    (mask,) = select(query, key, [101], 16, top_k=2)
    assert not torch.equal(mask[:, 0], mask[:, 1]) and not torch.equal(mask[:, 1], mask[:, 2])


@pytest.mark.parametrize("block_size", [16, 24, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pooled_keys_are_accumulated_in_fp32(dtype, block_size):
    """Each block's mean is that of its keys' fp32 values, the short last block's too."""
    lengths, dim = [70, 1, 0, 33], 20
    key = torch.randn(sum(lengths), 2, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = layout.block_table(oracle.cumulative(lengths), block_size, sum(lengths))
    pooled = pooled_keys(key, table)
    assert pooled.dtype == torch.float32 and pooled.shape == (table.num_blocks, 2, dim)
    for mean, start, stop in zip(pooled, table.starts.tolist(), table.stops.tolist(), strict=True):
        keys = key[start:stop].double()
        # Additions and a division, relative to the mean magnitude.
        bound = (block_size + 1) * oracle.FP32_ROUNDOFF * keys.abs().mean(0)
        assert ((mean.double() - keys.mean(0)).abs() <= bound).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_p": 0.9, "sink_blocks": 1, "max_blocks": 3}], ids=repr)
def test_selection_ignores_later_tokens(options):
    """Whatever stands after position t, keys or queries, what rows up to t keep stays bit for bit the same."""
    length = 101
    query, key = grid_case([length])
    other_query, other_key = grid_case([length], seed=2)
    bits, coverage = route(query, key, [length], 16, **options)
    for t in (16, 77):
        for changes in ("both", "nan", "gone"):
            q, k = query.clone(), key.clone()
            if changes == "both":
                q[t + 1 :], k[t + 1 :] = other_query[t + 1 :], other_key[t + 1 :]
            if changes == "nan":
                q[t + 1 :], k[t + 1 :] = math.nan, math.nan
            if changes == "gone":
                q, k = q[: t + 1], k[: t + 1]
            other_bits, other_coverage = route(q, k, [len(q)], 16, **options)
            assert torch.equal(other_bits[..., : t + 1], bits[..., : t + 1])
            assert torch.equal(other_coverage[:, : t + 1], coverage[:, : t + 1])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.5, "sink_blocks": 1}], ids=repr)
def test_bad_row_leaves_other_rows_alone_and_never_looks_ahead(options, bad):
    """NaN or infinity in one row's query leaves other rows' selection as it was and keeps no invisible block."""
    query, key = grid_case([85], kv_heads=1, group=3)
    key[..., 3] = 1.0
    (whole,) = select(query, key, [85], 16, **options)
    damaged = query.clone()
    damaged[40, 1] = bad
    # Every visible score of this row is the bad number, minus infinity included: the score of hidden blocks.
    damaged[70, 2, 3] = bad
    (mask,) = select(damaged, key, [85], 16, **options)
    changed = (mask != whole).any(-1)
    changed[40, 1] = changed[70, 2] = False
    assert not changed.any()
    assert mask[40, 1].any() and mask[70, 2].any()
    assert not mask[40, 1, 2:].any() and not mask[70, 2, 4:].any()


def heads_first(tensor):
    """The tensor as a view of a heads-first buffer, as transformers passes it."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def with_gaps(tensor):
    """The tensor as a view whose last stride is not 1; what stands in the gaps is NaN."""
    buffer = torch.full((*tensor.shape, 2), math.nan, dtype=tensor.dtype)
    buffer[..., 0] = tensor
    return buffer[..., 0]


@pytest.mark.parametrize("view", [heads_first, with_gaps])
def test_any_strides(view):
    """Views give bit for bit the selection of contiguous inputs."""
    query, key = grid_case()
    found = route(view(query), view(key), LENGTHS, 16, top_p=0.6)
    expected = route(query, key, LENGTHS, 16, top_p=0.6)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_offsets_beyond_32_bits():
    """Tokens 2^31 elements from the first are read where they stand, not where 32 bits would wrap to."""
    query, key = grid_case([20], block_size=4, kv_heads=1, group=2)

    def far_apart(tensor):
        # Never written, these pages take no memory.
        view = torch.from_numpy(np.empty((20, 2**27), dtype=np.float16))[:, : tensor[0].numel()].view(tensor.shape)
        return view.copy_(tensor)

    expected = route(query, key, [20], 4, top_p=0.6)
    found = route(far_apart(query), far_apart(key), [20], 4, top_p=0.6)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_many_documents_of_one_token(dtype):
    """Documents of one token between longer ones have no history and shift nobody's; both integer types do."""
    lengths = [1] * 20 + [40] + [1] * 7 + [0] + [33] + [1]
    query, key = grid_case(lengths)
    cu_seqlens = oracle.cumulative(lengths).to(dtype)
    bits, coverage = route(query, key, lengths, 16, top_k=2, cu_seqlens=cu_seqlens)
    assert_same(decode(bits, lengths, 16), oracle.select(query.double(), key.double(), lengths, 16, top_k=2))
    assert (coverage[:, :20] == 1.0).all()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths):
    """A batch without tokens has a selection without rows."""
    query, key = torch.zeros(0, 4, 32), torch.zeros(0, 2, 32)
    bits, coverage = route(query, key, lengths, 16, top_p=0.5, words=1)
    assert bits.shape == (4, 1, 0) and coverage.shape == (4, 0)


def test_two_runs_give_the_same_bits():
    """Routing twice gives the same bits and the same coverage."""
    query, key = grid_case()
    first, second = (route(query, key, LENGTHS, 16, top_p=0.6) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
