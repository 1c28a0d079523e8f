"""Pipelines of real processes (gloo) against one process that trains the whole model on the same micro-batches."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pipeline_cases as cases
import pytest
import torch

from hf_sparsebalance.torch_schedules import SCHEDULES, operation_order, worker_stages

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
TIMEOUT_S = 600
EXACT = ("plain", "checkpointed", "lora", "lora_above")
PARALLEL = ("1f1b", "zbvzerobubble")
pytestmark = pytest.mark.slow

one_process = functools.cache(cases.train_in_one_process)


def launch(out, num_processes, schedules, variants):
    """Reports of all ranks of pipelines of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command += [str(HERE / "job_pipeline.py"), str(out), "2", ",".join(schedules), ",".join(variants)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return [torch.load(out / f"{rank}.pt") for rank in range(num_processes)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """One pipeline, every schedule and variant."""
    return launch(tmp_path_factory.mktemp("pipeline"), 2, SCHEDULES, cases.VARIANTS)


@pytest.fixture(scope="module")
def parallel_ranks(tmp_path_factory):
    """Two pipelines side by side; rank = 2 * pipeline_rank + data_rank."""
    return launch(tmp_path_factory.mktemp("parallel"), 4, PARALLEL, ("plain", "tied"))


def whole_name(name, variant):
    """Name in the whole model: a tied head's weight has the embedding's."""
    return name.replace("lm_head", "model.embed_tokens") if "tied" in cases.VARIANTS[variant] else name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variant", EXACT)
def test_a_pipeline_trains_as_one_process(ranks, schedule, variant):
    """Losses (on both ranks) and gradients of two steps, and the parameters after them, are equal to the last bit."""
    losses, gradients, _, parameters = one_process(variant, 1)
    found = set()
    for rank in ranks:
        report = rank[schedule, variant]
        for step, (mine, evaluated) in enumerate(zip(report["losses"], report["evaluated"], strict=True)):
            assert torch.equal(mine, losses[step][0])
            assert torch.equal(evaluated, losses[step][0])
            for name, gradient in report["gradients"][step].items():
                assert torch.equal(gradient, gradients[step][name]), name
        for name, value in report["parameters"].items():
            assert torch.equal(value, parameters[whole_name(name, variant)]), name
        found |= set(report["gradients"][0])
    assert found == set(gradients[0])


def check_within_rounding(report, variant, num_pipelines, data_rank):
    """Losses and gradients are no further from one process's than a few times its own rounding, known from fp64."""
    single, exact = (one_process(variant, num_pipelines, dtype) for dtype in (torch.float32, torch.float64))
    for step, losses in enumerate(report["losses"]):
        allowed = 8 * torch.finfo(torch.float32).eps * float(losses.abs().max())
        assert float((losses - exact[0][step][data_rank]).abs().max()) <= allowed
        for name, gradient in report["gradients"][step].items():
            name = whole_name(name, variant)
            wanted = exact[1][step][name]
            rounding = max(float((single[1][step][n] - exact[1][step][n]).abs().max()) for n in exact[1][step])
            assert float((gradient - wanted).abs().max()) <= 4 * rounding, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_copies_train_as_one_weight(ranks, schedule):
    """Embedding and tied head on two ranks get the gradient of the one weight, and stay equal to the last bit."""
    for rank in ranks:
        check_within_rounding(rank[schedule, "tied"], "tied", 1, 0)
    copies = [rank[schedule, "tied"]["parameters"] for rank in ranks]
    embedding = copies[0]["model.embed_tokens.weight"]
    holders = [copy["lm_head.weight"] for copy in copies if "lm_head.weight" in copy]
    # In a V one rank has both ends, and one weight for them.
    assert len(holders) == (0 if schedule == "zbvzerobubble" else 1)
    assert all(torch.equal(head, embedding) for head in holders)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_gradient_norm_counts_every_weight_once(ranks, schedule):
    """The norm over all stages is that of one process, tied weights included."""
    for variant in cases.VARIANTS:
        gradients = one_process(variant, 1)[1]
        for rank in ranks:
            for step, norm in enumerate(rank[schedule, variant]["norms"]):
                wanted = torch.stack([g.double().norm() for g in gradients[step].values()]).norm()
                assert float(norm) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_operations_run_in_the_simulated_order(ranks, schedule):
    """Each rank runs its operations in the order that the simulator reads from torch."""
    order = operation_order(schedule, 2, len(cases.BUDGETS))
    for rank, report in enumerate(ranks):
        for operations in report[schedule, "plain"]["operations"]:
            assert operations == [tuple(operation) for operation in order[rank]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variant", ["plain", "checkpointed"])
def test_each_stage_reports_its_layers_statistics(ranks, schedule, variant):
    """Each micro-batch's collector holds the rank's layers, with the values of one process at that budget."""
    wanted = one_process(variant, 1)[2]
    for step in range(len(cases.STEPS)):
        for number, whole in enumerate(wanted[step][0]):
            parts = [rank[schedule, variant]["stats"][step][number] for rank in ranks]
            assert sorted(layer for part in parts for layer in part) == list(range(cases.NUM_LAYERS))
            for part in parts:
                assert all(torch.equal(vector, whole[layer]) for layer, vector in part.items())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_keeps_what_another_has(ranks, schedule):
    """The ranks' parameters are the whole model's, each on one rank, under the whole model's names."""
    names = [name for rank in ranks for name in rank[schedule, "plain"]["parameters"]]
    assert sorted(names) == sorted(name for name, _ in cases.build_model("plain").named_parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_the_gathered_checkpoint_is_the_whole_models(ranks, schedule, variant):
    """The first rank gets every tensor of the whole model once, under its name, with the value it has on its rank."""
    whole = cases.build_model(variant)
    wanted = whole.state_dict()
    if "tied" in cases.VARIANTS[variant]:
        wanted = {name: value for name, value in wanted.items() if not name.endswith("lm_head.weight")}
    first, second = (rank[schedule, variant] for rank in ranks)
    assert second["checkpoint"] is None
    assert first["checkpoint"].keys() == wanted.keys()
    for name, value in (second["parameters"] | first["parameters"]).items():
        assert torch.equal(first["checkpoint"].get(name, value), value), name


@pytest.mark.parametrize("schedule", PARALLEL)
@pytest.mark.parametrize("variant", ["plain", "tied"])
def test_parallel_pipelines_train_as_one_process(parallel_ranks, schedule, variant):
    """Two pipelines have the losses and gradients of one process that takes both their micro-batches; replicas agree.

    To the last bit, where the sums are taken in the same order.
    """
    losses, gradients, _, _ = one_process(variant, 2)
    for number, rank in enumerate(parallel_ranks):
        report = rank[schedule, variant]
        if variant == "tied":
            check_within_rounding(report, variant, 2, number % 2)
            continue
        for step, mine in enumerate(report["losses"]):
            assert torch.equal(mine, losses[step][number % 2])
            for name, gradient in report["gradients"][step].items():
                assert torch.equal(gradient, gradients[step][name]), name
    for first, second in (parallel_ranks[:2], parallel_ranks[2:]):
        mine, theirs = (rank[schedule, variant]["parameters"] for rank in (first, second))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("few", "1f1b with 2 pipeline ranks and 1 micro-batches.*--gradient_accumulation_steps"),
        ("differ", "ranks of a pipeline differ.*gpipe.*1f1b"),
        ("odd", "--pipeline_parallel_size 1 must be at least 2"),
    ],
)
def test_what_cannot_run_is_refused(ranks, name, match):
    """Too few micro-batches, ranks that disagree, and a size that does not divide the world end in a clear error."""
    for rank in ranks:
        assert rank[name] is not None
        with pytest.raises(AssertionError, match=match):
            raise AssertionError(rank[name].replace("\n", " "))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_stages_lie_where_torch_runs_them(schedule, num_workers):
    """The stages of each worker are those in its operations in torch's own table."""
    order = operation_order(schedule, num_workers, 2 * num_workers)
    table = tuple(tuple(sorted({operation.stage for operation in own})) for own in order)
    assert worker_stages(schedule, num_workers) == table
