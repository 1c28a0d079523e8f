"""What goes wrong in long runs, with real processes: ranks that are killed, hang, are told to leave, or see NaN."""

import json
import signal
import subprocess
from pathlib import Path

import job_setup
import pytest
import tiny_run
from launching import ENVIRONMENT, ROOT, TIMEOUT_S, command, launch, results

from hf_sparsebalance.checkpoints import STATE_FILE, last_complete
from hf_sparsebalance.errors import UserError

JOB = Path(__file__).parent / "job_faults.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Folder of a run to which nothing happened."""
    out = tmp_path_factory.mktemp("uninterrupted")
    done = launch(JOB, out)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def planned(out):
    """What the log says of each step, but for what was measured."""
    lines = [json.loads(line) for line in (out / "run" / "balance.jsonl").read_text().splitlines()]
    return [[(m["documents"], m["top_p"], m["density"]) for m in line["micro_batches"]] for line in lines]


def assert_same_run(out, whole):
    """Losses, gradient norms, budgets, documents and final parameters, to the bit."""
    for found, expected in zip(results(out, "faults"), results(whole, "faults"), strict=True):
        assert found["steps"] == expected["steps"] and len(found["steps"]) == 6
        assert found["parameters"] == expected["parameters"]
    assert planned(out) == planned(whole)


def test_a_run_killed_again_and_again_is_the_uninterrupted_one(uninterrupted, tmp_path):
    """kill -9 in every phase, of either rank, in either epoch: each restart goes on from the last whole checkpoint.

    The survivor says which rank is missing and after how many steps, and what was half-written is not picked up.
    """
    faults = [
        ("forward", 1, 2, 1),
        ("backward", 0, 3, 2),
        ("optimizer", 1, 4, 3),
        ("random-state", 1, 5, 4),
        ("optimizer-file", 0, 5, 4),
        ("backward", 1, 6, 5),
    ]
    for where, rank, step, last_whole in faults:
        done = launch(JOB, tmp_path, f"{where}:{rank}:{step}")
        assert done.returncode != 0
        finished = step - 1 if where in ("forward", "backward") else step
        assert f"rank {rank} died or hangs: no answer after {finished} whole steps" in done.stderr, done.stderr[-3000:]
        assert Path(last_complete(str(tmp_path / "run"))).name == f"checkpoint-{last_whole}"
    done = launch(JOB, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(tmp_path, uninterrupted)


def test_sigterm_saves_and_leaves(uninterrupted, tmp_path):
    """SIGTERM on one rank: all save after that step and leave together; the rest of the run follows to the bit."""
    done = launch(JOB, tmp_path, "term:1:2")
    assert done.returncode != 0 and "SIGTERM: saved after 2 steps" in done.stderr
    assert "died or hangs" not in done.stderr
    assert Path(last_complete(str(tmp_path / "run"))).name == "checkpoint-2"
    assert not (tmp_path / "faults-0.json").exists()
    done = launch(JOB, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(tmp_path, uninterrupted)


def test_sigterm_of_the_launcher_reaches_all(tmp_path):
    """A cluster signals the launcher, which passes it on: a whole checkpoint is there when it has gone."""
    out = tmp_path / "run"
    with subprocess.Popen(
        command(JOB, tmp_path, "nowhere:0:0"), cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as job:
        while not (out / "checkpoint-1" / STATE_FILE).exists():
            assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=TIMEOUT_S)
    assert job.returncode != 0 and last_complete(str(out)) is not None


def test_a_rank_that_hangs_is_named(tmp_path):
    """Nothing arrives within --ddp_timeout: the job ends with the rank and the step, not in silence."""
    done = launch(JOB, tmp_path, "hang:1:3", JOB_DDP_TIMEOUT="10")
    assert done.returncode != 0
    assert "rank 1 died or hangs: no answer after 2 whole steps" in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("rank_speed", ["equal", "auto"])
def test_a_slow_rank_is_named_and_gets_less(tmp_path, rank_speed):
    """Rank 0 takes three times as long per token: it is reported, and with --rank_speed auto has less to do."""
    done = launch(JOB.with_name("job_slow.py"), tmp_path, rank_speed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 takes" in done.stderr and "rank 1 takes" not in done.stderr
    tokens = results(tmp_path, "slow")[0]["tokens"]
    if rank_speed == "equal":
        assert max(tokens) < 1.2 * min(tokens)
    else:
        assert 1.5 * tokens[0] < tokens[1]


def test_out_of_memory_names_the_micro_batch(tmp_path):
    """A micro-batch that does not fit ends the job with rank, step, tokens and the ways out; checkpoints stay."""
    done = launch(JOB, tmp_path, "memory:1:3")
    assert done.returncode != 0
    assert "out of memory on rank 1 in step 3 of epoch 0: a micro-batch of" in done.stderr, done.stderr[-3000:]
    assert "--max_tokens" in done.stderr
    assert Path(last_complete(str(tmp_path / "run"))).name == "checkpoint-2"


def test_a_full_disk_loses_nothing_that_was_whole(uninterrupted, tmp_path):
    """Where a checkpoint cannot be written the job says which and from where to go on, and going on is exact."""
    done = launch(JOB, tmp_path, "full:0:3")
    assert done.returncode != 0
    assert "checkpoint-3 could not be written" in done.stderr and "checkpoint-2 with" in done.stderr, done.stderr[
        -3000:
    ]
    assert Path(last_complete(str(tmp_path / "run"))).name == "checkpoint-2"
    done = launch(JOB, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(tmp_path, uninterrupted)


def test_nan_ends_the_run_before_it_is_saved(tmp_path):
    """A NaN loss ends the run on all ranks with rank, step and documents; no checkpoint holds what followed."""
    done = launch(JOB, tmp_path, "nan:1:3")
    assert done.returncode != 0 and "died or hangs" not in done.stderr
    assert "the loss of rank 1 in step 3 is nan" in done.stderr, done.stderr[-3000:]
    assert Path(last_complete(str(tmp_path / "run"))).name == "checkpoint-2"


def test_another_number_of_ranks_cannot_resume(uninterrupted, tmp_path):
    """One process that resumes a run of two is refused by that: it would repeat documents, or lose them."""
    model, args = job_setup.build_model(), job_setup.arguments(tmp_path, num_train_epochs=2)
    args.profile = tiny_run.write_profile(tmp_path / "profile.json", model, args)
    with pytest.raises(UserError, match="num_ranks 2 .now 1"):
        job_setup.train(model, args, resume=str(uninterrupted / "run" / "checkpoint-6"))
