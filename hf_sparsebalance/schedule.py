"""What an optimizer step costs, from the times of its micro-batches.

Data parallel: the slowest rank's sum (plain DDP) or, where ranks meet at every micro-batch (FSDP, ZeRO-3), the sum of
the slots' slowest. Pipeline parallel: the makespan by event recursion over the schedule's real operation order; the
closed form T_max * PP + sum of the others of arXiv 2604.13847 is neither an upper nor a lower bound for uneven
micro-batches (exact / formula between .87 and 1.69 in simulation), so it is not used. Pure; O(ranks * slots * stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency
from hf_sparsebalance.pipeline_schedule import PipelineOrder, gpipe, one_f_one_b, time_pipelines

__all__ = ["StepCost", "simulate_step"]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost and balance of one optimizer step.

    Attributes:
        step_ms: time until the last rank is done, gradient synchronisation included.
        rank_ms: time each data-parallel rank (with pipelines: each replica) works or waits inside its own part,
            synchronisation excluded: its sum, or its pipeline's makespan.
        imbalance_microbatch: max / mean over all micro-batches of the step.
        imbalance_slot: the paper's metric (Eq. 11): slots averaged over ranks first, then max / mean over slots.
        imbalance_rank: max / mean over the ranks' sums: what data parallelism waits for.
        perfect_ms: step time if the same work were spread evenly. Data parallel: mean of the rank sums + sync, a true
            lower bound for this work. Pipelines: the same schedule with even micro-batches (GPipe and 1F1B: (slots +
            stages - 1) x one stage's time) + sync; a reference, not a strict bound (small micro-batches at both ends
            shorten the pipeline's filling and draining).
    """

    step_ms: float
    rank_ms: tuple[float, ...]
    imbalance_microbatch: float
    imbalance_slot: float
    imbalance_rank: float
    perfect_ms: float


def simulate_step(
    times: Sequence[Sequence[Latency]],
    *,
    num_stages: int = 1,
    sync_ms: float = 0.0,
    scope: str = "rank",
    schedule: str | PipelineOrder = "1f1b",
) -> StepCost:
    """Step time of micro-batches that are already placed.

    Args:
        times: times[rank][slot], whole-model time of each micro-batch; every rank has the same number of slots.
        num_stages: pipeline ranks; above 1 every stage takes an equal part of a micro-batch.
        sync_ms: gradient synchronisation at the end of the step.
        scope: without pipelines, where ranks wait for each other: "rank" (once a step) or "slot" (at every
            micro-batch). With pipelines it has no effect ("microbatch" is accepted too).
        schedule: with pipelines, "1f1b", "gpipe", or the order of operations itself, as
            :func:`hf_sparsebalance.torch_schedules.operation_order` gives it for every schedule of torch.

    Raises:
        UserError: unknown scope or schedule, or num_stages below 1, or sync_ms negative.
        ValueError: no micro-batches, ranks with different numbers of slots, or an order that does not fit them.

    Example: two ranks, one slot each, 3 and 5 ms -> step_ms 5, perfect_ms 4, imbalance_rank 1.25.
    """
    if num_stages < 1:
        raise UserError(f"num_stages must be at least 1, not {num_stages}: use 1 without pipeline parallelism")
    if not sync_ms >= 0.0:
        raise UserError(f"sync_ms must be at least 0, not {sync_ms}: use 0 to leave synchronisation out")
    if scope not in ("rank", "slot") and not (scope == "microbatch" and num_stages > 1):
        raise UserError(f"scope must be rank or slot (microbatch only with num_stages > 1), not {scope!r}")
    if not times or not times[0] or any(len(row) != len(times[0]) for row in times):
        raise ValueError("times must hold the same number of micro-batches, at least one, for every rank")
    num_ranks, num_slots = len(times), len(times[0])
    total_ms = [[latency.total_ms for latency in row] for row in times]
    sums_ms = [sum(row) for row in total_ms]
    slots_ms = [[row[slot] for row in total_ms] for slot in range(num_slots)]
    mean_sum_ms = sum(sums_ms) / num_ranks
    rank_ms, perfect_ms = tuple(sums_ms), mean_sum_ms
    if num_stages > 1:
        order = _order(schedule, num_stages, num_slots)
        forward_RM = np.array([[latency.forward_ms for latency in row] for row in times])
        backward_RM = np.array([[latency.backward_ms for latency in row] for row in times])
        rank_ms = tuple(time_pipelines(order, forward_RM, backward_RM).makespan_ms.tolist())
        even_2M = np.full((2, num_slots), [[forward_RM.mean()], [backward_RM.mean()]])
        perfect_ms = float(time_pipelines(order, even_2M[:1], even_2M[1:]).makespan_ms[0])
    step_ms = sum(max(slot) for slot in slots_ms) if scope == "slot" and num_stages == 1 else max(rank_ms)
    return StepCost(
        step_ms=step_ms + sync_ms,
        rank_ms=rank_ms,
        imbalance_microbatch=_max_over_mean([ms for row in total_ms for ms in row]),
        imbalance_slot=_max_over_mean([sum(slot) / num_ranks for slot in slots_ms]),
        imbalance_rank=_max_over_mean(sums_ms),
        perfect_ms=perfect_ms + sync_ms,
    )


def _order(schedule: str | PipelineOrder, num_stages: int, num_slots: int) -> PipelineOrder:
    if not isinstance(schedule, str):
        if len(schedule) != num_stages:
            raise ValueError(f"an order of {len(schedule)} pipeline ranks given, {num_stages} wanted")
        return schedule
    if schedule not in ("1f1b", "gpipe"):
        raise UserError(
            f"schedule must be 1f1b or gpipe, not {schedule!r}: pass the operation_order of torch_schedules for others"
        )
    return one_f_one_b(num_stages, num_slots) if schedule == "1f1b" else gpipe(num_stages, num_slots)


def _max_over_mean(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total > 0.0 else 1.0
