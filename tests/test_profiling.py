"""How often `sparsebalance profile` measures which point, and how times become a table."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_profiles import BLOCK_SIZE, context
from transformers import Qwen2Config

from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.measuring import AttentionPoint
from hf_sparsebalance.profiling import (
    DENSITIES,
    LONG_S,
    ROUNDS,
    TOO_LONG_S,
    ProfileRequest,
    assemble_dense,
    fit_powers,
    is_due,
    points_of,
)


def schedule(seconds_per_pair, max_length=32 * 1024):
    """{point: how often it runs}, {point: seconds} on a device whose time is that of the pairs kept."""
    request = ProfileRequest(Qwen2Config(), context(), max_length)
    runs, took_s = Counter(), {}
    for round_number in range(ROUNDS + 1):
        for point in points_of(request):
            length = point.length if isinstance(point, AttentionPoint) else sum(point.lengths)
            if is_due(request, point, round_number, took_s):
                took_s[point] = seconds_per_pair * length**2 * point.top_p
                runs[point] += 1
    return runs, took_s


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=3, max_size=8, unique=True),
    st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-6, 1.0))] * 3).filter(any),
)
def test_a_line_or_parabola_is_found_again(tokens, coefficients):
    """Times that are a polynomial without negative terms are fitted by one that predicts them."""
    times = [sum(c * n**power for power, c in enumerate(coefficients)) for n in tokens]
    found = fit_powers(tokens, times, 2)
    assert min(found) >= 0.0
    # Three columns, scaled to 1: the condition of the normal equations is not squared by lstsq.
    assert [sum(c * n**power for power, c in enumerate(found)) for n in tokens] == pytest.approx(times, rel=1e-6)


@pytest.mark.parametrize("times", [[5.0, 4.0, 3.0, 2.0], [1.0, 8.0, 27.0, 64.0], [1.0, 1.9, 2.7, 3.4]])
def test_no_power_gets_a_negative_coefficient(times):
    """Where a coefficient must not fall below 0 the fit is the best with that bound: no small step is better."""
    tokens = [1, 2, 3, 4]
    found = np.array(fit_powers(tokens, times, 2))

    def error(coefficients):
        return sum(
            (sum(c * n**k for k, c in enumerate(coefficients)) / t - 1) ** 2
            for n, t in zip(tokens, times, strict=True)
        )

    assert min(found) >= 0.0
    for step in itertools.product((-1e-3, 0.0, 1e-3), repeat=3):
        other = np.maximum(found + step, 0.0)
        assert error(other) >= error(found) - 1e-12


def test_a_dense_profile_predicts_the_whole_model():
    """Attention that leaves the caches beyond 2,048 tokens: each measured length is predicted as measured, and packed
    documents as the sum of theirs, with the constant once."""

    def forward_ms(length):
        return 3.0 + 0.01 * length + 1e-6 * length**2 * (1.0 if length <= 2048 else 1.5)

    lengths = (128, 256, 512, 1024, 2048, 4096, 8192)
    dense = context(attention="sdpa", num_dense_layers=context().num_layers)
    profile = assemble_dense(dense, [(n, forward_ms(n), 2 * forward_ms(n)) for n in lengths])
    predictor = LatencyPredictor(profile)
    for length in lengths:
        predicted = predictor.predict([length], [1.0], dense=True)
        assert predicted.forward_ms == pytest.approx(forward_ms(length), rel=1e-6)
        assert predicted.backward_ms == pytest.approx(2 * forward_ms(length), rel=1e-6)
    packed = predictor.predict([512, 4096], [1.0, 1.0], dense=True)
    assert packed.forward_ms == pytest.approx(forward_ms(512) + forward_ms(4096) - 3.0, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "whole_ms", "error"),
    [
        ("parabola", lambda n: 3.0 + 0.01 * n + 1e-6 * n**2, 0.01),
        ("below linear", lambda n: 3.0 + n**0.8, 0.05),
        # Attention that shows beyond 2,048 tokens only: a table of doubling lengths cannot see where.
        ("kink", lambda n: 3.0 + 0.01 * n + 0.02 * max(0, n - 2048), 0.15),
    ],
)
def test_a_dense_profile_predicts_between_its_lengths(name, whole_ms, error):
    """Whatever the line explains, between two measured lengths the prediction stays near the truth."""
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    dense = context(attention="sdpa", num_dense_layers=context().num_layers)
    profile = assemble_dense(dense, [(n, whole_ms(n), whole_ms(n)) for n in lengths])
    predictor = LatencyPredictor(profile)
    for length in range(200, 16384, 97):
        assert predictor.predict([length], [1.0], dense=True).forward_ms == pytest.approx(whole_ms(length), rel=error)


def test_where_all_is_fast_every_point_is_measured_in_every_round():
    """On a fast device nothing is left out: a warm-up and all rounds."""
    runs, _ = schedule(1e-12)
    assert set(runs.values()) == {ROUNDS + 1}
    assert {point.top_p for point in runs if isinstance(point, AttentionPoint)} == {1.0, *DENSITIES}


@pytest.mark.parametrize("seconds_per_pair", [1e-9, 1e-8, 1e-7])
def test_long_points_run_twice_and_too_long_ones_only_where_needed(seconds_per_pair):
    """What lasts runs twice; every length keeps the dense point and every second density, however long they take."""
    runs, took_s = schedule(seconds_per_pair)
    assert {runs[point] for point in runs if took_s[point] > LONG_S} == {2}
    assert {runs[point] for point in runs if took_s[point] <= LONG_S} == {ROUNDS + 1}
    attention = [point for point in runs if isinstance(point, AttentionPoint)]
    for length in {point.length for point in attention}:
        kept = {point.top_p for point in attention if point.length == length}
        assert {1.0, *(DENSITIES[::2] if length > BLOCK_SIZE else ())} <= kept
    left_out = set(points_of(ProfileRequest(Qwen2Config(), context(), 32 * 1024))) - set(runs)
    assert all(seconds_per_pair * point.length**2 * point.top_p > TOO_LONG_S for point in left_out)
    assert all(took_s[point] <= TOO_LONG_S for point in attention if point.top_p in DENSITIES[1::2])
