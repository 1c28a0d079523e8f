"""The programs that measure planning, at small size: how even the batches are, and what planning costs."""

import itertools
import json
import math
import sys

import batching_quality
import planning_scale
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparsebalance.batching import STRATEGIES, plan_batches
from hf_sparsebalance.tuning import ANCHORS, SCOPES


def fastest(costs, num_ranks, num_slots):
    """Least summed step time over all ways to cut the samples into steps and ranks."""

    def steps(left):
        if not left:
            return 0.0
        found = math.inf
        for members in itertools.combinations(sorted(left), num_ranks * num_slots):
            if min(left) in members:
                rest = steps(left.difference(members))
                found = min(found, ranks(frozenset(members)) + rest)
        return found

    def ranks(left):
        if not left:
            return 0.0
        own = (o for o in itertools.combinations(sorted(left), num_slots) if min(left) in o)
        return min(max(sum(costs[i] for i in o), ranks(left.difference(o))) for o in own)

    return steps(frozenset(range(len(costs))))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([(2, 2, 2), (2, 3, 1), (3, 2, 1), (2, 1, 3)]), st.data())
def test_no_plan_beats_the_bound(shape, data):
    """The bound of a window is never above the best of all its plans, found by brute force."""
    num_ranks, num_slots, num_steps = shape
    size = num_ranks * num_slots * num_steps
    costs = data.draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0, 30.0]), min_size=size, max_size=size))
    drawn = plan_batches([1] * size, strategy="random", num_ranks=num_ranks, num_slots=num_slots)
    best = fastest(costs, num_ranks, num_slots)
    assert batching_quality.bound_ms(drawn, costs, num_steps) <= best * (1 + 1e-12)


def test_batching_quality_lists_every_strategy(tmp_path, capsys):
    """Every strategy has a row in every setting; none beats perfect balance, nor SAB its bound."""
    path = tmp_path / "quality.json"
    assert batching_quality.main(["--small", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert {"date", "machine", "versions", "cost_ms"} <= document.keys()
    for _, group in itertools.groupby(document["rows"], key=lambda row: (row["lengths"], row["num_slots"])):
        rows = list(group)
        assert {row["strategy"] for row in rows} == set(STRATEGIES)
        for row in rows:
            assert row["share_of_perfect"] <= 1 + 1e-9
            if row["strategy"] == "sparsity_aware":
                assert row["share_of_perfect"] - 1e-9 <= row["share_of_bound"] <= 1 + 1e-9
                assert row["max_steps_moved"] < row["window"]
    assert "of bound" in capsys.readouterr().out


def test_planning_scale_times_batches_and_every_tuning(tmp_path, capsys, monkeypatch):
    """Each way to tune and each number of ranks has a time."""
    path = tmp_path / "scale.json"
    monkeypatch.setattr(sys, "argv", ["planning_scale", "--small", "--repeats", "1", "--json", str(path)])
    assert planning_scale.main() == 0
    rows = json.loads(path.read_text())["rows"]
    tuned = {(row["anchor"], row["scope"]) for row in rows if row["what"] == "tune_sparsity"}
    assert tuned == set(itertools.product(ANCHORS, SCOPES))
    assert any(row["what"] == "plan_batches" for row in rows)
    assert all(row["median_ms"] > 0.0 for row in rows)
    assert "plan_batches" in capsys.readouterr().out
