"""One training, whatever the processes share: ranks of DDP and of FSDP2, tensor parallelism, pipelines, one alone.

Every topology takes the same four documents per step, in float64.  Loss and gradient norm must then be those of one
process: logits and loss are fp32 in transformers, what comes before and after them is not.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import job_setup
import pytest
import tiny_run
import torch
from launching import ENVIRONMENT, ROOT, TIMEOUT_S, launch, results
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_sparsebalance.density import DensityCurve
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile
from hf_sparsebalance.planner import Planner
from hf_sparsebalance.plans import Measured, PlanSettings

JOB = Path(__file__).parent / "job_topology.py"
STEPS = 3
pytestmark = pytest.mark.slow
TOKENS = sum(tiny_run.LENGTHS)
# The loss is a sum over tokens in fp32.
LOSS_BOUND = torch.finfo(torch.float32).eps * TOKENS
# A gradient is a sum over tokens in fp64, of terms that come out of fp32 logits alike: equal documents, equal logits.
# Under tensor parallelism the sums before them are split, and a logit may round the other way.
EXACT = torch.finfo(torch.float64).eps * TOKENS
PIPELINES = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dp-pp")
# Processes, data-parallel ranks, micro-batches of each per step, bound of the gradient norm.
TOPOLOGIES = {
    "ddp": (2, 2, 2, EXACT),
    "fsdp": (2, 2, 2, EXACT),
    "tp": (2, 1, 4, LOSS_BOUND),
    **dict.fromkeys(PIPELINES, (2, 1, 4, EXACT)),
    "dp-pp": (4, 2, 2, EXACT),
}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Folder with the model, and with what one process showed."""
    folder = tmp_path_factory.mktemp("topologies")
    # Schedules with two stages per process need four layers.
    job_setup.build_model(torch.float64, num_hidden_layers=4).save_pretrained(folder / "model")
    command = [sys.executable, str(JOB), str(folder), "one"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def one(out, variant):
    return json.loads((out / f"one-{variant}-0.json").read_text())


@pytest.fixture(scope="module")
def start(out):
    """Runs the job of a topology, once."""

    @functools.cache
    def run(name):
        done = launch(JOB, out, name, processes=TOPOLOGIES[name][0])
        assert done.returncode == 0, done.stderr[-3000:]
        return name

    return run


def reports(out, topology, variant):
    """Of each process."""
    return results(out, f"{topology}-{variant}", TOPOLOGIES[topology][0])


@pytest.fixture(params=TOPOLOGIES)
def topology(request, start):
    """Name of a topology whose job has run."""
    return start(request.param)


def variants(topology):
    return ("plain", "recomputed", "clipped") + (() if topology == "tp" else ("lora",))


def test_the_topology_is_real(out, topology):
    """The model is wrapped as its topology says, and auto has chosen the scope where its ranks wait."""
    expected = {
        "ddp": ("DistributedDataParallel", "Parameter", "rank"),
        "fsdp": ("FSDPQwen2ForCausalLM", "DTensor", "slot"),
        "tp": ("Qwen2ForCausalLM", "DTensor", "rank"),
    } | dict.fromkeys(PIPELINES, ("Qwen2ForCausalLM", "Parameter", "microbatch"))
    for rank in reports(out, topology, "plain"):
        assert (rank["model"], rank["parameter"], rank["scope"]) == expected[topology]


def test_steps_are_those_of_one_process(out, topology):
    """Loss and gradient norm of each step, plain, recomputed, clipped under Adam, and with adapters."""
    for variant in variants(topology):
        alone = one(out, variant)["steps"]
        for rank in reports(out, topology, variant):
            assert len(rank["steps"]) == len(alone) == STEPS
            for found, expected in zip(rank["steps"], alone, strict=True):
                assert found["loss"] == pytest.approx(expected["loss"], rel=LOSS_BOUND), variant
                assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=TOPOLOGIES[topology][-1]), (
                    variant
                )
                assert found["density"] == pytest.approx(expected["density"], rel=LOSS_BOUND), variant
                assert found["coverage"] == pytest.approx(expected["coverage"], rel=LOSS_BOUND), variant
    assert one(out, "plain")["steps"] != one(out, "clipped")["steps"]


def test_ranks_share_the_documents(out, topology):
    """Data-parallel ranks have documents of their own, the processes of one the same; each document is seen once."""
    num_ranks = TOPOLOGIES[topology][1]
    seen = [process["micro_batches"] for process in reports(out, topology, "plain")]
    assert sorted(sum(sum(seen[:num_ranks], []), [])) == list(range(len(tiny_run.LENGTHS)))
    assert seen == [seen[number % num_ranks] for number in range(len(seen))]


def test_saved_models_are_those_of_one_process(out, topology):
    """save_model leaves an ordinary folder: plain from_pretrained reads what one process has saved."""
    loaded = [AutoModelForCausalLM.from_pretrained(out / name / "clipped").state_dict() for name in ("one", topology)]
    for name, expected in loaded[0].items():
        # Adam divides by the root of a gradient's square: a step is as exact as the gradient, but for its size.
        assert float((loaded[1][name] - expected).abs().max()) <= 1e-3 * LOSS_BOUND, name


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name != "tp"])
def test_saved_adapters_are_those_of_one_process(out, start, name):
    """A LoRA folder holds adapters only, and on the base model they give what one process' adapters give."""
    logits = []
    for each in ("one", start(name)):
        folder = out / each / "lora"
        assert (folder / "adapter_config.json").exists() and not list(folder.glob("model*.safetensors"))
        base = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float64)
        with torch.no_grad():
            logits.append(PeftModel.from_pretrained(base, folder)(torch.tensor([job_setup.documents()[0]])).logits)
    assert float((logits[0] - logits[1]).abs().max()) <= LOSS_BOUND


def test_heldout_loss_is_that_of_one_process(out, topology):
    """Five documents over two ranks, which is uneven: loss and statistics of one process."""
    alone = one(out, "plain")
    for rank in reports(out, topology, "plain"):
        told = rank["heldout"]
        assert told == pytest.approx({name: alone["heldout"][name] for name in told}, rel=LOSS_BOUND)


@pytest.mark.parametrize("name", ["tp", *PIPELINES])
def test_evaluation_is_that_of_one_process(out, start, name):
    """evaluate() after training, four documents one by one: the mean of their losses.

    Under DDP and FSDP it is Trainer's own, which weighs the documents of one round over the ranks by their tokens.
    """
    topology = start(name)
    for variant in variants(topology):
        alone = one(out, variant)["evaluated"]
        for rank in reports(out, topology, variant):
            assert rank["evaluated"] == pytest.approx(alone, rel=LOSS_BOUND), variant


def test_budgets_are_the_pure_planners(out, topology):
    """With tuning on, every rank ran the budgets that a planner alone gives when told the same, in the same order."""
    ranks = reports(out, topology, "tuned")
    assert all(rank["told"] == ranks[0]["told"] for rank in ranks) and len(ranks[0]["told"]) == STEPS
    _, num_ranks, slots, _ = TOPOLOGIES[topology]
    scope = {"fsdp": "slot"} | dict.fromkeys(PIPELINES, "microbatch")
    settings = PlanSettings(
        batching="sparsity_aware", num_ranks=num_ranks, num_slots=slots, batch_size=1, seed=3, window=2,
        max_tokens=None, base_top_p=tiny_run.BASE_TOP_P, tolerance=0.2, anchor="optimal",
        scope=scope.get(topology, "rank"), block_size=tiny_run.BLOCK, refit=False,
        num_stages=2 if topology in PIPELINES else 1,
    )  # fmt: skip
    profile = LatencyProfile.load(out / f"profile-{topology}-0.json")
    planner = Planner(settings, tiny_run.LENGTHS, LatencyPredictor(profile))
    budgets = []
    for step in range(STEPS):
        budgets += planner.take(0, step).top_p
        if step:
            planner.observe([measured(fields) for fields in ranks[0]["told"][step - 1]])
        if step + 1 < STEPS:
            planner.plan_ahead(0, step + 1)
    by_rank = torch.tensor(budgets).view(STEPS, num_ranks, slots)  # they travel as fp32
    for number, rank in enumerate(ranks):
        assert rank["budgets"] == by_rank[:, number % num_ranks].flatten().tolist()
    assert len(set(budgets)) > 1


def measured(fields):
    curve = fields["curve"]
    curve = DensityCurve(tuple(curve["top_p"]), tuple(curve["density"]))
    return Measured(**{**fields, "samples": tuple(fields["samples"]), "curve": curve})


def test_waiting_is_not_learned(out, topology):
    """Under FSDP only the micro-batch predicted slowest in its slot tells its time; elsewhere each does."""
    lines = [json.loads(line) for line in (out / topology / "tuned" / "balance.jsonl").read_text().splitlines()]
    for line, told in zip(lines, reports(out, topology, "tuned")[0]["told"], strict=True):
        predicted = [m["predicted_ms"] for m in line["micro_batches"]]
        for number, seen in enumerate(told):
            slowest = predicted[number] == max(predicted[number % 2 :: 2])
            assert (seen["total_ms"] is not None) == (slowest or topology != "fsdp")


def test_tensor_parallel_processes_select_what_one_process_selects(out, start):
    """Heads are whole: each process selects, for its heads, bit by bit the blocks that one process selects."""
    alone = one(out, "plain")["selections"]
    first, second = (rank["selections"] for rank in reports(out, start("tp"), "plain"))
    for layer, bits in enumerate(alone):
        assert first[layer] + second[layer] == bits
        assert bits[:2] != bits[2:]  # or any split would do
