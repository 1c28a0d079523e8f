"""``sparsebalance simulate``: predicted time of each batching strategy, with and without tuning, from a profile.

Densities are the analytic prior of a uniform gate, which a trained model stays below.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_sparsebalance.batching import STRATEGIES
from hf_sparsebalance.cli.parsing import Parser
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency, LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile
from hf_sparsebalance.planner import Planner, PlanSettings
from hf_sparsebalance.schedule import simulate_step
from hf_sparsebalance.tuning import ANCHORS


def run(arguments: Sequence[str]) -> None:
    """Print one row per strategy and tuning, over one epoch of the given lengths."""
    parser = Parser(prog="sparsebalance simulate", description=__doc__)
    parser.add_argument("--profile", required=True, help="written by sparsebalance profile")
    parser.add_argument("--lengths", required=True, help="file with one document length (tokens) per line")
    parser.add_argument("--num_ranks", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="micro-batches per rank and step")
    parser.add_argument("--per_device_train_batch_size", type=int, default=1, help="documents per micro-batch")
    parser.add_argument("--base_top_p", type=float, default=0.8, help="budget without tuning")
    parser.add_argument("--tolerance", type=float, default=0.1, help="largest loss of coverage")
    parser.add_argument("--anchor", default="optimal", choices=ANCHORS, help="what tuning aims at")
    parser.add_argument("--window", type=int, default=4, help="global batches planned together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    if not 0.0 < args.base_top_p <= 1.0 or not 0.0 <= args.tolerance < args.base_top_p:
        raise UserError("--base_top_p must lie in (0, 1], and --tolerance between 0 and below it")
    profile = LatencyProfile.load(args.profile)
    base = PlanSettings(
        batching="random",
        num_ranks=args.num_ranks,
        num_slots=args.gradient_accumulation_steps,
        batch_size=args.per_device_train_batch_size,
        seed=args.seed,
        window=args.window,
        max_tokens=None,
        base_top_p=args.base_top_p,
        tolerance=0.0,
        anchor=args.anchor,
        scope="rank",
        block_size=profile.context.block_size,
        refit=False,
    )
    lengths, predictor = _read_lengths(args.lengths), LatencyPredictor(profile)
    rows = [
        _simulate(dataclasses.replace(base, batching=strategy, tolerance=tolerance), lengths, predictor)
        for strategy in STRATEGIES
        for tolerance in ((0.0, args.tolerance) if args.tolerance else (0.0,))
    ]
    for row in rows:
        row["speedup"] = rows[0]["total_ms"] / row["total_ms"]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("batching", "tuning", "total s", "speedup", "of perfect", "rank max/mean", title="simulated")
    for row in rows:
        share = row["perfect_ms"] / row["total_ms"]
        numbers = (row["total_ms"] / 1000, row["speedup"], share, row["imbalance_rank"])
        table.add_row(row["batching"], row["tuning"] or "-", *(f"{number:.2f}" for number in numbers))
    Console().print(table)


def _simulate(settings: PlanSettings, lengths: list[int], predictor: LatencyPredictor) -> dict[str, Any]:
    planner = Planner(settings, lengths, predictor)
    costs = []
    for step in range(planner.num_steps):
        micro_batches, tuning = planner.micro_batches(0, step), planner.budgets(0, step)
        times = [[Latency(0.0, 0.0)] * settings.num_slots for _ in range(settings.num_ranks)]
        for number, micro_batch in enumerate(micro_batches):
            top_p = tuning.top_p[number] if tuning else settings.base_top_p
            assert top_p is not None
            densities = [curve.at(top_p) for curve in micro_batch.curves]
            times[micro_batch.rank][micro_batch.slot] = predictor.predict(micro_batch.lengths, densities, top_p == 1.0)
        costs.append(simulate_step(times))
    return {
        "batching": settings.batching,
        "tuning": settings.anchor if settings.tunes else None,
        "total_ms": sum(cost.step_ms for cost in costs),
        "perfect_ms": sum(cost.perfect_ms for cost in costs),
        "imbalance_microbatch": sum(cost.imbalance_microbatch for cost in costs) / len(costs),
        "imbalance_rank": sum(cost.imbalance_rank for cost in costs) / len(costs),
    }


def _read_lengths(path: str) -> list[int]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--lengths {path} cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.isdecimal() or int(line) < 1:
            raise UserError(f"--lengths {path} line {number}: a length must be a whole number above 0, got {line!r}")
    if not lines:
        raise UserError(f"--lengths {path} is empty: one document length per line")
    return [int(line) for line in lines]
