"""The comparison of real runs: its turns, its controls, its documents and how a gain is split."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from alternating_runs import Turns, mean_top_p

from evaluation import compare_balance as program
from hf_sparsebalance.tuning import MicroBatch


def test_turns_go_round_in_order():
    """One thread at a time, in the order given, until each has left; whoever stays comes round again."""
    turns, seen = Turns(["a", "b", "c"]), []

    def work(name, rounds):
        for number in range(rounds):
            turns.wait(name)
            seen.append(name)
            turns.end(stay=number + 1 < rounds)

    with ThreadPoolExecutor(3) as pool:
        for name, rounds in (("c", 1), ("b", 3), ("a", 2)):
            pool.submit(work, name, rounds)
    assert seen == ["a", "b", "c", "a", "b", "b"]


def test_a_control_has_the_weighted_mean_of_the_planned_budgets():
    """Same work weighs the tuned run's budgets with causal pairs, same coverage with tokens that have history."""
    steps = [[(0.1, (100,)), (0.4, (50,))], [(0.3, (20, 10))]]  # (top_p, lengths)
    micro_batches = [[MicroBatch(0, 0, lengths) for _, lengths in step] for step in steps]
    planner = SimpleNamespace(
        num_steps=2,
        settings=SimpleNamespace(block_size=16),
        budgets=lambda epoch, step: SimpleNamespace(top_p=tuple(p for p, _ in steps[step])),
        micro_batches=lambda epoch, step: micro_batches[step],
    )
    assert mean_top_p(planner, "history") == pytest.approx((0.1 * 84 + 0.4 * 34 + 0.3 * 4) / 122)
    pairs = (5050, 1275, 210 + 55)
    expected = (0.1 * pairs[0] + 0.4 * pairs[1] + 0.3 * pairs[2]) / sum(pairs)
    assert mean_top_p(planner, "causal_pairs") == pytest.approx(expected)


def test_a_gain_is_split_by_what_was_measured():
    """A tuned run that is only evener gains by tuning alone; fewer and cheaper pairs show in the busy times."""
    # (total, busy, share): total is busy / share, plus one second beside micro-batches.
    measured = {
        "random": [(11.0, 8.0, 0.8), (21.0, 16.0, 0.8)],
        "sab": [(9.0 + 8 / 9, 8.0, 0.9), (18.0 + 7 / 9, 16.0, 0.9)],
        "control": [(7.0, 5.4, 0.9), (13.0, 10.8, 0.9)],
        "tuned": [(6.0, 5.0, 1.0), (11.0, 10.0, 1.0)],
    }
    rows = [
        {"name": name, "repeat": repeat, "total_s": total, "busy_s": busy, "balance_share": share}
        for name, repeats in measured.items()
        for repeat, (total, busy, share) in enumerate(repeats)
    ]
    parts = program.split(rows, "tuned", "control", "sab")
    assert parts["total"] == pytest.approx((11 / 6 * 21 / 11) ** 0.5)
    assert parts["batching"] == pytest.approx(0.9 / 0.8) and parts["tuning"] == pytest.approx(1 / 0.9)
    assert parts["fewer_pairs"] == pytest.approx(8 / 5.4) and parts["cheaper_pairs"] == pytest.approx(5.4 / 5)
    product = math.prod(value for name, value in parts.items() if name != "total")
    assert product == pytest.approx(parts["total"])


def test_bimodal_documents_are_short_or_long(tmp_path):
    """Half of the pieces are up to a sixteenth of the longest, the others at least a third of it."""
    train = program.cut_documents(tmp_path, "bimodal", 40, 2048)
    sizes = [len(json.loads(line)["text"]) for line in train.read_text().splitlines()]
    assert len(sizes) == 40
    assert sum(size <= 2048 // 16 for size in sizes) == 20
    assert sum(2048 // 3 <= size <= 2048 for size in sizes) == 20


def test_equal_documents_are_equally_long(tmp_path):
    """All pieces are a third of the longest."""
    train = program.cut_documents(tmp_path, "equal", 16, 2048)
    assert {len(json.loads(line)["text"]) for line in train.read_text().splitlines()} == {2048 // 3}


def test_a_folder_of_another_size_is_refused(monkeypatch, tmp_path, capsys):
    """Runs of another size would be taken for this comparison's: one line says so, and nothing is run."""
    (tmp_path / "settings.json").write_text('{"documents": 80, "max_length": 512}')
    monkeypatch.setattr("sys.argv", ["compare_balance.py", "--small", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        program.main()
    assert stopped.value.code == 2 and "--output" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--corpora", "x"], ["--documents", "12"], ["--runs", "nothing"], ["--repeats", "0"], ["--max_length", "0"]],
)
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
    (gain,) = document["corpora"]["bimodal"]["gains"]
    assert (gain["run"], gain["over"]) == ("dst mean", "dst mean: same work")
    assert gain["median"] == pytest.approx(rows["dst mean: same work"]["total_s"] / rows["dst mean"]["total_s"])
