"""How often `sparsebalance profile` measures which point."""

from collections import Counter

import pytest
from planning_profiles import BLOCK_SIZE, context
from transformers import Qwen2Config

from hf_sparsebalance.measuring import AttentionPoint
from hf_sparsebalance.profiling import DENSITIES, LONG_S, ROUNDS, TOO_LONG_S, ProfileRequest, is_due, points_of


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
