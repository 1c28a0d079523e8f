"""The same training under one topology, argument 2, in every variant: what each step showed."""

import sys
from dataclasses import asdict

import job_setup
import tiny_run
import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_sparsebalance import attention
from hf_sparsebalance.heldout import heldout_loss
from hf_sparsebalance.planner import Planner
from sparsebalance_kernels import select_blocks

SHARDING = {"one": {}, "ddp": {}, "fsdp": {"fsdp_size": 2}, "tp": {"tp_size": 2}}
# Schedule, and processes of a pipeline.
PIPELINES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved1f1b",
    "zb": "interleavedzerobubble",
    "zbv": "zbvzerobubble",
    "dp-pp": "1f1b",
}
# Every topology takes the same documents per step.
MICRO_BATCHES = {"one": 4, "ddp": 2, "fsdp": 2, "tp": 4, **dict.fromkeys(PIPELINES, 4), "dp-pp": 2}
VARIANTS = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True},
    "clipped": {"max_grad_norm": 0.01, "optim": "adamw_torch", "learning_rate": 1e-3},
    "lora": {},
    "tuned": {"tolerance": 0.2, "batching": "sparsity_aware", "refit": False},
}

# accelerate refuses tensor parallelism on a CPU where it checks the device, and needs nothing of a GPU for it.
ParallelismConfig._validate_accelerator = lambda config, accelerator: None


def build(out, topology):
    """The saved model in float64, loaded as the topology wants it."""
    sharding = SHARDING.get(topology)
    return AutoModelForCausalLM.from_pretrained(
        out / "model",
        attn_implementation="sparsebalance",
        dtype=torch.float64,
        distributed_config=DistributedConfig(**sharding) if sharding else None,
    )


def adapted(model):
    """The model with the adapters of the SparseBalance paper, but for their dropout: it draws per process."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(out, topology, variant):
    """(trainer, recorder, what the planner was told step by step) of an epoch."""
    options = {"tolerance": 0.0, "batching": "random", "max_grad_norm": 1e9, "per_device_eval_batch_size": 1}
    options |= VARIANTS[variant]
    if topology in PIPELINES:
        options |= {"pipeline_parallel_size": 2, "pipeline_schedule": PIPELINES[topology]}
    folder = out / topology / variant
    args = job_setup.arguments(folder, gradient_accumulation_steps=MICRO_BATCHES[topology], **options)
    model = build(out, topology)
    if variant == "lora":
        model = adapted(model)
    if options["tolerance"]:
        args.profile = tiny_run.write_profile(out / f"profile-{topology}-{args.process_index}.json", model, args)
    told, observe = [], Planner.observe

    def listen(planner, measured):
        told.append([asdict(seen) for seen in measured])
        observe(planner, measured)

    Planner.observe = listen
    try:
        return *job_setup.train(model, args), told
    finally:
        Planner.observe = observe


def heldout(trainer, topology):
    """Loss, and where a process has the whole model statistics, of five documents."""
    documents = job_setup.documents()[:5]
    if topology in PIPELINES:
        return {"loss": trainer.heldout_loss(documents)}
    return heldout_loss(trainer.model, documents)


def selections(model):
    """By layer, the bits of the blocks that this process' heads keep of the longest document."""
    bits, attend = [], attention.attention_and_stats

    def listen(query, key, value, **options):
        gate = ("cu_seqlens", "top_p", "block_size", "scale")
        bits.append(select_blocks(query, key, **{name: options[name] for name in gate}).bits.tolist())
        return attend(query, key, value, **options)

    attention.attention_and_stats = listen
    try:
        with torch.no_grad():
            model.eval()(input_ids=torch.tensor([job_setup.documents()[0]]), use_cache=False)
    finally:
        attention.attention_and_stats = attend
    return bits


def main():
    out, topology = job_setup.out_folder(), sys.argv[2]
    for variant in VARIANTS:
        if (topology, variant) == ("tp", "lora"):
            continue
        trainer, recorder, told = train(out, topology, variant)
        trainer.save_model()
        place = trainer.topology()
        job_setup.report(
            f"{topology}-{variant}",
            model=type(trainer.model_wrapped).__name__,
            parameter=type(next(trainer.model.parameters())).__name__,
            scope=place.scope(trainer.args.scope),
            micro_batches=list(recorder.micro_batches),  # the evaluation below collates, too
            budgets=recorder.budgets,
            steps=[entry for entry in trainer.state.log_history if "loss" in entry],
            told=told,
            heldout=heldout(trainer, topology) if variant == "plain" else None,
            evaluated=trainer.evaluate()["eval_loss"],
            stages=trainer._pipeline and [list(cut) for cut in trainer._pipeline.cuts],
            selections=selections(trainer.model) if variant == "plain" and topology in ("one", "tp") else None,
        )


if __name__ == "__main__":
    main()
