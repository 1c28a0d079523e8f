"""The planner's state in each checkpoint folder, and with it the mark that the checkpoint is whole.

It is written last, when every rank has written its part, in one piece, and taken away before anything of the folder is
written again: where it lies, everything else does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer_utils import sort_checkpoints

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.runlog import replace_file

STATE_FILE = "sparsebalance_state.json"
# What a full disk raises: Python, torch's zip writer, safetensors.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


def last_complete(output_dir: str) -> str | None:
    """The last whole checkpoint in a folder, or None; half-written ones are passed over."""
    folders = sort_checkpoints(output_dir) if Path(output_dir).is_dir() else []
    return next((str(folder) for folder in reversed(folders) if (Path(folder) / STATE_FILE).exists()), None)


def checkpoint_folder(resume: str | bool, output_dir: str) -> str:
    """The checkpoint to resume from: the folder named, or, for True, the last whole one in ``output_dir``.

    Raises:
        UserError: there is none.
    """
    folder = resume if isinstance(resume, str) else last_complete(output_dir)
    if folder is None:
        raise UserError(f"--resume_from_checkpoint: no checkpoint in {output_dir} that was written to its end")
    return folder


def read_state(checkpoint: str) -> dict[str, object]:
    """The planner's state in a checkpoint folder.

    Raises:
        UserError: it is missing or not JSON.
    """
    path = Path(checkpoint) / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} is missing: this checkpoint was not written by SparseBalanceTrainer, or not to its end; resume "
            "from another"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): resume from an earlier checkpoint") from error
    if not isinstance(state, dict):
        raise UserError(f"{path} is not a balance state: resume from an earlier checkpoint")
    return state


def write_state(checkpoint: Path, state: Mapping[str, object]) -> None:
    """Mark a checkpoint as whole."""
    replace_file(checkpoint / STATE_FILE, json.dumps(state))


def forget_state(checkpoint: Path) -> None:
    """Before a checkpoint is written (again): it is not whole."""
    (checkpoint / STATE_FILE).unlink(missing_ok=True)
