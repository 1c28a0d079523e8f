"""Talking between ranks, but for what passes between pipeline stages (pipeline.py).

Without a process group there is one rank.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hf_sparsebalance.errors import UserError

ProcessGroup = dist.ProcessGroup
ROLL_CALL_S = 10.0


def rank_and_world() -> tuple[int, int]:
    """(this rank, number of ranks)."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def check_world(expected: int | None) -> None:
    """Refuse to train with another number of ranks than the user meant, and see to it that the ranks part cleanly.

    ``accelerate launch --cpu --num_processes 2`` starts one process without a word, and some work-arounds start two
    that do not know each other; both would train, slower and on the wrong batches.

    Raises:
        UserError: the launcher's WORLD_SIZE, or ``expected``, is not the number of ranks that found each other.
    """
    # At exit, gloo's threads may want Python's lock after the interpreter is gone, which aborts the process (seen in
    # about one of 40 two-rank runs, after all was saved); leaving the group joins them.  Unregister: once is enough.
    atexit.unregister(_leave)
    atexit.register(_leave)
    world = rank_and_world()[1]
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != world:
        raise UserError(
            f"the launcher started {launched} processes but {world} found each other: build SparseBalanceArguments "
            "before any other accelerate object, and on CPU launch with ACCELERATE_USE_CPU=true and --multi_gpu"
        )
    if expected is not None and expected != world:
        raise UserError(
            f"--num_ranks {expected}, but the job has {world}: on CPU use ACCELERATE_USE_CPU=true accelerate launch "
            f"--multi_gpu --num_processes {expected} (with --cpu alone accelerate starts one process)"
        )


def barrier() -> None:
    """Wait until every rank has come here."""
    if rank_and_world()[1] > 1:
        dist.barrier()


@dataclass(frozen=True)
class PipelineGroups:
    """Where this rank stands in pipelines that train side by side.

    Attributes:
        pipeline: the ranks of its pipeline, in order of the stages.
        data: the ranks that hold the same stages, one per pipeline.
        pipeline_rank, data_rank: its place in each.
        data_size: number of pipelines.
    """

    pipeline: ProcessGroup
    data: ProcessGroup
    pipeline_rank: int
    data_rank: int
    data_size: int


def pipelines(pipeline_size: int) -> int:
    """How many pipelines of ``pipeline_size`` all processes make.

    Raises:
        UserError: they do not divide into them.
    """
    world = rank_and_world()[1]
    if pipeline_size < 2 or world % pipeline_size:
        raise UserError(
            f"--pipeline_parallel_size {pipeline_size} must be at least 2 and divide the number of ranks, which is "
            f"{world}: launch a multiple of it"
        )
    return world // pipeline_size


def pipeline_groups(pipeline_size: int, device: torch.device) -> PipelineGroups:
    """Split all ranks into pipelines of ``pipeline_size``; collective.

    Ranks that hold the same stages are neighbours, as their gradients are most of what is sent.

    Raises:
        UserError: the number of ranks is no multiple of ``pipeline_size``.
    """
    data_size = pipelines(pipeline_size)
    mesh = init_device_mesh(device.type, (pipeline_size, data_size), mesh_dim_names=("pipeline", "data"))
    pipeline_rank, data_rank = mesh.get_coordinate()
    return PipelineGroups(mesh.get_group("pipeline"), mesh.get_group("data"), pipeline_rank, data_rank, data_size)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: ProcessGroup) -> None:
    """Replace each gradient by its sum over the group's ranks, which hold the same parameters; collective."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
        work.wait()


def add_up(tensor: torch.Tensor, group: ProcessGroup) -> None:
    """Replace a tensor by its sum over the group's ranks; collective."""
    dist.all_reduce(tensor, group=group)


def gather_rows(rows: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Every rank's ``rows`` (same shape everywhere), stacked: ``[ranks, *shape]`` on CPU, the same bits everywhere.

    With a group only its ranks take part.
    """
    _, world = rank_and_world()
    if world == 1:
        return rows[None].cpu()
    device = _device()
    gathered = [torch.empty_like(rows, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, rows.to(device).contiguous(), group=group)
    return torch.stack(gathered).cpu()


def check_same(what: str, value: object) -> None:
    """Refuse to go on where ranks hold different data; collective.

    Args:
        what: name of the thing in the message.
        value: JSON-able.

    Raises:
        UserError: on every rank, naming ``what``, where its digest differs between ranks.
    """
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    seen = gather_rows(torch.tensor(list(digest), dtype=torch.int64))
    if not bool((seen == seen[0]).all()):
        raise UserError(f"the ranks hold different {what}: start them all with the same options, files and versions")


def check_replicas(parameters: Sequence[torch.nn.Parameter], group: ProcessGroup | None = None) -> None:
    """Refuse to go on where ranks train models of their own; collective.

    Data parallelism leaves every rank with the same parameters to the last bit.  Where something kept the model from
    being wrapped, each rank trains on its own share and nothing else shows it.  Sharded parameters differ by design
    and are left out.

    Args:
        parameters: of the model, after an optimizer step.
        group: ranks that hold the same parameters; default: all.

    Raises:
        UserError: on every rank of the group, where a trainable parameter differs between ranks.
    """
    replicas = [each for each in parameters if each.requires_grad and not isinstance(each, DTensor)]
    if rank_and_world()[1] == 1 or not replicas:
        return
    sums = torch.stack([parameter.detach().sum(dtype=torch.float64) for parameter in replicas])
    seen = gather_rows(sums, group)
    # A parameter that went NaN did so on every rank, and is another fault.
    if not torch.allclose(seen, seen[:1].expand_as(seen), rtol=0.0, atol=0.0, equal_nan=True):
        raise UserError(
            "the ranks' parameters differ after the first step: the model was not wrapped for data parallelism; do "
            "not prepare it with accelerate yourself before train()"
        )


def has_sharded(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether any of them is spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def silent_ranks(error: Exception) -> list[int]:
    """Ranks that do not answer after a collective has failed; empty where ``error`` came from elsewhere.

    The backend knows addresses at best, and whoever loses a peer loses it in the middle of a collective.  So each rank
    that notices says so in the launcher's key-value store, and waits for the others to do the same.
    """
    rank, world = rank_and_world()
    if world == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return []
    deadline = time.monotonic() + ROLL_CALL_S
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=ROLL_CALL_S)
        )
        run = f"sparsebalance/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store.set(f"{run}/{rank}", "here")
    except dist.DistError:
        return [0]  # which keeps the store where no launcher does
    silent = []
    for other in range(world):
        try:
            store.wait([f"{run}/{other}"], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
        except dist.DistError:
            silent.append(other)
    return silent


def _leave() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _device() -> torch.device:
    """Where the backend's collectives work."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
