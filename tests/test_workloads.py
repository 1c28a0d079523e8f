"""Simulated documents: lengths follow the published figures, densities the measured ones."""

import itertools

import numpy as np
import pytest

from hf_sparsebalance.density import TOP_P_GRID, DensityCurve
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.workloads import (
    DISTRIBUTIONS,
    attended_share,
    make_workload,
    read_curves,
    sample_lengths,
    trained_curve,
)

# (mean, median, 99th percentile) as published, which the buckets were not made from.
PUBLISHED = {"wikipedia": (1014, 347, 10919), "prolong": (3052, 1914, 16270), "wlb": (3962, 3227, 26058)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_lengths_follow_the_published_figures(name):
    """Mean and median come within 10 % of the published ones, the 99th percentile within 15 %."""
    lengths = sample_lengths(name, 200_000, seed=0, max_length=10**9)
    mean, median, highest = PUBLISHED[name]
    assert (np.mean(lengths), np.median(lengths)) == pytest.approx((mean, median), rel=0.10)
    assert np.quantile(lengths, 0.99) == pytest.approx(highest, rel=0.15)


def test_synthetic_lengths_are_what_their_names_say():
    """ChatQA2-like has nothing between 4K and 16K, LongAlign-like 41 % in 8-16K; both say that they are synthetic."""
    chat = np.array(sample_lengths("chatqa2", 10_000, 0, 10**9))
    assert not ((chat > 4096) & (chat <= 16384)).any()
    assert np.mean(chat <= 4096) == pytest.approx(0.5, abs=0.02)
    align = np.array(sample_lengths("longalign", 10_000, 0, 10**9))
    assert (align.min() > 8192) & (align.max() <= 72 * 1024)
    assert np.mean(align <= 16384) == pytest.approx(0.41, abs=0.02)
    assert [name for name, (source, _) in DISTRIBUTIONS.items() if "synthetic" in source] == ["longalign", "chatqa2"]


def test_lengths_depend_on_the_seed_only():
    """The same seed draws the same lengths, another one others; longer documents are cut."""
    first, again, other = (sample_lengths("wlb", 100, seed, 8192) for seed in (1, 1, 2))
    assert first == again != other
    assert max(first) == 8192


@pytest.mark.parametrize(("length", "block"), [(1, 4), (4, 4), (5, 4), (23, 4), (64, 8), (65, 8)])
@pytest.mark.parametrize("density", [0.0, 0.25, 1.0])
def test_attended_share_counts_pairs(length, block, density):
    """Own-block pairs count in full, the others with the density: counted one by one."""
    pairs = [(t, s) for t, s in itertools.product(range(length), repeat=2) if s <= t]
    attended = sum(1.0 if t // block == s // block else density for t, s in pairs)
    assert attended_share(length, block, density) == pytest.approx(attended / len(pairs))


def test_trained_curve_is_the_measured_table():
    """At the measured lengths and budgets the curve is the table, beyond them length ** -.35; p = 1 keeps all."""
    assert trained_curve(2048, 64).at(0.9) == pytest.approx(0.50)
    assert trained_curve(4096, 64).at(0.5) == pytest.approx(0.12)
    assert trained_curve(16384, 64).at(0.8) == pytest.approx(0.28 * 4**-0.35)
    assert 0.18 < trained_curve(1500, 64).at(0.5) < 0.26
    assert trained_curve(4096, 64).at(1.0) == 1.0
    assert trained_curve(64, 64).density == (1.0,) * len(TOP_P_GRID)


def test_spread_is_the_stated_one():
    """Densities of one length have the stated lognormal spread around the curve that the planner knows."""
    workload = make_workload([8192] * 2000, block_size=64, spread=0.2, seed=3)
    known = workload.known_curves[0].at(0.5)
    ratios = np.log([curve.at(0.5) / known for curve in workload.curves])
    assert (ratios.mean(), ratios.std()) == pytest.approx((0.0, 0.2), abs=0.02)
    assert set(workload.known_curves) == {workload.known_curves[0]}
    own = make_workload([8192] * 5, block_size=64, spread=0.2, known="sample")
    assert own.curves == own.known_curves


def test_measured_curves_are_taken_as_they_are():
    """A document of a measured length has a measured curve of that length; others are scaled; short ones are dense."""
    flat, steep = (DensityCurve.from_measured(TOP_P_GRID, [s * p for p in TOP_P_GRID]) for s in (0.2, 0.4))
    measured = [(1024, flat), (1024, steep)]
    workload = make_workload([1024] * 50 + [4096, 16], block_size=16, measured=measured, spread=0.0)
    assert {round(curve.at(0.5), 12) for curve in workload.curves[:50]} == {0.1, 0.2}
    assert workload.known_curves[0].at(0.5) == pytest.approx(0.15)
    assert workload.known_curves[50].at(0.5) == pytest.approx(0.15 * 4**-0.35)
    assert workload.curves[51].density[0] == 1.0
    assert "2 measured curves" in workload.description


def test_prior_in_use_is_named():
    """The description says which densities were used, and the uniform gate keeps more than a trained one."""
    uniform, trained = (
        make_workload([4096], block_size=64, prior=prior, spread=0.0) for prior in ("uniform", "trained")
    )
    assert "uniform gate" in uniform.description
    assert "trained model" in trained.description
    assert uniform.curves[0].at(0.8) > trained.curves[0].at(0.8)


def test_curves_file_is_checked():
    """A curves file is a list of length, top_p and density; anything else is refused with its place."""
    entry = {"length": 100, "top_p": [0.5, 1.0], "density": [0.2, 1.0]}
    assert read_curves([entry], "f") == [(100, DensityCurve((0.5, 1.0), (0.2, 1.0)))]
    for wrong in ({}, [], [{}], [{**entry, "length": 0}], [{**entry, "density": [1.0]}], ["x"]):
        with pytest.raises(UserError, match="f.*is read"):
            read_curves(wrong, "f")


def test_bad_input_is_refused():
    """Unknown names and impossible numbers name their option."""
    with pytest.raises(UserError, match="--distribution"):
        sample_lengths("github", 1, 0, 1)
    with pytest.raises(UserError, match="--num_documents"):
        sample_lengths("wlb", 0, 0, 1)
    for option, wrong in (("density", {"prior": "x"}), ("known", {"known": "x"}), ("spread", {"spread": -1.0})):
        with pytest.raises(UserError, match=f"--{option}"):
            make_workload([1], block_size=1, **wrong)
