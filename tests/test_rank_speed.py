"""Ranks of unlike speed: how it is learned, and what the plan makes of it."""

import planning_profiles as toy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparsebalance.batching import plan_batches
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.planner import Planner
from hf_sparsebalance.plans import Measured, PlanSettings
from hf_sparsebalance.rank_speed import RankSpeeds
from hf_sparsebalance.tuning import ANCHORS, MicroBatch, tune_sparsity
from hf_sparsebalance.workloads import sample_lengths


def learned(steps, num_ranks):
    speeds = RankSpeeds(num_ranks)
    for measured, predicted in steps:
        speeds.observe(measured, predicted)
    return speeds


def test_slowness_is_against_the_middle_rank():
    """Whatever the ranks were given, and whatever the predictor's scale, the ratio of ratios is the slowness."""
    steps = [([30.0, 20.0, 90.0], [10.0, 20.0 / 3, 15.0]), ([3.0, 6.0, 12.0], [1.0, 2.0, 2.0])] * 2
    assert learned(steps, 3).slowness() == pytest.approx((1.0, 1.0, 2.0))
    assert learned([([30.0, 15.0], [10.0, 10.0])] * 3, 2).slowness() == pytest.approx((2.0, 1.0))


def test_one_stall_says_nothing():
    """A rank that took fifty times as long in one step of four counts as like the others; so do two steps alone."""
    steps = [([10.0, 10.0], [10.0, 10.0])] * 3 + [([500.0, 10.0], [10.0, 10.0])]
    assert learned(steps, 2).slowness() == (1.0, 1.0)
    assert learned([([20.0, 10.0], [10.0, 10.0])] * 2, 2).slowness() == (1.0, 1.0)


def test_noise_is_not_slowness():
    """Ranks within 5 % of each other are alike."""
    assert learned([([10.4, 10.0], [10.0, 10.0])] * 5, 2).slowness() == (1.0, 1.0)


def test_state_is_the_whole():
    """A copy made from the state says the same; one of another number of ranks is refused."""
    speeds = learned([([20.0, 10.0], [10.0, 10.0])] * 20, 2)
    copy = RankSpeeds(2)
    copy.load(speeds.state())
    assert (copy.state(), copy.slowness()) == (speeds.state(), speeds.slowness())
    with pytest.raises(ValueError, match="3"):
        RankSpeeds(3).load(speeds.state())


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(1.0, 3.0), min_size=2, max_size=6),
    st.integers(2, 4),
    st.sampled_from([1, 4]),
    st.integers(0, 5),
)
def test_unlike_ranks_are_evened_by_what_they_take(slowness, num_slots, window, seed):
    """Every sample is used once, steps hold what they did, and no step lasts longer than with ranks taken as alike."""
    lengths = sample_lengths("longalign", 8 * len(slowness) * num_slots, seed, 32768)
    costs = [float(n) + n * n / 8192 for n in lengths]
    options = {"strategy": "sparsity_aware", "num_ranks": len(slowness), "num_slots": num_slots, "window": window}
    alike = plan_batches(lengths, cost_ms=costs, **options)
    unlike = plan_batches(lengths, cost_ms=costs, slowness=slowness, **options)

    def step_ms(step):
        return max(f * sum(costs[s] for slot in rank for s in slot) for f, rank in zip(slowness, step, strict=True))

    for before, after in zip(alike.steps, unlike.steps, strict=True):
        samples = [sorted(s for rank in step for slot in rank for s in slot) for step in (before, after)]
        assert samples[0] == samples[1]
        assert all(len(rank) == num_slots and all(rank) for rank in after)
    assert sum(map(step_ms, unlike.steps)) <= sum(map(step_ms, alike.steps)) * (1 + 1e-9)


def test_a_rank_of_half_the_speed_gets_a_third_of_the_work():
    """Two ranks, 16 samples each: the slow one's share comes within a few samples of what evens them."""
    lengths = sample_lengths("wlb", 320, 1, 16384)
    costs = [float(n) for n in lengths]
    options = {"strategy": "sparsity_aware", "num_ranks": 2, "num_slots": 16, "window": 4}
    plan = plan_batches(lengths, cost_ms=costs, slowness=(2.0, 1.0), **options)
    sums = [[sum(costs[s] for slot in rank for s in slot) for rank in step] for step in plan.steps]
    share = sum(slow for slow, _ in sums) / sum(map(sum, sums))
    assert share == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_tuning_reckons_with_slowness(anchor):
    """Budgets of a slow rank are those of a rank whose documents are predicted to take so much longer."""
    predictor = toy.predictor()
    curve = toy.peaked_curve(2.0)
    micro_batches = [MicroBatch(rank, slot, (8192,), (curve,)) for rank in (0, 1) for slot in (0, 1)]
    options = {"base_top_p": 0.5, "tolerance": 0.2, "anchor": anchor}
    alike = tune_sparsity(micro_batches, predictor, **options)
    unlike = tune_sparsity(micro_batches, predictor, slowness=(1.5, 1.0), **options)
    assert unlike.base_ms[:2] == pytest.approx([1.5 * ms for ms in alike.base_ms[:2]])
    assert unlike.base_ms[2:] == alike.base_ms[2:]
    assert sum(unlike.top_p[:2]) < sum(unlike.top_p[2:])


@pytest.mark.parametrize("adapts", [False, True])
def test_the_planner_learns_which_rank_is_slow(adapts):
    """After three steps in which rank 0 took twice as long the plan reckons with it, if it may, also when resumed."""
    lengths = [4096] * 40
    plan = PlanSettings(
        batching="sparsity_aware", num_ranks=2, num_slots=2, batch_size=1, seed=0, window=1, max_tokens=None,
        base_top_p=0.5, tolerance=0.1, anchor="mean", scope="rank", block_size=toy.BLOCK_SIZE, refit=True,
        rank_speed=adapts,
    )  # fmt: skip
    planner = Planner(plan, lengths, LatencyPredictor(toy.profile()))
    for step in range(4):
        taken = planner.take(0, step)
        samples = [slot for rank in planner.batches(0).steps[step] for slot in rank]
        true_ms = [ms * (2.0 if number < 2 else 1.0) for number, ms in enumerate(taken.predicted_ms)]
        if step < 3:
            curves = [planner.curves.lookup(own[0], 4096) for own in samples]
            planner.observe(list(map(Measured, samples, taken.top_p, true_ms, curves)))
    assert planner.speeds.slowness() == pytest.approx((2.0, 1.0), rel=1e-6)
    slow, fast = taken.predicted_ms[:2], taken.predicted_ms[2:]
    assert (sum(slow) > 1.5 * sum(fast)) == adapts
    resumed = Planner(plan, lengths, LatencyPredictor(toy.profile()))
    resumed.load_state_dict(planner.state_dict())
    assert resumed.speeds.slowness() == planner.speeds.slowness()
