"""Predict the total time of runs that were measured, from their lengths and plan, and print the error.

    .venv/bin/python evaluation/simulate_real.py runs/balanced --profile profile.json

A run folder holds run.json and balance.jsonl, as `sparsebalance train` writes them.  Of each micro-batch only the
lengths of its documents and its budget are read; densities come from a prior, or from a curves file.  Where
micro-batches are packed, --lengths gives the length of each document by its number, one a line.

Two predictions, of the steps after the first --warmup: from the profile alone, and after the two scales of the
predictor and the constant part of a step (gradient sync, optimizer, data) were fitted to the warm-up steps, as
training does.  The error of each is that of the summed step time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table

from hf_sparsebalance import Latency, LatencyPredictor, LatencyProfile, UserError, read_run, simulate_step
from hf_sparsebalance.workloads import DENSITY_PRIORS, make_workload, read_curves


def predict(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measured and predicted total of one run, seconds."""
    run, profile = read_run(folder), LatencyProfile.load(args.profile)
    if len(run.steps) <= args.warmup:
        raise UserError(f"{folder} has {len(run.steps)} steps: more than --warmup {args.warmup} are needed")
    curves = read_curves(json.loads(Path(args.curves).read_text()), f"--curves {args.curves}") if args.curves else []
    by_number = [int(line) for line in Path(args.lengths).read_text().split()] if args.lengths else None
    micro_batches = [m for step in run.steps for m in step.micro_batches]
    lengths = [lengths_of(m.documents, m.tokens, by_number) for m in micro_batches]
    workload = make_workload(
        [length for packed in lengths for length in packed],
        block_size=profile.context.block_size,
        prior=args.density,
        measured=curves,
        spread=0.0,
    )
    known = iter(workload.known_curves)
    densities, dense = [], []
    for m, packed in zip(micro_batches, lengths, strict=True):
        top_p = 1.0 if m.top_p is None else m.top_p
        densities.append([next(known).at(top_p) for _ in packed])
        dense.append(top_p == 1.0)
    inputs = list(zip(lengths, densities, dense, strict=True))

    def step_ms(predictor: LatencyPredictor) -> list[float]:
        times = iter([predictor.predict(*each) for each in inputs])
        return [slowest_ms([(m.rank, next(times)) for m in step.micro_batches], run.scope) for step in run.steps]

    plain = LatencyPredictor(profile)
    fit = range(sum(len(step.micro_batches) for step in run.steps[: args.warmup]))
    fitted = plain.refit([(*plain.components(*inputs[i]), micro_batches[i].busy_ms) for i in fit])
    measured_ms = [step.step_s * 1000.0 for step in run.steps]
    busy_ms = [
        slowest_ms([(m.rank, Latency(m.forward_ms, m.backward_ms)) for m in step.micro_batches], run.scope)
        for step in run.steps
    ]
    rest = [total - busy for total, busy in zip(measured_ms, busy_ms, strict=True)][: args.warmup]
    constant_ms = statistics.median(rest) if rest else 0.0
    after = slice(args.warmup, None)
    total_s = sum(measured_ms[after]) / 1000.0
    alone_s = sum(step_ms(plain)[after]) / 1000.0
    trained_s = sum(ms + constant_ms for ms in step_ms(fitted)[after]) / 1000.0
    return {
        "run": run.name,
        "steps": len(measured_ms[after]),
        "measured_s": total_s,
        "profile_s": alone_s,
        "profile_error": alone_s / total_s - 1.0,
        "refit_s": trained_s,
        "refit_error": trained_s / total_s - 1.0,
        "attention_scale": fitted.attention_scale,
        "linear_scale": fitted.linear_scale,
        "constant_ms": constant_ms,
        "measured_step_ms": measured_ms,
        "predicted_step_ms": [ms + constant_ms for ms in step_ms(fitted)],
    }


def slowest_ms(times: Sequence[tuple[int, Latency]], scope: str | None) -> float:
    """Time of a step whose micro-batches, in the order of slots, are given with their rank."""
    ranks = sorted({rank for rank, _ in times})
    rows = [[latency for owner, latency in times if owner == rank] for rank in ranks]
    return simulate_step(rows, scope="slot" if scope == "slot" else "rank").step_ms


def lengths_of(documents: Sequence[int], tokens: int, by_number: Sequence[int] | None) -> list[int]:
    """Length of each document of a micro-batch."""
    if len(documents) == 1:
        return [tokens]
    if by_number is None or max(documents) >= len(by_number):
        raise UserError("this run packs micro-batches: --lengths FILE must give the length of every document")
    packed = [by_number[document] for document in documents]
    if sum(packed) != tokens:
        raise UserError(f"--lengths gives {sum(packed)} tokens where the run trained {tokens}: it is not of this data")
    return packed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", help="run folders")
    add("--profile", required=True, help="written by sparsebalance profile")
    add("--lengths", help="file with one document length (tokens) per line, in the order of the data")
    add("--density", default="trained", choices=DENSITY_PRIORS, help="how sparse the documents are")
    add("--curves", help="JSON file of measured density curves instead")
    add("--warmup", type=int, default=3, help="first steps, which are left out and fitted to")
    add("--json", nargs="?", const="-", metavar="PATH", help="write JSON; without PATH to stdout")
    args = parser.parse_args(arguments)
    try:
        rows = [predict(folder, args) for folder in args.runs]
    except (ValueError, OSError) as error:
        print(f"simulate_real: error: {error}", file=sys.stderr)
        return 2
    document = {
        "command": f"python {shlex.join(sys.argv)}",
        "settings": vars(args),
        "runs": rows,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__, "torch": torch.__version__},
    }
    if args.json == "-":
        print(json.dumps(document, indent=2))
        return 0
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    table = Table(
        "run", "steps", "measured s", "profile alone", "error", "refitted", "error", title="predicted totals"
    )
    for row in rows:
        seconds = [f"{row['measured_s']:.3f}"]
        for name in ("profile", "refit"):
            seconds += [f"{row[f'{name}_s']:.3f}", f"{row[f'{name}_error']:+.1%}"]
        table.add_row(row["run"], str(row["steps"]), *seconds)
    Console(width=None if sys.stdout.isatty() else 119).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
