"""The planner: steps planned ahead of time, and the state a resumed run needs."""

import dataclasses
import json
import random

import planning_profiles
import pytest

from hf_sparsebalance.density import top_k_density, uniform_curve
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.planner import Planner
from hf_sparsebalance.plans import Measured, PlanSettings

LENGTHS = [300, 4000, 900, 6000, 500, 2500, 700, 8000]


def planner(**changes):
    settings = {
        "batching": "random", "num_ranks": 2, "num_slots": 2, "batch_size": 1, "seed": 0, "window": 1,
        "max_tokens": None, "base_top_p": 0.5, "tolerance": 0.2, "anchor": "mean", "scope": "rank", "block_size": 128,
        "refit": True,
    }  # fmt: skip
    return Planner(PlanSettings(**{**settings, **changes}), LENGTHS, LatencyPredictor(planning_profiles.profile()))


def what_a_step_showed(plan, of, step=0):
    """Every document at half of the uniform gate's density, every micro-batch 30 % slower than predicted."""
    curve = uniform_curve(4000, 128)
    thin = type(curve)(curve.top_p, (*(density / 2 for density in curve.density[:-1]), 1.0))
    batches = [samples for slots in of.batches(0).steps[step] for samples in slots]
    return [
        Measured(samples, p, 1.3 * ms, thin)
        for samples, p, ms in zip(batches, plan.top_p, plan.predicted_ms, strict=True)
    ]


def test_a_step_planned_ahead_is_not_planned_again():
    """What is learned between planning and taking a step changes later plans, not that one."""
    ours, fresh = planner(), planner()
    ours.plan_ahead(0, 1)
    expected = fresh.take(0, 1)
    ours.observe(what_a_step_showed(fresh.take(0, 0), fresh))
    ours.plan_ahead(0, 1)
    assert ours.is_planned(0, 1) and ours.take(0, 1) == expected
    assert not ours.is_planned(0, 1) and ours.take(0, 1) != expected


def test_plans_made_ahead_survive_a_checkpoint():
    """A planner that loads the state takes the same plans, though it would now plan otherwise."""
    ours = planner()
    ours.plan_ahead(0, 1)
    ours.observe(what_a_step_showed(ours.take(0, 0), ours))
    state = json.loads(json.dumps(ours.state_dict()))
    resumed = planner()
    resumed.load_state_dict(state)
    assert resumed.is_planned(0, 1)
    assert resumed.take(0, 1) == ours.take(0, 1)
    assert resumed.take(0, 1) == ours.take(0, 1)  # planned anew, with what was learned


@pytest.mark.parametrize("changes", [{"tolerance": 0.1}, {"anchor": "max"}, {"base_top_p": 0.6}])
def test_other_budget_options_plan_anew(changes):
    """A run resumed with another tolerance, anchor or base does not run the old budgets."""
    ours = planner()
    ours.plan_ahead(0, 1)
    resumed = planner(**changes)
    resumed.load_state_dict(ours.state_dict())
    assert not resumed.is_planned(0, 1)
    assert resumed.take(0, 1) == planner(**changes).take(0, 1)


def test_without_tuning_every_micro_batch_has_the_base_budget_and_a_prediction():
    """tolerance 0 plans the base budget; the predictions are the predictor's own for these documents."""
    ours = planner(tolerance=0.0)
    plan = ours.take(0, 0)
    assert plan.top_p == (0.5,) * 4 and plan.anchor_ms is None
    for micro_batch, ms in zip(ours.micro_batches(0, 0), plan.predicted_ms, strict=True):
        densities = [curve.at(0.5) for curve in micro_batch.curves]
        assert ms == ours.predictor.predict(micro_batch.lengths, densities).total_ms


@pytest.mark.parametrize("before", [3, 60])
def test_one_stalled_step_does_not_move_the_plan(before):
    """A step that took ten times as long moves neither the fitted scales nor the planned rank times by 5 %."""
    noise = random.Random(0)

    def steps(ours, count, factor):
        for _ in range(count):
            seen = what_a_step_showed(ours.take(0, 0), ours)
            ours.observe([dataclasses.replace(m, total_ms=m.total_ms * factor * noise.gauss(1, 0.02)) for m in seen])

    smooth, stalled = planner(), planner()
    for ours in (smooth, stalled):
        noise.seed(1)
        steps(ours, before, 1.0)
    steps(stalled, 1, 10.0)
    ours, other = smooth.take(0, 1), stalled.take(0, 1)
    assert stalled.predictor.attention_scale == pytest.approx(smooth.predictor.attention_scale, rel=0.05)
    assert stalled.predictor.linear_scale == pytest.approx(smooth.predictor.linear_scale, rel=0.05)
    for rank in (slice(0, 2), slice(2, 4)):
        assert sum(other.predicted_ms[rank]) == pytest.approx(sum(ours.predicted_ms[rank]), rel=0.05)


def test_drift_is_part_of_the_plan():
    """Steps that take 1.3 times the profile's time show as scales of 1.3 in the plans made afterwards."""
    ours = planner()
    for _ in range(4):
        seen = what_a_step_showed(planner().take(0, 0), ours)
        ours.observe([dataclasses.replace(micro_batch, curve=None) for micro_batch in seen])
    assert ours.take(0, 1).scales == pytest.approx((1.3, 1.3), rel=1e-6)


# top_k.

TOP_K = {"base_top_p": None, "base_top_k": 16, "block_size": planning_profiles.BLOCK_SIZE}


@pytest.mark.parametrize("batching", ["random", "sparsity_aware"])
def test_top_k_plans_made_ahead_survive_a_checkpoint(batching):
    """Plans of a k go through JSON as those of a p do; another base or least k plans the budgets anew."""
    ours = planner(**TOP_K, batching=batching)
    ours.plan_ahead(0, 1)
    state = json.loads(json.dumps(ours.state_dict()))
    resumed = planner(**TOP_K, batching=batching)
    resumed.load_state_dict(state)
    plan = ours.take(0, 1)
    assert resumed.is_planned(0, 1) and resumed.take(0, 1) == plan
    assert plan.top_p is None and len(set(plan.top_k)) > 1 and all(isinstance(k, int) for k in plan.top_k)
    if batching == "random":
        for changes in ({"base_top_k": 8}, {"least_top_k": 2}):
            other = planner(**{**TOP_K, **changes})
            other.load_state_dict(state)
            assert not other.is_planned(0, 1)
    else:
        with pytest.raises(UserError, match="--base_top_k 16 .now 8"):
            planner(**{**TOP_K, "base_top_k": 8}, batching=batching).load_state_dict(state)


def test_without_tuning_a_top_k_is_priced_by_its_lengths():
    """tolerance 0 plans the base k; predictions are the predictor's at the density that counting tokens gives."""
    ours = planner(**TOP_K, tolerance=0.0)
    plan = ours.take(0, 0)
    assert plan.top_k == (16,) * 4 and plan.top_p is None
    for micro_batch, ms in zip(ours.micro_batches(0, 0), plan.predicted_ms, strict=True):
        (length,) = micro_batch.lengths
        blocks = [token // planning_profiles.BLOCK_SIZE for token in range(length)]
        density = sum(min(15, n) for n in blocks) / sum(blocks)
        expected = ours.predictor.predict([length], [density], dense=density == 1.0).total_ms
        assert ms == pytest.approx(expected, rel=1e-12)


def test_the_refit_reads_the_density_that_layers_took():
    """Layers that raised their k take longer, in no way because the device is slower: the scales stay at the truth."""
    ours = planner(**TOP_K)
    for _ in range(4):
        plan, seen = ours.take(0, 0), []
        for samples, k in zip([s for slots in ours.batches(0).steps[0] for s in slots], plan.top_k, strict=True):
            lengths = [LENGTHS[sample] for sample in samples]
            densities = top_k_density(lengths, k + 9, planning_profiles.BLOCK_SIZE)
            true_ms = planning_profiles.predictor().predict(lengths, densities, densities == 1.0).total_ms
            seen.append(Measured(samples, None, 1.3 * true_ms, None, density=float(densities[0])))
        ours.observe(seen)
    assert ours.take(0, 1).scales == pytest.approx((1.3, 1.3), rel=1e-6)


def test_a_time_that_was_spent_waiting_teaches_nothing():
    """Without a time of its own a micro-batch moves the curves, and leaves the predictor where it was."""
    ours, fresh = planner(), planner()
    showed = what_a_step_showed(ours.take(0, 0), ours)
    ours.observe([dataclasses.replace(seen, total_ms=None) for seen in showed])
    assert ours.predictor == fresh.predictor and ours.curves.state_dict() != fresh.curves.state_dict()
    ours.observe(showed * 8)
    assert ours.predictor != fresh.predictor


def test_a_state_of_other_blocks_gives_no_densities():
    """Without an order that depends on it, a state of another block size leaves curves and steps ahead behind."""
    options = {"batching": "random", "window": 1}
    before = planner(**options)
    before.observe(what_a_step_showed(before.take(0, 0), before))
    before.plan_ahead(0, 1)
    other = before.settings.block_size * 2
    after, fresh = (planner(**options, block_size=other) for _ in range(2))
    after.load_state_dict(before.state_dict())
    assert after.curves.state_dict() == fresh.curves.state_dict()
    assert not after.is_planned(0, 1)


@pytest.mark.parametrize("scales", [[float("nan"), 1.0], [1.0, 0.0], [float("inf"), 1.0]])
def test_impossible_scales_are_refused(scales):
    """A damaged drift of the predictor is one line, not a plan."""
    ours = planner()
    state = ours.state_dict()
    state["learned"]["scales"] = scales
    with pytest.raises(UserError, match="damaged"):
        ours.load_state_dict(state)
