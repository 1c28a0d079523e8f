"""Rank 0 sleeps for every token it trains on; argument 2 is --rank_speed."""

import sys
import time

import job_setup

SECONDS_PER_TOKEN = (3e-3, 1e-3)  # of either rank; a micro-batch's own work takes about 5 ms
LENGTHS = [5 + 7 * number % 56 for number in range(48)]
args = job_setup.arguments(
    job_setup.out_folder() / "run",
    num_train_epochs=3,
    gradient_accumulation_steps=8,
    rank_speed=sys.argv[2],
    tolerance=0.0,
    refit=True,
)


class Trainer(job_setup.Trainer):
    """Sleeps in the forward pass."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        time.sleep(SECONDS_PER_TOKEN[self.args.process_index] * inputs["input_ids"].numel())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


model = job_setup.build_model()
args.profile = job_setup.write_profile(job_setup.out_folder() / f"profile-{args.process_index}.json", model, args)
data = [[1 + number, *[2] * (length - 1)] for number, length in enumerate(LENGTHS)]
trainer, _ = job_setup.train(model, args, data=data, trainer_class=Trainer)
steps = trainer._plan_sampler.planner.batches(2).steps
job_setup.report(
    "slow", tokens=[sum(LENGTHS[s] for step in steps for slot in step[rank] for s in slot) for rank in (0, 1)]
)
