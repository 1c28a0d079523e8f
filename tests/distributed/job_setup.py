"""What the two-rank jobs share: a tiny model, documents that tell which they are, arguments, a profile, a recorder.

A job is a script that `accelerate launch` starts on two ranks; each rank writes what it saw to OUT/NAME-RANK.json.
"""

import dataclasses
import json
import sys
from pathlib import Path

import datasets
import planning_profiles
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Qwen2Config, TrainerCallback

from hf_sparsebalance.arguments import SparseBalanceArguments
from hf_sparsebalance.distributed import rank_and_world
from hf_sparsebalance.profiling import training_context
from hf_sparsebalance.trainer import SparseBalanceTrainer

BLOCK = 4
VOCAB = 61
BASE_TOP_P = 0.5
TOLERANCE = 0.2
LEARNING_RATE = 0.05
# 3 steps of 4 documents, and one document more.
LENGTHS = (60, 7, 25, 12, 44, 9, 5, 33, 18, 4, 52, 11, 28)


def documents():
    """Token ids of each document; the first token is the document's number plus one."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    return [[number + 1, *ids[1:]] for number, ids in enumerate(tokens)]


def build_model(dtype=torch.float32):
    """A tiny random model, the same everywhere."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sparsebalance").to(dtype)


def arguments(folder, **changes):
    """Two micro-batches of one document per rank and step."""
    values = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
        "base_top_p": BASE_TOP_P,
        "block_size": BLOCK,
        "tolerance": TOLERANCE,
        "window": 2,
    }
    return SparseBalanceArguments(**{**values, **changes})


def write_profile(path, model, args, factor=1.0):
    """A profile that holds for this run, its documents priced as if 16 times as long, dense ones times a factor."""
    profile = planning_profiles.profile(floor_ms=0.0)
    rows = tuple(
        dataclasses.replace(row, length=row.length // 16, dense_forward_ms=row.dense_forward_ms * factor**i)
        for i, row in enumerate(profile.attention)
    )
    context = training_context(model.config, args, BLOCK, args.device)
    dataclasses.replace(profile, attention=rows, context=context).save(path)
    return str(path)


class Recorder(TrainerCallback):
    """Collates and remembers the documents; remembers the parameters' digest after each step."""

    def __init__(self):
        self.collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        self.micro_batches = []
        self.budgets = []
        self.parameters = []

    def __call__(self, rows):
        self.micro_batches.append([row["input_ids"][0] - 1 for row in rows])
        return self.collator(rows)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters.append(torch.cat([p.detach().flatten().double() for p in trained]).tolist())


class Trainer(SparseBalanceTrainer):
    """Remembers the budget of each micro-batch that this rank ran."""

    budgets: list

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.budgets.append(float(inputs["sparse_top_p"]))
        return super().training_step(model, inputs, num_items_in_batch)


def train(model, args, data=None, evaluate_first=False):
    """(trainer, recorder) after a run."""
    recorder = Recorder()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"input_ids": data or documents()}),
        eval_dataset=datasets.Dataset.from_dict({"input_ids": documents()[:4]}),
        data_collator=recorder,
        callbacks=[recorder],
    )
    trainer.budgets = recorder.budgets
    if evaluate_first:
        trainer.evaluate()
        recorder.micro_batches.clear()
    trainer.train()
    return trainer, recorder


def out_folder():
    """Where the job writes: its first argument."""
    return Path(sys.argv[1])


def report(name, **values):
    """Write this rank's results."""
    rank, world = rank_and_world()
    path = out_folder() / f"{name}-{rank}.json"
    path.write_text(json.dumps({"rank": rank, "world": world, **values}), encoding="utf-8")
