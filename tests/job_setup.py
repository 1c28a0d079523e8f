"""What the two-rank jobs share: a tiny model, documents that tell which they are, arguments, a recorder.

A job is a script that `accelerate launch` starts on two ranks; each rank writes what it saw to OUT/NAME-RANK.json.
"""

import json
import sys
from pathlib import Path

import datasets
import tiny_run
import torch
from tiny_run import config_of
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, TrainerCallback

from hf_sparsebalance.distributed import rank_and_world
from hf_sparsebalance.trainer import SparseBalanceTrainer


def documents():
    """Token ids of each document, as lists."""
    return [list(ids) for ids in tiny_run.documents()]


def build_model(dtype=torch.float32, **changes):
    """A tiny random model, the same everywhere."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(**changes), attn_implementation="sparsebalance").to(dtype)


def arguments(folder, **changes):
    """Two micro-batches of one document per rank and step."""
    return tiny_run.arguments(folder, **{"per_device_train_batch_size": 1, **changes})


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
        if any(isinstance(p, DTensor) for p in model.parameters()):
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters.append(torch.cat([p.detach().flatten().double() for p in trained]).tolist())


class Trainer(SparseBalanceTrainer):
    """Remembers the budget, a p or a k, of each micro-batch that this rank ran."""

    budgets: list

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.budgets.append(float(inputs["sparse_top_p" if "sparse_top_p" in inputs else "sparse_top_k"]))
        return super().training_step(model, inputs, num_items_in_batch)


def train(model, args, data=None, evaluate_first=False, trainer_class=Trainer, callbacks=(), resume=False):
    """(trainer, recorder) after a run."""
    recorder = Recorder()
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"input_ids": data or documents()}),
        eval_dataset=datasets.Dataset.from_dict({"input_ids": documents()[:4]}),
        data_collator=recorder,
        callbacks=[recorder, *callbacks],
    )
    trainer.budgets = recorder.budgets
    if evaluate_first:
        trainer.evaluate()
        recorder.micro_batches.clear()
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


def out_folder():
    """Where the job writes: its first argument."""
    return Path(sys.argv[1])


def report(name, **values):
    """Write this rank's results."""
    rank, world = rank_and_world()
    path = out_folder() / f"{name}-{rank}.json"
    path.write_text(json.dumps({"rank": rank, "world": world, **values}), encoding="utf-8")
