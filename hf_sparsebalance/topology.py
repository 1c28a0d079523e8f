"""How the processes share the model and the work, from accelerate's state, the model as loaded, and the options."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import PeftModel
from torch import nn

from hf_sparsebalance.distributed import has_sharded, pipelines, rank_and_world
from hf_sparsebalance.errors import UserError

_SHARDED_LOADING = (
    "AutoModelForCausalLM.from_pretrained(..., distributed_config=transformers.distributed.DistributedConfig("
    "fsdp_size=N))"
)


@dataclass(frozen=True, slots=True)
class Topology:
    """Data-parallel ranks, each of one process, of a tensor-parallel group of them, or of a pipeline.

    Attributes:
        num_ranks: data-parallel ranks, each with micro-batches of its own.
        rank: the one that this process belongs to.
        tensor_size: tensor-parallel processes of one rank; they hold whole attention heads, equally many.
        meets_every_micro_batch: whether parameters are sharded over ranks (FSDP, ZeRO-3), which then gather them, and
            so wait for each other, in every micro-batch; else ranks wait once a step.
        pipeline_size: pipeline-parallel processes of one rank; they hold whole layers.
    """

    num_ranks: int
    rank: int
    tensor_size: int = 1
    meets_every_micro_batch: bool = False
    pipeline_size: int = 1

    def members(self, gathered: torch.Tensor) -> torch.Tensor:
        """[processes, ...], as gathered from all of them, as [ranks, processes of one, ...]."""
        if self.pipeline_size > 1:  # as `distributed.pipeline_groups` lays them out
            return gathered.unflatten(0, (self.pipeline_size, self.num_ranks)).transpose(0, 1)
        return gathered.unflatten(0, (self.num_ranks, self.tensor_size))

    def scope(self, asked: str) -> str:
        """The tuning's scope: the one asked for, or where ranks really wait for ``auto``."""
        if asked != "auto":
            return asked
        if self.pipeline_size > 1:
            return "microbatch"
        return "slot" if self.meets_every_micro_batch else "rank"


def sharded_when_loaded(model: nn.Module) -> bool:
    """Whether transformers spread the model over processes by a ``DistributedConfig``."""
    return getattr(model, "is_distributed_loading_by_transformers", False)


def launched_topology(pipeline_size: int = 1) -> Topology:
    """As far as the launch and ``--pipeline_parallel_size`` tell, before a model is there.

    Raises:
        UserError: pipelines do not divide the processes.
    """
    rank, world = rank_and_world()
    if pipeline_size == 1:
        return Topology(world, rank)
    data_size = pipelines(pipeline_size)
    return Topology(data_size, rank % data_size, pipeline_size=pipeline_size)


def topology_of(model: nn.Module, accelerator: Accelerator | None = None, pipeline_size: int = 1) -> Topology:
    """Read the topology.

    Args:
        model: as loaded; what transformers sharded by a ``DistributedConfig`` says so itself.
        accelerator: of the Trainer; None where only the model is there.
        pipeline_size: ``--pipeline_parallel_size``.

    Raises:
        UserError: pipelines do not divide the processes.
    """
    if pipeline_size > 1:
        return launched_topology(pipeline_size)
    rank, world = rank_and_world()
    tensor_size, sharded = 1, False
    if sharded_when_loaded(model):
        config = model.config.distributed_config
        tensor_size, sharded = config.tp_size, config.dp_size > 1
    if accelerator is not None:
        kind = accelerator.distributed_type
        zero3 = kind == DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage == 3
        sharded = sharded or kind == DistributedType.FSDP or zero3
    # transformers' device mesh counts the tensor-parallel dimension fastest.
    return Topology(world // tensor_size, rank // tensor_size, tensor_size, sharded)


def check_topology(topology: Topology, model: nn.Module, accelerator: Accelerator, tunes_top_k: bool) -> None:
    """Refuse what would train, but otherwise than it was asked to.

    Args:
        topology: of this run.
        model: as loaded.
        accelerator: of the Trainer.
        tunes_top_k: whether layers raise a k until a tolerance is kept.

    Raises:
        UserError: FSDP was asked for and is not there; the model was sharded behind the Trainer's back; or a
            tensor-parallel process does not hold what its decisions need.
    """
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and accelerator.distributed_type != DistributedType.FSDP:
        raise UserError(
            f"FSDP was asked for, but accelerate made {accelerator.distributed_type.value} of it without a word (it "
            f"has FSDP for accelerators only): launch without FSDP for plain data parallelism, or load the model with "
            f"{_SHARDED_LOADING}"
        )
    if has_sharded(model.parameters()) and not sharded_when_loaded(model):
        raise UserError(
            "the model's parameters are sharded already (fully_shard), and accelerate would wrap it once more: leave "
            f"the sharding to `accelerate launch --use_fsdp --fsdp_version 2`, or load it with {_SHARDED_LOADING}"
        )
    if topology.pipeline_size > 1 and (
        accelerator.distributed_type not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        or sharded_when_loaded(model)
    ):
        raise UserError(
            "--pipeline_parallel_size with a model that is sharded as well (FSDP, DeepSpeed, DistributedConfig): "
            "pipelines go with plain data parallelism; launch without the other"
        )
    size, config = topology.tensor_size, model.config
    if size == 1:
        return
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise UserError(
            f"tp_size {size} does not divide the model's {heads} query and {kv_heads} key/value heads: a process must "
            "hold whole heads, equally many; choose a tp_size that divides both"
        )
    if isinstance(model, PeftModel):
        raise UserError(
            "adapters under tensor parallelism: those that PEFT puts beside row-sharded layers fail in their first "
            "forward pass (peft 0.21 with transformers 5.24); train adapters with DDP or FSDP"
        )
    if tunes_top_k:
        raise UserError(
            "base_top_k with --tolerance > 0 under tensor parallelism: a layer's k is raised by the coverage over all "
            "its heads, and a process sees only its own; use --base_top_p, or --tolerance 0"
        )
