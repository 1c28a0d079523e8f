"""Batch plans: complete, reproducible, even."""

import itertools
import math
import random

import prtpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_sparsebalance.batching import STRATEGIES, BatchPlan, displacements, plan_batches
from hf_sparsebalance.epoch import small_at_both_ends
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency
from hf_sparsebalance.schedule import simulate_step


def cost(length):
    return 5e-4 * length + 4.8e-8 * length**2


def rank_sums(plan, weights, step):
    return [sum(weights[i] for slot in rank for i in slot) for rank in plan.steps[step]]


def total_ms(plan, weights):
    return sum(max(rank_sums(plan, weights, step)) for step in range(plan.num_steps))


def heavy_tailed(count, seed):
    rng = random.Random(seed)
    return [min(32_768, int(rng.lognormvariate(7.5, 1.2)) + 1) for _ in range(count)]


@st.composite
def problems(draw):
    ranks, slots, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = ranks * slots * batch
    lengths = draw(st.lists(st.integers(1, 5000), min_size=size, max_size=4 * size))
    options = {"num_ranks": ranks, "num_slots": slots, "batch_size": batch, "cost_ms": [cost(n) for n in lengths]}
    options |= {"seed": draw(st.integers(0, 3)), "epoch": draw(st.integers(0, 3)), "window": draw(st.integers(1, 4))}
    return lengths, options


def samples_of(plan, step):
    """All sample indices of a step, by rank and slot."""
    return [i for rank in plan.steps[step] for slot in rank for i in slot]


@settings(deadline=None)
@given(problems(), st.sampled_from(STRATEGIES))
def test_every_sample_once_and_every_slot_filled(problem, strategy):
    """A plan holds every sample exactly once, in non-empty micro-batches of the configured shape; again the same."""
    lengths, options = problem
    plan = plan_batches(lengths, strategy=strategy, **options)
    ranks, slots, batch = options["num_ranks"], options["num_slots"], options["batch_size"]
    assert plan.num_steps == len(lengths) // (ranks * slots * batch)
    everything = [i for step in range(plan.num_steps) for i in samples_of(plan, step)]
    assert sorted(everything) == list(range(len(lengths)))
    for step in plan.steps:
        assert len(step) == ranks
        for rank in step:
            assert len(rank) == slots
            assert all(rank)
    counts = [len(samples_of(plan, step)) for step in range(plan.num_steps)]
    assert max(counts) - min(counts) <= 1  # the remainder is spread evenly
    assert plan == plan_batches(lengths, strategy=strategy, **options)


@settings(deadline=None)
@given(problems(), st.sampled_from(["sparsity_aware", "length_partition"]))
def test_window_of_one_keeps_each_steps_samples(problem, strategy):
    """With window 1 (and in length_partition) each step has the samples `random` gives it: the same gradient."""
    lengths, options = problem
    options["window"] = 1
    plan = plan_batches(lengths, strategy=strategy, **options)
    plain = plan_batches(lengths, strategy="random", **options)
    assert [sorted(samples_of(plan, s)) for s in range(plan.num_steps)] == [
        sorted(samples_of(plain, s)) for s in range(plan.num_steps)
    ]


@settings(deadline=None)
@given(problems())
def test_window_keeps_its_samples_together(problem):
    """A larger window only moves samples between the global batches drawn together."""
    lengths, options = problem
    plan = plan_batches(lengths, strategy="sparsity_aware", **options)
    plain = plan_batches(lengths, strategy="random", **options)
    for first in range(0, plan.num_steps, options["window"]):
        inside = range(first, min(first + options["window"], plan.num_steps))
        planned = sorted(i for s in inside for i in samples_of(plan, s))
        drawn = sorted(i for s in inside for i in samples_of(plain, s))
        assert planned == drawn


def test_seed_and_epoch_change_the_order():
    """Another seed or another epoch gives another order."""
    lengths = heavy_tailed(64, 0)
    options = {"strategy": "random", "num_ranks": 2, "num_slots": 2}
    plans = [plan_batches(lengths, seed=s, epoch=e, **options) for s, e in ((0, 0), (1, 0), (0, 1))]
    assert plans[0] != plans[1] != plans[2] != plans[0]


def test_random_deals_slot_by_slot_as_accelerate_does():
    """Consecutive batches go to rank 0, 1, ... of slot 0, then of slot 1."""
    lengths = [10] * 24
    flat = plan_batches(lengths, strategy="random", num_ranks=1, num_slots=1, seed=5)
    order = [i for step in range(24) for i in samples_of(flat, step)]
    plan = plan_batches(lengths, strategy="random", num_ranks=2, num_slots=3, batch_size=2, seed=5)
    dealt = [
        i for step in range(2) for slot in range(3) for rank in range(2) for i in plan.micro_batch(step, rank, slot)
    ]
    assert dealt == order


def test_length_group_follows_hugging_faces_rule():
    """Each mega-batch is sorted by length, and the longest sample of all is in the very first micro-batch."""
    lengths = heavy_tailed(640, 3)
    plan = plan_batches(lengths, strategy="length_group", num_ranks=2, num_slots=4)
    dealt = [plan.micro_batch(s, r, k)[0] for s in range(80) for k in range(4) for r in range(2)]
    assert lengths[dealt[0]] == max(lengths)
    size = min(640 // 16, 50) * 4
    flat = plan_batches(lengths, strategy="random", num_ranks=1, num_slots=1)
    order = [i for step in range(640) for i in samples_of(flat, step)]
    for first in range(0, 640, size):
        mega = dealt[first : first + size]
        assert [lengths[i] for i in mega[1:]] == sorted((lengths[i] for i in mega[1:]), reverse=True)
        # The swap of the two first samples aside, a mega-batch is a slice of the shuffled order.
        assert len(set(mega) - set(order[first : first + size])) <= 1


def test_length_partition_evens_tokens_inside_a_step():
    """Partition by length leaves ranks less uneven than dealing, and each micro-batch holds batch_size samples."""
    lengths = heavy_tailed(512, 4)
    options = {"num_ranks": 2, "num_slots": 4, "batch_size": 2}
    plan = plan_batches(lengths, strategy="length_partition", **options)
    assert total_ms(plan, lengths) < total_ms(plan_batches(lengths, strategy="random", **options), lengths)
    assert {len(slot) for step in plan.steps for rank in step for slot in rank} == {2}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 2000), min_size=8, max_size=8))
def test_sparsity_aware_step_is_within_a_sample_of_the_exhaustive_best(lengths):
    """On 2 ranks of 4 samples the slowest rank exceeds the best possible split by at most half the largest sample."""
    # If no swap of the slow rank helps, every difference d of a pair satisfies d <= 0 or d >= gap = slow - fast. With
    # equal counts some pair has d > 0 (else slow <= fast), so gap <= d <= largest; best >= mean = slow - gap / 2.
    weights = [float(n) for n in lengths]
    plan = plan_batches(lengths, strategy="sparsity_aware", num_ranks=2, num_slots=4, cost_ms=weights)
    best = min(
        max(sum(weights[i] for i in half), sum(weights) - sum(weights[i] for i in half))
        for half in itertools.combinations(range(8), 4)
    )
    assert best <= max(rank_sums(plan, weights, 0)) <= best + max(weights) / 2


@pytest.mark.parametrize(("ranks", "slots"), [(2, 2), (2, 4), (8, 4), (8, 1)])
def test_sparsity_aware_beats_its_rivals_on_heavy_tails(ranks, slots):
    """By total time over one epoch: window 1 is no slower than length_partition; given as many samples
    to choose from as length_group's mega-batch (50 batches of one rank), a window is faster than every rival but wlb,
    which delays samples over the whole epoch, and so is a window of the whole epoch compared with wlb."""
    lengths = heavy_tailed(4096, 7)
    costs = [cost(n) for n in lengths]
    options = {"num_ranks": ranks, "num_slots": slots, "cost_ms": costs}
    totals = {s: total_ms(plan_batches(lengths, strategy=s, **options), costs) for s in STRATEGIES}
    wide = total_ms(plan_batches(lengths, strategy="sparsity_aware", window=50 // ranks, **options), costs)
    assert totals["sparsity_aware"] <= totals["length_partition"] * (1 + 1e-12)
    assert wide < min(total for strategy, total in totals.items() if strategy != "wlb")
    whole = total_ms(plan_batches(lengths, strategy="sparsity_aware", window=4096, **options), costs)
    assert whole < totals["wlb"]
    assert wide >= math.fsum(costs) / ranks


@settings(deadline=None)
@given(problems())
def test_token_budget_is_kept(problem):
    """With room for a whole rank's longest samples the plan always succeeds, and no micro-batch exceeds max_tokens."""
    lengths, options = problem
    # Enough for any greedy fit: the longest samples of a rank (extra ones included) in a single micro-batch.
    extra = len(lengths) % (options["num_ranks"] * options["num_slots"] * options["batch_size"])
    per_rank = options["num_slots"] * options["batch_size"] + extra
    limit = sum(sorted(lengths)[-per_rank:])
    plan = plan_batches(lengths, strategy="sparsity_aware", max_tokens=limit, **options)
    assert max(sum(lengths[i] for i in slot) for step in plan.steps for rank in step for slot in rank) <= limit


def test_token_budget_is_packed_tightly():
    """Where dealing by cost would overflow a micro-batch, documents are packed to fit."""
    lengths = [100, 60, 60, 40, 40, 100, 50, 50]
    plan = plan_batches(
        lengths,
        strategy="sparsity_aware",
        num_ranks=1,
        num_slots=5,
        cost_ms=[float(n) for n in lengths],
        max_tokens=100,
    )
    assert {sum(lengths[i] for i in slot) for slot in plan.steps[0][0]} == {100}


def as_transformers_would(lengths, ranks, slots, order):
    """The steps of transformers' own sampler for samples in this order."""
    samplers = [
        BatchRebalanceSampler([lengths[i] for i in order], len(order), ranks, slots, shuffle=False, rank=rank)
        for rank in range(ranks)
    ]
    return [[tuple(order[i] for i in slot) for slot in sampler] for sampler in samplers]


@settings(deadline=None)
@given(problems())
def test_batch_rebalance_is_transformers_own_rule(problem):
    """Each step equals what transformers' BatchRebalanceSampler makes of the same samples."""
    lengths, options = problem
    plan = plan_batches(lengths, strategy="batch_rebalance", **options)
    size = options["num_ranks"] * options["num_slots"] * options["batch_size"]
    lengths = lengths[
        : len(lengths) // size * size
    ]  # whole global batches: transformers makes another batch of the rest
    plan = plan_batches(lengths, strategy="batch_rebalance", **options)
    flat = plan_batches(lengths, strategy="random", **{**options, "num_ranks": 1, "num_slots": 1, "batch_size": 1})
    order = [i for step in range(len(lengths)) for i in samples_of(flat, step)]
    for number, step in enumerate(plan.steps):
        batch = order[number * size : (number + 1) * size]
        assert [list(rank) for rank in step] == as_transformers_would(
            lengths, options["num_ranks"], options["num_slots"], batch
        )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5000), min_size=8, max_size=8))
def test_two_ranks_of_differencing_against_prtpys_best(lengths):
    """No split is evener than prtpy's exhaustive best; two ranks differ by the widest pair of neighbours at most."""
    weights = [24_576 * n + n * n for n in lengths]
    plan = plan_batches(lengths, strategy="karmarkar_karp", num_ranks=2, num_slots=4)
    sums = rank_sums(plan, weights, 0)
    best = max(prtpy.partition(algorithm=prtpy.partitioning.cg, numbins=2, items=weights, outputtype=prtpy.out.Sums))
    ordered = sorted(weights)
    widest = max(b - a for a, b in zip(ordered[::2], ordered[1::2], strict=True))
    assert best <= max(sums)
    assert max(sums) - min(sums) <= widest


@pytest.mark.parametrize(("ranks", "slots"), [(2, 4), (2, 8), (8, 4), (3, 5)])
def test_sparsity_aware_reaches_prtpys_partition(ranks, slots):
    """A window's slowest rank exceeds the largest of prtpy's largest-first partition by .1% at most."""
    lengths = heavy_tailed(ranks * slots * 8, 5)
    costs = [float(n) for n in lengths]
    plan = plan_batches(lengths, strategy="sparsity_aware", num_ranks=ranks, num_slots=slots, window=8, cost_ms=costs)
    sums = prtpy.partition(algorithm=prtpy.partitioning.lpt, numbins=ranks * 8, items=costs, outputtype=prtpy.out.Sums)
    assert total_ms(plan, costs) <= 8 * max(sums) * 1.001


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 3000), min_size=8, max_size=8), st.integers(0, 2))
def test_no_plan_beats_brute_force(lengths, seed):
    """Two steps of two ranks with two samples: the plan is never below the best of all, and near it."""
    weights = [float(n) for n in lengths]
    plan = plan_batches(
        lengths, strategy="sparsity_aware", num_ranks=2, num_slots=2, window=2, cost_ms=weights, seed=seed
    )
    pairs = list(itertools.combinations(range(8), 2))

    def cheapest(left):
        """Least summed step time of the samples left, two ranks of two at a time."""
        if not left:
            return 0.0
        first = min(left)
        best = math.inf
        for one in (pair for pair in pairs if first in pair and left.issuperset(pair)):
            rest = left.difference(one)
            for other in (pair for pair in pairs if rest.issuperset(pair)):
                step = max(sum(weights[i] for i in one), sum(weights[i] for i in other))
                best = min(best, step + cheapest(rest.difference(other)))
        return best

    best = cheapest(frozenset(range(8)))
    assert best * (1 - 1e-12) <= total_ms(plan, weights) <= best + max(weights)


def test_a_sample_that_tuning_can_shorten_takes_less_beside_it():
    """The rank beside an outlying sample is filled no further than what tuning can bring that sample down to."""
    costs = [1000.0, 500.0, 450.0, 400.0] + [100.0] * 12
    least = [0.6 * ms for ms in costs]
    options = {"strategy": "sparsity_aware", "num_ranks": 2, "num_slots": 2, "window": 4, "cost_ms": costs}

    def beside(plan):
        """Samples of the rank that shares a step with the outlying one."""
        step = next(step for step in plan.steps if any((0,) in rank for rank in step))
        return [i for rank in step if (0,) not in rank for (i,) in rank]

    shortened, plain = (beside(plan_batches([100] * 16, least_ms=ms, **options)) for ms in (least, None))
    # At the outlying rank's own 1100 ms the other one takes 500 and 450; at the 700 it can be brought to, 500 and 100.
    assert sorted(costs[i] for i in plain) == [450.0, 500.0]
    assert sorted(costs[i] for i in shortened) == [100.0, 500.0]


def test_pipelines_begin_and_end_with_small_micro_batches():
    """With stages every rank's micro-batches rise to the middle and fall again; without they only fall."""
    lengths = heavy_tailed(240, 2)
    costs = [cost(n) for n in lengths]
    options = {"strategy": "sparsity_aware", "num_ranks": 2, "num_slots": 6, "window": 4, "cost_ms": costs}
    staged, plain = plan_batches(lengths, num_stages=4, **options), plan_batches(lengths, **options)
    for rank in (rank for step in staged.steps for rank in step):
        times = [costs[i] for (i,) in rank]
        assert sorted(times[:1] + times[-1:]) == sorted(times)[:2]
        peak = times.index(max(times))
        assert times[: peak + 1] == sorted(times[: peak + 1])
        assert times[peak:] == sorted(times[peak:], reverse=True)
    for rank in (rank for step in plain.steps for rank in step):
        assert [costs[i] for (i,) in rank] == sorted((costs[i] for (i,) in rank), reverse=True)


def pipelined_ms(plan, costs, num_stages):
    """Total of the steps by the event recursion of 1F1B, a third of each micro-batch's time forward."""
    total = 0.0
    for step in plan.steps:
        times = [[sum(costs[i] for i in slot) for slot in rank] for rank in step]
        latencies = [[Latency(ms / 3, ms * 2 / 3) for ms in rank] for rank in times]
        total += simulate_step(latencies, num_stages=num_stages).step_ms
    return total


def test_pipelines_let_like_samples_meet():
    """Four long and twelve short samples each fill steps of their own: a mix would wait for a long one every step."""
    costs = [9.0] * 4 + [1.0] * 12
    options = {"strategy": "sparsity_aware", "num_ranks": 2, "num_slots": 2, "cost_ms": costs, "num_stages": 4}
    plan = plan_batches([100] * 16, window=4, **options)
    kinds = sorted([costs[i] for i in samples_of(plan, step)] for step in range(4))
    assert kinds == [[1.0] * 4] * 3 + [[9.0] * 4]
    # Even micro-batches: two a rank, and three stages more to fill and drain.
    assert pipelined_ms(plan, costs, 4) == pytest.approx((2 + 3) * (9 + 3 * 1) / 4)


@settings(deadline=None)
@given(problems())
def test_planned_for_a_pipeline_is_no_slower_in_it(problem):
    """Planned for four stages an epoch takes no longer in their pipeline than dealt, evened and put in its order."""
    lengths, options = problem
    costs = options["cost_ms"]
    staged, mixed = (plan_batches(lengths, strategy="sparsity_aware", num_stages=n, **options) for n in (4, 1))
    mixed = BatchPlan(tuple(tuple(tuple(small_at_both_ends(list(rank))) for rank in step) for step in mixed.steps))
    assert pipelined_ms(staged, costs, 4) <= pipelined_ms(mixed, costs, 4) * (1 + 1e-12)


def test_displacement_is_bounded_by_the_window():
    """No sample moves as far as `window` steps, none at all inside its global batch; the sum of moves is 0."""
    lengths = heavy_tailed(640, 1)
    options = {"num_ranks": 2, "num_slots": 4, "cost_ms": [cost(n) for n in lengths]}
    drawn = plan_batches(lengths, strategy="random", **options)
    for strategy in ("length_partition", "karmarkar_karp", "batch_rebalance", "sparsity_aware"):
        assert set(displacements(plan_batches(lengths, strategy=strategy, **options), drawn)) == {0}
    moves = displacements(plan_batches(lengths, strategy="sparsity_aware", window=5, **options), drawn)
    assert 0 < max(map(abs, moves)) < 5
    assert sum(moves) == 0
    with pytest.raises(ValueError):
        displacements(plan_batches(lengths[:32], strategy="random", num_ranks=2, num_slots=4), drawn)


def test_wlb_gives_each_micro_batch_of_a_step_an_outlier():
    """Samples beyond a threshold run only in steps of like ones, one a micro-batch, until the epoch is flushed."""
    lengths = [100 + i for i in range(64)] + [10_000 + i for i in range(8)]
    rng = random.Random(0)
    rng.shuffle(lengths)
    plan = plan_batches(
        lengths, strategy="wlb", num_ranks=2, num_slots=2, batch_size=2, cost_ms=[float(n) for n in lengths]
    )
    for step in range(plan.num_steps - 1):
        outliers = [sum(lengths[i] > 1000 for i in slot) for rank in plan.steps[step] for slot in rank]
        assert set(outliers) in ({0}, {1})


def test_wlb_carries_over_what_does_not_fit():
    """Under a tight token limit documents wait for a later step, and every one runs once, within the limit."""
    lengths = [60] * 4 + [40] * 4 + [10] * 8
    costs = [float(n) for n in lengths]
    options = {"strategy": "wlb", "num_ranks": 2, "num_slots": 1, "batch_size": 2, "max_tokens": 100}
    drawn = plan_batches(lengths, strategy="random", num_ranks=2, num_slots=1, batch_size=2)
    assert max(sum(lengths[i] for i in slot) for step in drawn.steps for rank in step for slot in rank) > 100
    plan = plan_batches(lengths, cost_ms=costs, **options)
    assert sorted(i for step in range(4) for i in samples_of(plan, step)) == list(range(16))
    assert max(sum(lengths[i] for i in slot) for step in plan.steps for rank in step for slot in rank) <= 100


def test_wlb_refuses_what_it_cannot_place():
    """Documents that are carried over to the end of the epoch are an error, never dropped."""
    with pytest.raises(UserError, match="max_tokens"):
        plan_batches(
            [60] * 8, strategy="wlb", num_ranks=2, num_slots=1, batch_size=2, max_tokens=100, cost_ms=[1.0] * 8
        )


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"strategy": "sorted"}, "strategy"),
        ({"num_ranks": 64}, "per_device_train_batch_size or gradient_accumulation_steps"),
        ({"num_slots": 0}, "num_slots"),
        ({"window": 0}, "window"),
        ({"num_stages": 0}, "num_stages"),
        ({"least_ms": [1.0], "strategy": "sparsity_aware"}, "least_ms"),
        ({"cost_ms": None, "strategy": "wlb"}, "cost_ms"),
        ({"max_tokens": 99}, "max_tokens"),
        ({"max_tokens": 101, "batch_size": 2}, "max_tokens"),
        ({"max_tokens": 101, "batch_size": 2, "strategy": "sparsity_aware"}, "max_tokens"),
        ({"cost_ms": None, "strategy": "sparsity_aware"}, "cost_ms"),
        ({"cost_ms": [1.0], "strategy": "sparsity_aware"}, "cost_ms"),
        ({"cost_ms": [math.nan] * 16, "strategy": "sparsity_aware"}, "cost_ms"),
    ],
)
def test_bad_options_are_user_errors(wrong, named):
    """A wrong option is refused in one line that names it and the way out."""
    options = {"strategy": "random", "num_ranks": 2, "num_slots": 2, "cost_ms": [1.0] * 16, **wrong}
    with pytest.raises(UserError, match=named) as error:
        plan_batches([100] * 16, **options)
    assert "\n" not in str(error.value)
