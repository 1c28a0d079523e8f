"""`sparsebalance simulate` as a user calls it."""

import json

import planning_profiles
import pytest

from hf_sparsebalance.batching import STRATEGIES
from hf_sparsebalance.cli import main
from hf_sparsebalance.devices import h100_profile

SMALL = ("simulate", "--device", "h100", "--distribution", "chatqa2", "--num_documents", "32")


def simulated(capsys, *options):
    """The JSON that the command prints."""
    status = main([*options, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


@pytest.mark.parametrize("schedule", ["gpipe", "1F1B", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble"])
def test_pipelines_of_every_schedule(schedule, capsys):
    """Each schedule gives a row for each strategy, tuned and not, with two controls; dense attention stands first."""
    document = simulated(capsys, *SMALL, "--num_stages", "2", "--schedule", schedule)
    rows = [(row["batching"], row["tuning"], row["control"]) for row in document["rows"]]
    tuned = [(None, None), ("optimal", None), ("optimal", "compute"), ("optimal", "coverage")]
    assert rows == [("random", "dense", None), *((s, *kind) for s in STRATEGIES for kind in tuned)]
    assert document["settings"]["schedule"] == schedule.lower()


def test_what_was_assumed_is_said(capsys):
    """Output names lengths (synthetic ones as such), densities and the device table's assumptions."""
    notes = " ".join(simulated(capsys, *SMALL)["notes"])
    for text in ("synthetic", "trained model", "backward = 2 x forward", "spread 0.06"):
        assert text in notes
    assert main([*SMALL, "--tolerance", "0", "--density", "uniform"]) == 0
    assert "uniform gate" in capsys.readouterr().out


def test_own_lengths_profile_and_curves(tmp_path, capsys):
    """A user's lengths, profile and measured curves are used; without tolerance there is no tuning."""
    (tmp_path / "lengths").write_text("\n".join(str(100 * i) for i in range(1, 17)))
    planning_profiles.profile().save(tmp_path / "profile.json")
    curve = {"length": 800, "top_p": [0.5, 1.0], "density": [0.3, 1.0]}
    (tmp_path / "curves.json").write_text(json.dumps([curve]))
    files = [f"--{name}={tmp_path / file}" for name, file in (("lengths", "lengths"), ("profile", "profile.json"))]
    document = simulated(capsys, "simulate", *files, f"--curves={tmp_path / 'curves.json'}", "--tolerance=0")
    assert len(document["rows"]) == 1 + len(STRATEGIES)
    assert "1 measured curves, lognormal spread 0 " in document["notes"][1]


@pytest.mark.parametrize("options", [(), ("--num_stages", "2", "--schedule", "zbvzerobubble")])
def test_gantt_writes_a_picture(options, tmp_path, capsys):
    """--gantt writes a PNG of one step, with pipelines and without."""
    path = tmp_path / "step.png"
    simulated(capsys, *SMALL, *options, "--gantt", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_h100_table_is_the_published_one():
    """Dense times are the table's, attention meets the linear part near 10.3K tokens, sparse never beats the floor."""
    profile = h100_profile()
    by_length = {row.length: row for row in profile.attention}
    assert by_length[32768].dense_forward_ms == 51.89
    assert profile.forward_ms_per_token * 32768 == pytest.approx(36 * 16.25)
    assert min(point.forward_ms for row in profile.attention for point in row.points) == 0.0284
    crossing = [n for n, row in by_length.items() if row.dense_forward_ms * 36 > profile.forward_ms_per_token * n]
    assert min(crossing) == 16384
    assert by_length[8192].points[-1].forward_ms == pytest.approx(by_length[8192].dense_forward_ms)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--distribution", "wlb"), "--profile FILE and --device"),
        (("--device", "h100"), "--lengths FILE and --distribution"),
        ((*SMALL[1:], "--profile", "x"), "--profile FILE and --device"),
        ((*SMALL[1:], "--num_ranks", "0"), "--num_ranks"),
        ((*SMALL[1:], "--num_stages", "8"), "--gradient_accumulation_steps"),
        ((*SMALL[1:], "--schedule", "zb"), "--schedule"),
        ((*SMALL[1:], "--spread", "-1"), "--spread"),
        ((*SMALL[1:], "--tolerance", "0.9"), "--tolerance"),
        ((*SMALL[1:], "--curves", "no such file"), "--curves"),
        ((*SMALL[1:], "--num_documents", "3"), "fewer than one global batch"),
        (("--device", "h100", "--lengths", "no such file"), "--lengths"),
        ((*SMALL[1:], "--gantt", "no such folder/x.png"), "--gantt"),
    ],
)
def test_mistakes_end_in_one_line(options, wanted, capfd):
    """A user's mistake is one line that names the option, and status 2."""
    status = main(["simulate", *options])
    out, err = capfd.readouterr()
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert wanted in err
