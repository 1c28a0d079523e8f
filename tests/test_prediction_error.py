"""Errors of the predictor and of its two rivals on held-out micro-batches."""

import numpy as np
import planning_profiles
import pytest

from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.prediction_error import HeldOut, prediction_errors

PREDICTOR = LatencyPredictor(planning_profiles.profile())
LENGTHS = [(700,), (1500, 300), (4000,), (2500, 900, 200), (6000,), (350, 350), (8000, 100), (1200,)]


def predicted_ms(lengths, density=0.3, dense=False):
    return PREDICTOR.predict(lengths, [density] * len(lengths), dense).total_ms


def held_out(times_ms=predicted_ms, spread=0.0):
    """Micro-batches that take what ``times_ms`` says, in three rounds that lie ``spread`` (relative) around it."""
    rows = []
    for number, lengths in enumerate(LENGTHS):
        middle, dense = times_ms(lengths), number % 4 == 3
        middle = predicted_ms(lengths, dense=True) if dense and times_ms is predicted_ms else middle
        rounds = (middle * (1 - spread), middle, middle * (1 + spread))
        rows.append(HeldOut(lengths, 0.3, dense, 1e9 * sum(lengths) + 3e5 * sum(n * n for n in lengths), rounds))
    return rows


def test_times_as_predicted_have_no_error():
    """A machine that takes exactly what the profile says leaves error 0 and every pair in order."""
    ours = prediction_errors(PREDICTOR, held_out())[0]
    assert ours.name == "profile"
    assert ours.mape == pytest.approx(0.0, abs=1e-12) and ours.p95 == pytest.approx(0.0, abs=1e-12)
    assert ours.ordered == 1.0 and ours.pairs == len(LENGTHS) * (len(LENGTHS) - 1) // 2


def test_a_common_factor_is_an_error_but_no_disorder():
    """On a machine a quarter slower throughout, MAPE and 95th percentile are 1 - 1 / 1.25, the order is right."""
    slower = [
        HeldOut(row.lengths, row.density, row.dense, row.flops, tuple(1.25 * ms for ms in row.times_ms))
        for row in held_out()
    ]
    ours = prediction_errors(PREDICTOR, slower)[0]
    assert ours.mape == pytest.approx(0.2) and ours.p95 == pytest.approx(0.2) and ours.ordered == 1.0


def test_pairs_closer_than_the_noise_are_left_out():
    """With rounds that lie 20 % around the median, only pairs more than twice that noise apart are judged."""
    rows = held_out(spread=0.2)
    medians = [row.times_ms[1] for row in rows]
    apart = [abs(np.log(a / b)) > 2 * 1.4826 * 0.2 for i, a in enumerate(medians) for b in medians[i + 1 :]]
    assert prediction_errors(PREDICTOR, rows)[0].pairs == sum(apart) < len(apart)


def test_rivals_are_the_best_fits_of_their_kind():
    """FLOPs: numpy's weighted line. Lengths: exact where time is a constant plus tokens plus squares."""
    rows = held_out()
    measured = np.array([row.times_ms[1] for row in rows])
    flops = np.array([row.flops for row in rows])
    line = np.polynomial.Polynomial.fit(flops, measured, 1, w=1 / measured)
    expected = np.abs(line(flops) / measured - 1)
    _, by_flops, _ = prediction_errors(PREDICTOR, rows)
    assert by_flops.mape == pytest.approx(expected.mean()) and by_flops.p95 == pytest.approx(
        np.quantile(expected, 0.95)
    )

    def by_lengths_alone(lengths):
        return 3.0 + 0.01 * sum(lengths) + 2e-6 * sum(n * n for n in lengths)

    rows = [HeldOut(row.lengths, row.density, row.dense, row.flops, (by_lengths_alone(row.lengths),)) for row in rows]
    assert prediction_errors(PREDICTOR, rows)[2].mape == pytest.approx(0.0, abs=1e-9)


def test_too_few_micro_batches_are_refused():
    """Three numbers fit three points: fewer than four micro-batches say nothing about the rivals."""
    with pytest.raises(ValueError, match="at least 4"):
        prediction_errors(PREDICTOR, held_out()[:3])
