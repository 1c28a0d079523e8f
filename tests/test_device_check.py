import importlib
import json
import math
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sparsebalance_kernels import block_sparse_attention, ops

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "evaluation" / "device_check.py"
FAILING = "density"
CASES = {"correct-d24-g3-b16", "correct-d16-g1-b32"}
PARTS = {*CASES, "twice-tiny", "compile", "top_k", "density", "train", "grid-tiny", "flex"}

needs_triton = pytest.mark.skipif(find_spec("triton.language") is None, reason="interprets Triton kernels")


def run_program(*options, expected):
    """The program as its user starts it: nothing on PYTHONPATH; (printed, seconds)."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    begun = time.monotonic()
    command = [sys.executable, str(PROGRAM), "--device=cpu", "--tiny", *options]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == expected, done.stderr
    return done.stdout, time.monotonic() - begun


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """A run of all parts of which one is made to fail: (printed, document, folder)."""
    folder = tmp_path_factory.mktemp("device") / "made" / "here"
    # Six times the usual budget: the machine may be slow, and here nothing may be cut off.
    printed, _ = run_program(f"--out={folder}", f"--fail={FAILING}", "--budget-s=1740", expected=1)
    return printed, json.loads((folder / "device_check.json").read_text(encoding="utf-8")), folder


@pytest.fixture(scope="module")
def modules():
    """The program's modules by name."""
    sys.path.insert(0, str(PROGRAM.parent))
    names = ("device_check", "device_accuracy", "device_parts")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(PROGRAM.parent))
    for name in names:
        del sys.modules[name]


@pytest.fixture
def check(modules):
    return modules["device_check"]


@pytest.fixture
def accuracy(modules):
    return modules["device_accuracy"]


@pytest.fixture
def parts(modules):
    return modules["device_parts"]


def torch_attention(inputs, bits):
    """Output, gradients and log-sum-exp of the torch backend under given bits."""
    fixed = (bits, inputs.cu_seqlens, inputs.block_size, inputs.scale, "torch")
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    out, lse = ops.attend(*leaves, *fixed)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.d_out)], lse.detach()


@pytest.mark.slow
@needs_triton
def test_every_part_runs_and_says_how_it_ended(dry_run):
    """All parts pass but the one made to fail, whose reason is its last line; the machine and versions are named."""
    printed, document, folder = dry_run
    parts = {part["name"]: part for part in document["parts"]}
    assert set(parts) == PARTS
    assert {name for name, part in parts.items() if part["result"] != "passed"} == {FAILING}
    failed = parts[FAILING]
    assert (failed["result"], failed["exit_status"]) == ("failed", 1)
    assert failed["reason"] == "made to fail by --fail"
    assert all(part["reason"] is None for name, part in parts.items() if name != FAILING)
    assert document["machine"]["torch"] == torch.__version__ and document["machine"]["gpu"] is None
    assert document["dry_run"] and document["elapsed_s"] < document["budget_s"] == 1740
    assert "DRY RUN" in printed and "made to fail" in printed and "checks: " in printed
    assert {path.name for path in folder.iterdir()} == {"device_check.json", "lines.jsonl", "log.txt"}
    log = (folder / "log.txt").read_text(encoding="utf-8")
    assert all(f"== {name}: " in log for name in PARTS)


@pytest.mark.slow
@needs_triton
def test_correctness_holds_on_interpreted_kernels(dry_run):
    """Each case and dtype has four accuracies, equal bits of two runs and a sure selection, and all of them hold."""
    checks = dry_run[1]["checks"]
    assert all(check["holds"] is True for check in checks)
    for part in CASES:
        mine = [check for check in checks if check["part"] == part]
        found = {(check["dtype"], check["check"], check.get("result")) for check in mine}
        names = [("accuracy", result) for result in ("out", "dq", "dk", "dv")]
        names += [("run twice", None), ("selection", None)]
        assert found == {(dtype, *name) for dtype in ("float32", "float16") for name in names}
        for check in mine:
            if check["check"] == "accuracy":
                assert 0.0 < check["error"] <= check["factor"] * check["reference_error"] < 0.1
                assert check["factor"] == (2.0 if check["result"] == "out" else 3.0)
            if check["check"] == "selection":
                assert check["wrong_blocks"] == 0 and check["unsure_rows_share"] < 0.1
    kinds = {(check["part"], check["check"]) for check in checks}
    assert {("twice-tiny", name) for name in ("run twice", "accuracy", "select twice")} <= kinds
    assert {("compile", "torch.compile(fullgraph=True)"), ("flex", "flex")} <= kinds


@pytest.mark.slow
@needs_triton
def test_timings_fit_together(dry_run):
    """Pairs, FLOPs, totals and ratios of every row follow from each other; a failed part keeps its first row."""
    rows = dry_run[1]["timings"]
    found = {(row["part"], row["length"], row["selection"], row["mode"], row["contender"]) for row in rows}
    assert len(found) == len(rows)
    assert len([row for row in rows if row["part"] == FAILING]) == 1
    for mode in ("forward", "forward+backward"):
        assert {("top_k", 48, "k=2", mode, "ours"), ("top_k", 48, "dense", mode, "flash")} <= found
        for selection in ("k=2", "density=0.25", "density=1", "p=1"):
            assert ("grid-tiny", 32, selection, mode, "ours") in found
    assert ("flex", 48, "density=0.25", "forward", "flex") in found
    flash = {(row["part"], row["length"], row["mode"]): row for row in rows if row["contender"] == "flash"}
    for row in rows:
        causal = 2 * sum(range(1, row["length"] + 1))
        own = 2 * row["length"] // 16 * sum(range(1, 17))
        visible = 2 * sum(token // 16 for token in range(row["length"]))
        assert row["kept_pairs"] == own + round(row["density"] * visible) * 16 <= causal
        if row["selection"] in ("dense", "density=1", "p=1"):
            assert (row["kept_pairs"], row["density"]) == (causal, 1.0)
        products = 2 if row["mode"] == "forward" else 7
        assert row["flop"] == products * 2 * 16 * row["kept_pairs"]
        assert row["flop_per_s"] == pytest.approx(row["flop"] / row["median_s"])
        assert row["share_of_matmul"] == pytest.approx(row["flop_per_s"] / row["matmul_flop_per_s"])
        added = row["routing_times_s"] if row["routing_added"] else [0.0] * len(row["times_s"])
        assert row["total_times_s"] == pytest.approx([a + b for a, b in zip(row["times_s"], added, strict=True)])
        assert row["routing_added"] == (row["selection"] == "density=0.25" and row["contender"] == "ours")
        base = flash[row["part"], row["length"], row["mode"]]
        if len(row["times_s"]) == 1:
            assert row["speedup_over_flash"] == pytest.approx(base["median_s"] / row["median_s"])
    training = {row["attention"]: row for row in dry_run[1]["training"]}
    assert set(training) == {"sparsebalance", "sdpa"}
    assert all(abs(row["first_loss"] - math.log(64)) < 0.5 for row in training.values())


@pytest.mark.slow
@needs_triton
def test_the_budget_is_kept(tmp_path):
    """With seconds for minutes of work the program ends in time, and says of each part why it has no results."""
    printed, seconds = run_program(f"--out={tmp_path}", "--budget-s=6", expected=1)
    document = json.loads((tmp_path / "device_check.json").read_text(encoding="utf-8"))
    assert seconds < 6 + 3  # starting Python and printing, on a busy machine
    parts = {part["name"]: part for part in document["parts"]}
    assert set(parts) == PARTS
    for part in parts.values():
        assert part["result"] in ("timed out", "not run") and "\n" not in part["reason"]
        assert part["seconds"] is None or part["seconds"] < 6
    assert parts["flex"]["reason"] == "no time left of the 6 s (--budget-s)"
    assert "not run" in printed and document["verdict"] == []


def test_plan_of_a_gpu_run(check):
    """Correctness first, then the targets at k = 8, then those at density .1, and flex_attention last."""
    plan = check.plan(check.FULL, "cuda")
    names = [part.name for part in plan]
    assert names[:3] == ["correct-d64-g7-b128", "correct-d128-g8-b128", "correct-d128-g7-b128"]
    assert len(set(names)) == len(names) and names[-1] == "flex"
    timed = [part.name for part in plan if part.timed]
    assert timed[:2] == ["top_k", "density"] and names[-len(timed) :] == timed
    assert all(0.0 < part.share <= 1.0 for part in plan)
    sizes = check.FULL
    assert sizes.shapes == {"0.5B": (14, 2, 64), "3B": (16, 2, 128), "7B": (28, 4, 128)}
    assert set(sizes.densities) == {0.05, 0.1, 0.25, 1.0} and sizes.top_k == 8 and sizes.block_size == 128
    for target in check.TARGETS:
        assert target.length in sizes.lengths
    assert sizes.model_settings["hidden_size"] == 896 and sizes.model_settings["vocab_size"] == 151936


def test_verdict_compares_forward_and_backward_with_the_target(check):
    """A target is met from its factor on, by our total forward+backward; without a measurement it is neither."""
    row = {"contender": "ours", "mode": "forward+backward", "shape": "3B", "selection": "k=8"}
    timings = [
        row | {"length": 8192, "speedup_over_flash": 1.1},
        row | {"length": 32768, "speedup_over_flash": 3.4},
        row | {"length": 32768, "mode": "forward", "speedup_over_flash": 9.0},
        row | {"length": 131072, "contender": "flex", "speedup_over_flash": 20.0},
        row | {"length": 32768, "selection": "density=1", "speedup_over_flash": 0.77},
        row | {"length": 131072, "selection": "p=1", "speedup_over_flash": 0.76},
    ]
    said = {(one["selection"], one["length"], one["shape"]): one["met"] for one in check.verdict(timings, check.FULL)}
    assert len(said) == 3 * len(check.TARGETS)
    measured = {key: met for key, met in said.items() if met is not None}
    assert measured == {
        ("k=8", 8192, "3B"): True,
        ("k=8", 32768, "3B"): False,
        ("density=1", 32768, "3B"): True,
        ("p=1", 131072, "3B"): False,
    }
    assert check.verdict(timings, check.TINY) == []


def test_only_timed_parts_run_alone(check):
    """Untimed parts share the machine up to the number of jobs; a timed one waits for all and is waited for."""
    timed, untimed = check.Part("a", 1.0), check.Part("b", 1.0, timed=False)
    running = {kind: check.Running(part, None, None, 0.0, 1.0) for kind, part in (("t", timed), ("u", untimed))}
    assert check.may_start(timed, [], 2, False) and check.may_start(untimed, [running["u"]], 2, False)
    assert not check.may_start(untimed, [running["u"]] * 2, 2, False)
    assert not check.may_start(timed, [running["u"]], 2, False)
    assert not check.may_start(untimed, [running["t"]], 2, False)
    assert check.may_start(timed, [running["t"]], 2, True)


def test_a_cut_off_line_costs_only_itself(check, tmp_path):
    """Rows of a part that was killed while it wrote are read up to there."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"kind": "check", "holds": true}\n{"kind": "timing", "len', encoding="utf-8")
    assert check.read_lines(path) == {"machine": [], "check": [{"holds": True}], "timing": [], "training": []}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device cpu", "--device cpu interprets the kernels, which only a dry run can wait for: add --tiny"),
        ("--device cpu --tiny --budget-s 0", "--budget-s must be a positive number of seconds, got 0"),
        ("--device cpu --tiny --budget-s nan", "--budget-s must be a positive number of seconds, got nan"),
        ("--device cpu --tiny --only flex,dance", "--only dance: choose among correct-d24-g3-b16, "),
        ("--device cpu --tiny --part cudnn", "--part cudnn: choose among correct-d24-g3-b16, "),
        ("--device cpu --tiny --fail 7", "--fail 7: choose among correct-d24-g3-b16, "),
        ("--device cpu --tiny --out /dev/null", "--out /dev/null must be a folder that can be written: File exists"),
    ],
)
def test_mistakes_get_one_line(check, monkeypatch, capsys, tmp_path, options, message):
    """A mistake ends with exit status 2 and one line that names the option."""
    monkeypatch.setattr(sys, "argv", ["device_check.py", "--out", str(tmp_path), *options.split()])
    with pytest.raises(SystemExit) as ended:
        check.parse()
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and message in printed and printed.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said_in_one_line(check, monkeypatch, capsys, tmp_path):
    """Without a GPU the program says so, and what works here."""
    monkeypatch.setattr(sys, "argv", ["device_check.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        check.parse()
    assert capsys.readouterr().err == "device_check.py: torch sees no GPU here: use --device cpu --tiny\n"


@pytest.mark.parametrize("budget", [{"top_k": 3}, {"top_p": 0.5}], ids=["k", "p"])
def test_reference_is_the_operator_in_other_words(accuracy, budget):
    """Masked dense attention under the operator's bits equals backend="reference" of packed documents."""
    inputs = accuracy.make_inputs((4, 2, 16), (37, 1, 0, 70), 16, "float64", "cpu")
    bits = inputs.select("torch", budget.get("top_p"), budget.get("top_k"))
    found = accuracy.dense(accuracy.token_mask(bits, inputs), inputs.scale, inputs.query, inputs.key, inputs.value)
    fixed = {"cu_seqlens": inputs.cu_seqlens, "block_size": 16, "backend": "reference", **budget}
    expected = block_sparse_attention(inputs.query, inputs.key, inputs.value, **fixed)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("budget", [{"top_k": 3}, {"top_p": 0.5}], ids=["k", "p"])
def test_selection_check_finds_a_wrong_bit(accuracy, check, budget):
    """The torch selector's own bits hold; with one block more, or one less, in one row they do not."""
    case = check.Case(4, 2, 16, 16, (100, 40), **budget)
    inputs = accuracy.make_inputs((4, 2, 16), case.lengths, 16, "float32", "cpu")
    bits = inputs.select("torch", case.top_p, case.top_k)
    said = accuracy.selection_check(inputs, bits, case)
    assert said["holds"] and said["rows_unlike_torch_share"] == 0.0 and said["unsure_rows_share"] < 0.01
    for flipped in (1, 2, 4):
        wrong = bits.clone()
        wrong[1, 0, 99] ^= flipped
        said = accuracy.selection_check(inputs, wrong, case)
        assert not said["holds"] and said["wrong_blocks"] == 1 and said["unexplained_rows"] == 1


def test_selection_check_forgives_what_rounding_decides(accuracy, check):
    """Where two blocks hold the same keys either may be kept: rows that take the other one are unsure, not wrong."""
    case = check.Case(2, 1, 16, 16, (64,), top_k=2)
    inputs = accuracy.make_inputs((2, 1, 16), case.lengths, 16, "float32", "cpu")
    inputs.key[16:32] = inputs.key[:16]
    bits = inputs.select("torch", None, 2)
    rows = (bits[:, 0, 32:48] == 0b10).sum()
    assert rows == 32  # ties go to the later block
    bits[:, 0, 32:48] = 0b01
    said = accuracy.selection_check(inputs, bits, case)
    assert said["holds"] and said["rows_unlike_torch_share"] == 0.25 and said["unsure_rows_share"] >= 0.25


def test_accuracy_check_finds_an_error(accuracy, tmp_path):
    """An error of three reference errors is too much for the output, not for a gradient; NaN never holds."""
    results = accuracy.Results(tmp_path / "lines.jsonl", "here", False)
    exact = [torch.zeros(3, dtype=torch.float64) for _ in range(4)]
    rounded = [torch.tensor([0.0, 1.0, 0.0])] * 4
    found = [torch.tensor([0.0, 0.0, -3.0])] * 3 + [torch.tensor([0.0, float("nan"), 0.0])]
    results.accuracy({}, found, rounded, exact)
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [(row["result"], row["holds"]) for row in rows] == [("out", 0), ("dq", 1), ("dk", 1), ("dv", 0)]
    assert results.broken == 2 and rows[3]["error"] is None


def test_spots_are_rows_of_the_whole(accuracy):
    """In fp64 the results of a few tokens are those that full masked attention has for them."""
    inputs = accuracy.make_inputs((4, 2, 16), (150,), 16, "float64", "cpu")
    bits = inputs.select("torch", 0.5, None)
    spots = torch.tensor([0, 149, 20, 70, 71, 16])
    whole, lse = torch_attention(inputs, bits)
    for found, expected in zip(accuracy.spot_results(inputs, bits, spots, whole[0], lse), whole, strict=True):
        torch.testing.assert_close(found, expected[spots], rtol=1e-10, atol=1e-11)


def test_random_bits_have_the_density_asked_for(accuracy, parts, monkeypatch):
    """Bits stand only at visible blocks, as many as asked for; kept pairs are the mask's ones."""
    inputs = accuracy.make_inputs((4, 2, 16), (720,), 16, "float32", "cpu")
    for density in (0.1, 1.0):
        bits = accuracy.bits_for(f"density={density}", inputs)
        mask = accuracy.token_mask(bits, inputs)
        monkeypatch.setattr(accuracy.Inputs, "select", lambda *_: None)
        contenders, _, densities = parts.contenders_of(inputs, [f"density={density:g}"], ("flash",), ("forward",))
        pairs = {one.name: one.pairs for one in contenders}
        assert pairs == {"ours": int(mask.sum()), "flash": 4 * 720 * 721 // 2}
        # 63 360 visible triples: a standard error of .0012 at .1.
        assert densities[f"density={density:g}"] == pytest.approx(density, abs=0.005 if density < 1 else 0)


def test_flex_gets_the_same_mask(accuracy, parts):
    """flex_attention under the mask made from the bits equals masked dense attention, whole blocks or not."""
    inputs = accuracy.make_inputs((4, 2, 16), (80,), 16, "float64", "cpu")
    bits = accuracy.bits_for("density=0.5", inputs)
    bits[0] = accuracy.bits_for("density=1", inputs)[0]
    qkv = (inputs.query, inputs.key, inputs.value)
    expected = accuracy.dense(accuracy.token_mask(bits, inputs), inputs.scale, *qkv)
    torch.testing.assert_close(parts.flex_rival(bits, inputs)(*qkv), expected, rtol=1e-10, atol=1e-11)


def test_flash_is_causal_attention_of_packed_tensors(parts):
    """The rival computes what the operator does when it keeps everything; a call is timed in seconds."""
    inputs = parts.make_inputs((4, 2, 16), (48,), 16, "float32", "cpu")
    flash = parts.dense_rival("flash")(inputs.query, inputs.key, inputs.value)
    fixed = {"cu_seqlens": inputs.cu_seqlens, "block_size": 16, "backend": "torch"}
    ours = block_sparse_attention(inputs.query, inputs.key, inputs.value, top_p=1.0, **fixed)
    torch.testing.assert_close(flash, ours, rtol=1e-5, atol=1e-6)
    assert 0.01 < parts.seconds(lambda: time.sleep(0.01), 3, "cpu") < 1.0
