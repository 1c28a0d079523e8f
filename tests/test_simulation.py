"""Whole simulated runs: against plain loops, and what must hold between their rows."""

import itertools

import planning_profiles
import pytest

from hf_sparsebalance.batching import STRATEGIES
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.pipeline_schedule import one_f_one_b
from hf_sparsebalance.schedule import simulate_step
from hf_sparsebalance.simulation import Budgets, ClusterSetup, Simulation, compare
from hf_sparsebalance.workloads import make_workload, sample_lengths

PREDICTOR = planning_profiles.predictor()
SETUPS = {
    "rank": ClusterSetup(num_ranks=3, num_slots=2, batch_size=2),
    "slot": ClusterSetup(num_ranks=3, num_slots=2, batch_size=2, scope="slot"),
    "pipeline": ClusterSetup(num_ranks=2, num_slots=4, order=one_f_one_b(2, 4)),
}


@pytest.fixture(params=SETUPS)
def simulation(request):
    workload = make_workload(sample_lengths("wlb", 50, 0, 16384), block_size=planning_profiles.BLOCK_SIZE, spread=0.3)
    return Simulation(workload, PREDICTOR, SETUPS[request.param])


def by_hand(simulation, plan, top_p):
    """(step costs, work) with one call of the predictor per micro-batch; top_p in the order of the plan."""
    setup, workload = simulation.setup, simulation.workload
    budget = iter(top_p)
    costs, attended, visible = [], 0.0, 0.0
    for step in plan.steps:
        times = []
        for rank in step:
            times.append([])
            for samples in rank:
                p = next(budget)
                lengths = [workload.lengths[i] for i in samples]
                densities = [workload.curves[i].at(p) for i in samples]
                times[-1].append(PREDICTOR.predict(lengths, densities, p == 1.0))
                for length, density in zip(lengths, densities, strict=True):
                    own = sum(t % planning_profiles.BLOCK_SIZE + 1 for t in range(length))
                    visible += length * (length + 1) / 2
                    attended += own + density * (length * (length + 1) / 2 - own)
        if setup.order:
            costs.append(simulate_step(times, num_stages=len(setup.order)))
        else:
            costs.append(simulate_step(times, scope=setup.scope))
    return costs, attended / visible


def test_vectors_equal_loops(simulation):
    """Times, work and budgets of a run equal those of plain loops over its micro-batches."""
    plan = simulation.plan("length_partition")
    tuned = simulation.tuned(plan, "mean")
    budgets = Budgets(tuned.top_p.copy())
    budgets.top_p[:2] = 1.0  # the dense kernel too
    costs, work = by_hand(simulation, plan, budgets.top_p.tolist())
    found = simulation.costs(plan, budgets)
    assert [cost.step_ms for cost in found] == pytest.approx([cost.step_ms for cost in costs])
    assert [cost.imbalance_rank for cost in found] == pytest.approx([cost.imbalance_rank for cost in costs])
    assert simulation.work(plan, budgets) == pytest.approx(work)


def test_controls_match_what_they_promise(simulation):
    """The compute-matched budget does the tuning's work, the coverage-matched one its mean over history."""
    plan = simulation.plan("random")
    tuned = simulation.tuned(plan, "mean")
    same = simulation.fixed(plan, simulation.same_work(plan, tuned))
    assert simulation.work(plan, same) == pytest.approx(simulation.work(plan, tuned), rel=1e-9)
    tokens = [
        sum(max(0, simulation.workload.lengths[i] - planning_profiles.BLOCK_SIZE) for i in samples)
        for step in plan.steps
        for rank in step
        for samples in rank
    ]
    mean = sum(p * n for p, n in zip(tuned.top_p, tokens, strict=True)) / sum(tokens)
    assert simulation.mean_top_p(plan, tuned) == pytest.approx(mean)


def test_every_gain_is_split(simulation):
    """Each strategy has its rows, less_work * balance is the speedup, equal work in equal order gains no balance."""
    rows, runs = compare(simulation, ["mean", "optimal"])
    assert [row.batching for row in rows if row.tuning is None] == list(STRATEGIES)
    assert len(rows) == 1 + 7 * len(STRATEGIES)
    assert set(runs) == {("random", "dense"), *itertools.product(STRATEGIES, (None, "mean", "optimal"))}
    for row in rows:
        assert row.speedup == pytest.approx(row.less_work * row.balance)
        assert row.perfect_ms <= row.total_ms * (1 + 1e-9) or simulation.setup.order
        if row.tuning is None:
            assert row.less_work == pytest.approx(1.0)
        if row.batching == "random" and (row.control or row.tuning == "dense"):
            assert row.balance == pytest.approx(1.0)
        if row.control == "compute":
            tuned = next(r for r in rows if (r.batching, r.tuning, r.control) == (row.batching, row.tuning, None))
            assert row.less_work == pytest.approx(tuned.less_work)
            assert row.work == pytest.approx(tuned.work)
    assert (rows[0].tuning, rows[0].work) == ("dense", 1.0)


def test_planner_that_knows_every_document_reaches_its_plan():
    """With documents that are what the planner takes them for, tuning `optimal` never lengthens a run."""
    workload = make_workload(sample_lengths("wlb", 48, 1, 16384), block_size=64, spread=0.2, known="sample")
    rows, _ = compare(Simulation(workload, PREDICTOR, SETUPS["rank"]), ["optimal"])
    total = {(row.batching, row.tuning, row.control): row.total_ms for row in rows}
    for strategy in STRATEGIES:
        assert total[strategy, "optimal", None] <= total[strategy, None, None] * (1 + 1e-9)


def test_bars_show_the_step(simulation):
    """The picture's last bar ends when the step does, no lane does two things at once, and all work is there."""
    plan = simulation.plan("random")
    fixed = simulation.fixed(plan, 0.8)
    bars = simulation.bars(plan, fixed, 1)
    assert max(bar.end_ms for bar in bars) == pytest.approx(simulation.costs(plan, fixed)[1].step_ms)
    for lane in {bar.lane for bar in bars}:
        own = sorted((bar.start_ms, bar.end_ms) for bar in bars if bar.lane == lane)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))
    if simulation.setup.order is None:
        work = simulation.times_ms(plan, fixed)[:, 1].sum()
        assert sum(bar.end_ms - bar.start_ms for bar in bars) == pytest.approx(work)


def test_refitted_scales_count():
    """A predictor whose scales were fitted simulates with them."""
    workload = make_workload([1000] * 12, block_size=64)
    twice = LatencyPredictor(PREDICTOR.profile, 2.0, 2.0)
    plain, slow = (Simulation(workload, predictor, SETUPS["rank"]) for predictor in (PREDICTOR, twice))
    plan = plain.plan("random")
    assert slow.times_ms(plan, slow.fixed(plan, 0.8)) == pytest.approx(
        2.0 * plain.times_ms(plan, plain.fixed(plan, 0.8))
    )
