"""Rank 0 sleeps for every token it trains on; argument 2 is --rank_speed."""

import sys
import time

import job_setup

SECONDS_PER_TOKEN = (3e-3, 1e-3)  # of either rank; a step's own work takes about 20 ms
args = job_setup.arguments(
    job_setup.out_folder() / "run", num_train_epochs=4, rank_speed=sys.argv[2], tolerance=0.0, refit=True
)


class Trainer(job_setup.Trainer):
    """Sleeps in the forward pass."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        time.sleep(SECONDS_PER_TOKEN[self.args.process_index] * inputs["input_ids"].numel())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


model = job_setup.build_model()
args.profile = job_setup.write_profile(job_setup.out_folder() / f"profile-{args.process_index}.json", model, args)
trainer, _ = job_setup.train(model, args, trainer_class=Trainer)
job_setup.report("slow", batches=trainer._plan_sampler.planner.batches(3).steps)
