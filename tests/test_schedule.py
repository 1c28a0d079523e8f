"""What a step costs: data parallel and 1F1B."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency
from hf_sparsebalance.schedule import simulate_step

# Whole milliseconds (and powers of two as stages) keep all sums exact.
whole_times = st.tuples(st.integers(1, 4), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(
            st.builds(lambda f, b: Latency(float(f), float(b)), st.integers(0, 99), st.integers(0, 99)),
            min_size=shape[1],
            max_size=shape[1],
        ),
        min_size=shape[0],
        max_size=shape[0],
    )
)


def _latencies(rows):
    return [[Latency(0.0, float(ms)) for ms in row] for row in rows]


def test_data_parallel_by_hand():
    """Rank scope waits for the largest sum, slot scope for the largest of each slot; sync comes on top."""
    times = _latencies([[1, 5], [3, 1]])
    rank = simulate_step(times, sync_ms=2.0)
    assert (rank.step_ms, rank.rank_ms, rank.perfect_ms) == (8.0, (6.0, 4.0), 7.0)
    assert simulate_step(times, sync_ms=2.0, scope="slot").step_ms == 10.0
    assert rank.imbalance_microbatch == 2.0  # 5 over 2.5
    assert rank.imbalance_slot == 1.2  # slots 2 and 3 over 2.5
    assert rank.imbalance_rank == 1.2  # 6 over 5


@given(whole_times)
def test_step_is_bounded_by_work_and_serial_time(times):
    """A step takes at least every rank's sum and the perfect time, slots wait at least as long as ranks."""
    rank, slot = simulate_step(times), simulate_step(times, scope="slot")
    sums = [sum(t.total_ms for t in row) for row in times]
    assert rank.step_ms == max(sums)
    assert slot.step_ms >= rank.step_ms >= rank.perfect_ms * (1 - 2.0**-50)
    for cost in (rank, slot):
        assert min(cost.imbalance_microbatch, cost.imbalance_slot, cost.imbalance_rank) >= 1.0 - 2.0**-50


@pytest.mark.parametrize("num_slots", [1, 2, 5, 8])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_homogeneous_pipeline_is_exact(num_slots, num_stages):
    """Even micro-batches take (slots + stages - 1) * T, T one stage's forward and backward."""
    times = [[Latency(8.0, 16.0)] * num_slots]
    cost = simulate_step(times, num_stages=num_stages, scope="microbatch")
    assert cost.step_ms == cost.perfect_ms == (num_slots + num_stages - 1) * 24.0 / num_stages


def _oracle_1f1b(times, num_stages):
    """Longest path through the graph of operations, each after its dependency and its predecessor on the stage."""
    last, previous = num_stages - 1, {}
    for stage in range(num_stages):
        ahead, done = min(last - stage, len(times)), 0
        sequence = [("F", i) for i in range(ahead)]
        for i in range(ahead, len(times)):
            sequence += [("F", i), ("B", done)]
            done += 1
        sequence += [("B", i) for i in range(done, len(times))]
        for before, op in zip([None, *sequence], sequence, strict=False):
            previous[(*op, stage)] = None if before is None else (*before, stage)
    ends = {}

    def end(kind, i, stage):
        if (kind, i, stage) not in ends:
            waits = [previous[kind, i, stage]]
            if kind == "F":
                waits.append(("F", i, stage - 1) if stage else None)
            else:
                waits.append(("F", i, last) if stage == last else ("B", i, stage + 1))
            start = max([0.0, *(end(*op) for op in waits if op)])
            duration = times[i].forward_ms if kind == "F" else times[i].backward_ms
            ends[kind, i, stage] = start + duration / num_stages
        return ends[kind, i, stage]

    return max(end("B", len(times) - 1, stage) for stage in range(num_stages))


@given(whole_times, st.sampled_from([2, 4]))
def test_pipeline_equals_longest_path(times, num_stages):
    """The recursion gives the longest path of the operations' graph, between one stage's work and serial time."""
    cost = simulate_step(times, num_stages=num_stages, sync_ms=1.0)
    assert cost.rank_ms == tuple(_oracle_1f1b(row, num_stages) for row in times)
    assert cost.step_ms == max(cost.rank_ms) + 1.0
    for row, ms in zip(times, cost.rank_ms, strict=True):
        total = sum(t.total_ms for t in row)
        assert total / num_stages <= ms <= total


def test_idle_step_is_balanced():
    """Micro-batches without time count as even."""
    cost = simulate_step(_latencies([[0, 0], [0, 0]]))
    assert (cost.imbalance_microbatch, cost.imbalance_slot, cost.imbalance_rank) == (1.0, 1.0, 1.0)


def test_bad_input_is_refused():
    """Unknown scope, no stages, negative sync and ragged ranks are errors."""
    times = _latencies([[1], [2]])
    for wrong in ({"scope": "node"}, {"scope": "microbatch"}, {"num_stages": 0}, {"sync_ms": -1.0}):
        with pytest.raises(UserError):
            simulate_step(times, **wrong)
    with pytest.raises(ValueError):
        simulate_step(_latencies([[1], [2, 3]]))
    with pytest.raises(ValueError):
        simulate_step([])
