"""The command ``sparsebalance``: train, profile, simulate, evaluate, report.

A mistake of the user ends with one line on stderr and exit status 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hf_sparsebalance.cli import evaluate, profile, report, simulate, train
from hf_sparsebalance.errors import UserError

COMMANDS = {
    "train": ("fine-tune with balanced, sparsely attending micro-batches (run it under accelerate launch)", train.run),
    "profile": ("measure this device and model; training needs the profile to balance", profile.run),
    "simulate": ("predict step times of each batching strategy, with and without tuning", simulate.run),
    "evaluate": ("held-out loss of a model, dense or sparse", evaluate.run),
    "report": ("table and picture of finished runs", report.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0, or 2 for a mistake of the user)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:10}{text}" for name, (text, _) in COMMANDS.items()]
        print(
            "usage: sparsebalance COMMAND ...\n\n" + "\n".join(lines) + "\n\nsparsebalance COMMAND --help says more."
        )
        return 0
    try:
        if arguments[0] not in COMMANDS:
            raise UserError(f"unknown command {arguments[0]!r}; the commands are {', '.join(COMMANDS)}")
        _, run = COMMANDS[arguments[0]]
        run(arguments[1:])
    except UserError as error:
        rank = f" [rank {os.environ['RANK']}]" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        print(f"sparsebalance{rank}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
