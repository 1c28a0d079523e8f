"""One dataclass: transformers' TrainingArguments and what balanced sparse training adds to them."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from hf_sparsebalance.batching import STRATEGIES
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.torch_schedules import SCHEDULES
from hf_sparsebalance.tuning import ANCHORS, SCOPES


@dataclass
class SparseBalanceArguments(TrainingArguments):
    """Arguments of :class:`SparseBalanceTrainer`; every field of ``TrainingArguments`` is there too.

    Raises:
        UserError: a value is out of range, or an inherited option cannot be honoured; the message names it.
    """

    per_device_train_batch_size: int = field(
        default=1,
        metadata={"help": "Documents per micro-batch, on average. Long documents leave room for one."},
    )
    base_top_p: float | None = field(
        default=None,
        metadata={"help": "Attention budget: share of the gate's mass that each query keeps, in (0, 1]. Default: the "
                          "model's config.sparse_attention, else 0.8."},
    )  # fmt: skip
    base_top_k: int | None = field(
        default=None,
        metadata={"help": "Attention budget in blocks per query, the own one included (MoBA's k), instead of "
                          "base_top_p. Tuned per micro-batch and layer: with --anchor mean, min or max."},
    )  # fmt: skip
    block_size: int | None = field(
        default=None,
        metadata={"help": "Tokens per attention block. Default: the model's config.sparse_attention, else 128."},
    )
    tolerance: float = field(
        default=0.1,
        metadata={"help": "Largest loss of coverage that tuning (DST) may cost a micro-batch: no budget falls below "
                          "base_top_p - tolerance, and no layer loses more against base_top_k. 0 turns tuning off; "
                          "the paper uses .1 and .2."},
    )  # fmt: skip
    anchor: str | None = field(
        default=None,
        metadata={"help": f"What tuning aims at: {', '.join(ANCHORS)}. min, mean and max of the predicted latencies "
                          "are the paper's; optimal is the least step time at the same mean budget. Default: optimal, "
                          "or mean with a top_k."},
    )  # fmt: skip
    scope: str = field(
        default="auto",
        metadata={"help": f"Where ranks wait for each other: auto, {', '.join(SCOPES)}. auto is rank (once a step) "
                          "with plain data parallelism, slot (at every micro-batch) where parameters are sharded "
                          "(FSDP, ZeRO-3), microbatch with pipelines."},
    )  # fmt: skip
    batching: str = field(
        default="sparsity_aware",
        metadata={"help": f"How batches are composed: {', '.join(STRATEGIES)}."},
    )
    window: int = field(
        default=4,
        metadata={"help": "Global batches that sparsity_aware batching plans together. With 1 every optimizer step "
                          "sees the samples that random order would give it, hence the same gradient."},
    )  # fmt: skip
    max_tokens: int | None = field(
        default=None,
        metadata={"help": "Most tokens of one micro-batch (memory). With it sparsity_aware batching is free in how "
                          "many documents it packs into each."},
    )  # fmt: skip
    profile: str | None = field(
        default=None,
        metadata={"help": "Latency profile of this device and model, written by `sparsebalance profile`. Needed by "
                          "sparsity_aware and wlb batching and by tuning."},
    )  # fmt: skip
    rank_speed: str = field(
        default="equal",
        metadata={"help": "auto: a rank that takes longer than the others for the same work gets less of it (clusters "
                          "of unlike machines). equal: all count as alike; a slow one is only reported."},
    )  # fmt: skip
    refit: bool = field(
        default=True,
        metadata={"help": "Re-fit the predictor's constants from measured times while training. Off, the budgets are "
                          "reproducible to the bit."},
    )  # fmt: skip
    pipeline_parallel_size: int = field(
        default=1,
        metadata={"help": "Processes of a pipeline, each with some of the layers; all processes together make "
                          "pipelines of this size, which are the data-parallel ranks. 1: no pipelines."},
    )  # fmt: skip
    pipeline_schedule: str = field(
        default="1f1b",
        metadata={"help": f"Order of a pipeline's operations, as torch has it: {', '.join(SCHEDULES)}."},
    )
    num_ranks: int | None = field(
        default=None,
        metadata={"help": "Refuse to start unless exactly so many ranks have found each other."},
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            # Must be known before the process group is made: without it ranks on a CPU do not find each other.
            self.use_cpu = True
        if self.use_cpu:
            # transformers would make it without --ddp_timeout, and then finds it made.
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
        # The buffers of a causal language model are constants; broadcasting them makes ranks wait for rank 0 inside
        # the first forward pass of a step, which would then count as its time.  All parameters take part.
        if self.ddp_broadcast_buffers is None:
            self.ddp_broadcast_buffers = False
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False
        super().__post_init__()
        self._check_ranges()
        self._check_inherited()
        if self.pipeline_parallel_size > 1:
            self._check_pipeline()

    def anchor_for(self, top_k: int | None) -> str:
        """The anchor given, or the best that the budget allows: `optimal` needs a top_p."""
        return self.anchor or ("optimal" if top_k is None else "mean")

    def _check_ranges(self) -> None:
        if self.base_top_p is not None and not 0.0 < self.base_top_p <= 1.0:
            raise UserError(f"--base_top_p must lie in (0, 1], got {self.base_top_p}: .5 to .9 are usual")
        if self.base_top_p is not None and self.base_top_k is not None:
            raise UserError("--base_top_p and --base_top_k are two budgets for one thing: give one of them")
        if not 0.0 <= self.tolerance < 1.0:
            raise UserError(
                f"--tolerance must lie in [0, 1), got {self.tolerance}: .1 or .2 are usual, 0 turns it off"
            )
        if self.base_top_p is not None and self.tolerance >= self.base_top_p:
            raise UserError(
                f"--tolerance ({self.tolerance}) must be smaller than --base_top_p ({self.base_top_p}): no coverage "
                "would be left"
            )
        for name, value, known in (
            ("anchor", ANCHORS[0] if self.anchor is None else self.anchor, ANCHORS),
            ("scope", self.scope, ("auto", *SCOPES)),
            ("batching", self.batching, STRATEGIES),
            ("pipeline_schedule", self.pipeline_schedule, SCHEDULES),
            ("rank_speed", self.rank_speed, ("equal", "auto")),
        ):
            if value not in known:
                raise UserError(f"--{name} must be one of {', '.join(known)}, got {value!r}")
        for name, number in (
            ("base_top_k", self.base_top_k),
            ("block_size", self.block_size),
            ("window", self.window),
            ("max_tokens", self.max_tokens),
            ("num_ranks", self.num_ranks),
            ("pipeline_parallel_size", self.pipeline_parallel_size),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps),
            ("per_device_train_batch_size", self.per_device_train_batch_size),
        ):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise UserError(f"--{name} must be a whole number from 1 up, got {number!r}")
        if not math.isfinite(self.num_train_epochs):
            raise UserError(f"--num_train_epochs must be a number of epochs, got {self.num_train_epochs}")
        if min(self.seed, self.data_seed or 0) < 0:
            raise UserError("--seed and --data_seed must not be negative")

    def _check_pipeline(self) -> None:
        """What is computed from logits, or needs the whole model, cannot be had where no process has either."""
        for name, given in (
            ("fp16", self.fp16),
            ("label_smoothing_factor", self.label_smoothing_factor),
            ("load_best_model_at_end", self.load_best_model_at_end),
            ("torch_compile", self.torch_compile),
            ("neftune_noise_alpha", self.neftune_noise_alpha),
        ):
            if given:
                raise UserError(f"--{name} does not go with --pipeline_parallel_size: leave one of them out")

    def _check_inherited(self) -> None:
        if self.train_sampling_strategy != "random":
            raise UserError(
                f"--train_sampling_strategy {self.train_sampling_strategy} would be ignored: batches are composed by "
                "--batching"
            )
        if self.accelerator_config.dispatch_batches or self.accelerator_config.split_batches:
            raise UserError(
                "accelerator_config dispatch_batches and split_batches hand batches out themselves: leave them off, "
                "--batching gives each rank its own"
            )
        if self.ignore_data_skip:
            raise UserError("--ignore_data_skip would repeat documents after a resume: leave it off")
        if self.enable_jit_checkpoint:
            raise UserError(
                "--enable_jit_checkpoint lets each rank save when it likes: leave it off, on SIGTERM all ranks save "
                "together after the step"
            )
        if self.auto_find_batch_size:
            raise UserError(
                "--auto_find_batch_size changes the plan in the middle of a run: bound --max_tokens instead"
            )
        if not self.average_tokens_across_devices:
            raise UserError(
                "--average_tokens_across_devices must stay on: with uneven micro-batches the loss is normalised over "
                "the global batch's tokens"
            )


def check_writable(folder: str) -> None:
    """Find out now, not after hours of training, whether ``--output_dir`` can be written; leaves nothing behind.

    Raises:
        UserError: the folder cannot be made, or a file in it cannot be written.
    """
    path = Path(folder).absolute()
    try:
        while not path.exists():
            path = path.parent
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be written ({os.strerror(error.errno or 0)})") from error
