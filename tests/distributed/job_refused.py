"""Runs whose ranks do not agree: each must be refused, on both ranks."""

import job_setup
import torch

from hf_sparsebalance.distributed import check_replicas
from hf_sparsebalance.errors import UserError

out = job_setup.out_folder()
refusals = {}


def attempt(name, args, data=None):
    """Remember the refusal of a run."""
    model = job_setup.build_model()
    args.profile = args.profile or job_setup.write_profile(out / f"profile-{name}-{rank}.json", model, args)
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
args.profile = job_setup.write_profile(out / f"profile-profile-{rank}.json", model, args, factor=1.0 + rank)
attempt("profile", args)
try:
    check_replicas([torch.nn.Parameter(torch.full((3,), float(rank)))])
    refusals["replicas"] = None
except UserError as error:
    refusals["replicas"] = str(error)
check_replicas([torch.nn.Parameter(torch.tensor([float("nan")]))])  # alike on both ranks: another fault's business
check_replicas([])
job_setup.report("refused", refusals=refusals)
