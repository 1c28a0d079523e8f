"""What a Trainer does otherwise where its model is cut into a pipeline: steps, gradient norms, evaluation, files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import nn
from transformers.trainer_utils import EvalLoopOutput

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.heldout import heldout_loss
from hf_sparsebalance.planner import Planner

if TYPE_CHECKING:
    from hf_sparsebalance.pipeline_run import PipelineRun


class PipelineMixin:
    """Left of ``transformers.Trainer``; without ``pipeline_parallel_size`` everything is Trainer's own."""

    _pipeline: PipelineRun | None = None

    def heldout_loss(self, documents: Sequence[Sequence[int]]) -> float:
        """Nats per predicted token of held-out documents, given as token ids; collective."""
        run = self._pipeline
        if run is None:
            loss = heldout_loss(self.model, documents)["loss"]
            assert loss is not None
            return loss
        told = [document for document in documents if len(document) > 1]
        if not told:
            raise UserError("the held-out documents have one token each: there is nothing to predict")
        batches = [torch.tensor([list(document)], device=self.args.device) for document in told]
        weights = [len(document) - 1 for document in told]
        return run.weighted_loss([{"input_ids": ids, "labels": ids} for ids in batches], weights)

    def _cut(self, planner: Planner) -> None:
        """Reduce the model to this process's stages, once."""
        # Here and not above: it needs private parts of torch, and refuses versions that it was not tried with.
        from hf_sparsebalance.pipeline_run import PipelineRun

        args = self.args
        if self.compute_loss_func is not None or self.compute_metrics is not None:
            raise UserError(
                "compute_loss_func and compute_metrics need logits, which only the last stage has: leave them out, or "
                "train without --pipeline_parallel_size"
            )
        if self._pipeline is None:
            autocast = torch.bfloat16 if args.bf16 else None
            self._pipeline = PipelineRun(
                self.model, planner, args.pipeline_parallel_size, args.pipeline_schedule, args.device, autocast
            )

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._pipeline is None:
            return super()._clip_grad_norm(model)
        return self._pipeline.pipeline.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._pipeline is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._pipeline.pipeline.clip_gradients(float("inf")) if grad_norm is None else grad_norm

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Trainer's, or with pipelines the same mean loss: of batches, each counted once per document."""
        run = self._pipeline
        if run is None:
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if prediction_loss_only is False or description == "Prediction":
            raise UserError("predict() needs logits, which only a pipeline's last stage has: load the saved model")
        dataset, size = dataloader.dataset, self.args.per_device_eval_batch_size
        batches, weights = [], []
        for first in range(0, len(dataset), size):
            rows = [dataset[number] for number in range(first, min(first + size, len(dataset)))]
            batches.append(self._prepare_inputs(self.data_collator(rows)))
            weights.append(len(rows))
        loss = run.weighted_loss(batches, weights)
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": loss}, len(dataset))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's; with pipelines one ordinary model (or adapter), written by the first process."""
        if self._pipeline is None:
            super().save_model(output_dir, _internal_call)
            return
        whole, folder = self._pipeline.gather(self.model), output_dir or self.args.output_dir
        if whole is not None and isinstance(self.model, PeftModel):
            # PEFT writes of a state dict only what belongs to layers that are there.
            self._save(folder)
            save_file(whole, Path(folder) / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        elif whole is not None:
            self._save(folder, state_dict=whole)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # With pipelines before the model was cut, as it could not be loaded into a part.
        if self._pipeline is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._pipeline is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            self._pipeline.save_optimizer(output_dir, self.optimizer, self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._pipeline is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self._pipeline.load_optimizer(checkpoint, self.optimizer, self.lr_scheduler)
