"""The same training under one topology, argument 2; plain, recomputed, with adapters: what each step showed."""

import sys

import job_setup
import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_sparsebalance.topology import topology_of

SHARDING = {"one": {}, "ddp": {}, "fsdp": {"fsdp_size": 2}, "tp": {"tp_size": 2}}
# Every topology takes the same documents per step.
MICRO_BATCHES = {"one": 4, "ddp": 2, "fsdp": 2, "tp": 4}
VARIANTS = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True},
    "lora": {},
    "clipped": {"max_grad_norm": 0.01, "optim": "adamw_torch", "learning_rate": 1e-3},
    "tuned": {"tolerance": 0.2, "batching": "sparsity_aware", "refit": False},
}


# accelerate refuses tensor parallelism on a CPU where it checks the device, and needs nothing of a GPU for it.
ParallelismConfig._validate_accelerator = lambda config, accelerator: None


def build(folder, topology):
    """The saved model in float64, loaded as the topology wants it."""
    sharding = SHARDING[topology]
    return AutoModelForCausalLM.from_pretrained(
        folder / "model",
        attn_implementation="sparsebalance",
        dtype=torch.float64,
        distributed_config=DistributedConfig(**sharding) if sharding else None,
    )


def adapted(model):
    """The model with adapters as in the SparseBalance paper (rank 32, alpha 64), without dropout: it would differ."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(out, topology, variant):
    """(trainer, recorder) after an epoch."""
    options = {"tolerance": 0.0, "batching": "random", "max_grad_norm": 1e9, **VARIANTS[variant]}
    args = job_setup.arguments(
        out / topology / variant, gradient_accumulation_steps=MICRO_BATCHES[topology], **options
    )
    model = build(out, topology)
    if variant == "lora":
        model = adapted(model)
    if options["tolerance"]:
        args.profile = job_setup.write_profile(out / f"profile-{topology}-{args.process_index}.json", model, args)
    return job_setup.train(model, args)


def main():
    out, topology = job_setup.out_folder(), sys.argv[2]
    for variant in VARIANTS if len(sys.argv) < 4 else sys.argv[3:]:
        trainer, recorder = train(out, topology, variant)
        trainer.save_model()
        place = topology_of(trainer.model, trainer.accelerator)
        job_setup.report(
            f"{topology}-{variant}",
            wrapper=type(trainer.model_wrapped).__name__,
            scope=place.scope(trainer.args.scope),
            parameter=type(next(trainer.model.parameters())).__name__,
            micro_batches=recorder.micro_batches,
            budgets=recorder.budgets,
            steps=[entry for entry in trainer.state.log_history if "loss" in entry],
        )


if __name__ == "__main__":
    main()
