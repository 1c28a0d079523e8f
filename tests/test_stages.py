"""Cuts into stages against every possible cut; predicted times against the formula of a synthetic profile."""

import dataclasses
from itertools import combinations

import planning_profiles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.stages import ModelTimes, cut_layers, predict_times

LENGTHS, DENSITIES = (640, 4096), (0.2, 0.4)


def stage_ms(times, cuts):
    """Time of each stage."""
    sums = [sum(times.layer_ms[i] for i in cut) for cut in cuts]
    sums[0] += times.embedding_ms
    sums[-1] += times.head_ms
    return sums


def all_cuts(num_layers, num_stages):
    """Every cut into non-empty contiguous stages."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *inner, num_layers)
        yield [range(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]


@given(
    layer_ms=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    ends=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    data=st.data(),
)
def test_the_largest_stage_is_the_least_possible(layer_ms, ends, data):
    """No cut has a smaller largest stage; of those as good, none gives the early stages fewer layers."""
    times = ModelTimes(tuple(layer_ms), *ends)
    num_stages = data.draw(st.integers(1, len(layer_ms)))
    cuts = cut_layers(times, num_stages)
    best = min(max(stage_ms(times, every)) for every in all_cuts(len(layer_ms), num_stages))
    equals = [every for every in all_cuts(len(layer_ms), num_stages) if max(stage_ms(times, every)) == best]
    assert list(cuts) in equals
    for number, cut in enumerate(cuts):
        assert cut.stop == min(every[number].stop for every in equals)


def test_a_heavy_head_takes_layers_from_the_last_stage():
    """A head of three layers' time leaves the last stage three layers fewer."""
    assert [len(cut) for cut in cut_layers(ModelTimes((1.0,) * 29, head_ms=3.0), 4)] == [8, 8, 8, 5]


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_layers_are_refused(num_stages):
    """A stage without a layer is refused with the option that causes it."""
    with pytest.raises(UserError, match="--pipeline_parallel_size.*3 layers"):
        cut_layers(ModelTimes((1.0,) * 3), num_stages)


def test_times_come_from_the_profile():
    """Attention is the profile's formula, per layer dense or not; the rest is shared out by weights."""
    profile = planning_profiles.profile()
    profile = dataclasses.replace(profile, context=dataclasses.replace(profile.context, num_dense_layers=1))
    predictor = LatencyPredictor(profile)
    weights, head = (100, 100, 300, 100), 200
    times = predict_times(predictor, LENGTHS, DENSITIES, weights, head, dense_layers={1})
    linear_ms = predictor.linear(sum(LENGTHS)).total_ms
    sparse_ms = 3 * sum(planning_profiles.sparse_ms(n, d) for n, d in zip(LENGTHS, DENSITIES, strict=True))
    dense_ms = 3 * sum(map(planning_profiles.dense_ms, LENGTHS))
    attention = (sparse_ms, dense_ms, sparse_ms, sparse_ms)
    expected = [a + linear_ms * w / 800 for a, w in zip(attention, weights, strict=True)]
    # The table is exact at its own lengths; 640 lies between two of them, where a power law stands for the sum.
    assert times.layer_ms == pytest.approx(expected, rel=0.01)
    assert times.head_ms == pytest.approx(linear_ms / 4, rel=1e-12)
    assert sum(times.layer_ms) + times.head_ms == pytest.approx(
        predictor.predict(LENGTHS, DENSITIES).total_ms, rel=1e-12
    )


def test_a_model_of_dense_layers_has_no_sparse_time():
    """Where every layer is dense, all have the dense time."""
    profile = planning_profiles.profile()
    profile = dataclasses.replace(profile, context=dataclasses.replace(profile.context, num_dense_layers=4))
    times = predict_times(LatencyPredictor(profile), [4096], [0.1], (1,) * 4, 0, dense_layers=range(4))
    linear_ms = LatencyPredictor(profile).linear(4096).total_ms
    assert times.layer_ms == pytest.approx([3 * planning_profiles.dense_ms(4096) + linear_ms / 4] * 4)


def test_a_profile_of_another_model_is_refused():
    """Another number of layers than the profile's is an error."""
    with pytest.raises(ValueError, match="4 layers, 0 of them dense, the model 3 and 0"):
        predict_times(LatencyPredictor(planning_profiles.profile()), [64], [0.1], (1,) * 3, 1)
