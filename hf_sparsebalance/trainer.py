"""The Trainer: asks the plan, calls the model, feeds back what it measured."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import TrainOutput, rotate_checkpoints

from hf_sparsebalance.arguments import SparseBalanceArguments, check_writable
from hf_sparsebalance.attention import ATTENTION_NAME, SparseAttentionDefaults
from hf_sparsebalance.balance import StepBalance
from hf_sparsebalance.callback import BalanceProgressCallback, SparseBalanceCallback
from hf_sparsebalance.checkpoints import (
    WRITE_ERRORS,
    checkpoint_folder,
    forget_state,
    last_complete,
    read_state,
    write_state,
)
from hf_sparsebalance.distributed import barrier, check_same, check_world, silent_ranks
from hf_sparsebalance.documents import check_lengths
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile
from hf_sparsebalance.pipeline_trainer import PipelineMixin
from hf_sparsebalance.planner import Planner
from hf_sparsebalance.plans import PlanSettings
from hf_sparsebalance.profiling import training_context
from hf_sparsebalance.sampler import PlanSampler
from hf_sparsebalance.termination import EXIT_STATUS
from hf_sparsebalance.timing import MicroBatchClock, OperationClock
from hf_sparsebalance.topology import Topology, check_topology, sharded_when_loaded, topology_of
from hf_sparsebalance.tuning import OPTIMAL_NEEDS_TOP_P

RUN_LOG = "balance.jsonl"

logger = logging.getLogger(__name__)


class SparseBalanceMixin(PipelineMixin):
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
        """Train; see ``transformers.Trainer.train``.  A resumed run plans on from the checkpoint's balance state.

        Raises:
            SystemExit: some rank got SIGTERM; all have saved a checkpoint after the step that ran.
        """
        if not isinstance(self.args, SparseBalanceArguments):
            raise UserError(f"args must be SparseBalanceArguments, got {type(self.args).__name__}")
        if resume_from_checkpoint and sharded_when_loaded(self.model):
            raise UserError(
                "--resume_from_checkpoint with a model that was sharded when it was loaded: transformers stores only "
                "rank 0's share of its optimizer; load the model from the checkpoint and start a new run"
            )
        if resume_from_checkpoint:
            resume_from_checkpoint = checkpoint_folder(resume_from_checkpoint, self.args.output_dir)
        check_writable(self.args.output_dir)
        check_world(self.args.num_ranks)
        if resume_from_checkpoint and self.args.pipeline_parallel_size > 1:
            if self._pipeline is not None:
                raise UserError("--resume_from_checkpoint after train() with pipelines: make a new trainer")
            # Into the whole model: later each process has only some of its layers.
            self._load_from_checkpoint(resume_from_checkpoint)
        balance, sampler = self._set_up_balance()
        if resume_from_checkpoint:
            balance.planner.load_state_dict(read_state(resume_from_checkpoint))
        self._balance, self._plan_sampler = balance, sampler
        self._forget_evaluation()
        replicas = None
        if self._pipeline is not None:
            replicas = self._pipeline.groups.data
            # accelerate would wrap it for data parallelism, and broadcast the first stage to all.
            self.model._is_accelerate_prepared = True
        callback = SparseBalanceCallback(balance, sampler, replicas)
        self.add_callback(callback)
        bar = self.pop_callback(ProgressCallback)
        if bar is not None:
            self.add_callback(BalanceProgressCallback(balance))
        try:
            # Outside of all else: when a rank dies, the launcher sends SIGTERM to those that are just finding out.
            with balance.termination:
                output = self._train_or_name_the_dead(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            self.remove_callback(callback)
            if bar is not None:
                self.remove_callback(BalanceProgressCallback)
                self.add_callback(bar)
            self._balance = None
        if balance.leaves:
            logger.warning("SIGTERM: saved after %d steps, leaving", self.state.global_step)
            raise SystemExit(EXIT_STATUS)
        return output

    def _train_or_name_the_dead(
        self, resume_from_checkpoint: str | None, trial: Any, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        except RuntimeError as error:
            if silent := silent_ranks(error):
                raise UserError(
                    f"rank {', '.join(map(str, silent))} died or hangs: no answer after {self.state.global_step} "
                    "whole steps; see what it wrote itself, and go on with --resume_from_checkpoint true"
                ) from error
            raise

    def _forget_evaluation(self) -> None:
        """Undo what ``evaluate()`` before ``train()`` does: it marks the bare model as prepared, and accelerate then
        never wraps it in DDP, so that each rank would train a model of its own (accelerate 1.15, without a word).
        """
        if self.model_wrapped is self.model and getattr(self.model, "_is_accelerate_prepared", False):
            del self.model._is_accelerate_prepared
            self.accelerator.free_memory()

    def _set_up_balance(self) -> tuple[StepBalance, PlanSampler]:
        args, config = self.args, self.model.config
        topology = self.topology()
        lengths = check_lengths(self.train_dataset)
        planner = build_planner(config, args, lengths, self._train_batch_size, topology)
        settings, predictor = planner.settings, planner.predictor
        check_topology(topology, self.model, self.accelerator, settings.tunes and settings.base_top_k is not None)
        if settings.tunes:
            logger.info("tuning with scope %s on %d ranks", settings.scope, settings.num_ranks)
        versions = [platform.python_version(), torch.__version__, transformers.__version__, accelerate.__version__]
        check_same(
            "training data, options, model configuration, profile or versions",
            [
                list(lengths),
                repr(settings),
                config.to_json_string(use_diff=False),
                predictor and predictor.profile.to_json(),
                versions,
            ],
        )
        sparse = config._attn_implementation == ATTENTION_NAME
        log = Path(args.output_dir) / RUN_LOG
        clock: MicroBatchClock | OperationClock = MicroBatchClock(args.device)
        if topology.pipeline_size > 1:
            self._cut(planner)
            clock = self._pipeline.pipeline.clock
        balance = StepBalance(planner, clock, log, sparse, topology)
        return balance, PlanSampler(planner, topology.rank)

    def topology(self) -> Topology:
        """How the processes share the model and the work."""
        return topology_of(self.model, self.accelerator, self.args.pipeline_parallel_size)

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
        if self._pipeline is not None:
            return self._pipeline_step(inputs)
        try:
            with self._balance.clock.micro_batch():
                loss = super().training_step(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError as error:
            raise self._balance.out_of_memory() from error
        self._balance.saw_loss(loss)
        return loss

    def _pipeline_step(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Hold a micro-batch; the last one of a step runs them all."""
        assert self._pipeline is not None and self._balance is not None
        if not self._pipeline.hold(self._prepare_inputs(inputs)):
            return torch.zeros((), device=self.args.device)
        try:
            loss, losses = self._pipeline.step()
        except torch.OutOfMemoryError as error:
            raise self._balance.out_of_memory() from error
        for each in losses:
            self._balance.saw_loss(each)
        return loss

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Wraps the forward pass with its loss; leaving it marks where the backward pass starts."""
        stack = super().compute_loss_context_manager()
        if self._balance is not None and self._pipeline is None:
            stack.callback(self._balance.clock.forward_ended)
        return stack

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A checkpoint counts, and may replace older ones, once every rank has written its part."""
        if self._balance is None:
            super()._save_checkpoint(model, trial)
            return
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            forget_state(folder)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        except WRITE_ERRORS as error:
            if silent_ranks(error):
                raise
            raise UserError(
                f"{folder} could not be written ({str(error).splitlines()[0]}): is the disk full? It will not be "
                f"picked up; make room, and go on from {last_complete(str(folder.parent)) or 'the start'} with "
                "--resume_from_checkpoint true"
            ) from error
        finally:
            self.args.save_total_limit = limit
        self._balance.settle()
        barrier()
        if self.args.should_save:
            write_state(folder, self._balance.planner.state_dict())
            rotate_checkpoints(str(folder.parent), limit, self.state.best_model_checkpoint, use_mtime=True)

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
        if train_dataset is not None and not hasattr(train_dataset, "__len__"):
            # Trainer would ask for max_steps instead, which does not help.
            check_lengths(train_dataset)
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


def build_planner(
    config: PreTrainedConfig,
    args: SparseBalanceArguments,
    lengths: Sequence[int],
    batch_size: int,
    topology: Topology,
) -> Planner:
    """The plan of a run, from everything but the model's weights; every refusal that needs no weights comes from here.

    Args:
        config: of the model, with its attention set; gets ``sparse_attention`` as the arguments override it.
        args: of the run; the process group must be up.
        lengths: tokens of each training document.
        batch_size: documents per micro-batch.
        topology: of the run.

    Raises:
        UserError: data, profile and options do not go together.
    """
    sparse = config._attn_implementation == ATTENTION_NAME
    if not sparse and args.tolerance > 0.0:
        raise UserError(
            f"--tolerance {args.tolerance} tunes sparse attention, but the model attends through "
            f"{config._attn_implementation!r}: load it with attn_implementation='sparsebalance', or --tolerance 0"
        )
    defaults = _model_defaults(config, args) if sparse else None
    profile = None if args.profile is None else LatencyProfile.load(args.profile)
    block_size = 128 if defaults is None else defaults.block_size
    if profile is not None:
        profile.check(training_context(config, args, block_size, args.device))
    if args.rank_speed == "auto" and (profile is None or topology.meets_every_micro_batch):
        raise UserError(
            "--rank_speed auto compares each rank's own time with a prediction: it needs --profile, and ranks that do "
            "not wait for each other in every micro-batch, as sharded ones (FSDP, ZeRO-3) do; leave it out"
        )
    least_top_k, base_top_k = _top_k_of(defaults)
    settings = PlanSettings(
        batching=args.batching,
        num_ranks=topology.num_ranks,
        num_slots=args.gradient_accumulation_steps,
        batch_size=batch_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        window=args.window,
        max_tokens=args.max_tokens,
        base_top_p=None if defaults is None else defaults.top_p,
        tolerance=args.tolerance,
        anchor=args.anchor_for(base_top_k),
        scope=topology.scope(args.scope),
        block_size=block_size,
        refit=args.refit,
        base_top_k=base_top_k,
        least_top_k=least_top_k,
        num_stages=topology.pipeline_size,
        rank_speed=args.rank_speed == "auto",
    )
    predictor = None if profile is None else LatencyPredictor(profile)
    epochs = args.num_train_epochs
    if args.max_steps > 0:
        epochs = args.max_steps / max(1, len(lengths) // settings.global_batch)
    return Planner(settings, lengths, predictor, num_epochs=max(1, math.ceil(epochs)))


def _top_k_of(defaults: SparseAttentionDefaults | None) -> tuple[int, int | None]:
    """(smallest k that makes a difference, base k or None): the bounds on blocks hold beside the k."""
    if defaults is None or defaults.top_k is None:
        return 1, None
    least = 1 + max(defaults.min_blocks, defaults.sink_blocks)
    base = max(defaults.top_k, least)
    return least, base if defaults.max_blocks is None else min(base, 1 + defaults.max_blocks)


def _model_defaults(config: Any, args: SparseBalanceArguments) -> SparseAttentionDefaults:
    """The model's defaults with what the arguments override, written back to its config (and so to config.json)."""
    settings = dict(getattr(config, "sparse_attention", None) or {})
    if args.base_top_p is not None:
        settings |= {"top_p": args.base_top_p, "top_k": None}
    if args.base_top_k is not None:
        settings |= {"top_p": None, "top_k": args.base_top_k}
    if args.block_size is not None:
        settings["block_size"] = args.block_size
    config.sparse_attention = settings
    defaults = SparseAttentionDefaults.of(config)
    if defaults.top_k is not None and args.tolerance > 0 and args.anchor == "optimal":
        raise UserError(OPTIMAL_NEEDS_TOP_P)
    if args.tolerance > 0 and defaults.max_blocks is not None:
        raise UserError(
            "--tolerance > 0 with sparse_attention.max_blocks: tuning does not know that bound; leave max_blocks out, "
            "or --tolerance 0"
        )
    if defaults.top_p is not None and args.tolerance >= defaults.top_p:
        raise UserError(f"--tolerance ({args.tolerance}) must be smaller than the base top_p ({defaults.top_p})")
    budget = {"top_p": defaults.top_p, "top_k": defaults.top_k}
    config.sparse_attention = {**settings, **budget, "block_size": defaults.block_size}
    return defaults
