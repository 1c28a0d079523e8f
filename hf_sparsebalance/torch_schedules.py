"""Order of operations of torch's pipeline schedules, read from torch's own tables.

The tables are private in torch.distributed (present in torch 2.11 to 2.13), so they are read here alone, and the pure
modules that use them get plain data. Nothing is communicated; `pipeline.py` runs the schedules.
"""

from __future__ import annotations

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.pipeline_schedule import Operation, PipelineOrder

__all__ = ["SCHEDULES", "operation_order", "worker_stages"]

# torch's names; the last three give each worker two stages, the last two split the backward.
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble")


def worker_stages(schedule: str, num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Stages of each worker, rising.  Two per worker: in a loop (0, 1, 0, 1), or for ZBV in a V (0, 1, 1, 0)."""
    if schedule in ("gpipe", "1f1b"):
        return tuple((worker,) for worker in range(num_workers))
    if schedule == "zbvzerobubble":
        return tuple((worker, 2 * num_workers - 1 - worker) for worker in range(num_workers))
    return tuple((worker, num_workers + worker) for worker in range(num_workers))


def operation_order(schedule: str, num_workers: int, num_micro_batches: int) -> PipelineOrder:
    """Operations of each worker (pipeline rank) in the order torch runs them.

    Args:
        schedule: one of SCHEDULES.
        num_workers: pipeline ranks, at least 2.
        num_micro_batches: of one replica and step.

    Raises:
        UserError: unknown schedule, or torch does not make it for these numbers.
    """
    # Here and not above: it is private, and only pipelines need it.
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    if schedule not in SCHEDULES:
        raise UserError(f"--schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
    try:
        table = get_schedule_ops(schedule, num_workers, num_micro_batches)
    except ValueError as error:
        raise UserError(
            f"--schedule {schedule} with {num_workers} pipeline ranks and {num_micro_batches} micro-batches: {error}; "
            "change --gradient_accumulation_steps or --num_stages"
        ) from error
    order = [
        [
            Operation(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in own
            if action is not None and action.computation_type.value in ("F", "B", "I", "W")
        ]
        for own in table
    ]
    return [_renumbered(own) for own in order] if schedule == "1f1b" else order


def _renumbered(own: list[Operation]) -> list[Operation]:
    """The last stage's forwards count from 1 in torch's table of 1F1B, though torch runs them from 0."""
    forwards = iter(range(len(own)))
    return [each._replace(micro_batch=next(forwards)) if each.kind == "F" else each for each in own]
