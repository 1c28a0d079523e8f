import io
import json
import math
import statistics

import pytest
from rich.console import Console

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.report import Summary, balance_share, draw_timeline, read_run, render_table, summarise

RUN = {
    "name": "sab", "attention": "sparsebalance", "batching": "sab", "tuning": "mean", "base_top_p": 0.9,
    "tolerance": 0.1, "anchor": "mean", "scope": "rank", "documents": 4, "heldout_loss_before": 5.5,
    "heldout_loss_after": None, "environment": {"device": "cpu"}, "base_top_k": 8,
}  # fmt: skip


def micro_batch(rank=0, document=0, tokens=100, ms=(10.0, 30.0), **fields):
    return {
        "rank": rank, "slot": 0, "documents": [document], "tokens": tokens, "top_p": None, "predicted_ms": None,
        "causal_pairs": tokens * (tokens + 1) // 2 if isinstance(tokens, int) else 1,
        "start_ms": 0.0, "forward_ms": ms[0], "backward_ms": ms[1], "density": None, "work": None, "coverage": None,
        "top_k": 6.5, "stage_ms": None,
        **fields,
    }  # fmt: skip


def step(number, step_s, *micro_batches, **fields):
    return {
        "step": number, "epoch": 0, "step_s": step_s, "planning_ms": 0.5, "anchor_ms": None, "missed_anchors": 0,
        "micro_batches": list(micro_batches), **fields,
    }  # fmt: skip


STEPS = [
    # rank sums 100 and 60 ms, then 40 and 40 ms
    step(1, 0.110, micro_batch(0, 0, 100, (20.0, 40.0), density=0.5, work=0.6, coverage=0.9),
         micro_batch(0, 1, 300, (10.0, 30.0), density=0.1, work=0.2, coverage=1.0),
         micro_batch(1, 2, 50, (20.0, 40.0))),
    step(2, 0.050, micro_batch(0, 3, 10), micro_batch(1, 4, 40), planning_ms=1.5),
]  # fmt: skip


def write_run(folder, steps=STEPS, tail="", **fields):
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({**RUN, **fields}))
    (folder / "balance.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps) + tail)
    return folder


def show(table, width):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_a_run_is_read_as_written(tmp_path):
    """Every field of run.json and of the steps arrives in the run."""
    run = read_run(write_run(tmp_path))
    assert {key: getattr(run, key) for key in RUN} == RUN
    assert run.num_ranks == 2 and [len(step.micro_batches) for step in run.steps] == [3, 2]
    first = run.steps[0].micro_batches[0]
    assert {**vars(first), "documents": list(first.documents)} == STEPS[0]["micro_batches"][0]


def test_summary_follows_the_definitions(tmp_path):
    """The figures of a run worked out by hand, each from its definition."""
    run = read_run(write_run(tmp_path / "a"))
    slow = [dict(line, step_s=2 * line["step_s"]) for line in STEPS]
    summary = summarise(run, read_run(write_run(tmp_path / "b", slow)))
    assert set(summary) == set(Summary.__annotations__)
    assert (summary["steps"], summary["documents"]) == (2, 4)
    assert summary["total_s"] == pytest.approx(0.160)
    assert summary["step_s_mean"] == pytest.approx(0.080) == summary["step_s_median"]
    assert summary["step_s_p95"] == pytest.approx(0.050 + 0.95 * 0.060)
    assert summary["speedup"] == pytest.approx(2.0)
    # step 1: (100 + 60) / 2 + 10 ms of other work, step 2: 40 + 10
    assert summary["perfect_balance_speedup"] == pytest.approx(0.320 / (0.090 + 0.050))
    assert summary["imbalance_rank"] == pytest.approx((100 / 80 + 1) / 2)
    assert summary["imbalance_microbatch"] == pytest.approx((60 / statistics.mean([60, 40, 60]) + 1) / 2)
    # One document of 100 and one of 300 tokens: 5050 and 45150 pairs.
    assert summary["density"] == pytest.approx((5050 * 0.5 + 45150 * 0.1) / 50200)
    assert summary["work"] == pytest.approx((5050 * 0.6 + 45150 * 0.2) / 50200)
    assert summary["coverage"] == pytest.approx((100 * 0.9 + 300 * 1.0) / 400)
    assert summary["tokens_per_s"] == pytest.approx(500 / 0.160)
    assert summary["planning_ms"] == pytest.approx(1.0)
    assert balance_share(run) == pytest.approx((80 + 40) / (100 + 40))


def test_a_balanced_run_meets_its_bound(tmp_path):
    """Where all ranks take equally long, perfect balance would gain nothing and the share is 1."""
    run = read_run(write_run(tmp_path, STEPS[1:]))
    summary = summarise(run, run)
    assert summary["speedup"] == summary["perfect_balance_speedup"] == balance_share(run) == 1.0
    assert summary["imbalance_rank"] == summary["imbalance_microbatch"] == 1.0


def test_speedup_needs_the_same_documents(tmp_path):
    """A run over other documents or fewer epochs than the baseline's gets no speedup, but all other figures."""
    baseline = read_run(write_run(tmp_path / "a"))
    again = [dict(line, step=line["step"] + 2, epoch=1.5) for line in STEPS]
    for name, steps in [("fewer", STEPS[:1]), ("twice", STEPS + again)]:
        summary = summarise(read_run(write_run(tmp_path / name, steps)), baseline)
        assert summary["speedup"] is None and summary["perfect_balance_speedup"] is None
        assert summary["total_s"] > 0


def test_unmeasured_figures_are_null(tmp_path):
    """Density, work, coverage and planning time that no micro-batch measured are None, and the table shows a dash."""
    run = read_run(write_run(tmp_path, [step(1, 0.1, micro_batch(), planning_ms=None)], tuning=False))
    summary = summarise(run, run)
    assert [summary[key] for key in ("density", "work", "coverage", "planning_ms")] == [None] * 4
    line = next(line for line in show(render_table([summary]), 80).splitlines() if "coverage" in line)
    assert " - " in line


def test_a_rank_without_a_micro_batch_counts_as_idle(tmp_path):
    """A rank that had nothing to do in a step counts as waiting, not as absent."""
    steps = [STEPS[0], step(2, 0.05, micro_batch(0))]
    assert balance_share(read_run(write_run(tmp_path, steps))) == pytest.approx((80 + 20) / (100 + 40))


@pytest.mark.parametrize("kept", [1, 30, -1])
def test_a_half_written_last_line_is_left_out(tmp_path, kept):
    """A run that was cut off while it wrote a step is read up to the step before."""
    tail = json.dumps(step(3, 0.1, micro_batch()))[:kept]
    assert len(read_run(write_run(tmp_path, tail=tail)).steps) == 2


def test_a_whole_last_line_without_newline_counts(tmp_path):
    """A last step that was written in full counts, newline or not."""
    assert len(read_run(write_run(tmp_path, tail=json.dumps(step(3, 0.1, micro_batch())))).steps) == 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        (json.dumps(step(3, "fast", micro_batch())), "step_s"),
        (json.dumps(step(3, True, micro_batch())), "step_s"),
        (json.dumps(step(3, math.nan, micro_batch())), "step_s"),
        (json.dumps(step(3, 0.0, micro_batch())), "step_s"),
        (json.dumps(step(3, 0.1)), "micro_batches"),
        (json.dumps(step(3, 0.1, 7)), "micro-batch 0"),
        (json.dumps(step(3, 0.1, micro_batch(), micro_batch(-1))), "micro-batch 1: rank"),
        (json.dumps(step(3, 0.1, micro_batch(tokens=None))), "tokens"),
        (json.dumps(step(3, 0.1, micro_batch(document="a"))), "documents"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, reason):
    """A malformed line is refused with one line that names the file, the line and the field."""
    with pytest.raises(UserError, match=rf"balance\.jsonl line 3.*{reason}") as error:
        read_run(write_run(tmp_path, tail=line + "\n"))
    assert "\n" not in str(error.value)


def test_missing_and_malformed_files_are_named(tmp_path):
    """A missing file, a run.json that is no JSON or lacks a field, and a run without a step are refused by name."""
    with pytest.raises(UserError, match=r"run\.json.*cannot be read"):
        read_run(tmp_path)
    folder = write_run(tmp_path)
    for text, reason in [("{", "JSON"), ("[]", "object"), (json.dumps({**RUN, "name": None}), "name")]:
        (folder / "run.json").write_text(text)
        with pytest.raises(UserError, match=rf"run\.json.*{reason}"):
            read_run(folder)
    with pytest.raises(UserError, match=r"balance\.jsonl.*no whole step"):
        read_run(write_run(tmp_path, steps=[]))


def test_table_shows_every_run(tmp_path):
    """The table fits 80 columns for three runs and shows names, speedups and the share of perfect balance."""
    runs = [read_run(write_run(tmp_path / name, name=name)) for name in ("random", "[red]sab", "dense")]
    text = show(render_table([summarise(run, runs[0]) for run in runs], [balance_share(run) for run in runs]), 80)
    assert all(run.name in text for run in runs)
    assert text.count("1.00x") == 3 and text.count("85.7%") == 3
    assert "..." not in text and "\u2026" not in text


@pytest.mark.parametrize("top_p", [None, 0.5])
def test_timeline_is_a_png(tmp_path, top_p):
    """A timeline of runs with and without budgets and with different numbers of ranks is written as a PNG."""
    few = read_run(write_run(tmp_path / "a", [step(1, 0.1, micro_batch(top_p=top_p), micro_batch(1))]))
    many = read_run(write_run(tmp_path / "b", [step(n, 0.1, *(micro_batch(r) for r in range(4))) for n in (1, 2)]))
    path = tmp_path / "pictures" / "timeline.png"
    draw_timeline([few, many], path, max_steps=1)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UserError, match="at least one"):
        draw_timeline([], path)
