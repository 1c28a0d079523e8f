"""Trainer callbacks: epoch order, feedback after each step, state in each checkpoint, and the progress bar."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_sparsebalance.balance import StepBalance
from hf_sparsebalance.distributed import check_replicas
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.sampler import PlanSampler

STATE_FILE = "sparsebalance_state.json"


class SparseBalanceCallback(TrainerCallback):
    """Feeds back what a step measured, and keeps the planner's state in each checkpoint.

    Args:
        balance: of the run.
        sampler: whose epoch is set here, because Trainer's own call misses it after a resume.
        parameters: whose gradients mark the end of a backward pass.
    """

    def __init__(self, balance: StepBalance, sampler: PlanSampler, parameters: list[torch.nn.Parameter]) -> None:
        self.balance = balance
        self.sampler = sampler
        self._parameters = parameters
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._replicas_checked = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._handles = self.balance.clock.watch(self._parameters)
        self.balance.forget_after(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self.balance.settle()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        epoch = state.global_step // self.balance.planner.num_steps
        self.sampler.set_epoch(epoch)
        self.balance.plan_epoch(epoch)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.balance.end(state.global_step)
        if not self._replicas_checked:
            check_replicas(self._parameters)
            self._replicas_checked = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.is_world_process_zero:
            self.balance.settle()
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            text = json.dumps(self.balance.planner.state_dict())
            (folder / STATE_FILE).write_text(text, encoding="utf-8")


class BalanceProgressCallback(ProgressCallback):
    """transformers' progress bar, with the last step's time, imbalance and mean budget behind it."""

    def __init__(self, balance: StepBalance) -> None:
        super().__init__()
        self.balance = balance

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        super().on_step_end(args, state, control, **kwargs)
        metrics = self.balance.metrics
        if self.training_bar is not None and metrics:
            shown = {"step": f"{metrics['step_time_s']:.2f}s", "imbalance": f"{metrics['imbalance_rank']:.2f}"}
            for budget, form in (("top_p", ".2f"), ("top_k", ".1f")):
                if budget in metrics:
                    shown[budget] = format(metrics[budget], form)
            self.training_bar.set_postfix(shown)


def read_state(checkpoint: str) -> dict[str, object]:
    """The planner's state in a checkpoint folder.

    Raises:
        UserError: it is missing or not JSON.
    """
    path = Path(checkpoint) / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} is missing: this checkpoint was not written by SparseBalanceTrainer, or not to its end; resume "
            "from another"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): resume from an earlier checkpoint") from error
    if not isinstance(state, dict):
        raise UserError(f"{path} is not a balance state: resume from an earlier checkpoint")
    return state
