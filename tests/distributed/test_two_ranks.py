"""Two ranks on the CPU (gloo), started by accelerate launch as a user would."""

import json
import subprocess
import sys
from pathlib import Path

import job_setup
import pytest
import tiny_run
import torch
from launching import ENVIRONMENT, TIMEOUT_S, launch, results
from peft import PeftModel

from hf_sparsebalance.errors import UserError

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def log_of(folder):
    return [json.loads(line) for line in (folder / "balance.jsonl").read_text().splitlines()]


def finished(job, tmp_path_factory):
    """Folder of a job that ran to its end."""
    out = tmp_path_factory.mktemp("job")
    done = launch(HERE / job, out)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Folder of job_tuned."""
    return finished("job_tuned.py", tmp_path_factory)


def test_ranks_share_the_documents(tuned):
    """In each epoch the ranks see disjoint documents, together each exactly once, as the log tells."""
    ranks = results(tuned, "tuned")
    lines = log_of(tuned / "tuned")
    for number, rank in enumerate(ranks):
        logged = [m["documents"] for line in lines for m in line["micro_batches"] if m["rank"] == number]
        assert rank["micro_batches"] == logged
        assert len(logged) == 2 * 2 * 3  # micro-batches a step, epochs, steps
    for epoch in (0, 1):
        seen = [
            sample
            for line in lines
            if line["epoch"] == epoch
            for m in line["micro_batches"]
            for sample in m["documents"]
        ]
        assert sorted(seen) == list(range(len(tiny_run.LENGTHS)))


def test_ranks_plan_the_same(tuned):
    """Both ranks hold the same plan and, though times were measured and refitted, the same state and budgets."""
    first, second = results(tuned, "tuned")
    assert first["plans"] == second["plans"]
    assert first["state"] == second["state"]
    assert first["state"]["observations"]
    lines = log_of(tuned / "tuned")
    for number, rank in enumerate((first, second)):
        # A budget travels as an fp32 tensor.
        logged = [m["top_p"] for line in lines for m in line["micro_batches"] if m["rank"] == number]
        assert rank["budgets"] == [float(torch.tensor(p)) for p in logged]
    budgets = [m["top_p"] for line in lines for m in line["micro_batches"]]
    assert len(set(budgets)) > 1
    assert min(budgets) >= tiny_run.BASE_TOP_P - tiny_run.TOLERANCE - 1e-12


@pytest.mark.parametrize("name", ["tuned", "top_k"])
def test_ranks_hold_the_same_parameters(tuned, name):
    """Gradients were averaged: after training both ranks hold the same parameters, to the bit."""
    first, second = results(tuned, name)
    assert first["parameters"] == second["parameters"]


def test_ranks_plan_the_same_top_k(tuned):
    """With a top_k, too, both ranks learn and plan the same; layers attend with their micro-batch's k or a larger."""
    first, second = results(tuned, "top_k")
    assert first["state"] == second["state"] and first["state"]["observations"]
    lines = log_of(tuned / "top_k")
    for number, rank in enumerate((first, second)):
        logged = [m["top_k"] for line in lines for m in line["micro_batches"] if m["rank"] == number]
        assert all(planned <= mean for planned, mean in zip(rank["budgets"], logged, strict=True))
    assert len({*first["budgets"], *second["budgets"]}) > 1
    # Two layers: a raised one lifts the mean of its micro-batch.
    raised = [
        sum(m["top_k"] not in (*first["budgets"], *second["budgets"]) for m in line["micro_batches"]) for line in lines
    ]
    assert all(line["raised_top_k"] >= few for line, few in zip(lines, raised, strict=True))


def test_the_log_tells_both_ranks(tuned):
    """Each line has both ranks' micro-batches, no step is shorter than its slowest rank, logs carry the imbalance."""
    first, _ = results(tuned, "tuned")
    lines = log_of(tuned / "tuned")
    assert [line["step"] for line in lines] == list(range(1, 7))
    for line, entry in zip(lines, first["log"], strict=True):
        assert [(m["rank"], m["slot"]) for m in line["micro_batches"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        sums = [
            sum(m["forward_ms"] + m["backward_ms"] for m in line["micro_batches"] if m["rank"] == rank)
            for rank in (0, 1)
        ]
        assert line["step_s"] * 1000 >= max(sums)
        assert entry["imbalance_rank"] == pytest.approx(2 * max(sums) / sum(sums))


def test_lora_trains_on_two_ranks(tuned):
    """Adapters move, alike on both ranks; the saved ones give the trained model's logits on the base model, beside it
    or merged into it.
    """
    first, second = results(tuned, "lora")
    assert first["parameters"] == second["parameters"]
    assert first["parameters"][0] != first["parameters"][-1]
    folder = tuned / "lora"
    for saved in (folder, folder / "checkpoint-3"):
        assert (saved / "adapter_model.safetensors").exists() and not (saved / "model.safetensors").exists()
    base = job_setup.build_model()
    base.config.sparse_attention = {"block_size": tiny_run.BLOCK, "top_p": tiny_run.BASE_TOP_P}
    loaded = PeftModel.from_pretrained(base, folder).eval()
    ids, expected = torch.tensor([job_setup.documents()[0]]), torch.tensor(first["logits"])
    with torch.no_grad():
        beside, merged = loaded(input_ids=ids).logits, loaded.merge_and_unload()(input_ids=ids).logits
    # The same fp32 computation in another order: sums of 48 products at most, in a dozen layers; merging rounds each
    # weight once more.
    bound = 12 * 48 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert float((beside - expected).abs().max()) <= bound
    assert float((merged - expected).abs().max()) <= 2 * bound


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    """Folder of job_parity."""
    return finished("job_parity.py", tmp_path_factory)


def test_evaluation_before_training_changes_nothing(parity):
    """evaluate() before train() leaves the ranks in data parallelism: the same parameters on both, to the bit."""
    plain, _ = results(parity, "parity")
    for rank in results(parity, "evaluated"):
        assert rank["parameters"] == plain["parameters"]


def test_heldout_loss_does_not_depend_on_the_ranks(parity, tmp_path):
    """Five documents over two ranks give the token mean of one plain loop over them."""
    first, second = results(parity, "parity")
    assert first["heldout"] == second["heldout"]
    args = job_setup.arguments(tmp_path, tolerance=0.0, batching="random", gradient_accumulation_steps=4)
    trainer, _ = job_setup.train(job_setup.build_model(torch.float64), args)
    model, nats, targets = trainer.model.eval(), 0.0, 0
    for ids in job_setup.documents()[:5]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum"))
        targets += len(ids) - 1
    # The two models differ by their gradients' fp32 rounding, the losses by theirs.
    bound = torch.finfo(torch.float32).eps * sum(tiny_run.LENGTHS)
    assert first["heldout"]["loss"] == pytest.approx(nats / targets, rel=bound)
    assert first["heldout"]["tokens"] == sum(tiny_run.LENGTHS[:5])


def test_two_ranks_train_as_one(parity, tmp_path):
    """Without tuning two ranks have the losses and parameters of one process with twice the accumulation."""
    first, second = results(parity, "parity")
    args = job_setup.arguments(tmp_path / "one", tolerance=0.0, batching="random", gradient_accumulation_steps=4)
    trainer, recorder = job_setup.train(job_setup.build_model(torch.float64), args)
    # A step of one process holds the documents of both ranks' steps.
    for step in range(3):
        one = recorder.micro_batches[4 * step : 4 * step + 4]
        two = [rank["micro_batches"][2 * step : 2 * step + 2] for rank in (first, second)]
        assert sorted(sum(one, [])) == sorted(sum(sum(two, []), []))
    # The loss and norms are fp32: a gradient sums one term per token, each rounded.
    bound = torch.finfo(torch.float32).eps * sum(tiny_run.LENGTHS)
    start = torch.cat([p.detach().flatten() for p in job_setup.build_model(torch.float64).parameters()])
    for mine, theirs in zip(recorder.parameters, first["parameters"], strict=True):
        mine, theirs = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
        update = float((mine - start).abs().max())
        assert update > 1e-3
        assert float((mine - theirs).abs().max()) <= bound * update
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert first["losses"] == pytest.approx(losses, rel=bound)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Refusals of both ranks in job_refused."""
    out = finished("job_refused.py", tmp_path_factory)
    return [report["refusals"] for report in results(out, "refused")]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("data", "different.*data"),
        ("options", "different.*options"),
        ("world", "--num_ranks 3"),
        ("profile", "profile"),
        ("model", "different.*model"),
        ("versions", "different.*versions"),
        ("replicas", "parameters differ"),
        ("sharded", "sharded already.*DistributedConfig"),
        ("fsdp", "FSDP was asked for.*MULTI_CPU"),
    ],
)
def test_ranks_that_disagree_are_refused(refusals, name, match):
    """Different data, options, profiles, models or versions, another number of ranks, or sharding that the Trainer
    does not see end in a clear error on both ranks.
    """
    for refusal in refusals:
        with pytest.raises(UserError, match=match):
            if refusal[name] is not None:
                raise UserError(refusal[name])


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch, tmp_path):
    """A launcher that started two processes which both believe they are alone is found out."""
    args = job_setup.arguments(tmp_path, batching="random", tolerance=0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes but 1 found"):
        job_setup.train(job_setup.build_model(), args)


def test_the_process_group_is_left_at_exit():
    """A process whose world was checked has left its process group before the interpreter goes."""
    code = """
import atexit, tempfile
import torch.distributed as dist
from hf_sparsebalance.distributed import check_world
atexit.register(lambda: print(dist.is_initialized()))
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
    check_world(None)
    check_world(1)
print(dist.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]
