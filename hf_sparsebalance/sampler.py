"""A plan as transformers' sampler.

``BatchRebalanceSampler`` is the one class that Trainer passes on as a rank-aware batch sampler; Trainer asks for it by
``isinstance``, neither shards it again nor drops anything of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_sparsebalance.planner import Planner


class PlanSampler(BatchRebalanceSampler):
    """Yields this rank's micro-batches (lists of sample numbers) of one epoch, in the plan's order.

    Args:
        planner: asked for the epoch's batches when iteration starts.
        rank: which rank of the plan to yield.

    Call ``set_epoch`` at every epoch's start: Trainer's own call does not reach a sampler behind the batches that a
    resumed run skips, and epoch 0 would be repeated.
    """

    def __init__(self, planner: Planner, rank: int) -> None:
        settings = planner.settings
        super().__init__(
            lengths=list(planner.lengths),
            effective_batch_size=settings.global_batch,
            dp_size=settings.num_ranks,
            grad_accum=settings.num_slots,
            seed=settings.seed,
            rank=rank,
        )
        self.planner = planner

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.planner.batches(self.epoch).steps:
            for samples in step[self.rank]:
                yield list(samples)

    def __len__(self) -> int:
        return self.planner.num_steps * self.planner.settings.num_slots
