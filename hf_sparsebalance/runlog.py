"""What a run leaves behind: `run.json` (what was run) and `balance.jsonl` (one line per optimizer step).

Every line holds the measured times of all ranks' micro-batches of its step, so that figures and pictures can be made
long after, on another machine. Reading checks each field: a figure from a misread log is worse than none.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparsebalance.errors import UserError


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    Times are in milliseconds, `start_ms` from the start of its step. `causal_pairs` counts the (query, key) pairs that
    dense causal attention would attend in its documents: what density and work are shares of. `top_k` is the mean over
    the layers that have a gate. `stage_ms` is the time of each process of a pipeline, in order; together they make
    forward and backward.
    """

    rank: int
    slot: int
    documents: tuple[int, ...]
    tokens: int
    causal_pairs: int
    top_p: float | None
    predicted_ms: float | None
    start_ms: float
    forward_ms: float
    backward_ms: float
    density: float | None
    work: float | None
    coverage: float | None
    top_k: float | None = None
    stage_ms: tuple[float, ...] | None = None

    @property
    def busy_ms(self) -> float:
        """Forward and backward time."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Step:
    """One optimizer step: its wall time in seconds and the micro-batches of all ranks.

    `missed_anchors` counts the micro-batches (scope rank: ranks) planned above their anchor, because the least budget
    is too slow for it; `raised_top_k` (None without a top_k) the pairs of micro-batch and layer that raised the
    anchor's k, because the bound on coverage wins.
    """

    step: int
    epoch: int
    step_s: float
    planning_ms: float | None
    anchor_ms: float | None
    missed_anchors: int
    micro_batches: tuple[MicroBatch, ...]
    raised_top_k: int | None = None

    def rank_busy_ms(self, num_ranks: int) -> np.ndarray:
        """Summed micro-batch time of each rank, `[num_ranks]`; 0 for a rank that had none."""
        busy = np.zeros(num_ranks)
        for micro_batch in self.micro_batches:
            busy[micro_batch.rank] += micro_batch.busy_ms
        return busy


@dataclass(frozen=True)
class Run:
    """What `run.json` says, and the steps that were logged in full."""

    folder: Path
    name: str
    attention: str
    batching: str
    tuning: bool | str
    base_top_p: float | None
    tolerance: float | None
    anchor: str | None
    scope: str | None
    documents: int
    heldout_loss_before: float | None
    heldout_loss_after: float | None
    environment: dict[str, Any]
    steps: tuple[Step, ...]
    base_top_k: float | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks that took part."""
        return 1 + max(micro_batch.rank for step in self.steps for micro_batch in step.micro_batches)

    @property
    def total_s(self) -> float:
        """Sum of the steps' times, seconds."""
        return sum(step.step_s for step in self.steps)


def read_run(folder: str | Path) -> Run:
    """Read a run folder.

    A last line without its end, as a run that was cut off leaves it, is left out.

    Raises:
        UserError: if a file is missing or malformed (naming file and line), or no step was logged in full.
    """
    folder = Path(folder)
    run_path, steps_path = folder / "run.json", folder / "balance.jsonl"
    try:
        fields = json.loads(_read_bytes(run_path).decode("utf-8"))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{run_path}: not valid JSON ({error})") from error
    record = _Record(fields, str(run_path))
    lines = _read_bytes(steps_path).split(b"\n")
    steps = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{steps_path} line {number}"
        try:
            value = json.loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):  # no newline after it: the run was cut off while it wrote
                break
            raise UserError(f"{where}: not valid JSON ({error})") from error
        steps.append(_step(_Record(value, where)))
    if not steps:
        raise UserError(f"{steps_path}: holds no whole step: let the run finish at least one")
    return Run(
        folder=folder,
        name=record.get("name", str),
        attention=record.get("attention", str),
        batching=record.get("batching", str),
        tuning=record.get("tuning", (bool, str)),
        base_top_p=record.number_or_none("base_top_p"),
        tolerance=record.number_or_none("tolerance"),
        anchor=record.get("anchor", str, optional=True),
        scope=record.get("scope", str, optional=True),
        documents=record.whole("documents"),
        heldout_loss_before=record.number_or_none("heldout_loss_before"),
        heldout_loss_after=record.number_or_none("heldout_loss_after"),
        environment=record.get("environment", dict),
        steps=tuple(steps),
        base_top_k=record.number_or_none("base_top_k"),
    )


def append_step(path: Path, step: Step) -> None:
    """Add one line to a run's `balance.jsonl`; a cut-off run loses at most its last line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(step)) + "\n")


def keep_steps(path: Path, last_step: int) -> None:
    """Drop the steps after `last_step`, and a half-written last line: a resumed run does them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            whole = json.loads(line)
        except ValueError:
            break
        if whole["step"] <= last_step:
            kept.append(line + "\n")
    replace_file(path, "".join(kept))


def forget_run(folder: Path) -> None:
    """Remove `run.json`: the figures of an earlier run must not stand beside another's steps."""
    (folder / "run.json").unlink(missing_ok=True)


def write_run(folder: str | Path, fields: Mapping[str, Any]) -> None:
    """Write `run.json` whole or not at all; `fields` are those of `Run` without folder and steps."""
    replace_file(Path(folder) / "run.json", json.dumps(dict(fields), indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    written = path.with_suffix(path.suffix + ".new")
    written.write_text(text, encoding="utf-8")
    os.replace(written, path)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): name the folder of a run") from error


def _step(record: "_Record") -> Step:
    items = record.get("micro_batches", list)
    if not items:
        raise UserError(f"{record.where}: micro_batches is empty")
    step_s = record.number("step_s")
    micro_batches = tuple(
        _micro_batch(_Record(item, f"{record.where}, micro-batch {index}")) for index, item in enumerate(items)
    )
    if step_s <= 0 or sum(micro_batch.busy_ms for micro_batch in micro_batches) <= 0:
        raise UserError(f"{record.where}: step_s and the micro-batches' times must be above 0")
    return Step(
        step=record.whole("step"),
        epoch=int(record.number("epoch")),  # transformers counts epochs in fractions
        step_s=step_s,
        planning_ms=record.number_or_none("planning_ms"),
        anchor_ms=record.number_or_none("anchor_ms"),
        missed_anchors=record.whole("missed_anchors"),
        micro_batches=micro_batches,
        raised_top_k=record.whole("raised_top_k", optional=True),
    )


def _micro_batch(record: "_Record") -> MicroBatch:
    documents = record.get("documents", list)
    if not all(isinstance(document, int) for document in documents):
        raise UserError(f"{record.where}: documents must be a list of whole numbers")
    stage_ms = record.get("stage_ms", list, optional=True)
    if not all(isinstance(ms, (int, float)) for ms in stage_ms or ()):
        raise UserError(f"{record.where}: stage_ms must be a list of numbers")
    return MicroBatch(
        rank=record.whole("rank"),
        slot=record.whole("slot"),
        documents=tuple(documents),
        tokens=record.whole("tokens"),
        causal_pairs=record.whole("causal_pairs"),
        top_p=record.number_or_none("top_p"),
        predicted_ms=record.number_or_none("predicted_ms"),
        start_ms=record.number("start_ms"),
        forward_ms=record.number("forward_ms"),
        backward_ms=record.number("backward_ms"),
        density=record.number_or_none("density"),
        work=record.number_or_none("work"),
        coverage=record.number_or_none("coverage"),
        top_k=record.number_or_none("top_k"),
        stage_ms=None if stage_ms is None else tuple(stage_ms),
    )


class _Record:
    """A JSON object whose fields are checked as they are read; `where` names it in errors."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise UserError(f"{where}: not a JSON object")
        self._fields = value
        self.where = where

    def get(self, key: str, kinds: type | tuple[type, ...], *, optional: bool = False) -> Any:
        """The field, which may be absent or null only where it is optional."""
        value = self._fields.get(key)
        if value is None and optional:
            return None
        # bool is an int to Python, but "true" is no number of tokens
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in _as_tuple(kinds)):
            wanted = " or ".join(kind.__name__ for kind in _as_tuple(kinds))
            raise UserError(f"{self.where}: {key} is {value!r}, expected {wanted}")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = float(self.get(key, (int, float)))
        if not math.isfinite(value):
            raise UserError(f"{self.where}: {key} is {value}, expected a finite number")
        return value

    def number_or_none(self, key: str) -> float | None:
        """A number; None if it is absent or null. May be NaN: that is what a diverged loss is."""
        value = self.get(key, (int, float), optional=True)
        return None if value is None else float(value)

    def whole(self, key: str, optional: bool = False) -> Any:
        """A whole number, not negative; with `optional`, None if it is absent or null."""
        value = self.get(key, int, optional=optional)
        if value is not None and value < 0:
            raise UserError(f"{self.where}: {key} is {value}, expected a number from 0 up")
        return value


def _as_tuple(kinds: type | tuple[type, ...]) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)
