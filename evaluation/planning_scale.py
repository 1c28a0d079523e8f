"""How long planning takes at scale: a window of 100,000 samples, and the budgets of 1,024 ranks x 8 micro-batches.

    OPENBLAS_NUM_THREADS=1 .venv/bin/python evaluation/planning_scale.py --json evaluation/results/planning_scale.json

Lengths are lognormal, every sample has a density curve of its own, and the profile follows a formula.  Before a step
is tuned its micro-batches' curves are looked up: that has a line of its own.  Medians over the repeats after a
warm-up: elapsed time, and the process's CPU time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table

from hf_sparsebalance import DensityCurve, LatencyPredictor, plan_batches, tune_sparsity
from hf_sparsebalance.density import TOP_P_GRID, CurveStore
from hf_sparsebalance.latency_profile import LatencyProfile, LengthRow, ProfileContext, SparsePoint
from hf_sparsebalance.tuning import ANCHORS, SCOPES, MicroBatch

MAX_LENGTH = 32_768
DENSE_MS, SPARSE_MS, GATE_MS = 4e-8, 6e-8, 2e-6  # per pair, per kept pair, per token; one layer, forward
BASE_TOP_P, TOLERANCE = 0.7, 0.1


def predictor() -> LatencyPredictor:
    """A profile from a formula: sparse attention slower per pair than dense, and a gate linear in tokens."""
    rows = []
    for length in (64 * 2**i for i in range(10)):
        dense = 0.03 + DENSE_MS * length**2
        points = []
        for density in (0.05, 0.1, 0.2, 0.4, 0.7, 1.0):
            sparse = 0.03 + SPARSE_MS * length**2 * density + GATE_MS * length
            points.append(SparsePoint(density, sparse, 2 * sparse))
        rows.append(LengthRow(length, dense, 2 * dense, tuple(points)))
    context = ProfileContext(
        device="formula",
        num_threads=1,
        num_processes=1,
        attention="sparsebalance",
        backend="torch",
        dtype="float32",
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        num_layers=24,
        num_dense_layers=0,
        hidden_size=896,
        intermediate_size=0,
        vocab_size=0,
        block_size=64,
        gradient_checkpointing=False,
        versions={},
    )
    return LatencyPredictor(LatencyProfile(context, tuple(rows), 5e-4, 1e-3, 0.2, 0.3))


def peaked_curve(sharpness: float) -> DensityCurve:
    """Density p ** sharpness."""
    return DensityCurve.from_measured(TOP_P_GRID, [p**sharpness for p in TOP_P_GRID])


def timed(work: Callable[[], object], repeats: int) -> dict[str, float]:
    work()
    elapsed, cpu = [], []
    for _ in range(repeats):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        work()
        elapsed.append(time.perf_counter() - wall_s)
        cpu.append(time.process_time() - cpu_s)
    return {"median_ms": 1e3 * statistics.median(elapsed), "median_cpu_ms": 1e3 * statistics.median(cpu)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a hundredth of the size, for CI")
    parser.add_argument("--repeats", type=int, default=5, help="%(default)s")
    parser.add_argument("--json", metavar="PATH", help="write JSON there")
    args = parser.parse_args()
    num_samples, num_slots = (1_000, 8) if args.small else (100_000, 8)
    rng = random.Random(0)
    lengths = [min(int(rng.lognormvariate(7.5, 1.2)) + 1, MAX_LENGTH) for _ in range(num_samples)]
    costs = [5e-4 * n + 1.2e-8 * n * n for n in lengths]
    rows: list[dict[str, Any]] = []
    for num_ranks in (2, 8) if args.small else (8, 64, 1_024):
        window = num_samples // (num_ranks * num_slots)
        shape = {"num_ranks": num_ranks, "num_slots": num_slots, "window": window}
        spent = timed(
            lambda shape=shape: plan_batches(lengths, strategy="sparsity_aware", cost_ms=costs, **shape), args.repeats
        )
        rows.append({"what": "plan_batches", "num_samples": num_samples, **shape, **spent})
    num_ranks, known = 16 if args.small else 1_024, predictor()
    micro_batches = []
    for rank in range(num_ranks):
        for slot in range(num_slots):
            curve = peaked_curve(rng.uniform(1.0, 6.0))
            micro_batches.append(MicroBatch(rank, slot, (rng.choice(lengths),), (curve,)))
    options = {"base_top_p": BASE_TOP_P, "tolerance": TOLERANCE}
    for anchor in ANCHORS:
        for scope in SCOPES:
            choice = {"anchor": anchor, "scope": scope}
            spent = timed(lambda choice=choice: tune_sparsity(micro_batches, known, **options, **choice), args.repeats)
            rows.append({"what": "tune_sparsity", "num_ranks": num_ranks, "num_slots": num_slots, **choice, **spent})
    store = CurveStore(known.profile.context.block_size)
    for sample, m in enumerate(micro_batches):
        store.observe(sample, sum(m.lengths), m.curves[0])

    def look_up() -> list[MicroBatch]:
        found = [
            (m.rank, m.slot, m.lengths, store.lookup(sample, sum(m.lengths))) for sample, m in enumerate(micro_batches)
        ]
        return [MicroBatch(rank, slot, packed, (curve,)) for rank, slot, packed, curve in found]

    rows.append(
        {"what": "curves of a step", "num_ranks": num_ranks, "num_slots": num_slots, **timed(look_up, args.repeats)}
    )
    if args.json:
        document = provenance("numpy") | {
            "repeats": args.repeats,
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    table = Table("what", "ranks x micro-batches", "how", "ms", "CPU ms")
    for row in rows:
        how = (
            f"window {row['window']}"
            if "window" in row
            else ", ".join(row[k] for k in ("anchor", "scope") if k in row)
        )
        figures = (f"{row['median_ms']:.1f}", f"{row['median_cpu_ms']:.1f}")
        table.add_row(row["what"], f"{row['num_ranks']} x {row['num_slots']}", how, *figures)
    Console(width=None if sys.stdout.isatty() else 119).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
