"""The simulator's evaluation programs at small size: the paper's experiments, and a run predicted from its log."""

import importlib
import json

import planning_profiles
import pytest

from hf_sparsebalance import runlog
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.workloads import trained_curve

LENGTHS = (1024, 2048, 4096, 512, 2048, 1024, 4096, 700)


@pytest.fixture
def program(request):
    """A program of evaluation/ as a module."""
    return importlib.import_module(request.param)


@pytest.mark.parametrize("program", ["simulate_paper"], indirect=True)
def test_table2_stands_beside_the_papers(program, capsys):
    """The six rows of Table II have the paper's figures beside them; only the baseline's time is made equal."""
    assert program.main(["table2", "--small", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    paper = {row["row"]: row for row in rows if row["row"]}
    assert list(paper) == ["baseline", "+DST", "+LBB", "+LBB+DST", "+SAB", "+SAB+DST"]
    assert paper["baseline"]["ms_per_iteration"] == pytest.approx(4202.09)
    assert [row["paper_speedup"] for row in paper.values()] == [1.0, 1.08, 1.23, 1.28, 1.21, 1.35]
    for row in rows:
        assert row["ms_per_iteration"] * row["speedup"] == pytest.approx(4202.09, rel=1e-6)
    kinds = {(row["tuning"], row["control"]) for row in rows}
    assert kinds >= {(a, c) for a in ("mean", "optimal") for c in (None, "compute", "coverage")} | {("dense", None)}


@pytest.mark.parametrize("program", ["simulate_paper"], indirect=True)
@pytest.mark.parametrize("command", ["fig8", "fig9", "scaling"])
def test_figures_run_and_explain_themselves(program, command, tmp_path, capsys):
    """Each figure prints a table with its caption and writes JSON with settings, date and versions."""
    path = tmp_path / "figure.json"
    assert program.main([command, "--small", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["rows"] and {"date", "versions", "machine", "settings"} <= document.keys()
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join(document["notes"][0].split()) in printed
    if command == "fig8":
        assert {row["paper_speedup"] for row in document["rows"]} == {None, 1.074, 1.451}


def write_log(folder, slower=1.0, constant_ms=0.0, packed=1):
    """A run of 8 steps of two ranks whose times are the profile's, times a factor, plus a constant per step."""
    predictor = LatencyPredictor(planning_profiles.profile())
    folder.mkdir()
    for step in range(8):
        entries = []
        for rank in range(2):
            documents = tuple((step + rank * 3 + i) % len(LENGTHS) for i in range(packed))
            lengths = [LENGTHS[i] for i in documents]
            top_p = 0.7 + 0.1 * rank
            densities = [trained_curve(length, planning_profiles.BLOCK_SIZE).at(top_p) for length in lengths]
            time = predictor.predict(lengths, densities)
            pairs = sum(length * (length + 1) // 2 for length in lengths)
            entries.append(
                runlog.MicroBatch(
                    rank, 0, documents, sum(lengths), pairs, top_p, None, 0.0,
                    slower * time.forward_ms, slower * time.backward_ms, None, None, None,
                )
            )  # fmt: skip
        step_s = (max(entry.busy_ms for entry in entries) + constant_ms) / 1000
        runlog.append_step(folder / "balance.jsonl", runlog.Step(step, 0, step_s, 0.0, None, 0, tuple(entries)))
    fields = {"name": folder.name, "attention": "sparsebalance", "batching": "random", "tuning": False}
    runlog.write_run(folder, {**fields, "documents": 8, "environment": {}})
    planning_profiles.profile().save(folder / "profile.json")
    return [str(folder), "--profile", str(folder / "profile.json"), "--density", "trained", "--json"]


@pytest.mark.parametrize("program", ["simulate_real"], indirect=True)
def test_a_run_is_predicted(program, tmp_path, capsys):
    """A run that follows its profile is predicted exactly; a slower machine with a constant only after the refit."""

    def errors(command):
        assert program.main([*command, "--warmup", "3"]) == 0
        run = json.loads(capsys.readouterr().out)["runs"][0]
        assert run["steps"] == 5
        return run["error"], run["refit_error"]

    # The planner's curves are those of lengths rounded to 3 %.
    assert errors(write_log(tmp_path / "like")) == pytest.approx((0.0, 0.0), abs=0.02)
    alone, refitted = errors(write_log(tmp_path / "slow", slower=2.0, constant_ms=5.0))
    assert alone < -0.5
    assert refitted == pytest.approx(0.0, abs=0.02)
    (tmp_path / "lengths").write_text("\n".join(map(str, LENGTHS)))
    packed = write_log(tmp_path / "packed", packed=3)
    assert errors([*packed, "--lengths", str(tmp_path / "lengths")]) == pytest.approx((0.0, 0.0), abs=0.02)


@pytest.mark.parametrize("program", ["simulate_real"], indirect=True)
def test_runs_below_a_folder_are_found_with_their_profile(program, tmp_path, capsys):
    """All steps of all runs below a folder are predicted by the nearest profile above each, unseen what they took."""
    for corpus, slower in (("library", 1.0), ("bimodal", 1.25)):
        for repeat in ("0", "1"):
            (tmp_path / corpus / repeat).mkdir(parents=True)
            write_log(tmp_path / corpus / repeat / "random", slower=slower)
            (tmp_path / corpus / repeat / "random" / "profile.json").rename(tmp_path / corpus / "profile.json")
    assert program.main([str(tmp_path), "--density", "trained", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    runs = {run["run"].removeprefix(f"{tmp_path}/"): run for run in document["runs"]}
    assert list(runs) == [f"{corpus}/{repeat}/random" for corpus in ("bimodal", "library") for repeat in "01"]
    for name, run in runs.items():
        assert run["steps"] == 8 and run["refit_error"] is None
        assert run["error"] == pytest.approx(0.0 if name.startswith("library") else -0.2, abs=0.02)
    assert document["summary"]["largest_error"] == max(abs(run["error"]) for run in runs.values())
    assert program.main([str(tmp_path), "--density", "trained"]) == 0
    assert "4 runs, trained densities" in capsys.readouterr().out


@pytest.mark.parametrize("program", ["simulate_real"], indirect=True)
def test_ratios_of_runs_that_belong_together(program, tmp_path, capsys):
    """Two runs of one slow machine: totals are missed by a fifth, their ratio is not; runs elsewhere are no pair."""
    for name, slower in (("0/random", 1.25), ("0/other", 1.25), ("1/random", 2.0)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_log(tmp_path / name, slower=slower)
    assert program.main([str(tmp_path), "--density", "trained", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["within_10_percent"] == 0 and summary["mean_error"] > 0.2
    assert summary["largest_ratio_error"] == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("program", ["simulate_real"], indirect=True)
def test_what_cannot_be_predicted_is_refused(program, tmp_path, capsys):
    """Packed runs need the lengths, and they must be those of the data; too few steps are refused."""
    packed = write_log(tmp_path / "packed", packed=3)
    (tmp_path / "others").write_text("\n".join(["5"] * len(LENGTHS)))
    for options, wanted in (
        ([], "--lengths FILE"),
        (["--lengths", str(tmp_path / "others")], "not of this data"),
        (["--warmup", "8"], "--warmup"),
        (["--profile", str(tmp_path / "none.json")], "none.json"),
    ):
        assert program.main([*packed, *options]) == 2
        err = capsys.readouterr().err
        assert wanted in err and len(err.splitlines()) == 1
    assert program.main([str(tmp_path / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err
