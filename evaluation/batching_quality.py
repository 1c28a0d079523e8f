"""How even each batching strategy makes an epoch, and how far it moves samples: arithmetic on lengths, no training.

    .venv/bin/python evaluation/batching_quality.py --json evaluation/results/batching_quality.json

A sample's time is a stated function of its length: linear part, plus attention at a quarter of the dense work times a
lognormal spread between samples of one length.  A step takes its slowest rank's sum; total is the sum over the epoch.
"perfect" is all work spread evenly over the ranks.  "bound" is the share of perfect that no plan of the same windows
exceeds: a step's longest sample may leave too little to do beside it, or too many long samples may have to share ranks
(`bound_ms`).  "moved" counts steps between a sample's place and the one that `random` gives it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table

from hf_sparsebalance import BatchPlan, plan_batches
from hf_sparsebalance.batching import STRATEGIES, displacements

BYTES_PER_TOKEN, MAX_LENGTH = 4, 32_768
LINEAR_MS = 16.2 / 32_768  # per token
ATTENTION_MS = 4.8e-8  # per token squared, dense
DENSITY, SPREAD = 0.25, 0.35
SETTINGS = ((2, 4), (2, 8), (8, 4), (64, 8))  # ranks, micro-batches of each
WINDOWS = (1, 4, 16)


def stdlib_lengths() -> list[int]:
    """Python's own library: one document a file, counted crudely."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    sizes = [path.stat().st_size for path in files if "site-packages" not in path.parts]
    return [min(size // BYTES_PER_TOKEN, MAX_LENGTH) for size in sizes if size >= BYTES_PER_TOKEN]


def lognormal_lengths(count: int) -> list[int]:
    rng = random.Random(0)
    return [min(int(rng.lognormvariate(7.5, 1.2)) + 1, MAX_LENGTH) for _ in range(count)]


def bimodal_lengths(count: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randint(*rng.choice(((256, 4096), (16_384, MAX_LENGTH)))) for _ in range(count)]


def costs_of(lengths: Sequence[int]) -> list[float]:
    rng = random.Random(1)
    return [LINEAR_MS * n + ATTENTION_MS * DENSITY * rng.lognormvariate(0.0, SPREAD) * n * n for n in lengths]


def rank_sums(plan: BatchPlan, costs: Sequence[float]) -> list[list[float]]:
    return [[sum(costs[i] for slot in rank for i in slot) for rank in step] for step in plan.steps]


def bound_ms(drawn: BatchPlan, costs: Sequence[float], window: int) -> float:
    """Least total time of any plan that keeps the samples of each window of the drawn order together.

    A step of R ranks that lasts T does at most R * T work, so a window's steps last (its work + idle time) / R. A rank
    holds at least K = `num_slots` samples. Two cases make a step that lasts T wait, whatever the plan:

    - Of the j * ranks + 1 costliest samples of the window some rank holds j + 1, and K - 1 - j others. T is at least
      the least of those, and the step has no more work than the costliest samples, as many as a step has.
    - The longest sample's rank holds K - 1 others, so the step's other ranks share K samples fewer than a step has.
    """
    num_ranks, num_slots = drawn.num_ranks, drawn.num_slots
    total = 0.0
    for first in range(0, drawn.num_steps, window):
        steps = [[i for rank in step for slot in rank for i in slot] for step in drawn.steps[first : first + window]]
        pool = sorted((costs[i] for step in steps for i in step), reverse=True)
        most = max(map(len, steps))
        bins = len(steps) * num_ranks
        longest = [
            sum(pool[j * bins - j : j * bins + 1]) + sum(pool[len(pool) - num_slots + 1 + j :])
            for j in range(num_slots)
        ]
        idle = max(num_ranks * max(longest) - sum(pool[:most]), 0.0)
        idle = max((num_ranks - 1) * longest[0] - sum(pool[1 : most - num_slots + 1]), idle)
        total += (sum(pool) + idle) / num_ranks
    return total


def measure(name: str, lengths: list[int], num_ranks: int, num_slots: int) -> list[dict[str, Any]]:
    """One row per strategy (and window) of a distribution and setting."""
    costs = costs_of(lengths)
    shape = {"num_ranks": num_ranks, "num_slots": num_slots}
    drawn = plan_batches(lengths, strategy="random", **shape)
    random_ms = sum(map(max, rank_sums(drawn, costs)))
    perfect_ms = sum(costs) / num_ranks
    rows = []
    for strategy in STRATEGIES:
        for window in WINDOWS if strategy == "sparsity_aware" else (None,):
            plan = plan_batches(lengths, strategy=strategy, window=window or 1, cost_ms=costs, **shape)
            sums = rank_sums(plan, costs)
            moved = [abs(steps) for steps in displacements(plan, drawn)]
            total_ms = sum(map(max, sums))
            bound = bound_ms(drawn, costs, window) if window else None
            rows.append(
                {
                    "lengths": name,
                    "num_samples": len(lengths),
                    **shape,
                    "num_steps": plan.num_steps,
                    "strategy": strategy,
                    "window": window,
                    "total_ms": total_ms,
                    "speedup_over_random": random_ms / total_ms,
                    "share_of_perfect": perfect_ms / total_ms,
                    "bound_share_of_perfect": perfect_ms / bound if bound else None,
                    "share_of_bound": bound / total_ms if bound else None,
                    "imbalance_rank": sum(max(step) * num_ranks / sum(step) for step in sums) / len(sums),
                    "mean_steps_moved": sum(moved) / len(moved),
                    "max_steps_moved": max(moved),
                }
            )
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "lengths", "ranks x GA", "strategy", "speedup", "of perfect", "bound", "of bound", "max/mean", "moved", "most"
    )
    for row in rows:
        window = f", window {row['window']}" if row["window"] else ""
        bounds = (
            "-" if share is None else f"{share:.1%}"
            for share in (row["bound_share_of_perfect"], row["share_of_bound"])
        )
        table.add_row(
            row["lengths"],
            f"{row['num_ranks']} x {row['num_slots']}",
            row["strategy"] + window,
            f"{row['speedup_over_random']:.3f}",
            f"{row['share_of_perfect']:.1%}",
            *bounds,
            f"{row['imbalance_rank']:.3f}",
            f"{row['mean_steps_moved']:.1f}",
            str(row["max_steps_moved"]),
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="fewer samples and settings, for CI")
    parser.add_argument("--json", metavar="PATH", help="write JSON there")
    args = parser.parse_args(arguments)
    count = 512 if args.small else 16_384
    distributions = {
        "stdlib": stdlib_lengths()[: count if args.small else None],
        "lognormal": lognormal_lengths(count),
        "bimodal": bimodal_lengths(count),
    }
    rows = [
        row
        for name, lengths in distributions.items()
        for num_ranks, num_slots in SETTINGS[: 2 if args.small else None]
        for row in measure(name, lengths, num_ranks, num_slots)
    ]
    if args.json:
        document = provenance("numpy") | {
            "cost_ms": f"{LINEAR_MS} n + {ATTENTION_MS} x {DENSITY} x lognormal(0, {SPREAD}) x n^2",
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(rows, Console(width=None if sys.stdout.isatty() else 119))
    return 0


if __name__ == "__main__":
    sys.exit(main())
