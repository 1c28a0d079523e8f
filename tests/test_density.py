"""Density curves: interpolation, cleaning, the analytic prior and the store."""

import base64
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_sparsebalance.density import (
    TOP_P_GRID,
    CurveStore,
    DensityCurve,
    share_curve,
    share_density,
    top_k_coverage,
    top_k_density,
    uniform_curve,
)
from hf_sparsebalance.errors import UserError

# Sums of a few numbers in [0, 1]: rounding stays within a few units in the last place.
ULPS = 8 * 2.0**-52

measured = st.lists(st.integers(1, 999), min_size=1, max_size=8, unique=True).flatmap(
    lambda grid: st.tuples(
        st.just([g / 1000 for g in sorted(grid)]),
        st.lists(st.floats(-0.5, 1.5), min_size=len(grid), max_size=len(grid)),
    )
)


def test_at_interpolates_and_is_dense_at_one():
    """A curve is linear between its points, starts in the origin, and is exactly 1 at p = 1."""
    curve = DensityCurve((0.5, 1.0), (0.2, 1.0))
    assert curve.at(0.25) == pytest.approx(0.1, abs=ULPS)
    assert curve.at(0.5) == 0.2
    assert curve.at(0.75) == pytest.approx(0.6, abs=ULPS)
    assert curve.at(1.0) == 1.0


@pytest.mark.parametrize(
    ("top_p", "density"),
    [((), ()), ((0.5,), (0.5,)), ((0.5, 0.5, 1.0), (0.1, 0.2, 1.0)), ((0.4, 0.5, 1.0), (0.3, 0.2, 1.0))]
    + [((0.0, 1.0), (0.0, 1.0)), ((0.5, 1.0), (-0.1, 1.0)), ((0.5, 1.0), (math.nan, 1.0)), ((0.5, 1.0), (1.0,))],
)
def test_curve_refuses_broken_promises(top_p, density):
    """A curve that is not monotone, in range and closed by (1, 1) cannot be built."""
    with pytest.raises(ValueError):
        DensityCurve(top_p, density)


@given(measured)
def test_cleaning_is_monotone_in_range_and_never_below_the_data(data):
    """A cleaned curve is monotone in [0, 1], ends in (1, 1), and is the least such curve above the clipped data."""
    top_p, density = data
    curve = DensityCurve.from_measured(top_p, density)
    assert list(curve.density) == sorted(curve.density)
    assert (curve.top_p[-1], curve.density[-1]) == (1.0, 1.0)
    for i, p in enumerate(top_p):
        assert curve.at(p) == max(0.0, *(min(value, 1.0) for value in density[: i + 1]))


@given(measured, st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2))
def test_at_is_monotone(data, budgets):
    """A larger budget never has a smaller density."""
    curve = DensityCurve.from_measured(*data)
    low, high = sorted(budgets)
    assert curve.at(low) <= curve.at(high) + ULPS


@pytest.mark.parametrize(("length", "block"), [(5, 4), (64, 4), (63, 4), (10, 1), (257, 64), (1000, 100)])
def test_uniform_curve_equals_keeping_blocks_one_by_one(length, block):
    """The prior is what the selection rule keeps of a uniform gate, token by token."""
    tenths = range(1, 10)
    curve = uniform_curve(length, block, tuple(i / 10 for i in range(1, 11)))
    for i in tenths:
        kept = visible = 0
        for t in range(length):
            n = t // block
            visible += n
            kept += sum(10 * before < i * n for before in range(n))  # mass before < p, in whole numbers
        assert curve.at(i / 10) == pytest.approx(kept / visible, rel=1e-12)


def test_uniform_curve_without_history_is_dense():
    """A document no longer than a block keeps everything: nothing is there to drop."""
    assert set(uniform_curve(64, 64).density) == {1.0}
    assert uniform_curve(65, 64).at(0.05) == 1.0  # one block of history: the best is always kept


def test_store_prefers_own_then_bucket_then_prior():
    """A sample's own curve wins over its bucket's average, and that over the prior of a store that saw nothing."""
    store = CurveStore(64)
    assert store.lookup(0, 1024) == uniform_curve(1024, 64)
    low, high = DensityCurve((0.5, 1.0), (0.1, 1.0)), DensityCurve((0.5, 1.0), (0.3, 1.0))
    store.observe(1, 1000, low)
    store.observe(2, 1020, high)
    assert store.lookup(1, 1000) == low
    assert store.lookup(3, 600).at(0.5) == pytest.approx(
        0.2 / uniform_curve(1024, 64).at(0.5) * uniform_curve(609, 64).at(0.5), rel=1e-9
    )  # same power of two, seldom seen: plain mean of the ratios to the prior; one bucket has no slope
    assert store.lookup(3, 4096).at(0.5) == pytest.approx(
        0.2 / uniform_curve(1024, 64).at(0.5) * uniform_curve(4096, 64).at(0.5), rel=1e-9
    )
    assert store.lookup(3, 64) == uniform_curve(64, 64)  # no history


def law(length, block_size=64):
    """A curve that lies below the prior by a power of the length, the steeper the smaller p is."""
    prior = uniform_curve(length, block_size)
    scaled = [d * (length / 256) ** (-0.5 * (1 - p)) for p, d in zip(prior.top_p, prior.density, strict=True)]
    return DensityCurve.from_measured(prior.top_p, scaled)


@pytest.mark.parametrize("length", [1024, 1448, 2048, 2896, 4096, 8192])
def test_unseen_lengths_follow_the_power_law_of_the_seen(length):
    """From three lengths seen, a power law is continued to lengths between and beyond, at every p."""
    store = CurveStore(64)
    for sample, seen in enumerate([1024, 2048, 4096] * 10):
        store.observe(sample, seen, law(seen))
    for p in (0.25, 0.5, 0.75, 0.9):
        assert store.lookup(99, length).at(p) == pytest.approx(law(length).at(p), rel=0.01)


@given(st.lists(st.integers(65, 20_000), min_size=1, max_size=20), st.integers(65, 20_000))
def test_a_uniform_gate_stays_at_the_prior(seen, length):
    """While everything seen is the prior, the prediction stays there, whatever the lengths."""
    store = CurveStore(64)
    for sample, each in enumerate(seen):
        store.observe(sample, 2 ** round(math.log2(each)), uniform_curve(max(65, 2 ** round(math.log2(each))), 64))
    predicted, prior = store.lookup(99, length), CurveStore(64).lookup(99, length)
    assert predicted.density == pytest.approx(prior.density, rel=1e-9)


def test_two_neighbours_set_no_slope():
    """Two documents on both sides of a bucket's edge, of nearly one length, do not extrapolate their difference."""
    store = CurveStore(64)
    store.observe(0, 2047, DensityCurve((0.5, 1.0), (0.2, 1.0)))
    store.observe(1, 2049, DensityCurve((0.5, 1.0), (0.3, 1.0)))
    assert 0.15 < store.lookup(9, 512).at(0.5) < 0.25
    assert 0.25 < store.lookup(9, 16384).at(0.5) < 0.35


def test_store_average_moves_by_its_weight_once_settled():
    """After 1 / weight observations a new curve moves the average by exactly the weight."""
    store = CurveStore(64, average_weight=0.25)
    for sample in range(4):
        store.observe(sample, 1000, DensityCurve((0.5, 1.0), (0.2, 1.0)))
    store.observe(4, 1000, DensityCurve((0.5, 1.0), (0.6, 1.0)))
    assert store.lookup(99, 1000).at(0.5) == pytest.approx(0.3, rel=1e-9)


def test_store_survives_json():
    """A store restored from JSON answers alike."""
    store = CurveStore(64)
    for sample in range(5):
        store.observe(sample, 100 * (sample + 1), uniform_curve(100 * (sample + 1), 64))
    restored = CurveStore.from_state_dict(json.loads(json.dumps(store.state_dict())))
    questions = [(s, n) for s in (*range(5), 77) for n in (10, 64, 65, 100, 300, 500, 9000)]
    assert [restored.lookup(*q) for q in questions] == [store.lookup(*q) for q in questions]


def encoded(*densities):
    """As the state holds them."""
    return base64.b64encode(struct.pack(f"<{len(densities)}d", *densities)).decode()


def test_state_holds_densities_to_the_bit():
    """Each curve is in the state with the very doubles of its densities, under its grid."""
    store, curve = CurveStore(64), DensityCurve((0.3, 1.0), (0.1 + 0.2, 1.0))
    store.observe(7, 1000, curve)
    assert store.state_dict()["curves"] == [
        {"top_p": [0.3, 1.0], "samples": [7], "densities": encoded(0.1 + 0.2, 1.0)}
    ]


def test_damaged_state_is_a_user_error():
    """A checkpoint with damaged curves is refused in one line."""
    state = CurveStore(64).state_dict()
    for damage in (
        {"curves": None},
        {"curves": [{"top_p": [0.5, 1.0], "samples": [1], "densities": "no base64"}]},
        {"curves": [{"top_p": [0.5, 1.0], "samples": [1], "densities": encoded(0.5)}]},
        {"curves": [{"top_p": [0.5, 1.0], "samples": [1, 2], "densities": encoded(0.5, 1.0)}]},
        {"curves": [{"top_p": [0.5, 1.0], "samples": [1], "densities": encoded(0.5, math.nan)}]},
        {"buckets": [[9, 1, 9.5, [1.0]]]},
        {"buckets": [[9, 0, 9.5, [1.0] * len(TOP_P_GRID)]]},
        {"buckets": [[9, math.inf, 9.5, [1.0] * len(TOP_P_GRID)]]},
        {"buckets": [[9, 1, math.nan, [1.0] * len(TOP_P_GRID)]]},
        {"buckets": [[9, 1, 9.5, [-1.0] * len(TOP_P_GRID)]]},
        {"block_size": "x"},
        {"block_size": 0},
    ):
        with pytest.raises(UserError):
            CurveStore.from_state_dict({**state, **damage})


@given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 48))
def test_top_k_closed_forms_equal_counting_tokens(length, k, block_size):
    """Density, and coverage under a uniform gate, are what counting token by token gives."""
    history = [token // block_size for token in range(length)]
    kept = [min(k - 1, blocks) for blocks in history]
    density = sum(kept) / sum(history) if sum(history) else 1.0
    assert top_k_density(length, k, block_size) == density
    coverage = sum(k / blocks for k, blocks in zip(kept, history, strict=True) if blocks)
    assert top_k_coverage(length, k, block_size) == pytest.approx(coverage, rel=1e-12)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=4), st.floats(0.0, 1.0))
def test_shared_densities_average_to_the_whole(lengths, density):
    """Weighted by visible pairs they give the micro-batch's density; at a whole k they are each document's own."""
    block_size = 16
    visible = [sum(token // block_size for token in range(length)) for length in lengths]
    shared = share_density(lengths, density, block_size)
    assert all(0.0 <= each <= 1.0 for each in shared)
    if sum(visible):
        assert np.dot(visible, shared) / sum(visible) == pytest.approx(density, abs=1e-12)
        own = top_k_density(lengths, 5, block_size)
        assert share_density(lengths, np.dot(visible, own) / sum(visible), block_size) == pytest.approx(own, abs=1e-12)


def test_a_packed_curve_is_shared_as_the_documents_differ():
    """With a uniform gate each packed document gets back the curve it has alone, though the whole's is another."""
    lengths, block = (40, 300, 2000), 64
    alone = [uniform_curve(length, block) for length in lengths]
    pairs = [sum(t // block for t in range(length)) for length in lengths]
    whole = [
        sum(n * curve.density[i] for n, curve in zip(pairs, alone, strict=True)) / sum(pairs)
        for i in range(len(alone[0].top_p))
    ]
    seen = DensityCurve.from_measured(alone[0].top_p, whole)
    shared = share_curve(seen, alone, lengths, block)
    for curve, expected in zip(shared, alone, strict=True):
        assert curve.density == pytest.approx(expected.density, rel=1e-12)
    # Half as dense as known: each document with history is, the one without keeps density 1.
    halved = share_curve(
        DensityCurve.from_measured(seen.top_p[:-1], [d / 2 for d in whole[:-1]]), alone, lengths, block
    )
    assert halved[0] == alone[0]
    assert halved[2].density[:-1] == pytest.approx([d / 2 for d in alone[2].density[:-1]], rel=1e-12)
