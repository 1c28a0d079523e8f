"""Training without tuning in fp64, with and without an evaluation before: losses and parameters after each step."""

import job_setup
import torch

for name in ("parity", "evaluated"):
    args = job_setup.arguments(job_setup.out_folder() / name, tolerance=0.0, batching="random")
    trainer, recorder = job_setup.train(job_setup.build_model(torch.float64), args, evaluate_first=name == "evaluated")
    job_setup.report(
        name,
        micro_batches=recorder.micro_batches,
        parameters=recorder.parameters,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    )
