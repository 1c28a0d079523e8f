"""Trainer callbacks: epoch order, feedback after each step, and the progress bar."""

from __future__ import annotations

import torch
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_sparsebalance.balance import StepBalance
from hf_sparsebalance.distributed import ProcessGroup, check_replicas
from hf_sparsebalance.sampler import PlanSampler
from hf_sparsebalance.timing import MicroBatchClock


class SparseBalanceCallback(TrainerCallback):
    """Feeds back what a step measured.

    Args:
        balance: of the run.
        sampler: whose epoch is set here, because Trainer's own call misses it after a resume.
        replicas: processes that hold the same parameters; None: all of them.
    """

    def __init__(self, balance: StepBalance, sampler: PlanSampler, replicas: ProcessGroup | None) -> None:
        self.balance = balance
        self._replicas = replicas
        self.sampler = sampler
        self._parameters: list[torch.nn.Parameter] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._replicas_checked = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        **kwargs: object,
    ) -> None:
        # Only now: wrapping for FSDP has put other parameters in the place of the model's own.
        self._parameters = list(model.parameters())
        if isinstance(self.balance.clock, MicroBatchClock):
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
            check_replicas(self._parameters, self._replicas)
            self._replicas_checked = True
        if self.balance.leaves:
            control.should_save = control.should_training_stop = True


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
