"""What an optimizer step costs, from the times of its micro-batches.

Data parallel: the slowest rank's sum (plain DDP) or, where ranks meet at every micro-batch (FSDP, ZeRO-3), the sum of
the slots' slowest. Pipeline parallel: the makespan of 1F1B by event recursion over the real operation order; the
closed form T_max * PP + sum of the others of arXiv 2604.13847 is neither an upper nor a lower bound for uneven
micro-batches (exact / formula between .87 and 1.69 in simulation), so it is not used. Pure; O(ranks * slots * stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency

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
            lower bound for this work. Pipelines: (slots + stages - 1) x the mean per-stage micro-batch time + sync,
            1F1B with even micro-batches; a reference, not a strict bound (an uneven order can be somewhat faster).
    """

    step_ms: float
    rank_ms: tuple[float, ...]
    imbalance_microbatch: float
    imbalance_slot: float
    imbalance_rank: float
    perfect_ms: float


def simulate_step(
    times: Sequence[Sequence[Latency]], *, num_stages: int = 1, sync_ms: float = 0.0, scope: str = "rank"
) -> StepCost:
    """Step time of micro-batches that are already placed.

    Args:
        times: times[rank][slot], whole-model time of each micro-batch; every rank has the same number of slots.
        num_stages: pipeline stages; above 1 each stage takes 1 / num_stages of a micro-batch and 1F1B is simulated.
        sync_ms: gradient synchronisation at the end of the step.
        scope: without pipelines, where ranks wait for each other: "rank" (once a step) or "slot" (at every
            micro-batch). With pipelines it has no effect ("microbatch" is accepted too).

    Raises:
        UserError: unknown scope, or num_stages below 1, or sync_ms negative.
        ValueError: no micro-batches, or ranks with different numbers of slots.

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
        rank_ms = tuple(_one_f_one_b_ms(row, num_stages) for row in times)
        perfect_ms = (num_slots + num_stages - 1) * (mean_sum_ms / num_slots / num_stages)
    step_ms = sum(max(slot) for slot in slots_ms) if scope == "slot" and num_stages == 1 else max(rank_ms)
    return StepCost(
        step_ms=step_ms + sync_ms,
        rank_ms=rank_ms,
        imbalance_microbatch=_max_over_mean([ms for row in total_ms for ms in row]),
        imbalance_slot=_max_over_mean([sum(slot) / num_ranks for slot in slots_ms]),
        imbalance_rank=_max_over_mean(sums_ms),
        perfect_ms=perfect_ms + sync_ms,
    )


def _one_f_one_b_ms(micro_batches: Sequence[Latency], num_stages: int) -> float:
    """Makespan of one pipeline: every operation starts when its stage is free and its input is there."""
    num_slots = len(micro_batches)
    operations = [_one_f_one_b_order(stage, num_stages, num_slots) for stage in range(num_stages)]
    position = [0] * num_stages
    free_ms = [0.0] * num_stages
    end_ms: dict[tuple[bool, int, int], float] = {}  # (is_forward, micro-batch, stage) -> end
    progressed = True
    while progressed:
        progressed = False
        for stage in range(num_stages):
            while position[stage] < len(operations[stage]):
                is_forward, slot = operations[stage][position[stage]]
                ready_ms: float | None = 0.0
                if is_forward and stage > 0:
                    ready_ms = end_ms.get((True, slot, stage - 1))
                elif not is_forward:
                    last = stage == num_stages - 1
                    ready_ms = end_ms.get((True, slot, stage) if last else (False, slot, stage + 1))
                if ready_ms is None:
                    break
                latency = micro_batches[slot]
                duration_ms = (latency.forward_ms if is_forward else latency.backward_ms) / num_stages
                free_ms[stage] = end_ms[is_forward, slot, stage] = max(free_ms[stage], ready_ms) + duration_ms
                position[stage] += 1
                progressed = True
    return max(free_ms)


def _one_f_one_b_order(stage: int, num_stages: int, num_slots: int) -> list[tuple[bool, int]]:
    """Operations of a stage as (is_forward, micro-batch): warm-up forwards, one forward one backward, the rest."""
    warm_up = min(num_stages - 1 - stage, num_slots)
    order = [(True, slot) for slot in range(warm_up)]
    for slot in range(num_slots - warm_up):
        order += [(True, warm_up + slot), (False, slot)]
    return order + [(False, slot) for slot in range(num_slots - warm_up, num_slots)]


def _max_over_mean(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total > 0.0 else 1.0
