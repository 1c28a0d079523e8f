"""Trains each variant with each schedule on one rank of a pipeline; writes what it saw to OUT/RANK.pt.

python -m torch.distributed.run --nproc_per_node N job_pipeline.py OUT PIPELINE_SIZE SCHEDULES VARIANTS
"""

import sys
from pathlib import Path

import pipeline_cases as cases
import torch
import torch.distributed as dist

from hf_sparsebalance.distributed import check_world, pipeline_groups, sum_gradients
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.pipeline import Pipeline
from hf_sparsebalance.stage_model import make_stages
from hf_sparsebalance.stages import cut_layers
from hf_sparsebalance.torch_schedules import worker_stages

CPU = torch.device("cpu")


def build(variant, schedule):
    """This rank's part of the model, and its pipeline."""
    every = worker_stages(schedule, size)
    model = cases.build_model(variant)
    cuts = cut_layers(cases.TIMES, sum(map(len, every)))
    stages = make_stages(model, cuts, every[groups.pipeline_rank])
    return model, Pipeline(stages, schedule, groups.pipeline, CPU)


def train(variant, schedule):
    """What train_in_one_process returns, of this rank's stages, and the order of operations."""
    model, pipeline = build(variant, schedule)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=cases.LEARNING_RATE)
    seen = {"losses": [], "evaluated": [], "gradients": [], "norms": [], "stats": [], "operations": []}
    for step in range(len(cases.STEPS)):
        evaluated = cases.global_batch(step, groups.data_size)[groups.data_rank]
        seen["evaluated"].append(pipeline.evaluate(evaluated))
        optimizer.zero_grad()
        own = cases.global_batch(step, groups.data_size, collect=True)[groups.data_rank]
        seen["losses"].append(pipeline.train_step(own))
        sum_gradients(trainable, groups.data)
        pipeline.sum_tied_gradients()
        seen["norms"].append(pipeline.clip_gradients(float("inf")))
        seen["gradients"].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        seen["stats"].append([micro_batch["sparse_stats"].vectors for micro_batch in own])
        seen["operations"].append([(each.kind, each.stage, each.micro_batch) for each in pipeline.clock.operations()])
        optimizer.step()
    seen["checkpoint"] = pipeline.gather_state_dict(model.state_dict())
    return seen | {"parameters": {name: p.detach() for name, p in model.named_parameters()}}


def refusal(attempt, *arguments):
    """The one-line error of an attempt."""
    try:
        attempt(*arguments)
    except UserError as error:
        return str(error)
    return None


out, size = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
check_world(None)
groups = pipeline_groups(size, CPU)
report = {
    (schedule, variant): train(variant, schedule)
    for schedule in sys.argv[3].split(",")
    for variant in sys.argv[4].split(",")
}
report["few"] = refusal(build("plain", "1f1b")[1].train_step, cases.global_batch(0, 1)[0][:1])
report["differ"] = refusal(build, "plain", ("gpipe", "1f1b")[groups.pipeline_rank % 2])
report["odd"] = refusal(pipeline_groups, dist.get_world_size() - 1, CPU)
torch.save(report, out / f"{dist.get_rank()}.pt")
