"""Latency profile and predictor."""

import dataclasses
import json
import math
import random

import numpy as np
import planning_profiles as toy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency, LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile

# A chain of logarithms and exponentials of numbers below e^25.
ROUNDING = 25 * 16 * 2.0**-52


def test_dense_layers_take_dense_time():
    """With d of n layers always dense, a prediction is d dense layers and n - d sparse ones."""
    plain = toy.profile()
    mixed = dataclasses.replace(plain, context=dataclasses.replace(plain.context, num_dense_layers=1))
    sparse, dense = (LatencyPredictor(plain).document(1000, 0.3, dense=d).total_ms for d in (False, True))
    assert LatencyPredictor(mixed).document(1000, 0.3).total_ms == pytest.approx(0.75 * sparse + 0.25 * dense)
    assert LatencyPredictor(mixed).document(1000, 0.3, dense=True).total_ms == pytest.approx(dense)


def test_profile_survives_its_file(tmp_path):
    """A saved profile is read back equal."""
    profile = toy.profile()
    profile.save(tmp_path / "p.json")
    assert LatencyProfile.load(tmp_path / "p.json") == profile


def _broken():
    data = toy.profile().to_json()
    yield {**data, "format": 1}
    yield {k: v for k, v in data.items() if k != "forward_ms_per_token"}
    yield {**data, "forward_ms_constant": -1.0}
    yield {**data, "backward_ms_constant": math.nan}
    yield {**data, "backward_ms_constant": "1"}
    yield {**data, "attention": data["attention"][:1]}
    yield {**data, "attention": data["attention"][::-1]}
    yield {**data, "attention": 3}
    yield {**data, "context": {**data["context"], "num_heads": "4"}}
    yield {**data, "attention": [{**row, "points": []} for row in data["attention"]]}
    yield [data]


@pytest.mark.parametrize("data", list(_broken()))
def test_bad_profile_names_option_and_way_out(tmp_path, data):
    """Wrong format, missing, negative or NaN values: one line with --profile and the command that mends it."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"^--profile .*p\.json: .*sparsebalance profile") as error:
        LatencyProfile.load(path)
    assert "\n" not in str(error.value)


def test_unreadable_profile_names_option_and_way_out(tmp_path):
    """A missing file and one that is not JSON are user errors too."""
    (tmp_path / "half.json").write_text('{"format": 1, ')
    for name in ("none.json", "half.json"):
        with pytest.raises(UserError, match=r"--profile .*sparsebalance profile"):
            LatencyProfile.load(tmp_path / name)


def test_check_lists_every_difference_with_both_values():
    """A profile of other settings is refused, each differing field with both values; the same settings pass."""
    profile = toy.profile()
    profile.check(toy.context())
    other = toy.context(dtype="bfloat16", num_threads=8, versions={"torch": "2.13.1", "transformers": "5.0.0"})
    with pytest.raises(UserError) as error:
        profile.check(other)
    for part in ("dtype float32 (now bfloat16)", "num_threads 2 (now 8)", "torch 2.13.0 (now 2.13.1)"):
        assert part in str(error.value)
    assert "transformers" not in str(error.value)


def test_profiled_points_are_returned_exactly():
    """At a profiled length and density the predictor gives back what was measured, times the layers."""
    predictor = toy.predictor()
    for length in toy.LENGTHS:
        assert predictor.document(length, 0.3, dense=True).forward_ms == pytest.approx(
            toy.NUM_LAYERS * toy.dense_ms(length), rel=ROUNDING
        )
        for density in toy.DENSITIES:
            sparse_ms = toy.dense_ms(length) if length <= toy.BLOCK_SIZE else toy.sparse_ms(length, density)
            latency = predictor.document(length, density)
            assert latency.forward_ms == pytest.approx(toy.NUM_LAYERS * sparse_ms, rel=ROUNDING)
            assert latency.backward_ms == pytest.approx(2 * toy.NUM_LAYERS * sparse_ms, rel=ROUNDING)


@given(st.integers(65, 32768), st.floats(0.05, 1.0))
def test_between_points_the_formula_is_met(length, density):
    """Off the grid the error stays below that of a power law through c + bL + aL^2 at lengths a factor 2 apart."""
    # For t = u + v with u ~ L^0 and v ~ L^2 the chord of log t over log 2 lies above t by at most the gap between
    # arithmetic and geometric mean of exponents: max over shares s of (1-s+4s)^.5 / (1-s+2s) = 1.0607 (s = 1/3).
    low_ms = toy.NUM_LAYERS * toy.sparse_ms(length, density)
    predicted = toy.predictor().document(length, density).forward_ms
    assert low_ms * (1 - ROUNDING) <= predicted <= low_ms * 1.061


def test_power_law_goes_on_beyond_the_table():
    """A pure quadratic is extended exactly above the longest row."""
    rows = toy.profile(floor_ms=0.0)
    predictor = LatencyPredictor(rows)
    length = 4 * toy.LENGTHS[-1]
    assert predictor.document(length, 1.0, dense=True).forward_ms == pytest.approx(
        toy.NUM_LAYERS * toy.DENSE_MS * length**2, rel=1e-9
    )


@given(st.integers(1, 500_000), st.floats(0.0, 1.0), st.booleans())
def test_no_prediction_is_negative(length, density, dense):
    """Anywhere, also far outside the table, time is finite and not negative."""
    latency = toy.predictor().document(length, density, dense)
    assert 0.0 <= latency.forward_ms < math.inf
    assert 0.0 <= latency.backward_ms < math.inf


def test_short_documents_are_dense():
    """A document no longer than a block takes the dense time at any density."""
    predictor = toy.predictor()
    assert predictor.document(64, 0.1) == predictor.document(64, 0.1, dense=True)
    assert predictor.document(65, 0.1) != predictor.document(65, 0.1, dense=True)


def test_micro_batch_is_sum_of_documents_plus_linear_part():
    """Packing adds documents' attention; tokens and the constant are counted once; scales act on their own part."""
    predictor = LatencyPredictor(toy.profile(), attention_scale=2.0, linear_scale=0.5)
    lengths, densities = [100, 3000, 64], [0.3, 0.5, 1.0]
    total = sum((predictor.document(*d) for d in zip(lengths, densities, strict=True)), Latency(0.0, 0.0))
    predicted = predictor.predict(lengths, densities)
    assert predicted.forward_ms == pytest.approx(total.forward_ms + 0.5 * (5e-4 * 3164 + 0.2), rel=ROUNDING)
    assert predicted.backward_ms == pytest.approx(total.backward_ms + 0.5 * (1e-3 * 3164 + 0.3), rel=ROUNDING)
    attention_ms, linear_ms = predictor.components(lengths, densities)
    assert 2.0 * attention_ms + 0.5 * linear_ms == pytest.approx(predicted.total_ms, rel=ROUNDING)
    with pytest.raises(ValueError):
        predictor.predict([1, 2], [1.0])


def _observations(count, seed, attention_scale=1.3, linear_scale=0.8, noise=0.0):
    rng = random.Random(seed)
    predictor, result = toy.predictor(), []
    for _ in range(count):
        parts = predictor.components([int(2 ** rng.uniform(8, 15))], [rng.uniform(0.1, 0.9)])
        clean = attention_scale * parts[0] + linear_scale * parts[1]
        result.append((*parts, clean * math.exp(rng.gauss(0.0, noise))))
    return result


def _steps(observations, size=8):
    return [observations[i : i + size] for i in range(0, len(observations), size)]


def test_refit_recovers_both_scales():
    """From noiseless times the two scales come back."""
    fitted = toy.predictor().refit(_steps(_observations(24, 0)))
    # IRLS stops at steps of 1e-9; its error is of that order.
    assert fitted.attention_scale == pytest.approx(1.3, rel=1e-6)
    assert fitted.linear_scale == pytest.approx(0.8, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("stall", [3.0, 100.0])
def test_one_stalled_micro_batch_hardly_moves_the_scales(seed, stall):
    """One of 32 micro-batches taking 3 or 100 times as long, wherever it is, moves a scale by 2% at most."""
    observations = _observations(32, seed, noise=0.01)
    clean = toy.predictor().refit(_steps(observations))
    for victim in range(32):
        stalled = [(a, b, m * (stall if i == victim else 1.0)) for i, (a, b, m) in enumerate(observations)]
        fitted = toy.predictor().refit(_steps(stalled))
        assert fitted.attention_scale == pytest.approx(clean.attention_scale, rel=0.02)
        assert fitted.linear_scale == pytest.approx(clean.linear_scale, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("more", [lambda ms: 3.0 * ms, lambda ms: ms + 1000.0])
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_one_slow_step_moves_no_plan(seed, more, victim, count):
    """However few steps there are, one that was slow as a whole leaves the two scales' ratio within 5 %."""
    steps = _steps(_observations(8 * count, seed, noise=0.01))
    clean = toy.predictor().refit(steps)
    if victim < count:
        steps[victim] = [(a, b, more(m)) for a, b, m in steps[victim]]
    fitted = toy.predictor().refit(steps)
    if count < 3:  # one common ratio, whatever the times: the plan is the profile's
        assert fitted.attention_scale == fitted.linear_scale
    else:
        mix = clean.attention_scale / clean.linear_scale
        assert fitted.attention_scale / fitted.linear_scale == pytest.approx(mix, rel=0.05)


def test_refit_takes_one_ratio_where_two_are_undetermined():
    """With few observations, or all of one mix, both scales are the median ratio."""
    few = toy.predictor().refit([[(a, b, 1.5 * (a + b))] for a, b, _ in _observations(7, 1)])
    assert (few.attention_scale, few.linear_scale) == (pytest.approx(1.5), pytest.approx(1.5))
    alike = toy.predictor().refit([[(2.0, 1.0, 6.0)] * 5] * 4 + [[(2.0, 1.0, 900.0)]])
    assert (alike.attention_scale, alike.linear_scale) == (2.0, 2.0)


def test_refit_is_clipped_and_ignores_unusable_times():
    """Scales stay within [0.25, 4]; NaN, zero and no observations change nothing."""
    predictor = toy.predictor()
    assert predictor.refit([[(1.0, 1.0, 100.0)]]).attention_scale == 4.0
    assert predictor.refit([[(1.0, 1.0, 0.01)]]).linear_scale == 0.25
    assert predictor.refit([[(1.0, 1.0, math.nan), (1.0, 1.0, 0.0), (0.0, 0.0, 1.0)], []]) is predictor


def test_vectorised_and_single_predictions_agree():
    """Many documents at once give the same numbers as one at a time."""
    predictor = toy.predictor()
    lengths, densities = [1, 64, 65, 4096, 99999], [0.01, 0.5, 0.2, 1.0, 0.33]
    single = [predictor.document(*d) for d in zip(lengths, densities, strict=True)]
    together = predictor.attention_ms(lengths, densities)
    assert np.array_equal(together[0], [latency.forward_ms for latency in single])
