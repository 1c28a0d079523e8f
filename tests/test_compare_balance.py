"""The comparison of real runs: its order, its controls and how a gain is split."""

import json
from types import SimpleNamespace

import pytest

from evaluation import compare_balance as program


def run_of(*micro_batches):
    """A run of one step from (top_p, tokens, causal_pairs) triples."""
    entries = [SimpleNamespace(top_p=p, tokens=t, causal_pairs=c) for p, t, c in micro_batches]
    return SimpleNamespace(steps=[SimpleNamespace(micro_batches=entries)])


def test_a_control_has_the_weighted_mean_budget():
    """Same work weighs budgets with pairs, same coverage with tokens."""
    run = run_of((0.1, 100, 10_000), (0.4, 50, 2_500))
    assert program.matched_top_p(run, "causal_pairs") == pytest.approx((0.1 * 4 + 0.4) / 5)
    assert program.matched_top_p(run, "tokens") == pytest.approx((0.1 * 2 + 0.4) / 3)


def test_backwards_keeps_controls_behind_what_they_match():
    """Every trial runs once either way; forwards and backwards a control follows its tuned run at once or later."""
    trials = program.trials()
    for order in (trials, program.backwards(trials)):
        names = [trial.name for trial in order]
        assert sorted(names) == sorted(trial.name for trial in trials) and len(set(names)) == len(names)
        for number, trial in enumerate(order):
            assert trial.matches is None or trial.matches[0] in names[:number]
    assert program.backwards(trials)[-1].name == trials[0].name


def test_parts_multiply_to_the_total_inside_a_repeat():
    """random / tuned = (random / before) * (before / control) * (control / tuned)."""
    seconds = {"random": 12.0, "sab": 10.0, "sab dst: same work": 8.0, "sab dst": 7.5}
    rows = [{"name": name, "repeat": 0, "total_s": total} for name, total in seconds.items()]
    parts = program.split(rows, "sab dst", "sab dst: same work", "sab")
    assert parts["total"] == pytest.approx(12 / 7.5)
    assert parts["batching"] * parts["less_work"] * parts["balance"] == pytest.approx(parts["total"])


def test_bimodal_documents_are_short_or_long(tmp_path):
    """Half of the pieces are up to a sixteenth of the longest, the others at least a third of it."""
    train, heldout = program.bimodal_documents(tmp_path, 40, 2048)
    sizes = [len(json.loads(line)["text"]) for line in train.read_text().splitlines()]
    assert len(sizes) == 40 and heldout.exists()
    assert sum(size <= 2048 // 16 for size in sizes) == 20
    assert sum(2048 // 3 <= size <= 2048 for size in sizes) == 20


@pytest.mark.parametrize("arguments", [["--corpora", "x"], ["--documents", "12"], ["--runs", "nothing"]])
def test_bad_options_end_with_a_line(monkeypatch, capsys, arguments):
    """A wrong option ends with status 2 and names itself."""
    monkeypatch.setattr("sys.argv", ["compare_balance.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        program.main()
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_comparison(monkeypatch, tmp_path):
    """Random order, a tuned run and its control are really trained; JSON holds the runs and the split."""
    result = tmp_path / "found.json"
    monkeypatch.setattr(
        "sys.argv",
        ["compare_balance.py", "--small", "--corpora", "bimodal", "--runs", "dst mean: same work",
         "--output", str(tmp_path / "runs"), "--json", str(result)],
    )  # fmt: skip
    assert program.main() == 0
    document = json.loads(result.read_text())
    rows = {row["name"]: row for row in document["corpora"]["bimodal"]["runs"]}
    assert set(rows) == {"random", "dst mean", "dst mean: same work"}
    assert rows["random"]["speedup"] == 1.0
    assert {row["documents"] for row in rows.values()} == {16}
    parts = document["corpora"]["bimodal"]["parts"]["dst mean"]
    assert parts["total"] == pytest.approx(rows["random"]["total_s"] / rows["dst mean"]["total_s"])
