"""What the trainer and its callback share during a run: the planner, this rank's clock, and the run's log.

One step: :meth:`StepBalance.begin` gives this rank's budgets, the trainer runs the micro-batches under the clock, and
:meth:`StepBalance.end` gathers what every rank measured and writes one line of the log.  While a step computes, a
thread lets the planner learn from the step before and plan the next: when that begins, its plan has long been made.
Every rank does the same in the same order, so all plan alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from hf_sparsebalance import runlog
from hf_sparsebalance.attention import NO_SPARSE_ATTENTION, StatsCollector
from hf_sparsebalance.density import DensityCurve
from hf_sparsebalance.distributed import gather_rows, rank_and_world
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency
from hf_sparsebalance.planner import Measured, Planner, StepPlan
from hf_sparsebalance.schedule import simulate_step
from hf_sparsebalance.termination import TerminationRequest
from hf_sparsebalance.timing import MicroBatchClock
from hf_sparsebalance.topology import Topology
from sparsebalance_kernels import CURVE_TOP_P, AttentionStats

# Columns of the row that each rank sends per micro-batch; the density curve follows.
_COLUMNS = ("start_ms", "forward_ms", "backward_ms", "loss", "top_k", "raised", "density", "work", "coverage")


class StepBalance:
    """Budgets, measurements and log of a run's steps.

    Args:
        planner: the same on every rank.
        clock: this rank's.
        log: file that gets one JSON line per step, on rank 0.
        sparse: whether the model attends through ``sparsebalance`` (else there are no budgets and no statistics).
        topology: which rank this process belongs to, and where ranks wait.

    Attributes:
        metrics: what the last step showed.
        termination: whether this process was asked to leave.
        leaves: whether any was, as all learned at the end of the last step.
    """

    def __init__(self, planner: Planner, clock: MicroBatchClock, log: Path, sparse: bool, topology: Topology) -> None:
        self.planner = planner
        self.clock = clock
        self.sparse = sparse
        self.metrics: dict[str, float] = {}
        self.termination = TerminationRequest()
        self.leaves = False
        self._log = log
        self._topology = topology
        self._rank = topology.rank
        self._writes = rank_and_world()[0] == 0
        self._plan: StepPlan | None = None
        # One thread: its jobs run in order.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparsebalance")
        self._jobs: list[Future[None]] = []
        self._measured: list[Measured] = []
        self._collectors: list[StatsCollector] = []
        self._losses: list[torch.Tensor] = []
        self._started_s = 0.0
        self._planning_ms = 0.0
        self._carried_s = 0.0
        self._position = (0, 0)

    def forget_after(self, global_step: int) -> None:
        """Drop an earlier run's figures, and the steps that a run resumed at ``global_step`` will do again."""
        if self._writes:
            runlog.forget_run(self._log.parent)
            runlog.keep_steps(self._log, global_step)

    def plan_epoch(self, epoch: int) -> None:
        """Plan an epoch's batches now; the time counts in its first step."""
        started = time.perf_counter()
        self.settle()
        self.planner.batches(epoch)
        self._carried_s += time.perf_counter() - started

    def settle(self) -> None:
        """Wait until the planner has learned and planned all it was given; whatever went wrong there is raised."""
        self._learn()
        while self._jobs:
            self._jobs.pop(0).result()

    def start_clock(self) -> None:
        """The step begins here: fetching its data and planning it count."""
        self._started_s = time.perf_counter()
        self.clock.start_step()

    def begin(self, global_step: int) -> list[dict[str, object]]:
        """Plan a step; returns the forward keywords of each of this rank's micro-batches (empty for dense attention).

        Args:
            global_step: optimizer steps done before this one.
        """
        started = time.perf_counter()
        epoch, step = self._position = divmod(global_step, self.planner.num_steps)
        if not self.planner.is_planned(epoch, step):
            # The first step of an epoch, or of a run; or the thread has not come so far.
            self.settle()
        self._plan = self.planner.take(epoch, step)
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()  # raises what went wrong there
        # Now, not when the last step ended: there the thread would hold up this one, which logs, by 5 ms at a time.
        self._learn()
        if step + 1 < self.planner.num_steps:
            self._jobs.append(self._worker.submit(self.planner.plan_ahead, epoch, step + 1))
        self._planning_ms = (time.perf_counter() - started + self._carried_s) * 1000.0
        num_slots = self.planner.settings.num_slots
        self._collectors = [StatsCollector() for _ in range(num_slots)]
        self._losses = []
        if not self.sparse:
            return [{} for _ in range(num_slots)]
        return [
            {**self._budget_keywords(slot), "sparse_stats": collector}
            for slot, collector in enumerate(self._collectors)
        ]

    def _budget_keywords(self, slot: int) -> dict[str, object]:
        """Tensors: a float would be a constant of the graph under torch.compile, and each new budget a new graph."""
        settings, budget = self.planner.settings, torch.tensor(self._budget(self._rank, slot))
        if settings.base_top_k is None:
            return {"sparse_top_p": budget}
        if not settings.tunes:
            return {"sparse_top_k": budget}
        return {
            "sparse_top_k": budget,
            "sparse_base_top_k": torch.tensor(settings.base_top_k),
            "sparse_tolerance": torch.tensor(settings.tolerance, dtype=torch.float64),
        }

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Keep a micro-batch's loss until the step ends: reading it now would wait for the device."""
        self._losses.append(loss)

    def end(self, global_step: int) -> None:
        """Gather, learn and log; collective.  ``metrics`` then holds what the step showed.

        Args:
            global_step: optimizer steps done, this one included.

        Raises:
            UserError: the model never called the sparse attention, or a loss is not finite.
        """
        times = self.clock.times()
        # What was planned and learned between the steps is part of the price.
        step_s = time.perf_counter() - self._started_s + self._carried_s
        width = len(_COLUMNS) + len(CURVE_TOP_P)
        rows = torch.full((len(times) + 1, width), math.nan, dtype=torch.float64)
        rows[-1, :3] = torch.tensor([step_s, self._planning_ms, self.termination.received], dtype=torch.float64)
        for slot, (measured, loss, collector) in enumerate(zip(times, self._losses, self._collectors, strict=True)):
            rows[slot, :4] = torch.tensor(
                [measured.start_ms, measured.forward_ms, measured.backward_ms, float(loss)], dtype=torch.float64
            )
            stats = collector.mean()
            if stats is not None:
                rows[slot, 4:] = self._stats_row(slot, stats, collector)
            elif self.sparse and not collector.layers:
                raise UserError(NO_SPARSE_ATTENTION)
        # The processes of a rank do the same at the same time, each on its own heads: the mean is that over all heads.
        gathered = gather_rows(rows).unflatten(0, (self._topology.num_ranks, self._topology.tensor_size)).mean(1)
        self.leaves = bool(gathered[:, -1, 2].any())
        self._check_losses(global_step, gathered[:, :-1, _COLUMNS.index("loss")])
        started = time.perf_counter()
        self._digest(global_step, gathered)
        self._carried_s = time.perf_counter() - started

    def _check_losses(self, global_step: int, losses: torch.Tensor) -> None:
        for rank, slot in (~losses.isfinite()).nonzero().tolist():
            epoch, step = self._position
            documents = self.planner.batches(epoch).micro_batch(step, rank, slot)
            raise UserError(
                f"the loss of rank {rank} in step {global_step} is {float(losses[rank, slot])} (documents "
                f"{', '.join(map(str, documents))} of the training data): look at them, or resume from the last "
                "checkpoint with a smaller --learning_rate"
            )

    def _digest(self, global_step: int, gathered: torch.Tensor) -> None:
        """Learn from and log ``gathered [ranks, slots + 1, columns]``, the same on every rank."""
        epoch, step = self._position
        assert self._plan is not None
        plan, slots = self.planner.batches(epoch), gathered.shape[1] - 1
        predicted: Sequence[float | None] = self._plan.predicted_ms or (None,) * (gathered.shape[0] * slots)
        measured: list[Measured] = []
        entries: list[runlog.MicroBatch] = []
        for number, expected_ms in enumerate(predicted):
            rank, slot = divmod(number, slots)
            row = gathered[rank, slot].tolist()
            entry = self._entry(rank, slot, plan.micro_batch(step, rank, slot), expected_ms, row)
            entries.append(entry)
            curve = _curve(row[len(_COLUMNS) :])
            own_ms = entry.busy_ms if self._is_awaited(number, predicted) else None
            measured.append(Measured(entry.documents, entry.top_p, own_ms, curve, entry.density))
        self._measured = measured
        if step + 1 == self.planner.num_steps:
            self.settle()  # the next epoch's batches depend on it
        step_s = float(gathered[:, -1, 0].max())
        record = runlog.Step(
            step=global_step,
            epoch=epoch,
            step_s=step_s,
            planning_ms=float(gathered[:, -1, 1].max()),
            anchor_ms=self._plan.anchor_ms,
            missed_anchors=self._plan.num_missed,
            micro_batches=tuple(entries),
            raised_top_k=self._num_raised(gathered),
        )
        if self._writes:
            runlog.append_step(self._log, record)
        self.metrics = _metrics(record, predicted)
        if self._plan.scales is not None:
            self.metrics["attention_scale"], self.metrics["linear_scale"] = self._plan.scales

    def _is_awaited(self, number: int, predicted: Sequence[float | None]) -> bool:
        """Whether a micro-batch's measured time is its own.

        Where ranks meet in every micro-batch, all of a slot last as long as its slowest.  Only the one predicted to be
        that tells what it took; the others waited for it.
        """
        expected_ms, slots = predicted[number], self.planner.settings.num_slots
        if expected_ms is None or not self._topology.meets_every_micro_batch:
            return True
        return all(expected_ms >= (other or 0.0) for other in predicted[number % slots :: slots])

    def _learn(self) -> None:
        """Hand what the last step showed to the thread, once."""
        if self._measured:
            self._jobs.append(self._worker.submit(self.planner.observe, self._measured))
            self._measured = []

    def _budget(self, rank: int, slot: int) -> float:
        """The p or the anchor's k of a micro-batch."""
        assert self._plan is not None
        budgets = self._plan.top_p or self._plan.top_k
        assert budgets is not None
        return budgets[rank * self.planner.settings.num_slots + slot]

    def _num_raised(self, gathered: torch.Tensor) -> int | None:
        """How many layers of micro-batches raised their k; None without a top_k."""
        if self.planner.settings.base_top_k is None:
            return None
        return int(gathered[:, :-1, _COLUMNS.index("raised")].nansum())

    def _stats_row(self, slot: int, stats: AttentionStats, collector: StatsCollector) -> torch.Tensor:
        """What follows the times in a micro-batch's row; the curve of a top_k is one of coverage, and stays here."""
        shares = [stats.density, stats.work, stats.coverage]
        if self.planner.settings.base_top_k is None:
            head = torch.tensor([math.nan, math.nan, *shares], dtype=torch.float64)
            return torch.cat([head, stats.curve])
        planned = self._budget(self._rank, slot)
        chosen = [int(k) for k in collector.top_k.values()] or [planned]
        counts = [sum(chosen) / len(chosen), sum(k > planned for k in chosen)]
        return torch.tensor([*counts, *shares, *[math.nan] * len(CURVE_TOP_P)], dtype=torch.float64)

    def _entry(
        self,
        rank: int,
        slot: int,
        samples: tuple[int, ...],
        predicted_ms: float | None,
        row: Sequence[float],
    ) -> runlog.MicroBatch:
        start_ms, forward_ms, backward_ms, _, top_k, _, density, work, coverage = row[: len(_COLUMNS)]
        by_top_p = self.sparse and self.planner.settings.base_top_k is None
        lengths = [self.planner.lengths[sample] for sample in samples]
        return runlog.MicroBatch(
            rank=rank,
            slot=slot,
            documents=samples,
            tokens=sum(lengths),
            causal_pairs=sum(length * (length + 1) // 2 for length in lengths),
            top_p=self._budget(rank, slot) if by_top_p else None,
            predicted_ms=predicted_ms,
            start_ms=start_ms,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            density=_or_none(density),
            work=_or_none(work),
            coverage=_or_none(coverage),
            top_k=_or_none(top_k),
        )


def _curve(densities: list[float]) -> DensityCurve | None:
    if math.isnan(densities[0]):
        return None
    return DensityCurve.from_measured(CURVE_TOP_P, densities)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _metrics(step: runlog.Step, predicted: Sequence[float | None]) -> dict[str, float]:
    """What a user watches, per step."""
    ranks = 1 + max(entry.rank for entry in step.micro_batches)
    times = [
        [Latency(entry.forward_ms, entry.backward_ms) for entry in step.micro_batches if entry.rank == rank]
        for rank in range(ranks)
    ]
    cost = simulate_step(times)
    tokens = sum(entry.tokens for entry in step.micro_batches)
    metrics = {
        "step_time_s": step.step_s,
        "tokens_per_s": tokens / step.step_s,
        "imbalance_microbatch": cost.imbalance_microbatch,
        "imbalance_slot": cost.imbalance_slot,
        "imbalance_rank": cost.imbalance_rank,
        "planning_ms": step.planning_ms or 0.0,
    }
    # Density and work are shares of pairs, budgets and coverage belong to tokens.
    for name, weight in (
        ("top_p", "tokens"),
        ("top_k", "tokens"),
        ("density", "causal_pairs"),
        ("work", "causal_pairs"),
        ("coverage", "tokens"),
    ):
        known = [(getattr(entry, name), getattr(entry, weight)) for entry in step.micro_batches]
        if all(value is not None for value, _ in known):
            metrics[name] = sum(value * share for value, share in known) / sum(share for _, share in known)
    errors = [
        abs(expected / entry.busy_ms - 1.0)
        for expected, entry in zip(predicted, step.micro_batches, strict=True)
        if expected is not None
    ]
    if errors:
        metrics["predictor_error"] = sum(errors) / len(errors)
    return metrics
