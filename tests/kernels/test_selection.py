import itertools
import math

import harness
import oracle
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparsebalance_kernels import CURVE_TOP_P, block_sparse_attention, reference, selection, selector
from sparsebalance_kernels.selection import count_bits, pack_bits, unpack_bits
from sparsebalance_kernels.selector import pooled_keys

LENGTHS = [1, 15, 16, 17, 32, 33, 56, 101, 0, 5]
BUDGETS = {
    "p.02": {"top_p": 0.02},
    "p.35": {"top_p": 0.35},
    "p.8": {"top_p": 0.8},
    "p.999": {"top_p": 0.999},
    "p1": {"top_p": 1.0},
    "p1-max2": {"top_p": 1.0, "max_blocks": 2},
    "p.3-min2": {"top_p": 0.3, "min_blocks": 2},
    "p.9-max2": {"top_p": 0.9, "max_blocks": 2},
    "p.5-sink1": {"top_p": 0.5, "sink_blocks": 1},
    "p.02-sink3": {"top_p": 0.02, "sink_blocks": 3},
    "p.7-sink2-max3": {"top_p": 0.7, "sink_blocks": 2, "max_blocks": 3},
    "p-documents": {"top_p": [0.1, 0.2, 0.3, 1.0, 0.4, 0.5, 0.6, 0.05, 0.7, 1.0]},
    "k1": {"top_k": 1},
    "k3": {"top_k": 3},
    "k20": {"top_k": 20},
    "k3-min3": {"top_k": 3, "min_blocks": 3},
    "k6-max2": {"top_k": 6, "max_blocks": 2},
    "k1-sink2": {"top_k": 1, "sink_blocks": 2},
    "k4-sink2": {"top_k": 4, "sink_blocks": 2},
    "k-documents": {"top_k": [1, 2, 3, 1, 2, 2, 4, 3, 9, 1]},
}


def grid_case(lengths=LENGTHS, block_size=16, kv_heads=2, group=2, dim=32, seed=1):
    query, key, _, _ = oracle.grid_batch(
        lengths, block_size=block_size, kv_heads=kv_heads, group=group, dim=dim, seed=seed
    )
    return query, key


def assert_same(masks, expected):
    assert len(masks) == len(expected)
    for mask, right in zip(masks, expected, strict=True):
        assert torch.equal(mask, right.kept)


@pytest.mark.parametrize("options", BUDGETS.values(), ids=BUDGETS.keys())
def test_selection_follows_the_definition(options):
    """The selector keeps exactly the blocks of the definition, under every kind of budget."""
    query, key = grid_case()
    found = harness.decode(harness.select(query.float(), key.float(), LENGTHS, 16, **options), LENGTHS)
    assert_same(found, oracle.select(query, key, LENGTHS, 16, **options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_selection_is_the_same_in_every_dtype(dtype):
    """Scores are accumulated in fp32: inputs that all dtypes hold exactly give one selection."""
    query, key = grid_case()
    found = harness.decode(harness.select(query.to(dtype), key.to(dtype), LENGTHS, 16, top_p=0.6), LENGTHS)
    assert_same(found, oracle.select(query, key, LENGTHS, 16, top_p=0.6))


@pytest.mark.parametrize("options", [{"top_p": 0.6}, {"top_k": 3}], ids=["p.6", "k3"])
@pytest.mark.parametrize("dim", [32, 80])
def test_selection_of_arbitrary_inputs_follows_the_definition(dim, options):
    """Gaussian inputs and a scale that is no power of two are selected as defined, wherever fp32 decides at all."""
    generator = torch.Generator().manual_seed(dim)
    lengths, scale = [70, 33], dim**-0.5
    query, key = (torch.randn(sum(lengths), heads, dim, generator=generator).float() for heads in (4, 2))
    # |fl(q . mean k) - q . mean k| <= (D + B + 3) roundings of scale * sum |q| |k|, with |q| |k| by Cauchy-Schwarz.
    largest = float(query.norm(dim=-1).amax() * key.norm(dim=-1).amax()) * scale
    score_error = (dim + 16 + 3) * oracle.FP32_ROUNDOFF * largest
    expected = oracle.select(query, key, lengths, 16, scale=scale, score_error=score_error, **options)
    assert_same(harness.decode(harness.select(query, key, lengths, 16, scale=scale, **options), lengths), expected)


@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 2, 4, 8]),
    budget=st.one_of(
        st.fixed_dictionaries({"top_p": st.floats(0.001, 1.0)}), st.fixed_dictionaries({"top_k": st.integers(1, 9)})
    ),
    sink_blocks=st.integers(0, 2),
    min_blocks=st.integers(0, 3),
    spare=st.one_of(st.none(), st.integers(0, 3)),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    seed=st.integers(0, 1000),
)
def test_selection_follows_the_definition_everywhere(
    lengths, block_size, budget, sink_blocks, min_blocks, spare, heads, seed
):
    """Any documents, any block size and any combination of bounds are selected as defined."""
    kv_heads, group = heads
    query, key = grid_case(lengths, block_size, kv_heads, group, 8, seed)
    bounds = {"sink_blocks": sink_blocks, "min_blocks": min_blocks}
    bounds["max_blocks"] = None if spare is None else max(sink_blocks, min_blocks) + spare
    try:
        expected = oracle.select(query, key, lengths, block_size, **budget, **bounds)
    except oracle.Undecided:
        assume(False)
    found = harness.select(query.float(), key.float(), lengths, block_size, **budget, **bounds)
    assert_same(harness.decode(found, lengths), expected)


@pytest.mark.parametrize("options", BUDGETS.values(), ids=BUDGETS.keys())
def test_reference_mask_follows_the_definition(options):
    """The shipped reference attends exactly the tokens of the definition, none of them in another document."""
    lengths = LENGTHS[1:9]
    options = {name: value[1:9] if isinstance(value, list) else value for name, value in options.items()}
    query, key = grid_case(lengths)
    boundaries = oracle.cumulative(lengths).tolist()
    budget = harness.budget_of(lengths, 16, **options)
    mask = reference.keep_mask(query, key, boundaries, budget, oracle.SCALE)
    expected = torch.zeros_like(mask)
    selections = oracle.select(query, key, lengths, 16, **options)
    for first, stop, one in zip(boundaries[:-1], boundaries[1:], selections, strict=True):
        expected[:, first:stop, first:stop] = oracle.token_mask(one.kept, 16)
    assert torch.equal(mask, expected)


def test_ties_go_to_the_more_recent_block():
    """Identical keys, or zero queries, keep the most recent history blocks."""
    length, size = 130, 16
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(length, 2, 32, generator=generator)
    same_keys = torch.full((length, 1, 32), 0.5)
    keys = torch.randn(length, 1, 32, generator=generator)
    for options, kept_of in (
        ({"top_k": 4}, lambda visible: min(3, visible)),
        # Every mass is 1 / visible: the rank-th block (from 0) is kept iff rank / visible < .55.
        ({"top_p": 0.55}, lambda visible: math.ceil(0.55 * visible)),
    ):
        for q, k in ((query, same_keys), (torch.zeros_like(query), keys), (torch.zeros_like(query), same_keys)):
            (mask,) = harness.decode(harness.select(q, k, [length], size, **options), [length])
            for position in range(length):
                visible = position // size
                expected = [block >= visible - kept_of(visible) and block < visible for block in range(length // size)]
                assert mask[position].tolist() == [expected, expected]


def test_two_equal_blocks_among_others_are_ordered_by_recency():
    """Of two blocks with one score at the cut, the later one is kept; a better block before both stays."""
    size, dim = 4, 8
    key = torch.zeros(size * 4, 1, dim)
    key[:4], key[4:8], key[8:12] = 3.0, 1.0, 1.0
    query = torch.ones(size * 4, 1, dim)
    (mask,) = harness.decode(harness.select(query, key, [size * 4], size, top_k=3), [size * 4])
    assert mask[12:, 0].tolist() == [[True, False, True, False]] * 4


def test_smaller_p_keeps_a_subset():
    """S(p1) is a subset of S(p2) for p1 <= p2, for p from a fine grid and right up to 1."""
    query, key = grid_case()
    grid = [1e-6, *(number / 40 for number in range(1, 40)), 0.999, 1 - 1e-6, 1 - 2**-24, 1.0]
    masks = [
        torch.cat([m.flatten() for m in harness.decode(harness.select(query, key, LENGTHS, 16, top_p=p), LENGTHS)])
        for p in grid
    ]
    for smaller, larger in itertools.pairwise(masks):
        assert not (smaller & ~larger).any()
    assert masks[0].sum() < masks[-1].sum()


@pytest.mark.parametrize("p", [0.05, 0.3, 0.61, 0.9, 0.99])
def test_top_p_is_minimal_and_covers(p):
    """What is kept has mass at least p, and without its last block less than p."""
    query, key = grid_case()
    expected = oracle.select(query, key, LENGTHS, 16, top_p=1.0)
    masks = harness.decode(harness.select(query.float(), key.float(), LENGTHS, 16, top_p=p), LENGTHS)
    for length, mask, full in zip(LENGTHS, masks, expected, strict=True):
        rounding = oracle.mass_error(max(1, length // 16))
        mass = (full.mass * mask)[16:]
        smallest = full.mass[16:].masked_fill(~mask[16:], math.inf)
        assert (mass.sum(-1) >= p - rounding).all()
        if mass.numel():
            assert (mass.sum(-1) - smallest.amin(-1) < p + rounding).all()


def test_only_complete_blocks_before_the_own_one_are_kept():
    """With p = 1 a row keeps each block i with (i + 1) * B <= t, and no other; the tail of a document is no block."""
    query, key = grid_case()
    masks = harness.decode(harness.select(query, key, LENGTHS, 16, top_p=1.0), LENGTHS)
    for length, mask in zip(LENGTHS, masks, strict=True):
        position, block = torch.arange(length)[:, None, None], torch.arange(length // 16)
        assert torch.equal(mask, ((block + 1) * 16 <= position).expand(mask.shape))


def test_p_one_is_decided_without_summing():
    """p = 1 keeps every visible block even where the rounded mass of fewer is 1 already, and the curve ends at 1."""
    query, key = grid_case([101])
    query = query * 64
    (half,) = harness.decode(harness.select(query, key, [101], 16, top_p=1 - 2**-24), [101])
    (full,) = harness.decode(harness.select(query, key, [101], 16, top_p=1.0), [101])
    visible = torch.arange(101) // 16
    assert torch.equal(full.sum(-1), visible[:, None].expand(101, 4)) and half.sum() < full.sum()
    cu_seqlens = oracle.cumulative([101])
    for p, density in ((1.0, 1.0), (0.5, None)):
        options = {"cu_seqlens": cu_seqlens, "block_size": 16, "top_p": p, "return_stats": True}
        _, stats = block_sparse_attention(query, key, key, **options)
        assert stats.curve[-1] == 1.0 and stats.density == (density or stats.curve[CURVE_TOP_P.index(p)])


def test_heads_of_one_group_choose_separately():
    """Query heads that share a kv head keep different blocks when their queries differ."""
    query, key = grid_case(kv_heads=1, group=4)
    masks = harness.decode(harness.select(query, key, LENGTHS, 16, top_k=2), LENGTHS)
    assert not torch.equal(masks[7][:, 0], masks[7][:, 1])


@pytest.mark.parametrize("slab", [1, 3, 16, 5, 100])
@pytest.mark.parametrize("name", ["p.35", "p.8", "p.7-sink2-max3", "k3", "p-documents"])
def test_slab_sizes_change_nothing(monkeypatch, name, slab):
    """How tokens are cut into slabs leaves the selection bit for bit the same."""
    query, key = grid_case()
    whole = harness.select(query, key, LENGTHS, 16, **BUDGETS[name])
    monkeypatch.setattr(selector, "SELECT_TOKENS", slab)
    assert torch.equal(harness.select(query, key, LENGTHS, 16, **BUDGETS[name]).bits, whole.bits)


@pytest.mark.parametrize("blocks", [1, 31, 32, 33, 64, 100])
def test_bits_are_packed_low_block_first(blocks):
    """Packing sets bit j % 32 of word j // 32 for block j; unpacking gives it back; counting counts it."""
    keep = torch.rand(5, 3, blocks, generator=torch.Generator().manual_seed(blocks)) < 0.4
    words = pack_bits(keep)
    expected = [
        [
            sum(1 << j % 32 for j in range(32 * w, min(32 * w + 32, blocks)) if row[j])
            for w in range((blocks + 31) // 32)
        ]
        for row in keep.flatten(0, 1).tolist()
    ]
    unsigned = words.flatten(0, 1).long() & 0xFFFFFFFF
    assert words.dtype == torch.int32 and unsigned.tolist() == expected
    assert torch.equal(unpack_bits(words)[..., :blocks], keep) and not unpack_bits(words)[..., blocks:].any()
    assert torch.equal(count_bits(words).sum(-1), keep.sum(-1))


def test_bits_are_the_same_on_every_device():
    """Packing and unpacking by shifts, the way of devices that numpy cannot reach, equals numpy's."""
    keep = torch.rand(7, 96, generator=torch.Generator().manual_seed(0)) < 0.5
    words = pack_bits(keep)
    assert torch.equal(selection._pack_by_shifts(keep), words)
    assert torch.equal(selection._unpack_by_shifts(words), keep)


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 1}, {"top_k": 3}, {"top_p": 1.0}])
def test_density_counts_the_bits(options):
    """A selection's density is its kept share of visible triples, counted row by row."""
    query, key = grid_case()
    expected = oracle.count(oracle.select(query, key, LENGTHS, 16, **options), LENGTHS, 16).density
    assert harness.select(query.float(), key.float(), LENGTHS, 16, **options).density() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pooled_keys_are_accumulated_in_fp32(dtype):
    """The mean of half-precision keys is that of their fp32 values, not rounded on the way; the tail is left out."""
    key = torch.randn(150, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    pooled = pooled_keys(key, 64)
    expected = key[:128].double().unflatten(0, (2, 64)).mean(1)
    assert pooled.dtype == torch.float32 and pooled.shape == (2, 2, 32)
    # 64 additions and a division, relative to the mean magnitude.
    bound = 65 * oracle.FP32_ROUNDOFF * key[:128].double().abs().unflatten(0, (2, 64)).mean(1)
    assert ((pooled.double() - expected).abs() <= bound).all()


def test_selection_ignores_later_tokens():
    """Whatever stands after position t, keys or queries, what rows up to t keep stays bit for bit the same."""
    length = 150
    query, key = grid_case([length])
    other_query, other_key = grid_case([length], seed=2)
    for options in ({"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.9, "sink_blocks": 1, "max_blocks": 3}):
        (whole,) = harness.decode(harness.select(query, key, [length], 16, **options), [length])
        for t in (0, 15, 16, 31, 32, 77, 148):
            for changes in ("query", "key", "both", "nan", "gone"):
                q, k = query.clone(), key.clone()
                if changes in ("query", "both"):
                    q[t + 1 :] = other_query[t + 1 :]
                if changes in ("key", "both"):
                    k[t + 1 :] = other_key[t + 1 :]
                if changes == "nan":
                    q[t + 1 :], k[t + 1 :] = math.nan, math.nan
                if changes == "gone":
                    q, k = q[: t + 1], k[: t + 1]
                (mask,) = harness.decode(harness.select(q, k, [len(q)], 16, **options), [len(q)])
                assert torch.equal(mask[: t + 1], whole[: t + 1, :, : mask.shape[-1]])
                assert not whole[: t + 1, :, mask.shape[-1] :].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.5, "sink_blocks": 1}], ids=repr)
def test_bad_row_leaves_other_rows_alone_and_never_looks_ahead(options, bad):
    """NaN or infinity in one row's query leaves other rows' selection as it was and keeps no invisible block."""
    query, key = grid_case([100])
    key[..., 3] = 1.0
    (whole,) = harness.decode(harness.select(query, key, [100], 16, **options), [100])
    damaged = query.clone()
    damaged[40, 1] = bad
    # Every visible score of this row is the bad number, minus infinity included: the score of hidden blocks.
    damaged[70, 2, 3] = bad
    (mask,) = harness.decode(harness.select(damaged, key, [100], 16, **options), [100])
    changed = (mask != whole).any(-1)
    changed[40, 1] = changed[70, 2] = False
    assert not changed.any()
    assert not mask[40, 1, 2:].any() and not mask[70, 2, 4:].any()


def test_more_than_64_blocks():
    """Documents of 150 blocks are selected as defined: nothing is limited to a machine word of blocks."""
    lengths = [600, 3]
    query, key = grid_case(lengths, block_size=4, kv_heads=1, group=1, dim=16)
    # Sharp gates: with flat ones the running sum of 150 masses would meet any p within its rounding bound.
    query = query * 8
    for options in ({"top_p": 0.6, "min_blocks": 66}, {"top_p": 0.6}, {"top_k": 70}):
        found = harness.decode(harness.select(query.float(), key.float(), lengths, 4, **options), lengths)
        assert_same(found, oracle.select(query, key, lengths, 4, **options))
        assert found[0][:, 0, 128:].any()


def test_selection_carries_no_gradient():
    """Selecting with inputs that require a gradient records nothing."""
    query, key = grid_case([40])
    found = harness.select(query.requires_grad_(), key.requires_grad_(), [40], 16, top_p=0.5)
    assert not found.bits.requires_grad
