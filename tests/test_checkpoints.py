"""Whole and half-written checkpoints, as plain folders."""

import os

import pytest

from hf_sparsebalance import checkpoints
from hf_sparsebalance.checkpoints import checkpoint_folder, forget_state, last_complete, read_state, write_state
from hf_sparsebalance.errors import UserError


def folder(tmp_path, step, whole=True):
    made = tmp_path / f"checkpoint-{step}"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    if whole:
        write_state(made, {"step": step})
    return str(made)


def test_the_last_whole_one_is_taken(tmp_path):
    """By number, not by name or age, and never one without its state."""
    nine = folder(tmp_path, 9)
    ten = folder(tmp_path, 10)
    folder(tmp_path, 11, whole=False)
    os.utime(ten, (0, 0))
    assert nine != ten == last_complete(str(tmp_path)) == checkpoint_folder(True, str(tmp_path))
    assert read_state(ten) == {"step": 10}
    assert checkpoint_folder(nine, str(tmp_path)) == nine


@pytest.mark.parametrize("output", ["none", "."])
def test_nothing_to_resume_from(tmp_path, output):
    """Neither a missing folder nor one with half a checkpoint has anything to resume from, and True says so."""
    folder(tmp_path, 3, whole=False)
    assert last_complete(str(tmp_path / output)) is None
    with pytest.raises(UserError, match="no checkpoint"):
        checkpoint_folder(True, str(tmp_path / output))


def test_a_checkpoint_written_again_is_not_whole_meanwhile(tmp_path):
    """The state of an earlier run goes before new files come."""
    path = tmp_path / "checkpoint-1"
    folder(tmp_path, 1)
    forget_state(path)
    forget_state(path)
    assert last_complete(str(tmp_path)) is None


def test_a_full_disk_leaves_no_mark(tmp_path, monkeypatch):
    """Where the state cannot be written to its end, the checkpoint does not count."""
    path = tmp_path / "checkpoint-1"
    folder(tmp_path, 1, whole=False)

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_sparsebalance.runlog.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_state(path, {})
    assert not (path / checkpoints.STATE_FILE).exists() and last_complete(str(tmp_path)) is None
