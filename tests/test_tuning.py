"""Dynamic sparsity tuning against brute force and its promises."""

import functools
import itertools
import random

import numpy as np
import planning_profiles as toy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparsebalance import tuning
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.tuning import (
    ANCHORS,
    SCOPES,
    MicroBatch,
    candidate_budgets,
    candidate_top_k,
    tune_sparsity,
    tune_top_k,
)

PREDICTOR = toy.predictor()
# Sums of up to a dozen products, and the fit test's own allowance for means that round below their terms.
ROUNDING = 2e-9


def history(micro_batch):
    """Tokens with a block before their own: all but each document's first block."""
    return sum(length - min(length, toy.BLOCK_SIZE) for length in micro_batch.lengths)


def time_ms(micro_batch, p):
    """What the predictor says of a micro-batch, by its public single prediction."""
    densities = [curve.at(p) for curve in micro_batch.curves]
    return PREDICTOR.predict(micro_batch.lengths, densities, dense=p == 1.0).total_ms


def step_ms(micro_batches, times, scope):
    """Step time: slowest micro-batch, sum of the slots' slowest, or slowest rank's sum."""
    if scope == "microbatch":
        return max(times)
    groups = {}
    for m, ms in zip(micro_batches, times, strict=True):
        groups.setdefault(m.slot if scope == "slot" else m.rank, []).append(ms)
    return sum(map(max, groups.values())) if scope == "slot" else max(map(sum, groups.values()))


def mean_p(micro_batches, budgets):
    """Of the tokens with history; 1 where there are none."""
    tokens = [history(m) for m in micro_batches]
    return sum(t * p for t, p in zip(tokens, budgets, strict=True)) / sum(tokens) if any(tokens) else 1.0


def grid(shape, documents):
    """Micro-batches of shape (ranks, slots) from (length, sharpness) pairs, one document each unless nested."""
    ranks, slots = shape
    result = []
    for i, packed in enumerate(documents):
        lengths = tuple(length for length, _ in packed)
        curves = tuple(toy.peaked_curve(sharpness) for _, sharpness in packed)
        result.append(MicroBatch(i // slots, i % slots, lengths, curves))
    assert len(result) == ranks * slots
    return result


document = st.tuples(st.integers(1, 30_000), st.floats(1.0, 6.0))
steps = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda shape: st.lists(
        st.lists(document, min_size=1, max_size=2), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]
    ).map(lambda documents: grid(shape, documents))
)
small_steps = st.lists(st.lists(document, min_size=1, max_size=2), min_size=4, max_size=4).map(
    lambda documents: grid((2, 2), documents)
)


def test_candidates_hold_bound_base_and_dense_exactly():
    """The grid runs from the bound to 1 and holds bound, base and 1 as given; nothing is at or below 0."""
    budgets = candidate_budgets(0.7, 0.123)
    assert budgets[0] == 0.7 - 0.123
    assert 0.7 in budgets
    assert budgets[-1] == 1.0
    assert list(budgets) == sorted(set(budgets))
    assert max(b - a for a, b in itertools.pairwise(budgets)) < 0.01 + 1e-6
    assert min(candidate_budgets(0.1, 0.5)) == 0.01
    assert min(candidate_budgets(0.005, 0.5)) == 0.005


@settings(deadline=None)
@given(steps, st.sampled_from(ANCHORS), st.sampled_from(SCOPES), st.floats(0.05, 1.0), st.floats(0.0, 0.4))
def test_promises_hold(micro_batches, anchor, scope, base, tolerance):
    """No budget falls below the bound, times are the predictor's, and whoever is above the anchor is counted."""
    tuned = tune_sparsity(micro_batches, PREDICTOR, base_top_p=base, tolerance=tolerance, anchor=anchor, scope=scope)
    assert all(max(base - tolerance, 0.0) <= p <= 1.0 and p > 0.0 for p in tuned.top_p)
    for m, p, ms, base_ms in zip(micro_batches, tuned.top_p, tuned.predicted_ms, tuned.base_ms, strict=True):
        assert ms == pytest.approx(time_ms(m, p), rel=ROUNDING)
        assert base_ms == pytest.approx(time_ms(m, base), rel=ROUNDING)
    if anchor == "optimal":
        assert step_ms(micro_batches, tuned.predicted_ms, scope) <= step_ms(micro_batches, tuned.base_ms, scope)
        assert mean_p(micro_batches, tuned.top_p) >= base * (1 - ROUNDING)
        assert tuned.num_missed == 0
    if scope == "rank" and anchor != "optimal":
        sums = {m.rank: 0.0 for m in micro_batches}
        for m, ms in zip(micro_batches, tuned.predicted_ms, strict=True):
            sums[m.rank] += ms
        assert sum(ms > tuned.anchor_ms * (1 + ROUNDING) for ms in sums.values()) == tuned.num_missed
    again = tune_sparsity(micro_batches, PREDICTOR, base_top_p=base, tolerance=tolerance, anchor=anchor, scope=scope)
    assert again == tuned


@settings(deadline=None, max_examples=60)
@given(steps, st.sampled_from(["min", "mean", "max"]), st.sampled_from(["microbatch", "slot"]))
def test_single_choices_equal_exhaustive_search(micro_batches, anchor, scope):
    """Each micro-batch gets the largest budget that meets its anchor, else its fastest allowed one."""
    base, tolerance = 0.6, 0.1
    tuned = tune_sparsity(micro_batches, PREDICTOR, base_top_p=base, tolerance=tolerance, anchor=anchor, scope=scope)
    summary = {"min": min, "max": max, "mean": lambda values: sum(values) / len(values)}[anchor]
    missed, anchors = 0, {}
    for m, p in zip(micro_batches, tuned.top_p, strict=True):
        fellows = [f for f in micro_batches if scope == "microbatch" or f.slot == m.slot]
        target = anchors[m.slot if scope == "slot" else 0] = summary([time_ms(f, base) for f in fellows])
        times = {q: time_ms(m, q) for q in candidate_budgets(base, tolerance)}
        fitting = [q for q, ms in times.items() if ms <= target * (1 + ROUNDING)]
        strictly = [q for q, ms in times.items() if ms <= target * (1 - ROUNDING)]
        if strictly:
            assert max(strictly) <= p <= max(fitting)
        elif not fitting:
            assert times[p] == pytest.approx(min(times.values()), rel=ROUNDING)
            missed += 1
    assert tuned.num_missed == missed
    assert tuned.anchor_ms == pytest.approx(sum(anchors.values()), rel=ROUNDING)


def exhaustive_optimum(micro_batches, base, tolerance, scope):
    """(least step time, longest move): all plans of each pair that shares a rank or slot, then all pairs of those."""
    budgets = np.array(candidate_budgets(base, tolerance))
    times = np.array([[time_ms(m, p) for p in budgets] for m in micro_batches])
    gains = np.array([history(m) for m in micro_batches])[:, None] * budgets
    target = base * sum(history(m) for m in micro_batches) * (1 - 1e-12)
    pairs = [(0, 1), (2, 3)] if scope == "rank" else [(0, 2), (1, 3)]
    join = np.add if scope == "rank" else np.maximum
    fronts = []
    for a, b in pairs:
        cost = join.outer(times[a], times[b]).ravel()
        gain = np.add.outer(gains[a], gains[b]).ravel()
        order = np.argsort(cost, kind="stable")
        fronts.append((cost[order], np.maximum.accumulate(gain[order])))
    (cost_a, gain_a), (cost_b, gain_b) = fronts
    # For each plan of the first pair the cheapest of the second that reaches the target with it.
    partner = np.searchsorted(gain_b, target - gain_a)
    fits = partner < len(gain_b)
    cost_b = cost_b[partner[fits]]
    step = cost_a[fits] + cost_b if scope == "slot" else np.maximum(cost_a[fits], cost_b)
    return step.min(), (times.max(axis=1) - times.min(axis=1)).max()


@settings(deadline=None, max_examples=40)
@given(small_steps, st.sampled_from(SCOPES), st.sampled_from([0.3, 0.5, 0.9]), st.sampled_from([0.02, 0.2]))
def test_optimal_equals_exhaustive_search(micro_batches, scope, base, tolerance):
    """Optimal is the least step time over all allowed plans; sums may miss it by one move of one micro-batch."""
    tuned = tune_sparsity(
        micro_batches, PREDICTOR, base_top_p=base, tolerance=tolerance, anchor="optimal", scope=scope
    )
    reached = step_ms(micro_batches, tuned.predicted_ms, scope)
    assert reached == pytest.approx(tuned.anchor_ms, rel=ROUNDING)
    best, move = exhaustive_optimum(micro_batches, base, tolerance, "slot" if scope == "slot" else "rank")
    if scope == "microbatch":  # no pairs: the least limit within which the largest budgets are enough
        budgets, move = candidate_budgets(base, tolerance), 0.0
        times = [[time_ms(m, p) for p in budgets] for m in micro_batches]
        best = min(
            limit
            for limit in itertools.chain(*times)
            if all(min(row) <= limit for row in times)
            and mean_p(
                micro_batches,
                [max(p for p, ms in zip(budgets, row, strict=True) if ms <= limit) for row in times],
            )
            >= base * (1 - 1e-12)
        )
    assert best * (1 - ROUNDING) <= reached <= (best + move) * (1 + ROUNDING)


def test_optimal_takes_nothing_for_documents_without_history():
    """Documents of one block lose nothing at any budget, so a long one's budget is not lowered at their expense."""
    short = toy.BLOCK_SIZE
    micro_batches = grid((2, 1), [[(16 * short, 2.0)], [(short, 2.0)] * 12])
    tuned = tune_sparsity(micro_batches, PREDICTOR, base_top_p=0.5, tolerance=0.2, anchor="optimal")
    assert tuned.top_p[0] >= 0.5


@pytest.mark.parametrize("anchor", ["mean", "optimal"])
@pytest.mark.parametrize("scope", SCOPES)
def test_of_thousands_every_second_budget_will_do(monkeypatch, scope, anchor):
    """4,096 micro-batches: no step gets longer by .1 % beside all budgets, and none falls below the bound."""
    rng = random.Random(0)
    documents = [[(int(rng.lognormvariate(7.5, 1.2)) + 1, rng.uniform(1.0, 6.0))] for _ in range(4096)]
    micro_batches = grid((1024, 4), documents)
    options = {"base_top_p": 0.5, "tolerance": 0.1, "anchor": anchor, "scope": scope}
    coarse = tune_sparsity(micro_batches, PREDICTOR, **options)
    monkeypatch.setattr(tuning, "_MANY", 10**9)
    fine = tune_sparsity(micro_batches, PREDICTOR, **options)
    assert set(coarse.top_p) <= set(candidate_budgets(0.5, 0.1, 0.02)) < set(candidate_budgets(0.5, 0.1))
    assert coarse.anchor_ms <= fine.anchor_ms * 1.001
    assert (
        step_ms(micro_batches, coarse.predicted_ms, scope) <= step_ms(micro_batches, fine.predicted_ms, scope) * 1.001
    )


@settings(deadline=None, max_examples=60)
@given(small_steps, st.sampled_from(["min", "mean", "max"]))
def test_rank_filling_is_near_the_exhaustive_best(micro_batches, anchor):
    """Within a rank's anchor the token-weighted budget is the largest possible but for one move of one micro-batch."""
    base, tolerance = 0.5, 0.1
    tuned = tune_sparsity(micro_batches, PREDICTOR, base_top_p=base, tolerance=tolerance, anchor=anchor, scope="rank")
    budgets = candidate_budgets(base, tolerance)
    for rank in (0, 1):
        members = [m for m in micro_batches if m.rank == rank]
        chosen = [p for m, p in zip(micro_batches, tuned.top_p, strict=True) if m.rank == rank]
        times = [{p: time_ms(m, p) for p in budgets} for m in members]
        gains = [
            sum(history(m) * p for m, p in zip(members, plan, strict=True))
            for plan in itertools.product(budgets, repeat=2)
            if times[0][plan[0]] + times[1][plan[1]] <= tuned.anchor_ms
        ]
        gain = sum(history(m) * p for m, p in zip(members, chosen, strict=True))
        move = max(history(m) for m in members) * (budgets[-1] - budgets[0])
        if gains:
            assert gain >= max(gains) - move - ROUNDING * gain


@settings(deadline=None)
@given(steps, st.sampled_from(ANCHORS), st.sampled_from(SCOPES))
def test_zero_tolerance_never_lowers_a_budget(micro_batches, anchor, scope):
    """Without tolerance coverage only grows."""
    tuned = tune_sparsity(micro_batches, PREDICTOR, base_top_p=0.7, tolerance=0.0, anchor=anchor, scope=scope)
    assert min(tuned.top_p) >= 0.7


def pipelined_ms(micro_batches, times, num_stages):
    """The slowest rank's makespan under 1F1B, by recursion over what each operation waits for."""
    ranks = {}
    for m, ms in zip(micro_batches, times, strict=True):
        ranks.setdefault(m.rank, []).append(ms / num_stages)
    return max(makespan_1f1b(tuple(times), num_stages) for times in ranks.values())


def makespan_1f1b(times, num_stages):
    """One pipeline; a forward is a third of a micro-batch's time at a stage."""
    last = len(times) - 1

    @functools.cache
    def end(kind, stage, i):
        if kind == "F":
            before = end("F", stage - 1, i) if stage else 0.0
            # After its warm-up a stage runs the oldest backward before each further forward.
            waiting = num_stages - 1 - stage
            own = 0.0 if i == 0 else end("F", stage, i - 1) if i <= waiting else end("B", stage, i - waiting - 1)
            return max(before, own) + times[i] / 3
        before = end("B", stage + 1, i) if stage < num_stages - 1 else end("F", stage, i)
        own = end("F", stage, min(i + num_stages - 1 - stage, last))
        own = max(own, end("B", stage, i - 1)) if i else own
        return max(before, own) + times[i] * 2 / 3

    return end("B", 0, last)


@settings(deadline=None, max_examples=40)
@given(steps, st.sampled_from([2, 4, 8]), st.floats(0.3, 0.9), st.floats(0.0, 0.3))
def test_optimal_with_pipelines_keeps_its_promises(micro_batches, num_stages, base, tolerance):
    """No budget below the bound, the mean budget at least the base, and no longer a pipelined step than at base."""
    tuning = tune_sparsity(
        micro_batches, PREDICTOR, base_top_p=base, tolerance=tolerance, anchor="optimal", scope="microbatch",
        num_stages=num_stages,
    )  # fmt: skip
    assert min(tuning.top_p) >= candidate_budgets(base, tolerance)[0]
    assert mean_p(micro_batches, tuning.top_p) >= base * (1 - 1e-9)
    times = [time_ms(m, p) for m, p in zip(micro_batches, tuning.top_p, strict=True)]
    reached = pipelined_ms(micro_batches, times, num_stages)
    assert tuning.anchor_ms == pytest.approx(reached)
    assert reached <= pipelined_ms(micro_batches, tuning.base_ms, num_stages) * (1 + ROUNDING)


def test_optimal_with_pipelines_is_near_the_exhaustive_best():
    """On steps of four micro-batches it comes within 3 % of the best of all budgets on a coarse grid, on average."""
    rng, ratios = random.Random(0), []
    for _ in range(12):
        documents = [[(rng.randint(500, 30_000), rng.uniform(1.0, 6.0))] for _ in range(4)]
        micro_batches = grid((1, 4), documents)
        tuning = tune_sparsity(
            micro_batches, PREDICTOR, base_top_p=0.7, tolerance=0.2, anchor="optimal", scope="microbatch", num_stages=4
        )
        coarse = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
        table = [[time_ms(m, p) for p in coarse] for m in micro_batches]
        best = min(
            pipelined_ms(micro_batches, [row[i] for row, i in zip(table, choice, strict=True)], 4)
            for choice in itertools.product(range(len(coarse)), repeat=4)
            if mean_p(micro_batches, [coarse[i] for i in choice]) >= 0.7
        )
        ratios.append(tuning.anchor_ms / best)
    assert sum(ratios) / len(ratios) <= 1.03 and max(ratios) <= 1.1


def test_dense_is_taken_where_it_is_faster():
    """Where the dense kernel beats the sparse one at base, p = 1 gives more coverage for less time."""
    flat = grid((1, 1), [[(16_384, 1.0)]])  # density .9 at p = .9: sparse slower than dense in this profile
    assert time_ms(flat[0], 1.0) < time_ms(flat[0], 0.9)
    for anchor, scope in itertools.product(ANCHORS, SCOPES):
        tuned = tune_sparsity(flat, PREDICTOR, base_top_p=0.9, tolerance=0.0, anchor=anchor, scope=scope)
        assert tuned.top_p == (1.0,)


def test_long_shrinks_and_short_grows_toward_the_mean():
    """With the mean anchor the slow rank gets sparser and the fast one denser, and both end at or below the anchor."""
    micro_batches = grid((2, 1), [[(20_000, 2.0)], [(16_000, 2.0)]])
    tuned = tune_sparsity(micro_batches, PREDICTOR, base_top_p=0.7, tolerance=0.3, anchor="mean", scope="rank")
    assert tuned.top_p[0] < 0.7 < tuned.top_p[1]
    assert max(tuned.predicted_ms) <= tuned.anchor_ms * (1 + ROUNDING)
    assert tuned.num_missed == 0


def test_bound_wins_over_the_anchor():
    """Where even the smallest allowed budget is too slow it is taken, and counted as missed."""
    micro_batches = grid((2, 1), [[(30_000, 2.0)], [(1_000, 2.0)]])
    for scope in SCOPES:
        tuned = tune_sparsity(micro_batches, PREDICTOR, base_top_p=0.7, tolerance=0.1, anchor="min", scope=scope)
        # In scope slot both share the only slot; in every scope the long one cannot reach the short one's time.
        assert tuned.top_p[0] == 0.7 - 0.1
        assert tuned.num_missed == 1


def test_optimal_beats_the_uniform_budget_when_sensitivity_differs():
    """With equal mean budget, optimal spends coverage on the fast rank and shortens the step."""
    micro_batches = grid((2, 2), [[(20_000, 1.5)], [(18_000, 1.5)], [(9_000, 4.0)], [(20_000, 4.0)]])
    tuned = tune_sparsity(micro_batches, PREDICTOR, base_top_p=0.7, tolerance=0.2, anchor="optimal", scope="rank")
    base = step_ms(micro_batches, tuned.base_ms, "rank")
    assert step_ms(micro_batches, tuned.predicted_ms, "rank") < 0.95 * base  # the ranks differ by far more
    assert mean_p(micro_batches, tuned.top_p) >= 0.7


@pytest.mark.parametrize(
    "wrong",
    [{"base_top_p": 0.0}, {"base_top_p": 1.1}, {"tolerance": -0.1}, {"tolerance": float("nan")}]
    + [{"anchor": "median"}, {"scope": "node"}],
)
def test_bad_options_are_user_errors(wrong):
    """Options out of range are refused in one line that names them."""
    options = {"base_top_p": 0.7, "tolerance": 0.1, **wrong}
    with pytest.raises(UserError, match=next(iter(wrong)).removeprefix("base_")):
        tune_sparsity(grid((1, 1), [[(100, 1.0)]]), PREDICTOR, **options)


def test_malformed_micro_batches_are_refused():
    """No micro-batches, or documents without curves, are a caller's error."""
    with pytest.raises(ValueError):
        tune_sparsity([], PREDICTOR, base_top_p=0.7, tolerance=0.1)
    with pytest.raises(ValueError):
        tune_sparsity([MicroBatch(0, 0, (100,), ())], PREDICTOR, base_top_p=0.7, tolerance=0.1)


# top_k: the anchor's k, from lengths alone.


def top_k_ms(micro_batch, k):
    """What the predictor says of a micro-batch at k, its density counted token by token."""
    blocks = [[token // toy.BLOCK_SIZE for token in range(length)] for length in micro_batch.lengths]
    densities = [sum(min(k - 1, n) for n in each) / sum(each) if sum(each) else 1.0 for each in blocks]
    attention = [
        PREDICTOR.document(length, density, dense=density == 1.0).total_ms
        for length, density in zip(micro_batch.lengths, densities, strict=True)
    ]
    return sum(attention) + PREDICTOR.linear(sum(micro_batch.lengths)).total_ms


short_steps = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(1, 1500), min_size=1, max_size=2), min_size=shape[0] * shape[1],
        max_size=shape[0] * shape[1],
    ).map(lambda packed: [MicroBatch(i // shape[1], i % shape[1], tuple(each)) for i, each in enumerate(packed)])
)  # fmt: skip


def test_candidate_top_k_reaches_from_the_least_to_dense():
    """Every k where they are few, none further than 6 % from the next, base and the dense k among them."""
    budgets = candidate_top_k(37, 2, 30_001, 64)
    assert budgets[0] == 2 and budgets[-1] == 1 + 30_000 // 64 and 37 in budgets
    assert all(b - a == 1 or b <= 1.06 * a for a, b in itertools.pairwise(budgets))
    assert candidate_top_k(9, 1, 129, 64) == (1, 2, 3)
    assert candidate_top_k(9, 5, 10, 64) == (5,)


@settings(deadline=None, max_examples=60)
@given(
    short_steps, st.sampled_from(["min", "mean", "max"]), st.sampled_from(["microbatch", "slot"]), st.integers(1, 9)
)
def test_top_k_equals_exhaustive_search(micro_batches, anchor, scope, base):
    """Each micro-batch gets the largest k that meets its anchor, at most what makes it dense, else a fastest one."""
    tuned = tune_top_k(micro_batches, PREDICTOR, base_top_k=base, anchor=anchor, scope=scope)
    assert tuned.top_p == ()
    summary = {"min": min, "max": max, "mean": lambda values: sum(values) / len(values)}[anchor]
    missed = 0
    for m, k, ms in zip(micro_batches, tuned.top_k, tuned.predicted_ms, strict=True):
        dense = 1 + (max(m.lengths) - 1) // toy.BLOCK_SIZE
        assert 1 <= k <= dense and ms == pytest.approx(top_k_ms(m, k), rel=ROUNDING)
        fellows = [f for f in micro_batches if scope == "microbatch" or f.slot == m.slot]
        target = summary([top_k_ms(f, base) for f in fellows])
        times = {q: top_k_ms(m, q) for q in range(1, dense + 1)}  # 24 blocks at most: every k is a candidate
        fitting = [q for q, ms in times.items() if ms <= target * (1 + ROUNDING)]
        strictly = [q for q, ms in times.items() if ms <= target * (1 - ROUNDING)]
        if strictly:
            assert max(strictly) <= k <= max(fitting)
        elif not fitting:
            assert times[k] == pytest.approx(min(times.values()), rel=ROUNDING)
            missed += 1
    assert tuned.num_missed == missed


def uniform_coverage(micro_batch, k):
    """Covered tokens of a micro-batch at k under a uniform gate, counted token by token."""
    blocks = [token // toy.BLOCK_SIZE for length in micro_batch.lengths for token in range(length)]
    return sum(min(k - 1, n) / n for n in blocks if n)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(200, 1500), min_size=4, max_size=4), st.sampled_from(["min", "mean", "max"]))
def test_top_k_of_a_rank_goes_where_coverage_costs_least(lengths, anchor):
    """A rank's sum meets the anchor where any plan does, within one move of the most coverage under a uniform gate."""
    micro_batches = [MicroBatch(i // 2, i % 2, (length,)) for i, length in enumerate(lengths)]
    tuned = tune_top_k(micro_batches, PREDICTOR, base_top_k=6, anchor=anchor, scope="rank")
    missed = 0
    for rank in (0, 1):
        members = [m for m in micro_batches if m.rank == rank]
        ks = range(1, 2 + 1499 // toy.BLOCK_SIZE)
        times = [{k: top_k_ms(m, k) for k in ks} for m in members]
        gains = [{k: uniform_coverage(m, k) for k in ks} for m in members]
        chosen = [k for m, k in zip(micro_batches, tuned.top_k, strict=True) if m.rank == rank]
        fitting = [
            gains[0][a] + gains[1][b]
            for a, b in itertools.product(ks, repeat=2)
            if times[0][a] + times[1][b] <= tuned.anchor_ms
        ]
        missed += not fitting
        if fitting:
            assert sum(row[k] for row, k in zip(times, chosen, strict=True)) <= tuned.anchor_ms * (1 + ROUNDING)
            move = max(row[ks[-1]] - row[1] for row in gains)
            assert sum(row[k] for row, k in zip(gains, chosen, strict=True)) >= max(fitting) - move
    assert abs(tuned.num_missed - missed) <= (anchor != "max")  # a sum may lie on the anchor but for rounding


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"base_top_k": 0}, "top_k must be at least 1"),
        ({"least_top_k": 9}, "top_k must be at least 9"),
        ({"anchor": "optimal"}, "(?s)--anchor optimal.*--anchor mean.*--base_top_p"),
        ({"anchor": "median"}, "anchor"),
        ({"scope": "node"}, "scope"),
    ],
)
def test_top_k_refuses_what_is_out_of_range(changes, match):
    """Each option out of range is refused by its name; `optimal` with the way out."""
    with pytest.raises(UserError, match=match):
        tune_top_k([MicroBatch(0, 0, (100,))], PREDICTOR, **{"base_top_k": 4, **changes})
