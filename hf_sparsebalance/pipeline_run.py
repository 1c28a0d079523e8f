"""A model that a Trainer trains in pipelines: cut into stages by predicted time, stepped, evaluated, saved, resumed.

A Trainer goes through micro-batches one by one and knows nothing of stages.  Here they are held until the step is
complete; then torch's schedule runs them all, and the gradients are what the optimizer expects: summed over the
pipelines, a tied weight's two copies alike.  A checkpoint's model is an ordinary one, gathered from all stages; the
optimizer's state lies beside it, one file per process of a pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from hf_sparsebalance.attention import ATTENTION_NAME, SparseAttentionDefaults
from hf_sparsebalance.distributed import add_up, pipeline_groups, sum_gradients
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.pipeline import Pipeline
from hf_sparsebalance.planner import Planner
from hf_sparsebalance.stage_model import make_stages, weight_entries
from hf_sparsebalance.stages import ModelTimes, cut_layers, predict_times
from hf_sparsebalance.torch_schedules import worker_stages

SCHEDULER_FILE = "scheduler.pt"


class PipelineRun:
    """This process's part of a pipeline.

    Args:
        model: whole; what other processes hold is taken out of it.
        planner: of the run, before it has learned anything, so that a resumed run cuts alike.
        pipeline_size: processes of a pipeline.
        schedule: one of ``torch_schedules.SCHEDULES``.
        device: where the model is.
        autocast: dtype of mixed precision, or None.

    Raises:
        UserError: the model, the schedule or the number of processes does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: Planner,
        pipeline_size: int,
        schedule: str,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self.groups = pipeline_groups(pipeline_size, device)
        every = worker_stages(schedule, pipeline_size)
        self.cuts = cut_layers(model_times(model, planner), sum(map(len, every)))
        stages = make_stages(model, self.cuts, every[self.groups.pipeline_rank], autocast)
        self.pipeline = Pipeline(stages, schedule, self.groups.pipeline, device)
        self._num_slots = planner.settings.num_slots
        self.pipeline.engine(self._num_slots)  # refused now, not in the first step
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._held: list[dict[str, Any]] = []

    def hold(self, micro_batch: Mapping[str, Any]) -> bool:
        """Keep a micro-batch until the step is complete; returns whether it is."""
        self._held.append(dict(micro_batch))
        return len(self._held) == self._num_slots

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of the micro-batches held.

        Returns:
            The loss over the target tokens of all pipelines, and each micro-batch's part of it, ``[micro-batches]``.
        """
        held, self._held = self._held, []
        targets = torch.stack([(each["labels"][..., 1:] != -100).sum() for each in held]).sum()
        add_up(targets, self.groups.data)
        losses = self.pipeline.train_step([{**each, "num_items_in_batch": targets} for each in held])
        sum_gradients(self._trainable, self.groups.data)
        self.pipeline.sum_tied_gradients()
        loss = losses.sum()
        add_up(loss, self.groups.data)
        return loss, losses

    def mean_losses(self, micro_batches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Mean loss per target token of each micro-batch, without gradients: ``[micro-batches]``.

        They run in groups of a step's size, as a schedule may want so many; the last group is filled up with copies.
        """
        losses = []
        for first in range(0, len(micro_batches), self._num_slots):
            group = list(micro_batches[first : first + self._num_slots])
            losses.append(self.pipeline.evaluate(group + group[-1:] * (self._num_slots - len(group)))[: len(group)])
        return torch.cat(losses)

    def weighted_loss(self, micro_batches: Sequence[Mapping[str, Any]], weights: Sequence[int]) -> float:
        """Weighted mean of the micro-batches' mean losses; the pipelines share the work, collective over all."""
        size, rank = self.groups.data_size, self.groups.data_rank
        sums = torch.zeros(2, dtype=torch.float64)
        if own := micro_batches[rank::size]:
            own_weights = torch.tensor(weights[rank::size], dtype=torch.float64)
            sums[0], sums[1] = (self.mean_losses(own).cpu().double() * own_weights).sum(), own_weights.sum()
        sums = sums.to(self.pipeline.device)
        add_up(sums, self.groups.data)
        return float(sums[0] / sums[1])

    def gather(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """What a file of the whole model, or of its adapter, holds, on the first process, else None; collective over
        the first pipeline."""
        if self.groups.data_rank:
            return None
        state = get_peft_model_state_dict(model) if isinstance(model, PeftModel) else model.state_dict()
        return self.pipeline.gather_state_dict(state)

    def save_optimizer(self, folder: str, optimizer: Any, scheduler: Any) -> None:
        """One file per process of the first pipeline; the others hold the same."""
        if self.groups.data_rank:
            return
        os.makedirs(folder, exist_ok=True)
        cuts = [[cut.start, cut.stop] for cut in self.cuts]
        torch.save({"cuts": cuts, "optimizer": optimizer.state_dict()}, self._optimizer_file(folder))
        if self.groups.pipeline_rank == 0:
            torch.save(scheduler.state_dict(), Path(folder) / SCHEDULER_FILE)

    def load_optimizer(self, folder: str, optimizer: Any, scheduler: Any) -> None:
        """What ``save_optimizer`` wrote.

        Raises:
            UserError: the model was cut otherwise.
        """
        path = self._optimizer_file(folder)
        if not path.exists():
            raise UserError(
                f"--resume_from_checkpoint: {path} is missing: that run had another --pipeline_parallel_size; resume "
                "with the same, or start a new run from its model"
            )
        saved = torch.load(path, map_location="cpu", weights_only=True)
        cuts = [[cut.start, cut.stop] for cut in self.cuts]
        if saved["cuts"] != cuts:
            raise UserError(
                f"--resume_from_checkpoint: that run's stages had the layers {saved['cuts']} (now {cuts}): resume "
                "with the same --pipeline_schedule, --profile and budget, or start a new run from its model"
            )
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(torch.load(Path(folder) / SCHEDULER_FILE, weights_only=True))

    def _optimizer_file(self, folder: str) -> Path:
        return Path(folder) / f"optimizer_{self.groups.pipeline_rank}.pt"


def model_times(model: nn.Module, planner: Planner) -> ModelTimes:
    """Predicted time of each layer and of the head over the training documents; by multiplications alone where there
    is no profile.

    Raises:
        UserError: the model has another layout than stages are cut from.
    """
    layer_weights, head_weights = weight_entries(model)
    if planner.predictor is None:
        return ModelTimes(tuple(map(float, layer_weights)), head_ms=float(head_weights))
    config = model.config
    dense: Sequence[int] = range(len(layer_weights))
    if config._attn_implementation == ATTENTION_NAME:
        dense = SparseAttentionDefaults.of(config).dense_layers
    return predict_times(
        planner.predictor, planner.lengths, planner.base_densities(), layer_weights, head_weights, dense
    )
