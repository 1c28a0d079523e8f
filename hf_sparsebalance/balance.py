"""What the trainer and its callback share during a run: the planner, this rank's clock, and the run's log.

One step: :meth:`StepBalance.begin` gives this rank's budgets, the trainer runs the micro-batches under the clock, and
:meth:`StepBalance.end` gathers what every rank measured and writes one line of the log.  While a step computes, a
thread lets the planner learn from the step before and plan the next: when that begins, its plan has long been made.
Every rank does the same in the same order, so all plan alike.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from hf_sparsebalance import runlog
from hf_sparsebalance.attention import NO_SPARSE_ATTENTION, StatsCollector
from hf_sparsebalance.density import DensityCurve
from hf_sparsebalance.distributed import gather_rows, rank_and_world
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency
from hf_sparsebalance.planner import Planner
from hf_sparsebalance.plans import Measured, StepPlan
from hf_sparsebalance.schedule import simulate_step
from hf_sparsebalance.termination import TerminationRequest
from hf_sparsebalance.timing import MicroBatchClock, OperationClock
from hf_sparsebalance.topology import Topology
from sparsebalance_kernels import CURVE_TOP_P

# Columns of the row that each process sends per micro-batch; the density curve follows.  From `layers` on they are
# sums over the layers that the process ran.
_COLUMNS = (
    *("start_ms", "forward_ms", "backward_ms", "loss"),
    *("layers", "gates", "raised", "density", "work", "coverage", "top_k"),
)
_SLOW = 1.2  # from this on a rank is reported
_TIMES = slice(_COLUMNS.index("forward_ms"), _COLUMNS.index("backward_ms") + 1)
_SUMS = slice(_COLUMNS.index("layers"), None)
_OF_LAYERS = slice(_COLUMNS.index("density"), _COLUMNS.index("coverage") + 1)
_OF_GATES = slice(_COLUMNS.index("top_k"), None)

logger = logging.getLogger(__name__)


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

    def __init__(
        self, planner: Planner, clock: MicroBatchClock | OperationClock, log: Path, sparse: bool, topology: Topology
    ) -> None:
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
        self._reported: set[int] = set()

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

    def out_of_memory(self) -> UserError:
        """What to say where the micro-batch that runs now does not fit; with pipelines the step's."""
        (epoch, step), settings = self._position, self.planner.settings
        slots = [len(self._losses)] if self._topology.pipeline_size == 1 else range(settings.num_slots)
        plan = self.planner.batches(epoch)
        largest = max(
            (plan.micro_batch(step, self._rank, slot) for slot in slots),
            key=lambda samples: sum(self.planner.lengths[sample] for sample in samples),
        )
        tokens = sum(self.planner.lengths[sample] for sample in largest)
        return UserError(
            f"out of memory on rank {self._rank} in step {step + 1} of epoch {epoch}: a micro-batch of {tokens} "
            f"tokens (documents {', '.join(map(str, largest))}); lower --max_tokens or --max_length, or use "
            "--gradient_checkpointing; earlier checkpoints are whole"
        )

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
        rows = torch.zeros((len(times) + 1, width), dtype=torch.float64)
        rows[-1, :3] = torch.tensor([step_s, self._planning_ms, self.termination.received], dtype=torch.float64)
        for slot, (measured, loss, collector) in enumerate(zip(times, self._losses, self._collectors, strict=True)):
            if self.sparse and not collector.vectors:
                raise UserError(NO_SPARSE_ATTENTION)
            head = [measured.start_ms, measured.forward_ms, measured.backward_ms, float(loss)]
            rows[slot] = torch.cat([torch.tensor(head, dtype=torch.float64), self._sums(slot, collector)])
        members = self._topology.members(gather_rows(rows))
        gathered = _join(members, self._topology.tensor_size)
        stage_ms = members[:, :, :-1, _TIMES].sum(-1) if self._topology.pipeline_size > 1 else None
        self.leaves = bool(gathered[:, -1, 2].any())
        self._check_losses(global_step, gathered[:, :-1, _COLUMNS.index("loss")])
        started = time.perf_counter()
        self._digest(global_step, gathered, stage_ms)
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

    def _digest(self, global_step: int, gathered: torch.Tensor, stage_ms: torch.Tensor | None) -> None:
        """Learn from and log ``gathered [ranks, slots + 1, columns]`` and ``stage_ms [ranks, processes, slots]``."""
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
            if stage_ms is not None:
                entry = replace(entry, stage_ms=tuple(stage_ms[rank, :, slot].tolist()))
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
            self._report_slow_ranks(global_step)
        self.metrics = _metrics(record, predicted)
        if self._plan.scales is not None:
            self.metrics["attention_scale"], self.metrics["linear_scale"] = self._plan.scales

    def _report_slow_ranks(self, global_step: int) -> None:
        """Name a rank that has been much slower than the others, once."""
        for rank, slowness in enumerate(self.planner.speeds.slowness()):
            if slowness >= _SLOW and rank not in self._reported:
                self._reported.add(rank)
                logger.warning(
                    "rank %d takes %.2f times as long as the others for the same work (step %d): look at its machine, "
                    "or let it have less with --rank_speed auto",
                    *(rank, slowness, global_step),
                )

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
        return int(gathered[:, :-1, _COLUMNS.index("raised")].sum())

    def _sums(self, slot: int, collector: StatsCollector) -> torch.Tensor:
        """What a row holds from `layers` on.  The curve of a top_k is one of coverage, and stays here."""
        layers = collector.layers
        gated = [stats for stats in layers.values() if stats is not None]
        dense = len(layers) - len(gated)
        shares = [sum(getattr(stats, name) for stats in gated) + dense for name in ("density", "work", "coverage")]
        raised = top_k = 0.0
        curve = torch.zeros(len(CURVE_TOP_P), dtype=torch.float64)
        if self.planner.settings.base_top_k is not None:
            planned = self._budget(self._rank, slot)
            chosen = [int(k) for k in collector.top_k.values()]
            raised = sum(k > planned for k in chosen)
            top_k = sum(chosen) + planned * (len(gated) - len(chosen))
            curve.fill_(math.nan)
        elif gated:
            curve = torch.stack([stats.curve for stats in gated]).sum(0).to(curve)
        head = [len(layers), len(gated), raised, *shares, top_k]
        return torch.cat([torch.tensor(head, dtype=torch.float64), curve])

    def _entry(
        self,
        rank: int,
        slot: int,
        samples: tuple[int, ...],
        predicted_ms: float | None,
        row: Sequence[float],
    ) -> runlog.MicroBatch:
        start_ms, forward_ms, backward_ms, *_, density, work, coverage, top_k = row[: len(_COLUMNS)]
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
            top_k=None if self.planner.settings.base_top_k is None else _or_none(top_k),
        )


def _join(members: torch.Tensor, tensor_size: int) -> torch.Tensor:
    """What each rank did, ``[ranks, slots + 1, columns]``, from what its processes did, ``[ranks, processes, ...]``.

    A pipeline's processes ran different layers, one after the other: their times add up.  Those of a tensor-parallel
    rank ran all layers at the same time, each its own heads: their mean counts.
    """
    joined = members.mean(1)
    joined[:, -1] = members[:, :, -1].amax(1)
    slots = members[:, :, :-1]
    joined[:, :-1, 0] = slots[..., 0].amin(1)
    joined[:, :-1, _TIMES] = slots[..., _TIMES].sum(1) / tensor_size
    joined[:, :-1, _SUMS] = slots[..., _SUMS].sum(1)
    # Where no layer has a gate there is nothing to tell: 0 / 0.
    gates = joined[:, :-1, _COLUMNS.index("gates"), None]
    layers = torch.where(gates > 0.0, joined[:, :-1, _COLUMNS.index("layers"), None], math.nan)
    joined[:, :-1, _OF_LAYERS] /= layers
    joined[:, :-1, _OF_GATES] /= gates
    return joined


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
