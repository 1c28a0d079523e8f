"""A whole simulated run: plan its batches, tune its budgets, add up its steps, and say where a gain comes from.

Time follows each document's own density curve; the planner only knows the workload's `known_curves`. Every
row is compared at equal work: `less_work` is what the random order gains by one budget for all micro-batches with
the row's attended work, `balance` is the rest of the speedup. Planning and gradient synchronisation cost nothing here.
Pure numpy; a step costs O(documents * log grid), beside what planning it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_sparsebalance.batching import STRATEGIES, BatchPlan, plan_batches
from hf_sparsebalance.density import TOP_P_GRID, history_tokens
from hf_sparsebalance.latency import Latency, LatencyPredictor
from hf_sparsebalance.pipeline_schedule import PipelineOrder, time_pipelines
from hf_sparsebalance.schedule import StepCost, simulate_step
from hf_sparsebalance.tuning import MicroBatch, tune_sparsity
from hf_sparsebalance.workloads import Workload, attended_share

__all__ = ["Bar", "Budgets", "ClusterSetup", "Row", "Simulation", "compare"]


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """What is simulated.

    Attributes:
        num_ranks: data-parallel ranks; with pipelines, replicas.
        num_slots: micro-batches per rank and step.
        batch_size: documents per micro-batch.
        order: operations of each pipeline rank; None without pipelines.
        scope: without pipelines, where ranks wait for each other: "rank" or "slot".
        base_top_p, tolerance: budget without tuning, and the largest loss of coverage.
        window: global batches planned together.
        seed: of the order of documents.
    """

    num_ranks: int
    num_slots: int
    batch_size: int = 1
    order: PipelineOrder | None = None
    scope: str = "rank"
    base_top_p: float = 0.8
    tolerance: float = 0.1
    window: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Budgets:
    """top_p of each micro-batch, step by step, rank by rank and slot by slot; and how many anchors were missed."""

    top_p: NDArray[np.float64]
    num_missed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison, over the whole workload.

    Attributes:
        batching: strategy of the batches.
        tuning: anchor of the tuning; "dense" for full attention; None for the base budget.
        control: "compute" or "coverage" where one budget for all has the tuning's attended work or mean budget; None
            for the tuning itself and for rows without one.
        total_ms: all steps, the slowest rank of each.
        perfect_ms: the same work spread evenly in every step.
        mean_ms, median_ms, p95_ms: of a step.
        speedup: over random order at the base budget; less_work * balance.
        less_work: part of the speedup that one budget for all with this row's work gives random order.
        balance: the rest of it.
        work: attended / causally visible pairs.
        top_p: mean budget over the tokens with history: the lower bound of their coverage.
        imbalance_microbatch, imbalance_slot, imbalance_rank: see StepCost; mean over steps.
        missed_anchors: micro-batches (scope rank: ranks) that the bound on coverage kept above their anchor.
    """

    batching: str
    tuning: str | None
    control: str | None
    total_ms: float
    perfect_ms: float
    mean_ms: float
    median_ms: float
    p95_ms: float
    speedup: float
    less_work: float
    balance: float
    work: float
    top_p: float
    imbalance_microbatch: float
    imbalance_slot: float
    imbalance_rank: float
    missed_anchors: int

    def to_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of work in a picture: its lane (rank, or pipeline rank of the slowest replica), kind, micro-batch."""

    lane: int
    kind: str
    micro_batch: int
    start_ms: float
    end_ms: float


class Simulation:
    """Plans and times a workload on a cluster.

    Args:
        workload: documents and their curves.
        predictor: time of a micro-batch at a density.
        setup: the cluster and the budgets.
    """

    def __init__(self, workload: Workload, predictor: LatencyPredictor, setup: ClusterSetup) -> None:
        self.workload, self.predictor, self.setup = workload, predictor, setup
        self._lengths_N = np.array(workload.lengths)
        self._density_NP = np.array([curve.density for curve in workload.curves])
        block_size = predictor.profile.context.block_size
        self._visible_N = self._lengths_N * (self._lengths_N + 1.0) / 2.0
        self._own_share_N = np.array([attended_share(length, block_size, 0.0) for length in workload.lengths])

    def plan(self, strategy: str) -> BatchPlan:
        """The batches of one epoch; costs come from what the planner knows, at the base budget."""
        setup = self.setup
        known_NP = np.array([curve.density for curve in self.workload.known_curves])
        base_N = np.full(len(self._lengths_N), setup.base_top_p)
        attention_2N = self._attention_ms(_at(known_NP, base_N), base_N, self._lengths_N)
        linear_ms = self.predictor.linear(1).total_ms - self.predictor.linear(0).total_ms
        return plan_batches(
            self.workload.lengths,
            strategy=strategy,
            num_ranks=setup.num_ranks,
            num_slots=setup.num_slots,
            batch_size=setup.batch_size,
            seed=setup.seed,
            window=setup.window,
            num_stages=len(setup.order) if setup.order else 1,
            cost_ms=(attention_2N.sum(axis=0) + linear_ms * self._lengths_N).tolist(),
        )

    def fixed(self, plan: BatchPlan, top_p: float) -> Budgets:
        """One budget for all micro-batches."""
        return Budgets(np.full(plan.num_steps * plan.num_ranks * plan.num_slots, top_p))

    def tuned(self, plan: BatchPlan, anchor: str) -> Budgets:
        """What DST chooses, step by step, from what the planner knows."""
        setup, known = self.setup, self.workload.known_curves
        chosen: list[float] = []
        missed = 0
        for step in plan.steps:
            micro_batches = [
                MicroBatch(
                    rank,
                    slot,
                    tuple(self.workload.lengths[i] for i in samples),
                    tuple(known[i] for i in samples),
                )
                for rank, slots in enumerate(step)
                for slot, samples in enumerate(slots)
            ]
            tuning = tune_sparsity(
                micro_batches,
                self.predictor,
                base_top_p=setup.base_top_p,
                tolerance=setup.tolerance,
                anchor=anchor,
                scope="microbatch" if setup.order else setup.scope,
                num_stages=len(setup.order) if setup.order else 1,
            )
            chosen += tuning.top_p
            missed += tuning.num_missed
        return Budgets(np.array(chosen), missed)

    def work(self, plan: BatchPlan, budgets: Budgets) -> float:
        """Attended / causally visible pairs of all documents, own blocks included."""
        sample_N, micro_N = _layout(plan)
        return self._work(sample_N, budgets.top_p[micro_N])

    def mean_top_p(self, plan: BatchPlan, budgets: Budgets) -> float:
        """Mean budget over the tokens with history; 1.0 where none has any, whose coverage is complete."""
        sample_N, micro_N = _layout(plan)
        history_N = history_tokens(self._lengths_N[sample_N], self.predictor.profile.context.block_size)
        return float(np.average(budgets.top_p[micro_N], weights=history_N)) if history_N.any() else 1.0

    def same_work(self, plan: BatchPlan, budgets: Budgets) -> float:
        """The one budget for all micro-batches with the same attended work (bisection)."""
        sample_N, _ = _layout(plan)
        wanted = self.work(plan, budgets)

        def excess(top_p: float) -> float:
            return self._work(sample_N, np.full(len(sample_N), top_p)) - wanted

        return _bisect(excess, 0.0, 1.0)

    def times_ms(self, plan: BatchPlan, budgets: Budgets) -> NDArray[np.float64]:
        """[2, steps, ranks, slots] forward and backward time of each micro-batch."""
        sample_N, micro_N = _layout(plan)
        lengths_N, top_p_N = self._lengths_N[sample_N], budgets.top_p[micro_N]
        attention_2N = self._attention_ms(_at(self._density_NP[sample_N], top_p_N), top_p_N, lengths_N)
        count = len(budgets.top_p)
        tokens_M = np.bincount(micro_N, weights=lengths_N, minlength=count)
        empty, token = self.predictor.linear(0), self.predictor.linear(1)
        times_2M = np.array([np.bincount(micro_N, weights=part, minlength=count) for part in attention_2N])
        times_2M[0] += empty.forward_ms + (token.forward_ms - empty.forward_ms) * tokens_M
        times_2M[1] += empty.backward_ms + (token.backward_ms - empty.backward_ms) * tokens_M
        return times_2M.reshape(2, plan.num_steps, plan.num_ranks, plan.num_slots)

    def costs(self, plan: BatchPlan, budgets: Budgets) -> list[StepCost]:
        """What each step costs."""
        setup = self.setup
        times_SRK2 = np.moveaxis(self.times_ms(plan, budgets), 0, -1)
        rows = [[[Latency(*pair) for pair in rank] for rank in step] for step in times_SRK2.tolist()]
        if setup.order is None:
            return [simulate_step(step, scope=setup.scope) for step in rows]
        return [simulate_step(step, num_stages=len(setup.order), schedule=setup.order) for step in rows]

    def bars(self, plan: BatchPlan, budgets: Budgets, step: int) -> list[Bar]:
        """One step as a picture: all ranks, or with pipelines the slowest replica's pipeline ranks."""
        forward_RK, backward_RK = self.times_ms(plan, budgets)[:, step]
        if self.setup.order is not None:
            times = time_pipelines(self.setup.order, forward_RK, backward_RK)
            slowest = int(np.argmax(times.makespan_ms))
            pieces = zip(times.operations, times.start_ms[:, slowest], times.end_ms[:, slowest], strict=True)
            return [Bar(worker, op.kind, op.micro_batch, float(a), float(b)) for (worker, op), a, b in pieces]
        total_RK = forward_RK + backward_RK
        ends_RK = np.cumsum(total_RK, axis=1)
        if self.setup.scope == "slot":
            meet_K = np.concatenate([[0.0], np.cumsum(total_RK.max(axis=0))[:-1]])
            ends_RK = meet_K + total_RK
        bars = []
        for (rank, slot), end in np.ndenumerate(ends_RK):
            middle = float(end - backward_RK[rank, slot])
            bars.append(Bar(rank, "F", slot, middle - float(forward_RK[rank, slot]), middle))
            bars.append(Bar(rank, "B", slot, middle, float(end)))
        return bars

    def _work(self, sample_N: NDArray[np.intp], top_p_N: NDArray[np.float64]) -> float:
        density_N = _at(self._density_NP[sample_N], top_p_N)
        own_N, visible_N = self._own_share_N[sample_N], self._visible_N[sample_N]
        return float(((own_N + density_N * (1.0 - own_N)) * visible_N).sum() / visible_N.sum())

    def _attention_ms(
        self, density_N: NDArray[np.float64], top_p_N: NDArray[np.float64], lengths_N: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """[2, documents]; at p = 1 the dense kernel runs."""
        sparse_2N = self.predictor.attention_ms(lengths_N, density_N)
        dense_2N = self.predictor.attention_ms(lengths_N, 1.0, dense=True)
        return np.where(top_p_N == 1.0, dense_2N, sparse_2N)


def compare(
    simulation: Simulation, anchors: Sequence[str], strategies: Sequence[str] = STRATEGIES
) -> tuple[list[Row], dict[tuple[str, str | None], tuple[BatchPlan, Budgets]]]:
    """Every strategy at the base budget, and, per anchor, tuned and with the two controls; dense attention first.

    Returns:
        The rows, and the plan and budgets of each (batching, tuning) that is no control.
    """
    base = simulation.setup.base_top_p
    random = simulation.plan("random")
    reference_ms = sum(cost.step_ms for cost in simulation.costs(random, simulation.fixed(random, base)))
    rows: list[Row] = []
    runs: dict[tuple[str, str | None], tuple[BatchPlan, Budgets]] = {}

    def add(batching: str, tuning: str | None, control: str | None, plan: BatchPlan, budgets: Budgets) -> None:
        costs = simulation.costs(plan, budgets)
        same = _one_value(budgets.top_p) or simulation.same_work(plan, budgets)
        same_ms = sum(cost.step_ms for cost in simulation.costs(random, simulation.fixed(random, same)))
        step_ms = [cost.step_ms for cost in costs]
        rows.append(
            Row(
                batching=batching,
                tuning=tuning,
                control=control,
                total_ms=sum(step_ms),
                perfect_ms=sum(cost.perfect_ms for cost in costs),
                mean_ms=float(np.mean(step_ms)),
                median_ms=float(np.median(step_ms)),
                p95_ms=float(np.quantile(step_ms, 0.95)),
                speedup=reference_ms / sum(step_ms),
                less_work=reference_ms / same_ms,
                balance=same_ms / sum(step_ms),
                work=simulation.work(plan, budgets),
                top_p=simulation.mean_top_p(plan, budgets),
                imbalance_microbatch=float(np.mean([cost.imbalance_microbatch for cost in costs])),
                imbalance_slot=float(np.mean([cost.imbalance_slot for cost in costs])),
                imbalance_rank=float(np.mean([cost.imbalance_rank for cost in costs])),
                missed_anchors=budgets.num_missed,
            )
        )
        if control is None:
            runs[batching, tuning] = plan, budgets

    add("random", "dense", None, random, simulation.fixed(random, 1.0))
    for strategy in strategies:
        plan = simulation.plan(strategy)
        add(strategy, None, None, plan, simulation.fixed(plan, base))
        for anchor in anchors:
            tuned = simulation.tuned(plan, anchor)
            add(strategy, anchor, None, plan, tuned)
            add(strategy, anchor, "compute", plan, simulation.fixed(plan, simulation.same_work(plan, tuned)))
            add(strategy, anchor, "coverage", plan, simulation.fixed(plan, simulation.mean_top_p(plan, tuned)))
    return rows, runs


def _layout(plan: BatchPlan) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(sample, micro-batch) of each document in the order of the plan."""
    micro_batches = [samples for step in plan.steps for rank in step for samples in rank]
    counts = [len(samples) for samples in micro_batches]
    sample_N = np.array([i for samples in micro_batches for i in samples], dtype=np.intp)
    return sample_N, np.repeat(np.arange(len(counts)), counts)


def _at(density_NP: NDArray[np.float64], top_p_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row's density at its budget: linear on TOP_P_GRID, from 0 at budget 0."""
    grid = np.array((0.0, *TOP_P_GRID))
    padded_NP = np.pad(density_NP, ((0, 0), (1, 0)))
    upper_N = np.clip(np.searchsorted(grid, top_p_N), 1, len(grid) - 1)
    rows = np.arange(len(top_p_N))
    weight_N = (top_p_N - grid[upper_N - 1]) / (grid[upper_N] - grid[upper_N - 1])
    low_N = padded_NP[rows, upper_N - 1]
    density_N: NDArray[np.float64] = low_N + weight_N * (padded_NP[rows, upper_N] - low_N)
    return density_N


def _one_value(top_p: NDArray[np.float64]) -> float | None:
    return float(top_p[0]) if np.all(top_p == top_p[0]) else None


def _bisect(excess: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0.0 else (middle, high)
    return (low + high) / 2
