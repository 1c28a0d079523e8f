"""Training in a pipeline that goes on from a checkpoint."""

from pathlib import Path

import job_setup
import pytest
import torch
from launching import launch, results
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

JOB = Path(__file__).parent / "job_pipeline_resume.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["plain", "lora"])
def ran(request, tmp_path_factory):
    """(folder, variant) of a job."""
    out = tmp_path_factory.mktemp(request.param)
    job_setup.build_model(num_hidden_layers=4).save_pretrained(out / "base")
    done = launch(JOB, out, request.param)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, request.param


def test_a_resumed_pipeline_is_the_uninterrupted_one(ran):
    """From the middle of the first epoch into the second: documents, budgets, losses and weights, to the bit."""
    out, variant = ran
    for process in results(out, variant):
        whole, resumed = process["whole"], process["resumed"]
        for name in ("micro_batches", "budgets"):
            assert resumed[name] == whole[name][4 * 2 :], name  # four micro-batches in each of two steps
        # The first two come out of the checkpoint.
        assert len(whole["steps"]) > 2
        for expected, found in zip(whole["steps"], resumed["steps"], strict=True):
            assert (found["loss"], found["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    file = "model.safetensors" if variant == "plain" else "adapter_model.safetensors"
    expected, found = (load_file(out / name / file) for name in ("whole", "resumed"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_checkpoints_are_ordinary(ran):
    """Plain from_pretrained, or PEFT, reads what a pipeline's checkpoint holds, with every weight there."""
    out, variant = ran
    folder = out / "whole" / "checkpoint-2"
    if variant == "plain":
        model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        assert len(model.model.layers) == 4
        return
    names = load_file(folder / "adapter_model.safetensors")
    assert len(names) == 4 * 7 * 2  # layers, linear maps of each, A and B
    assert not list(folder.glob("model*.safetensors"))
    ids = torch.arange(1, 9)[None]
    base = AutoModelForCausalLM.from_pretrained(out / "base")
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, folder).eval()
        logits = adapted(ids).logits
        merged = adapted.merge_and_unload()(ids).logits
    assert not torch.allclose(logits, plain)
    # Merged weights are rounded once more: of 32 products each, through eight layers of two blocks.
    assert float((merged - logits).abs().max()) <= 32 * 16 * torch.finfo(torch.float32).eps * float(logits.abs().max())


def test_other_cuts_are_refused(ran):
    """A checkpoint of a pipeline goes on with the same schedule and size only; the message names the option."""
    out, variant = ran
    for process in results(out, variant):
        assert "--pipeline_schedule" in process["schedule"]
        assert "--pipeline_parallel_size" in process["size"]
