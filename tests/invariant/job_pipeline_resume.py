"""Two tuned epochs in a pipeline, saved on the way; then the same from the first checkpoint; then what is refused."""

import sys

import job_setup
import tiny_run
import torch
from peft import LoraConfig, get_peft_model

from hf_sparsebalance.errors import UserError

out, variant = job_setup.out_folder(), sys.argv[2]
OPTIONS = {
    "num_train_epochs": 2,
    "pipeline_parallel_size": 2,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.5,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "refit": False,
    "save_strategy": "steps",
    "save_steps": 2,
}


def build():
    """The model, in the variant with adapters (whose dropout draws from each process's own generator)."""
    model = job_setup.build_model(num_hidden_layers=4)
    if variant == "plain":
        return model
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def train(name, resume=False, **changes):
    """(losses, saved folder) of a run."""
    args = job_setup.arguments(out / name, **{**OPTIONS, **changes})
    model = build()
    args.profile = tiny_run.write_profile(out / f"profile-{args.process_index}.json", model, args)
    trainer, recorder = job_setup.train(model, args, resume=resume)
    trainer.save_model()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": steps, "micro_batches": recorder.micro_batches, "budgets": recorder.budgets}


def refusal(name, resume, **changes):
    """The message of a run that is refused."""
    try:
        train(name, resume, **changes)
    except UserError as error:
        return str(error)
    return None


whole = train("whole")
checkpoint = str(out / "whole" / "checkpoint-2")
job_setup.report(
    variant,
    whole=whole,
    resumed=train("resumed", checkpoint),
    schedule=refusal("schedule", checkpoint, pipeline_schedule="zbvzerobubble"),
    size=refusal("size", checkpoint, pipeline_parallel_size=1, gradient_accumulation_steps=2),
)
