"""``sparsebalance train``: documents in, a fine-tuned model out."""

from __future__ import annotations

import datetime
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed

from hf_sparsebalance import runlog
from hf_sparsebalance.arguments import SparseBalanceArguments, check_writable
from hf_sparsebalance.attention import ATTENTION_NAME
from hf_sparsebalance.checkpoints import checkpoint_folder, read_state
from hf_sparsebalance.cli.models import load_config, load_model, load_tokenizer
from hf_sparsebalance.cli.parsing import DataclassParser, with_config_file
from hf_sparsebalance.distributed import check_world, rank_and_world
from hf_sparsebalance.documents import check_lengths, load_documents
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.planner import Planner
from hf_sparsebalance.profiling import device_name
from hf_sparsebalance.topology import launched_topology
from hf_sparsebalance.trainer import SparseBalanceTrainer, build_planner
from hf_sparsebalance.version import __version__

DTYPES = ("float32", "bfloat16", "float16", "auto")

logger = logging.getLogger("hf_sparsebalance")


@dataclass
class ModelArguments:
    """Which model, how it attends, and whether it gets adapters."""

    model_name_or_path: str = field(metadata={"help": "Model folder or hub name."})
    attn_implementation: str = field(
        default=ATTENTION_NAME,
        metadata={"help": "sparsebalance, or any other: then only the batches are balanced (with --tolerance 0)."},
    )
    dtype: str = field(default="float32", metadata={"help": "Parameter dtype: float32, bfloat16, float16 or auto."})
    lora_r: int = field(default=0, metadata={"help": "Rank of LoRA adapters on all linear layers; 0 trains it all."})
    lora_alpha: int = field(default=64, metadata={"help": "LoRA scale."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapters."})


@dataclass
class DataArguments:
    """Which documents, and what happens to long ones."""

    data: list[str] = field(
        metadata={
            "help": "Text files, .jsonl or .parquet with a text or messages column, directories of these, or a name "
            "that datasets.load_dataset takes."
        }
    )
    eval_data: list[str] = field(default_factory=list, metadata={"help": "Held-out documents, as --data."})
    max_length: int = field(default=32768, metadata={"help": "Longest document, tokens."})
    overflow: str = field(
        default="truncate", metadata={"help": "Longer documents: truncate, split (into several) or drop."}
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})


def run(arguments: Sequence[str], callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train as the command line says; writes the model, run.json and balance.jsonl to --output_dir."""
    model_args, data_args, args = parse(arguments)
    rank, _ = rank_and_world()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    # Every HTTP request of the hub client and every compiled format is an INFO line of the root logger otherwise.
    for noisy in ("httpx", "filelock", "fsspec", "datasets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    check_world(args.num_ranks)
    check_writable(str(args.output_dir))
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args.model_name_or_path)
    train_set = _load("data", data_args.data, data_args, tokenizer)
    eval_set = _load("eval_data", data_args.eval_data, data_args, tokenizer) if data_args.eval_data else None
    # Everything that needs no weights is refused before they are loaded.
    planner = _planner(model_args, args, train_set)
    if args.resume_from_checkpoint:
        planner.load_state_dict(read_state(checkpoint_folder(args.resume_from_checkpoint, str(args.output_dir))))
    try:
        trainer = SparseBalanceTrainer(
            model=build_model(model_args),
            args=args,
            train_dataset=train_set,
            eval_dataset=eval_set,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
    except UserError:
        raise
    except (ValueError, ImportError) as error:
        # Options that transformers and peft refuse.
        raise UserError(str(error)) from error
    before = None
    if eval_set is not None and not args.resume_from_checkpoint:
        before = trainer.heldout_loss(eval_set["input_ids"])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = None if eval_set is None else trainer.heldout_loss(eval_set["input_ids"])
    trainer.save_model()
    if trainer.is_world_process_zero():
        trainer.save_state()
        runlog.write_run(str(args.output_dir), _run_fields(trainer, len(train_set), before, after))


def plan(arguments: Sequence[str]) -> Planner:
    """The planner with which :func:`run` would start, without its weights."""
    model_args, data_args, args = parse(arguments)
    tokenizer = load_tokenizer(model_args.model_name_or_path)
    return _planner(model_args, args, _load("data", data_args.data, data_args, tokenizer))


def parse(arguments: Sequence[str]) -> tuple[ModelArguments, DataArguments, SparseBalanceArguments]:
    """Parse flags and --config.

    Raises:
        UserError: an unknown option, or a value that does not fit.
    """
    parser = DataclassParser((ModelArguments, DataArguments, SparseBalanceArguments), prog="sparsebalance train")
    parser.add_argument("--config", help="YAML file of options; flags override it.")
    flags = with_config_file(arguments)
    try:
        *parsed, _, unknown = parser.parse_args_into_dataclasses(flags, return_remaining_strings=True)
    except UserError:
        raise
    except (ValueError, ImportError) as error:
        # TrainingArguments' own checks.
        raise UserError(str(error)) from error
    if unknown:
        raise UserError(f"unknown options {' '.join(unknown)}: see sparsebalance train --help")
    model_args, data_args, args = parsed
    if model_args.dtype not in DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(DTYPES)}, got {model_args.dtype!r}")
    if model_args.lora_r < 0:
        raise UserError(f"--lora_r must not be negative, got {model_args.lora_r}: 0 trains the whole model")
    if not 0.0 <= model_args.lora_dropout < 1.0:
        raise UserError(f"--lora_dropout must lie in [0, 1), got {model_args.lora_dropout}")
    if args.eval_strategy != "no" and not data_args.eval_data:
        raise UserError(
            f"--eval_strategy {args.eval_strategy.value} needs --eval_data: give it, or --eval_strategy no"
        )
    # A command line knows no types: only here may `true` mean the last checkpoint.
    resume = {"true": True, "false": None}
    if isinstance(args.resume_from_checkpoint, str):
        args.resume_from_checkpoint = resume.get(args.resume_from_checkpoint.lower(), args.resume_from_checkpoint)
    if data_args.overflow not in ("truncate", "split", "drop"):
        raise UserError(f"--overflow must be truncate, split or drop, got {data_args.overflow!r}")
    return model_args, data_args, args


def build_model(args: ModelArguments) -> PreTrainedModel:
    """Load the model with its attention, and wrap it in adapters if asked for; UserError where it cannot be."""
    model = load_model(args.model_name_or_path, args.attn_implementation, args.dtype)
    if args.lora_r == 0:
        return model
    adapters = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapters)


def _planner(model_args: ModelArguments, args: SparseBalanceArguments, train_set: datasets.Dataset) -> Planner:
    config = load_config(model_args.model_name_or_path)
    config._attn_implementation = model_args.attn_implementation
    if model_args.dtype != "auto":
        config.dtype = getattr(torch, model_args.dtype)
    topology = launched_topology(args.pipeline_parallel_size)
    return build_planner(config, args, check_lengths(train_set), args.train_batch_size, topology)


def _load(
    option: str, data: list[str], data_args: DataArguments, tokenizer: PreTrainedTokenizerBase
) -> datasets.Dataset:
    documents, counts = load_documents(
        data,
        tokenizer=tokenizer,
        max_length=data_args.max_length,
        overflow=data_args.overflow,
        text_column=data_args.text_column,
    )
    logger.info("%s: %s", option, counts)
    return documents


def _run_fields(
    trainer: SparseBalanceTrainer, num_documents: int, before: float | None, after: float | None
) -> dict[str, Any]:
    args, config = trainer.args, trainer.model.config
    sparse = config._attn_implementation == ATTENTION_NAME
    anchor = args.anchor_for(config.sparse_attention["top_k"]) if args.tolerance > 0 else None
    return {
        "name": args.run_name or Path(str(args.output_dir)).name,
        "attention": config._attn_implementation,
        "batching": args.batching,
        "tuning": anchor or False,
        "base_top_p": config.sparse_attention["top_p"] if sparse else None,
        "base_top_k": config.sparse_attention["top_k"] if sparse else None,
        "tolerance": args.tolerance if args.tolerance > 0 else None,
        "anchor": anchor,
        "scope": trainer.topology().scope(args.scope) if args.tolerance > 0 else None,
        "documents": num_documents,
        "heldout_loss_before": before,
        "heldout_loss_after": after,
        "environment": {
            "hf_sparsebalance": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": device_name(args.device),
            "ranks": rank_and_world()[1],
            "threads_per_rank": torch.get_num_threads(),
            "host_cores": os.cpu_count(),
            "date": datetime.date.today().isoformat(),
        },
    }
