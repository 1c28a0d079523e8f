"""Worker of compare_balance.py: many trainings in one job, an optimizer step of each in turn.

    accelerate launch ... evaluation/alternating_runs.py SPEC.json

Each training is the command line's own, in a thread of its own; only one thread runs at a time, and all ranks pass the
turn in the same order.  What a machine's slow minute costs is so shared by all trainings, where one after another it
hit one of them: on a shared machine speed drifts by more in minutes than the gains that are to be told apart.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_sparsebalance.cli.train import plan
from hf_sparsebalance.cli.train import run as train
from hf_sparsebalance.density import history_tokens
from hf_sparsebalance.planner import Planner


class Turns:
    """Lets threads run one at a time, round and round in a fixed order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._queue = deque(names)
        self._changed = threading.Condition()

    def wait(self, name: str) -> None:
        """Until it is this one's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue[0] == name)

    def end(self, *, stay: bool) -> None:
        """The turn of the one that has it is over; with `stay` it comes round again."""
        with self._changed:
            name = self._queue.popleft()
            if stay:
                self._queue.append(name)
            self._changed.notify_all()


class TakeTurns(TrainerCallback):
    """Passes the turn on after each step's log, which is the last of it: the wait counts in no step."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self._name = name

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._turns.end(stay=True)
        self._turns.wait(self._name)


def mean_top_p(planner: Planner, weight: str) -> float:
    """Mean budget that a planner chooses over its first epoch.

    Args:
        planner: with tuning.
        weight: of a micro-batch: its tokens with `history`, for the same coverage; or its `causal_pairs`, for the same
            work, where the gate is uniform and density follows p.
    """
    total = weights = 0.0
    block_size = planner.settings.block_size
    for step in range(planner.num_steps):
        tuning = planner.budgets(0, step)
        assert tuning is not None
        for micro_batch, top_p in zip(planner.micro_batches(0, step), tuning.top_p, strict=True):
            pairs = sum(length * (length + 1) // 2 for length in micro_batch.lengths)
            history = int(history_tokens(micro_batch.lengths, block_size).sum())
            share = history if weight == "history" else pairs
            total, weights = total + top_p * share, weights + share
    return total / weights


def main() -> int:
    """Run the trainings of a JSON file: `{name: {"arguments": [...], "matches": [arguments, weight] or null}}`."""
    trials = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    turns = Turns(list(trials))

    def run(name: str) -> None:
        turns.wait(name)
        arguments = trials[name]["arguments"]
        if trials[name]["matches"] is not None:
            other, weight = trials[name]["matches"]
            arguments = [*arguments, "--base_top_p", f"{mean_top_p(plan(other), weight):.4f}"]
        train(arguments, [TakeTurns(turns, name)])
        turns.end(stay=False)

    with ThreadPoolExecutor(len(trials)) as pool:
        futures = [pool.submit(run, name) for name in trials]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            error = future.exception()
            if error is not None:
                traceback.print_exception(error)
                os._exit(1)  # the other threads wait for turns that will not come
    return 0


if __name__ == "__main__":
    sys.exit(main())
