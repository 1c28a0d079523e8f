"""When each operation of a pipeline runs, from the order of operations and the time of each micro-batch.

    end(op) = max(end(previous operation of its worker), end(what it needs)) + duration(micro-batch, kind)

An order lists, for every worker (pipeline rank), its operations in the order it runs them: forward F, backward B, or a
backward in two parts, I (gradient of the input, which the previous stage waits for) and W (gradient of the weights,
which nobody waits for: what zero-bubble schedules fill gaps with, arXiv 2401.10241). A worker may own several stages.
`torch_schedules.py` reads orders from torch; GPipe's and 1F1B's are simple enough to stand here too.
Pure numpy; one vector operation over all replicas per operation, so thousands of replicas cost little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "WEIGHT_SHARE",
    "Operation",
    "PipelineOrder",
    "PipelineTimes",
    "gpipe",
    "makespans_1f1b",
    "one_f_one_b",
    "time_pipelines",
]

_FORWARD = 1 / 3  # of a micro-batch's time, where only the whole is known
# Of a linear layer's backward half is W, of attention's nothing: a third where attention is a third of the backward.
WEIGHT_SHARE = 1 / 3


class Operation(NamedTuple):
    """One piece of work of a worker: its kind (F, B, I or W), its stage and its micro-batch."""

    kind: str
    stage: int
    micro_batch: int


PipelineOrder: TypeAlias = Sequence[Sequence[Operation]]


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """When the operations of all replicas run.

    Attributes:
        operations: (worker, operation) of each row below.
        start_ms, end_ms: [operations, replicas] from the start of the step.
    """

    operations: tuple[tuple[int, Operation], ...]
    start_ms: NDArray[np.float64]
    end_ms: NDArray[np.float64]

    @property
    def makespan_ms(self) -> NDArray[np.float64]:
        """[replicas] when the last operation ends."""
        longest: NDArray[np.float64] = self.end_ms.max(axis=0)
        return longest


def gpipe(num_stages: int, num_micro_batches: int) -> PipelineOrder:
    """All forwards, then all backwards."""
    return [
        [Operation(kind, stage, i) for kind in "FB" for i in range(num_micro_batches)] for stage in range(num_stages)
    ]


def one_f_one_b(num_stages: int, num_micro_batches: int) -> PipelineOrder:
    """1F1B: warm-up forwards, then one forward and one backward in turn, then the backwards that are left."""
    order = []
    for stage in range(num_stages):
        warm_up = min(num_stages - 1 - stage, num_micro_batches)
        operations = [Operation("F", stage, i) for i in range(warm_up)]
        for i in range(num_micro_batches - warm_up):
            operations += [Operation("F", stage, warm_up + i), Operation("B", stage, i)]
        operations += [Operation("B", stage, i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
        order.append(operations)
    return order


def makespans_1f1b(times_ms: NDArray[np.float64], num_stages: int) -> NDArray[np.float64]:
    """[replicas] makespans under 1F1B from [replicas, micro-batches] whole times, a third of each the forward pass."""
    order = one_f_one_b(num_stages, times_ms.shape[1])
    return time_pipelines(order, times_ms * _FORWARD, times_ms * (1 - _FORWARD)).makespan_ms


def time_pipelines(
    order: PipelineOrder, forward_ms: ArrayLike, backward_ms: ArrayLike, weight_share: float = WEIGHT_SHARE
) -> PipelineTimes:
    """Run the same order in every replica.

    Args:
        order: operations of each worker.
        forward_ms, backward_ms: [replicas, micro-batches], whole model; every stage takes an equal part of it.
        weight_share: part of a backward that is W where the order splits it, in [0, 1].

    Raises:
        ValueError: the order lacks an operation, has one twice, or waits for itself.

    Cost: O(operations) vector operations of the length of the replicas.
    """
    forward_RM, backward_RM = np.asarray(forward_ms, dtype=np.float64), np.asarray(backward_ms, dtype=np.float64)
    num_stages = _check_complete(order, forward_RM.shape[1])
    part_RM = {
        "F": forward_RM / num_stages,
        "B": backward_RM / num_stages,
        "I": backward_RM * (1.0 - weight_share) / num_stages,
        "W": backward_RM * weight_share / num_stages,
    }
    free_R = [np.zeros(len(forward_RM)) for _ in order]
    position = [0] * len(order)
    # Whoever waits for a backward waits for its input's gradient, so B and I are filed under one name.
    end_R: dict[tuple[str, int, int], NDArray[np.float64]] = {}
    operations: list[tuple[int, Operation]] = []
    starts, ends = [], []
    progressed = True
    while progressed:
        progressed = False
        for worker, own in enumerate(order):
            while position[worker] < len(own):
                operation = own[position[worker]]
                needs = _needs(operation, num_stages)
                if needs is not None and needs not in end_R:
                    break
                start_R = free_R[worker] if needs is None else np.maximum(free_R[worker], end_R[needs])
                kind, stage, micro_batch = operation
                free_R[worker] = start_R + part_RM[kind][:, micro_batch]
                end_R["B" if kind == "I" else kind, stage, micro_batch] = free_R[worker]
                operations.append((worker, operation))
                starts.append(start_R)
                ends.append(free_R[worker])
                position[worker] += 1
                progressed = True
    if len(operations) < sum(len(own) for own in order):
        raise ValueError("the order of operations waits for itself: an operation comes before what it needs")
    return PipelineTimes(tuple(operations), np.array(starts), np.array(ends))


def _needs(operation: Operation, num_stages: int) -> tuple[str, int, int] | None:
    kind, stage, micro_batch = operation
    if kind == "F":
        return ("F", stage - 1, micro_batch) if stage > 0 else None
    if kind == "W":
        return ("B", stage, micro_batch)
    return ("B", stage + 1, micro_batch) if stage < num_stages - 1 else ("F", stage, micro_batch)


def _check_complete(order: PipelineOrder, num_micro_batches: int) -> int:
    """The number of stages, if every stage has one forward and one whole backward of every micro-batch."""
    num_stages = 1 + max((operation.stage for own in order for operation in own), default=-1)
    kinds: dict[tuple[int, int], str] = {}
    for own in order:
        for kind, stage, micro_batch in own:
            kinds[stage, micro_batch] = kinds.get((stage, micro_batch), "") + kind
    wanted = {(stage, i) for stage in range(num_stages) for i in range(num_micro_batches)}
    if kinds.keys() != wanted or not all(found in ("FB", "FIW") for found in kinds.values()):
        raise ValueError(f"the order needs one F and B (or I and W) of {num_micro_batches} micro-batches per stage")
    return num_stages
