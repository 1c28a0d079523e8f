"""Predict the total time of runs that were measured, from their profile and plan alone, and print the error.

    .venv/bin/python evaluation/simulate_real.py runs/compare_balance --json evaluation/results/simulate_real.json

A run folder holds run.json and balance.jsonl, as `sparsebalance train` writes them; a folder that holds none itself
is searched for runs.  The profile is the nearest profile.json in a folder above the run, or --profile.  Of each
micro-batch only its rank, its slot, the lengths of its documents and its budget are read: nothing that was measured in
the run.  Densities come from a prior (by default that of a gate without preferences, which the planner starts from
too; that is what a random model's are), or from a curves file.  Where micro-batches are packed, --lengths gives the
length of each document by its number, one a line.

Predicted and measured are sums of step times over all steps.  Where runs that belong together lie beside each other
(`compare_balance.py` puts each repeat's into one folder), also how well the ratio of every two of their totals is
predicted: there a machine that has slowed down since it was profiled cancels.

With --warmup N the first N steps are left out, and a second prediction is made after the two scales of the predictor
and the constant part of a step (gradient sync, optimizer, data) were fitted to them, as training does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table

from hf_sparsebalance import Latency, LatencyPredictor, LatencyProfile, UserError, read_run, simulate_step
from hf_sparsebalance.workloads import DENSITY_PRIORS, make_workload, read_curves


def find_runs(folder: Path) -> list[Path]:
    """The run folder itself, or all runs below a folder."""
    found = (
        sorted(path.parent for path in folder.rglob("run.json")) if not (folder / "run.json").exists() else [folder]
    )
    if not found:
        raise UserError(f"{folder} holds no run: give a folder with run.json, or one above such folders")
    return found


def profile_of(run: Path, args: argparse.Namespace) -> Path:
    """--profile, or the nearest profile.json above the run."""
    nearest = (parent / "profile.json" for parent in (run, *run.resolve().parents))
    found = args.profile or next((path for path in nearest if path.exists()), None)
    if found is None:
        raise UserError(f"no profile.json above {run}: give --profile FILE, as sparsebalance profile wrote it")
    return Path(found)


def predict(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measured and predicted total of one run, seconds."""
    run, profile_path = read_run(folder), profile_of(folder, args)
    profile = LatencyProfile.load(profile_path)
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
    parts = iter([(*plain.components(*each), m.busy_ms) for each, m in zip(inputs, micro_batches, strict=True)])
    fitted = plain.refit([[next(parts) for _ in step.micro_batches] for step in run.steps[: args.warmup]])
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
        "run": str(folder),
        "profile": str(profile_path),
        "steps": len(measured_ms[after]),
        "measured_s": total_s,
        "predicted_s": alone_s,
        "error": alone_s / total_s - 1.0,
        "refit_s": trained_s if args.warmup else None,
        "refit_error": trained_s / total_s - 1.0 if args.warmup else None,
        "attention_scale": fitted.attention_scale,
        "linear_scale": fitted.linear_scale,
        "constant_ms": constant_ms,
        "measured_step_ms": measured_ms,
        "predicted_step_ms": step_ms(plain),
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


def ratio_errors(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Relative error of the predicted ratio of totals, of every two runs whose folders lie beside each other."""
    beside: dict[Path, list[float]] = {}
    for row in rows:
        beside.setdefault(Path(row["run"]).parent, []).append(row["predicted_s"] / row["measured_s"])
    pairs = [pair for together in beside.values() for pair in itertools.combinations(together, 2)]
    return [abs(one / other - 1.0) for one, other in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="run folders, or folders above them")
    add("--profile", help="written by sparsebalance profile (default: the nearest profile.json above the run)")
    add("--lengths", help="file with one document length (tokens) per line, in the order of the data")
    add("--density", default="uniform", choices=DENSITY_PRIORS, help="how sparse the documents are")
    add("--curves", help="JSON file of measured density curves instead")
    add("--warmup", type=int, default=0, help="first steps, which are left out and fitted to")
    add("--json", nargs="?", const="-", metavar="PATH", help="write JSON; without PATH to stdout")
    args = parser.parse_args(arguments)
    try:
        rows = [predict(run, args) for folder in args.runs for run in find_runs(folder)]
    except (ValueError, OSError) as error:
        print(f"simulate_real: error: {error}", file=sys.stderr)
        return 2
    errors, ratios = [abs(row["error"]) for row in rows], ratio_errors(rows)
    summary = {"runs": len(rows), "mean_error": statistics.fmean(errors), "largest_error": max(errors)}
    summary["within_10_percent"] = sum(error <= 0.1 for error in errors)
    if ratios:
        summary |= {"mean_ratio_error": statistics.fmean(ratios), "largest_ratio_error": max(ratios)}
    document = provenance("numpy", "torch") | {
        "settings": vars(args),
        "summary": summary,
        "runs": rows,
    }
    if args.json == "-":
        print(json.dumps(document, indent=2, default=str))
        return 0
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
    refitted = ("refitted s", "error") if args.warmup else ()
    table = Table("run", "steps", "measured s", "predicted s", "error", *refitted, title="predicted totals")
    for row in rows:
        cells = [f"{row['measured_s']:.3f}", f"{row['predicted_s']:.3f}", f"{row['error']:+.1%}"]
        if args.warmup:
            cells += [f"{row['refit_s']:.3f}", f"{row['refit_error']:+.1%}"]
        table.add_row(row["run"], str(row["steps"]), *cells)
    console = Console(width=None if sys.stdout.isatty() else 119)
    console.print(table)
    console.print(
        f"{summary['runs']} runs, {args.density if not args.curves else 'measured'} densities: mean error "
        f"{summary['mean_error']:.1%}, largest {summary['largest_error']:.1%}, "
        f"{summary['within_10_percent']} within 10 %"
    )
    if ratios:
        console.print(
            f"{len(ratios)} pairs of runs that belong together: mean error of the ratio of their totals "
            f"{summary['mean_ratio_error']:.1%}, largest {summary['largest_ratio_error']:.1%}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
