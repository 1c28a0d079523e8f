"""Runs whose ranks do not agree: each must be refused, on both ranks."""

import os

import job_setup
import tiny_run
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_sparsebalance.distributed import check_replicas
from hf_sparsebalance.errors import UserError

out = job_setup.out_folder()
refusals = {}


def attempt(name, args, data=None, model=None):
    """Remember the refusal of a run."""
    model = model or job_setup.build_model()
    if args.tolerance:
        args.profile = args.profile or tiny_run.write_profile(out / f"profile-{name}-{rank}.json", model, args)
    try:
        job_setup.train(model, args, data)
        refusals[name] = None
    except UserError as error:
        refusals[name] = str(error)


args = job_setup.arguments(out / "data")
rank = args.process_index
other = job_setup.documents()
other[3] = other[3] + [1] * rank  # one document is a token longer on rank 1
attempt("data", args, other)
attempt("options", job_setup.arguments(out / "options", seed=3 + rank))
attempt("world", job_setup.arguments(out / "world", num_ranks=3))
model, args = job_setup.build_model(), job_setup.arguments(out / "profile")
args.profile = tiny_run.write_profile(out / f"profile-profile-{rank}.json", model, args, factor=1.0 + rank)
attempt("profile", args)
sharded = job_setup.build_model()
fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
attempt("sharded", job_setup.arguments(out / "sharded"), model=sharded)
untuned = {"tolerance": 0.0, "batching": "random"}
model = job_setup.build_model()
model.config.rms_norm_eps *= 1.0 + rank
attempt("model", job_setup.arguments(out / "model", **untuned), model=model)
version = transformers.__version__
transformers.__version__ = f"{version}+{rank}"
attempt("versions", job_setup.arguments(out / "versions", **untuned))
transformers.__version__ = version
os.environ["ACCELERATE_USE_FSDP"] = "true"
attempt("fsdp", job_setup.arguments(out / "fsdp"))
try:
    check_replicas([torch.nn.Parameter(torch.full((3,), float(rank)))])
    refusals["replicas"] = None
except UserError as error:
    refusals["replicas"] = str(error)
check_replicas([torch.nn.Parameter(torch.tensor([float("nan")]))])  # alike on both ranks: another fault's business
check_replicas([])
job_setup.report("refused", refusals=refusals)
