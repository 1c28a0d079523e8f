"""Two tuned epochs with a checkpoint after every step, resumed where there is one; argument 2 is what goes wrong.

PLACE:RANK:STEP kills that rank in that place of that step; place hang lets it hang in the forward pass, term sends it
SIGTERM, nan spoils its loss, memory is out for it, and from full on it can write no file of more than 64 KiB.
"""

import os
import resource
import signal
import sys
import time

import job_setup
import tiny_run
import torch
from transformers import TrainerCallback

from hf_sparsebalance.checkpoints import last_complete

fault = tuple(sys.argv[2].split(":")) if len(sys.argv) > 2 else None
folder = job_setup.out_folder() / "run"
args = job_setup.arguments(
    folder,
    num_train_epochs=2,
    save_strategy="steps",
    save_steps=1,
    save_total_limit=2,
    optim="adamw_torch",
    learning_rate=1e-3,
    refit=False,
    ddp_timeout=int(os.environ.get("JOB_DDP_TIMEOUT", "1800")),
)


def struck(place, global_step):
    """Whether it is this rank's turn, in this place and step (the number of whole steps before it)."""
    return (place, str(args.process_index), str(global_step + 1)) == fault


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Trainer(job_setup.Trainer):
    """Dies inside the save: rank 0 with half of the optimizer's file written, others before their random state."""

    def _save_optimizer_and_scheduler(self, output_dir):
        if struck("optimizer-file", self.state.global_step - 1):
            with open(os.path.join(output_dir, "optimizer.pt"), "wb") as file:
                file.write(b"half")
            die()
        super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir):
        if struck("random-state", self.state.global_step - 1):
            die()
        super()._save_rng_state(output_dir)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        done = self.state.global_step
        if struck("forward", done):
            die()
        if struck("hang", done):
            time.sleep(3600)
        if struck("memory", done):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        if struck("full", done):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        if struck("term", done):
            os.kill(os.getpid(), signal.SIGTERM)
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if struck("backward", done):
            # The head's gradient comes first: those of the layers are still to come.
            self.model.lm_head.weight.register_hook(lambda gradient: die())
        return loss * torch.nan if struck("nan", done) else loss


class Killer(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if struck("optimizer", state.global_step):
            die()


model = job_setup.build_model()
args.profile = tiny_run.write_profile(job_setup.out_folder() / f"profile-{args.process_index}.json", model, args)
trainer, recorder = job_setup.train(
    model, args, trainer_class=Trainer, callbacks=[Killer()], resume=last_complete(str(folder)) is not None
)
job_setup.report(
    "faults",
    steps=[[entry[name] for name in ("loss", "grad_norm", "top_p")] for entry in trainer.state.log_history[:6]],
    parameters=recorder.parameters[-1],
)
