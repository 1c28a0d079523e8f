"""Who shares what, read from accelerate's state and from the model; what must not start."""

from types import SimpleNamespace

import pytest
import tiny_run
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_sparsebalance import topology
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.topology import Topology, check_topology, topology_of


def accelerator(kind, stage=0):
    plugin = SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=plugin))


def model(config=None, loaded=None):
    """A tiny model; `loaded` is the DistributedConfig that it claims to be loaded with."""
    built = AutoModelForCausalLM.from_config(config or tiny_run.config_of(), attn_implementation="sparsebalance")
    if loaded is not None:
        built._is_distributed_loading_by_transformers = True
        built.config.distributed_config = loaded
    return built


@pytest.mark.parametrize(
    ("kind", "stage", "scope"),
    [
        (DistributedType.NO, 0, "rank"),
        (DistributedType.MULTI_CPU, 0, "rank"),
        (DistributedType.MULTI_GPU, 0, "rank"),
        (DistributedType.FSDP, 0, "slot"),
        (DistributedType.DEEPSPEED, 1, "rank"),
        (DistributedType.DEEPSPEED, 2, "rank"),
        (DistributedType.DEEPSPEED, 3, "slot"),
    ],
)
def test_auto_is_where_ranks_wait(kind, stage, scope):
    """Sharded parameters are gathered in every micro-batch, replicas meet once a step; what is asked for stays."""
    found = topology_of(model(), accelerator(kind, stage))
    assert found.scope("auto") == scope
    assert [found.scope(asked) for asked in ("rank", "slot", "microbatch")] == ["rank", "slot", "microbatch"]


@pytest.mark.parametrize(
    ("tp", "dp", "rank", "expected"),
    [
        (2, 1, 5, Topology(4, 2, 2, False)),
        (2, 4, 5, Topology(4, 2, 2, True)),
        (4, 2, 3, Topology(2, 0, 4, True)),
        (1, 8, 7, Topology(8, 7, 1, True)),
    ],
)
def test_tensor_parallel_processes_are_one_rank(monkeypatch, tp, dp, rank, expected):
    """Neighbouring processes form a rank: transformers' mesh counts its tensor-parallel dimension fastest."""
    monkeypatch.setattr(topology, "rank_and_world", lambda: (rank, 8))
    assert topology_of(model(loaded=SimpleNamespace(tp_size=tp, dp_size=dp))) == expected


def test_refuses_fsdp_that_is_not_there(monkeypatch):
    """accelerate takes FSDP for plain data parallelism on a CPU, without a word; this is found, with both ways out."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_topology(Topology(2, 0, 1, True), model(), accelerator(DistributedType.FSDP), tunes_top_k=False)
    with pytest.raises(UserError, match="(?s)FSDP.*MULTI_CPU.*DistributedConfig"):
        check_topology(Topology(2, 0), model(), accelerator(DistributedType.MULTI_CPU), tunes_top_k=False)


@pytest.mark.parametrize(
    ("size", "changes", "match"), [(4, {}, "4 query and 2"), (2, {"num_key_value_heads": 1}, "1 key")]
)
def test_refuses_to_split_heads(size, changes, match):
    """Every tensor-parallel process must hold whole query and key/value heads, equally many."""
    with pytest.raises(UserError, match=match):
        kind = accelerator(DistributedType.MULTI_GPU)
        check_topology(Topology(1, 0, size), model(tiny_run.config_of(**changes)), kind, tunes_top_k=False)


def test_refuses_decisions_that_need_all_heads():
    """A k that is raised by the coverage over all heads cannot be decided by a process that sees half of them."""
    kind = accelerator(DistributedType.MULTI_GPU)
    check_topology(Topology(1, 0, 2), model(), kind, tunes_top_k=False)
    with pytest.raises(UserError, match="(?s)base_top_k.*--base_top_p"):
        check_topology(Topology(1, 0, 2), model(), kind, tunes_top_k=True)


def test_refuses_adapters_on_sharded_layers():
    """LoRA under tensor parallelism is refused, with the ways out."""
    torch.manual_seed(0)
    adapted = get_peft_model(model(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with pytest.raises(UserError, match="DDP or FSDP"):
        check_topology(Topology(1, 0, 2), adapted, accelerator(DistributedType.MULTI_GPU), tunes_top_k=False)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (Topology(4, 0), [[0], [1], [2], [3]]),
        (Topology(2, 0, tensor_size=2), [[0, 1], [2, 3]]),  # the tensor-parallel dimension counts fastest
        (Topology(2, 0, pipeline_size=2), [[0, 2], [1, 3]]),  # neighbours hold the same stages
        (Topology(1, 0, pipeline_size=4), [[0, 1, 2, 3]]),
    ],
)
def test_members_are_the_processes_of_each_rank(place, expected):
    """What all processes sent, by rank; a pipeline's in the order of its stages."""
    assert place.members(torch.arange(4)[:, None])[..., 0].tolist() == expected


def test_a_pipeline_is_tuned_by_micro_batch():
    """auto follows the topology; what was asked for stays."""
    assert Topology(2, 0, pipeline_size=2).scope("auto") == "microbatch"
    assert Topology(2, 0, pipeline_size=2).scope("rank") == "rank"


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_pipelines_of_sharded_models_are_refused(kind):
    """Pipelines go with plain data parallelism; the message names the option."""
    with pytest.raises(UserError, match="--pipeline_parallel_size"):
        check_topology(Topology(2, 0, pipeline_size=2), model(), accelerator(kind), tunes_top_k=False)
