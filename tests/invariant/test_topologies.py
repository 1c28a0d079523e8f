"""One training, whatever the processes share: two ranks of DDP, of FSDP2, two tensor-parallel processes, one alone.

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
from hf_sparsebalance.planner import Measured, Planner, PlanSettings

JOB = Path(__file__).parent / "job_topology.py"
STEPS = 3
pytestmark = pytest.mark.slow
TOKENS = sum(tiny_run.LENGTHS)
# The loss is a sum over tokens in fp32.
LOSS_BOUND = torch.finfo(torch.float32).eps * TOKENS
# A gradient is a sum over tokens in fp64, of terms that come out of fp32 logits alike: equal documents, equal logits.
# Under tensor parallelism the sums before them are split, and a logit may round the other way.
NORM_BOUND = {name: torch.finfo(torch.float64).eps * TOKENS for name in ("ddp", "fsdp")} | {"tp": LOSS_BOUND}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Folder with the model, and with what one process showed."""
    folder = tmp_path_factory.mktemp("topologies")
    job_setup.build_model(torch.float64).save_pretrained(folder / "model")
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
        done = launch(JOB, out, name)
        assert done.returncode == 0, done.stderr[-3000:]
        return name

    return run


@pytest.fixture(params=("ddp", "fsdp", "tp"))
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
    }
    for rank in results(out, f"{topology}-plain"):
        assert (rank["model"], rank["parameter"], rank["scope"]) == expected[topology]


def test_steps_are_those_of_one_process(out, topology):
    """Loss and gradient norm of each step, plain, recomputed, clipped under Adam, and with adapters."""
    for variant in variants(topology):
        alone = one(out, variant)["steps"]
        for rank in results(out, f"{topology}-{variant}"):
            assert len(rank["steps"]) == len(alone) == STEPS
            for found, expected in zip(rank["steps"], alone, strict=True):
                assert found["loss"] == pytest.approx(expected["loss"], rel=LOSS_BOUND), variant
                assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM_BOUND[topology]), variant
                assert found["density"] == pytest.approx(expected["density"], rel=LOSS_BOUND), variant
                assert found["coverage"] == pytest.approx(expected["coverage"], rel=LOSS_BOUND), variant
    assert one(out, "plain")["steps"] != one(out, "clipped")["steps"]


def test_ranks_share_the_documents(out, topology):
    """Ranks of data parallelism have documents of their own, tensor-parallel processes the same; each is seen once."""
    ranks = [rank["micro_batches"] for rank in results(out, f"{topology}-plain")]
    seen = ranks[:1] if topology == "tp" else ranks
    assert sorted(sum(sum(seen, []), [])) == list(range(len(tiny_run.LENGTHS)))
    assert (ranks[0] == ranks[1]) == (topology == "tp")


def test_saved_models_are_those_of_one_process(out, topology):
    """save_model leaves an ordinary folder: plain from_pretrained reads what one process has saved."""
    loaded = [AutoModelForCausalLM.from_pretrained(out / name / "clipped").state_dict() for name in ("one", topology)]
    for name, expected in loaded[0].items():
        # Adam divides by the root of a gradient's square: a step is as exact as the gradient, but for its size.
        assert float((loaded[1][name] - expected).abs().max()) <= 1e-3 * LOSS_BOUND, name


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
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
    alone = one(out, "plain")["heldout"]
    for rank in results(out, f"{topology}-plain"):
        assert rank["heldout"] == pytest.approx(alone, rel=LOSS_BOUND)


def test_budgets_are_the_pure_planners(out, topology):
    """With tuning on, every rank ran the budgets that a planner alone gives when told the same, in the same order."""
    ranks = results(out, f"{topology}-tuned")
    assert ranks[0]["told"] == ranks[1]["told"] and len(ranks[0]["told"]) == STEPS
    num_ranks, slots = (1, 4) if topology == "tp" else (2, 2)
    settings = PlanSettings(
        batching="sparsity_aware", num_ranks=num_ranks, num_slots=slots, batch_size=1, seed=3, window=2,
        max_tokens=None, base_top_p=tiny_run.BASE_TOP_P, tolerance=0.2, anchor="optimal",
        scope="slot" if topology == "fsdp" else "rank", block_size=tiny_run.BLOCK, refit=False,
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
    for line, told in zip(lines, results(out, f"{topology}-tuned")[0]["told"], strict=True):
        predicted = [m["predicted_ms"] for m in line["micro_batches"]]
        for number, seen in enumerate(told):
            slowest = predicted[number] == max(predicted[number % 2 :: 2])
            assert (seen["total_ms"] is not None) == (slowest or topology != "fsdp")


def test_tensor_parallel_processes_select_what_one_process_selects(out, start):
    """Heads are whole: each process selects, for its heads, bit by bit the blocks that one process selects."""
    alone = one(out, "plain")["selections"]
    first, second = (rank["selections"] for rank in results(out, f"{start('tp')}-plain"))
    for layer, bits in enumerate(alone):
        assert first[layer] + second[layer] == bits
        assert bits[:2] != bits[2:]  # or any split would do
