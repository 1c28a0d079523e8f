"""Shared by the trainer's tests and the two-rank jobs: documents that tell which they are, a model, a profile."""

import dataclasses
import functools

import planning_profiles
import torch
from transformers import Qwen2Config

from hf_sparsebalance.arguments import SparseBalanceArguments
from hf_sparsebalance.profiling import training_context

BLOCK = 4
VOCAB = 61
BASE_TOP_P = 0.5
TOLERANCE = 0.2
LEARNING_RATE = 0.05
# 3 steps of 4 documents, and one document more.
LENGTHS = (60, 7, 25, 12, 44, 9, 5, 33, 18, 4, 52, 11, 28)


@functools.cache
def documents(lengths=LENGTHS):
    """Token ids of each document; the first token is the document's number plus one."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return tuple((number + 1, *ids[1:]) for number, ids in enumerate(tokens))


def config_of(**changes):
    """A Qwen2 of two layers."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Qwen2Config(**{**values, **changes})


def arguments(folder, **changes):
    """A tuned epoch of plain SGD on the CPU, logged at every step, with nothing saved."""
    values = {
        "output_dir": str(folder),
        "use_cpu": True,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 2,
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


def write_profile(path, model, args, factor=1.0, **context):
    """A profile that holds for this run, its documents priced as if 16 times as long: budgets then move.

    Dense times are multiplied by `factor`, once more for each longer row; `context` overrides what it holds for.
    """
    profile = planning_profiles.profile(floor_ms=0.0)
    rows = tuple(
        dataclasses.replace(row, length=row.length // 16, dense_forward_ms=row.dense_forward_ms * factor**i)
        for i, row in enumerate(profile.attention)
    )
    block_size = BLOCK if model.config._attn_implementation == "sparsebalance" else 128
    ours = training_context(model.config, args, block_size, args.device)
    dataclasses.replace(profile, attention=rows, context=dataclasses.replace(ours, **context)).save(path)
    return str(path)
