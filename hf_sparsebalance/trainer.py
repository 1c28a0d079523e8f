"""The Trainer: asks the plan, calls the model, feeds back what it measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from hf_sparsebalance.arguments import SparseBalanceArguments, check_writable
from hf_sparsebalance.attention import ATTENTION_NAME, SparseAttentionDefaults
from hf_sparsebalance.balance import StepBalance
from hf_sparsebalance.callback import BalanceProgressCallback, SparseBalanceCallback, read_state
from hf_sparsebalance.distributed import check_same, check_world, rank_and_world
from hf_sparsebalance.documents import check_lengths
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor, LatencyProfile
from hf_sparsebalance.planner import Planner, PlanSettings
from hf_sparsebalance.profiling import training_context
from hf_sparsebalance.sampler import PlanSampler
from hf_sparsebalance.timing import MicroBatchClock

RUN_LOG = "balance.jsonl"


class SparseBalanceMixin:
    """Balanced training for any Trainer: ``class MyTrainer(SparseBalanceMixin, SFTTrainer)``.

    The arguments must be :class:`SparseBalanceArguments` (or a class that inherits from it), the training data
    map-style with ``input_ids``, and the collator one that packs without padding, such as
    ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``.

    Raises (from ``train``):
        UserError: data, model, profile and options do not go together; the message names the option and the way out.
    """

    _balance: StepBalance | None = None
    _plan_sampler: PlanSampler | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train; see ``transformers.Trainer.train``.  A resumed run plans on from the checkpoint's balance state."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise UserError(f"--resume_from_checkpoint: no checkpoint in {self.args.output_dir}")
        check_writable(self.args.output_dir)
        check_world(self.args.num_ranks)
        balance, sampler = self._set_up_balance()
        if resume_from_checkpoint:
            balance.planner.load_state_dict(read_state(str(resume_from_checkpoint)))
        self._balance, self._plan_sampler = balance, sampler
        callback = SparseBalanceCallback(balance, sampler, list(self.model.parameters()))
        self.add_callback(callback)
        bar = self.pop_callback(ProgressCallback)
        if bar is not None:
            self.add_callback(BalanceProgressCallback(balance))
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            self.remove_callback(callback)
            if bar is not None:
                self.remove_callback(BalanceProgressCallback)
                self.add_callback(bar)
            self._balance = None

    def _set_up_balance(self) -> tuple[StepBalance, PlanSampler]:
        args = self.args
        if not isinstance(args, SparseBalanceArguments):
            raise UserError(f"args must be SparseBalanceArguments, got {type(args).__name__}")
        config = self.model.config
        sparse = config._attn_implementation == ATTENTION_NAME
        if not sparse and args.tolerance > 0.0:
            raise UserError(
                f"--tolerance {args.tolerance} tunes sparse attention, but the model attends through "
                f"{config._attn_implementation!r}: load it with attn_implementation='sparsebalance', or --tolerance 0"
            )
        defaults = _model_defaults(config, args) if sparse else None
        lengths = check_lengths(self.train_dataset)
        rank, world = rank_and_world()
        settings = PlanSettings(
            batching=args.batching,
            num_ranks=world,
            num_slots=args.gradient_accumulation_steps,
            batch_size=self._train_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            window=args.window,
            max_tokens=args.max_tokens,
            base_top_p=None if defaults is None else defaults.top_p,
            tolerance=args.tolerance,
            anchor=args.anchor,
            scope=args.scope,
            block_size=128 if defaults is None else defaults.block_size,
            refit=args.refit,
        )
        predictor = None
        if args.profile is not None:
            profile = LatencyProfile.load(args.profile)
            profile.check(training_context(config, args, settings.block_size, args.device))
            predictor = LatencyPredictor(profile)
        check_same("training data or options", [list(lengths), repr(settings)])
        planner = Planner(settings, lengths, predictor)
        log = Path(args.output_dir) / RUN_LOG
        return StepBalance(planner, MicroBatchClock(args.device), log, sparse), PlanSampler(planner, rank)

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[Any] | None:
        return self._plan_sampler or super()._get_train_sampler(train_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """One step's micro-batches, each with its budget: all of them are known here, before the first runs."""
        if self._balance is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        self._balance.start_clock()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        keywords = self._balance.begin(self.state.global_step)
        for batch, extra in zip(batches, keywords, strict=True):
            batch.update(extra)
        return batches, num_items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch, timed."""
        if self._balance is None:
            return super().training_step(model, inputs, num_items_in_batch)
        with self._balance.clock.micro_batch():
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Wraps the forward pass with its loss; leaving it marks where the backward pass starts."""
        stack = super().compute_loss_context_manager()
        if self._balance is not None:
            stack.callback(self._balance.clock.forward_ended)
        return stack

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the last step's times, imbalances and budgets to a training step's log."""
        if self._balance is not None and "loss" in logs:
            logs = {**logs, **self._balance.metrics}
        super().log(logs, start_time)


class SparseBalanceTrainer(SparseBalanceMixin, Trainer):
    """transformers' Trainer with balanced micro-batches and tuned attention budgets.

    Args:
        model: a causal language model; with ``attn_implementation="sparsebalance"`` its budgets are tuned, with any
            other attention only the batches are balanced (``tolerance=0``).
        args: :class:`SparseBalanceArguments`.
        train_dataset: map-style, rows with ``input_ids`` (and ``labels`` where they differ), best a ``length`` column.
        data_collator: default: documents packed end to end without padding.
        eval_dataset, processing_class, compute_loss_func, compute_metrics, callbacks, optimizers: as in Trainer.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        args: SparseBalanceArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or DataCollatorWithFlattening(return_flash_attn_kwargs=True),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )


def _model_defaults(config: Any, args: SparseBalanceArguments) -> SparseAttentionDefaults:
    """The model's defaults with what the arguments override, written back to its config (and so to config.json)."""
    settings = dict(getattr(config, "sparse_attention", None) or {})
    if args.base_top_p is not None:
        settings |= {"top_p": args.base_top_p, "top_k": None}
    if args.block_size is not None:
        settings["block_size"] = args.block_size
    config.sparse_attention = settings
    defaults = SparseAttentionDefaults.of(config)
    if defaults.top_p is None:
        raise UserError("config.sparse_attention sets top_k; tuning and planning need top_p: give --base_top_p")
    if args.tolerance >= defaults.top_p:
        raise UserError(f"--tolerance ({args.tolerance}) must be smaller than the base top_p ({defaults.top_p})")
    config.sparse_attention = {**settings, "top_p": defaults.top_p, "block_size": defaults.block_size}
    return defaults
