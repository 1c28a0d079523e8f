"""Training without tuning in fp64, with and without an evaluation before: losses and parameters after each step."""

import job_setup
import torch

from hf_sparsebalance.heldout import heldout_loss

for name in ("parity", "evaluated"):
    args = job_setup.arguments(job_setup.out_folder() / name, tolerance=0.0, batching="random")
    trainer, recorder = job_setup.train(job_setup.build_model(torch.float64), args, evaluate_first=name == "evaluated")
    heldout = heldout_loss(trainer.model, job_setup.documents()[:5])
    job_setup.report(
        name,
        heldout=heldout,
        micro_batches=recorder.micro_batches,
        parameters=recorder.parameters,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    )
