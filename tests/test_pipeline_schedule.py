"""Pipelines: the recursion against a discrete-event simulation, torch's tables, and what must hold of any schedule."""

import functools
import random

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency
from hf_sparsebalance.pipeline_schedule import Operation, gpipe, one_f_one_b, time_pipelines
from hf_sparsebalance.schedule import simulate_step
from hf_sparsebalance.torch_schedules import SCHEDULES, operation_order

# Multiples of 48 and a third or quarter as W: all durations are whole, all sums exact.
order_of = functools.cache(operation_order)  # torch mocks a stage for each table, which takes its time
DURATIONS = st.integers(0, 20).map(lambda n: 48.0 * n)
PIPELINES = st.tuples(st.sampled_from(SCHEDULES), st.sampled_from([2, 4]), st.sampled_from([4, 8]))


def simpy_ms(order, micro_batches, weight_share):
    """Makespan with one process per worker that sleeps through its operations and waits for others' events."""
    environment = simpy.Environment()
    last = max(op.stage for own in order for op in own)
    done = {op: environment.event() for own in order for op in own}

    def gradient_of(stage, i):
        return done.get(Operation("B", stage, i)) or done[Operation("I", stage, i)]

    def worker(own):
        for op in own:
            kind, stage, i = op
            if kind == "F" and stage > 0:
                yield done[Operation("F", stage - 1, i)]
            elif kind == "W":
                yield gradient_of(stage, i)
            elif kind in "BI":
                yield gradient_of(stage + 1, i) if stage < last else done[Operation("F", stage, i)]
            forward, backward = micro_batches[i]
            duration = {"F": forward, "B": backward, "I": backward * (1 - weight_share), "W": backward * weight_share}
            yield environment.timeout(duration[kind] / (last + 1))
            done[op].succeed()

    for own in order:
        environment.process(worker(own))
    environment.run()
    return environment.now


@settings(deadline=None)
@given(PIPELINES, st.data())
def test_recursion_equals_discrete_events(pipeline, data):
    """For every schedule of torch: simpy's makespan, at least each worker's own work, at most the serial sum."""
    order = order_of(*pipeline)
    micro_batches = data.draw(
        st.lists(st.tuples(DURATIONS, DURATIONS), min_size=pipeline[2], max_size=pipeline[2]), "times"
    )
    forward, backward = ([row[part] for row in micro_batches] for part in (0, 1))
    times = time_pipelines(order, [forward, forward[::-1]], [backward, backward[::-1]], weight_share=0.25)
    assert times.makespan_ms.tolist() == [
        simpy_ms(order, micro_batches, 0.25),
        simpy_ms(order, micro_batches[::-1], 0.25),
    ]
    total = sum(forward) + sum(backward)
    assert total / len(order) <= times.makespan_ms[0] <= total
    for worker in range(len(order)):  # no worker does two things at once
        rows = [row for row, (owner, _) in enumerate(times.operations) if owner == worker]
        assert all(times.end_ms[a, 0] <= times.start_ms[b, 0] for a, b in zip(rows, rows[1:], strict=False))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "slots"), [(2, 2), (2, 7), (4, 4), (4, 8), (8, 16)])
def test_even_micro_batches_take_the_textbook_time(schedule, stages, slots):
    """Even micro-batches take (M + P - 1) * T exactly, T one stage's forward and backward."""
    cost = simulate_step([[Latency(16.0, 32.0)] * slots], num_stages=stages, schedule=schedule)
    assert cost.step_ms == cost.perfect_ms == (slots + stages - 1) * 48.0 / stages


@pytest.mark.parametrize(("stages", "slots"), [(2, 2), (4, 4), (4, 7), (8, 8)])
def test_built_in_orders_are_torchs(stages, slots):
    """The orders that stand here are the ones torch runs."""
    assert gpipe(stages, slots) == operation_order("gpipe", stages, slots)
    assert one_f_one_b(stages, slots) == operation_order("1f1b", stages, slots)


def test_splitting_the_backward_shortens_an_even_pipeline():
    """Zero-bubble orders beat interleaved 1F1B, and that beats 1F1B, where all micro-batches are even."""
    times = [[Latency(48.0, 96.0)] * 8]
    ms = [
        simulate_step(times, num_stages=4, schedule=operation_order(name, 4, 8)).step_ms
        for name in ("zbvzerobubble", "interleaved1f1b", "1f1b")
    ]
    assert ms[0] < ms[1] < ms[2]


def test_replicas_do_not_touch_each_other():
    """Each replica of a step takes what it takes alone; the step takes the slowest."""
    draw = random.Random(0)
    times = [[Latency(draw.random(), draw.random()) for _ in range(4)] for _ in range(5)]
    alone = [simulate_step([row], num_stages=4).step_ms for row in times]
    assert simulate_step(times, num_stages=4).rank_ms == tuple(alone)
    assert simulate_step(times, num_stages=4).step_ms == max(alone)


def test_bad_orders_are_refused():
    """Unknown names, impossible numbers, and orders that lack an operation or wait for themselves."""
    for wrong in (("dualpipev", 4, 8), ("1f1b", 4, 2)):
        with pytest.raises(UserError, match="--schedule"):
            operation_order(*wrong)
    with pytest.raises(UserError, match="schedule"):
        simulate_step([[Latency(1.0, 1.0)]], num_stages=2, schedule="zbv")
    with pytest.raises(ValueError, match="pipeline ranks"):
        simulate_step([[Latency(1.0, 1.0)]], num_stages=2, schedule=gpipe(4, 1))
    with pytest.raises(ValueError, match="micro-batches"):
        time_pipelines(gpipe(2, 3), [[1.0, 1.0]], [[1.0, 1.0]])
    backwards = [[Operation("B", 0, 0), Operation("F", 0, 0)]]
    with pytest.raises(ValueError, match="F and B"):
        time_pipelines(backwards, [[1.0]], [[1.0]])
    crossed = [
        [Operation("F", 0, 0), Operation("F", 0, 1), Operation("B", 0, 1), Operation("B", 0, 0)],
        [Operation("F", 1, 0), Operation("B", 1, 0), Operation("F", 1, 1), Operation("B", 1, 1)],
    ]
    time_pipelines(crossed, [[1.0, 1.0]], [[1.0, 1.0]])
    crossed[0] = [Operation("F", 0, 0), Operation("B", 0, 1), Operation("F", 0, 1), Operation("B", 0, 0)]
    with pytest.raises(ValueError, match="F and B|waits"):
        time_pipelines(crossed, [[1.0, 1.0]], [[1.0, 1.0]])
