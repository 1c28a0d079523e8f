"""Rank 0 takes three times as long for every token, as its clock tells; argument 2 is --rank_speed.

The clock is told what to say: slept seconds would drown in those of a busy machine.
"""

import sys

import job_setup
import tiny_run

from hf_sparsebalance.timing import MicroBatchClock, MicroBatchTime

MS_PER_TOKEN = (3.0, 1.0)  # of either rank
LENGTHS = [5 + 7 * number % 56 for number in range(48)]
args = job_setup.arguments(
    job_setup.out_folder() / "run",
    num_train_epochs=3,
    gradient_accumulation_steps=8,
    rank_speed=sys.argv[2],
    tolerance=0.0,
    refit=True,
)
tokens = []


class Trainer(job_setup.Trainer):
    """Remembers how many tokens each micro-batch of the step has."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens.append(inputs["input_ids"].numel())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def times(clock):
    """What the clock says at a step's end."""
    rate = MS_PER_TOKEN[args.process_index]
    step = [MicroBatchTime(0.0, rate * n / 3.0, rate * n * 2.0 / 3.0) for n in tokens]
    tokens.clear()
    return step


MicroBatchClock.times = times
model = job_setup.build_model()
args.profile = tiny_run.write_profile(job_setup.out_folder() / f"profile-{args.process_index}.json", model, args)
data = [[1 + number, *[2] * (length - 1)] for number, length in enumerate(LENGTHS)]
trainer, _ = job_setup.train(model, args, data=data, trainer_class=Trainer)
steps = trainer._plan_sampler.planner.batches(2).steps
job_setup.report(
    "slow", tokens=[sum(LENGTHS[s] for step in steps for slot in step[rank] for s in slot) for rank in (0, 1)]
)
