"""``sparsebalance simulate``: predicted time of each batching strategy, with and without tuning, on a cluster.

Every row says how much of its speedup is less work (what one budget for all with the same work gives random order) and
how much is balance. Each tuned row stands beside two controls, one budget for all micro-batches with the same work and
one with the same mean budget.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hf_sparsebalance.attention import ATTENTION_NAME
from hf_sparsebalance.cli.parsing import Parser
from hf_sparsebalance.devices import DEVICES, H100_ASSUMPTIONS, h100_profile
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.gantt import draw_gantt
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile
from hf_sparsebalance.simulation import ClusterSetup, Row, Simulation, compare
from hf_sparsebalance.torch_schedules import SCHEDULES, operation_order
from hf_sparsebalance.tuning import ANCHORS
from hf_sparsebalance.workloads import (
    DENSITY_PRIORS,
    DISTRIBUTIONS,
    MEASURED_SPREAD,
    Workload,
    make_workload,
    read_curves,
    sample_lengths,
)

_BATCHES_SIMULATED = 64  # global batches drawn where --num_documents is not given


def run(arguments: Sequence[str]) -> None:
    """Print one row per strategy, tuning and control, over one epoch of the documents."""
    args = _parser().parse_args(arguments)
    _check(args)
    profile = LatencyProfile.load(args.profile) if args.profile else h100_profile(args.block_size)
    attention = profile.context.attention
    if args.tolerance and attention != ATTENTION_NAME:
        raise UserError(
            f"--profile was measured with {attention!r}, which no budget makes faster: give --tolerance 0, or a "
            "profile of sparsebalance"
        )
    order = None
    if args.num_stages > 1:
        order = operation_order(args.schedule, args.num_stages, args.gradient_accumulation_steps)
    setup = ClusterSetup(
        num_ranks=args.num_ranks,
        num_slots=args.gradient_accumulation_steps,
        batch_size=args.per_device_train_batch_size,
        order=order,
        scope=args.scope,
        base_top_p=args.base_top_p,
        tolerance=args.tolerance,
        window=args.window,
        seed=args.seed,
    )
    workload, lengths_from = _workload(args, profile.context.block_size)
    simulation = Simulation(workload, LatencyPredictor(profile), setup)
    rows, runs = compare(simulation, [args.anchor] if args.tolerance else [])
    times_from = H100_ASSUMPTIONS if args.device else f"profile {args.profile} ({profile.context.device})"
    notes = [lengths_from, workload.description, times_from]
    if args.gantt:
        last = "sparsity_aware", args.anchor if args.tolerance else None
        replica = "" if order is None else " of its slowest replica"
        panels = [
            (f"{batching}, tuning {tuning or 'off'}: first step{replica}", simulation.bars(*runs[batching, tuning], 0))
            for batching, tuning in (("random", None), last)
        ]
        draw_gantt(panels, args.gantt, "rank" if order is None else "pipeline rank")
    if args.json:
        print(json.dumps({"settings": vars(args), "notes": notes, "rows": [row.to_json() for row in rows]}, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 119)
    console.print(render(rows, "simulated"))
    for note in notes:
        console.print(f"- {note}", highlight=False, markup=False)


def render(rows: Sequence[Row], title: str) -> Table:
    """The rows as a table for the terminal."""
    numbers = (
        "total s",
        "speedup",
        "less work",
        "balance",
        "of perfect",
        "work",
        "mean p",
        "max/mean",
        "rank max/mean",
    )
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("batching", "tuning", "same"):
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.batching,
            row.tuning or "-",
            row.control or "",
            f"{row.total_ms / 1000:.4g}",
            f"{row.speedup:.2f}",
            f"{row.less_work:.2f}",
            f"{row.balance:.2f}",
            f"{row.perfect_ms / row.total_ms:.1%}",
            f"{row.work:.3f}",
            f"{row.top_p:.3f}",
            f"{row.imbalance_microbatch:.2f}",
            f"{row.imbalance_rank:.3f}",
        )
    return table


def _parser() -> Parser:
    parser = Parser(prog="sparsebalance simulate", description=__doc__)
    add = parser.add_argument
    add("--profile", help="written by sparsebalance profile")
    add("--device", choices=DEVICES, help="a built-in table instead of a profile")
    add("--block_size", type=int, default=256, help="tokens per attention block with --device")
    add("--lengths", help="file with one document length (tokens) per line")
    add("--distribution", choices=tuple(DISTRIBUTIONS), help="built-in lengths instead of a file")
    add("--num_documents", type=int, help=f"documents drawn from it (default: {_BATCHES_SIMULATED} global batches)")
    add("--max_length", type=int, default=131072, help="longer documents of a built-in distribution are cut")
    add("--density", default="trained", choices=DENSITY_PRIORS, help="how sparse the documents are")
    add("--curves", help="JSON file of measured density curves instead: [{length, top_p, density}, ...]")
    add(
        "--spread", type=float, help="lognormal spread of density at equal length (default: measured; 0 with --curves)"
    )
    add("--known", default="length", choices=("length", "sample"), help="whose density curve the planner knows")
    add("--num_ranks", type=int, default=2, help="data-parallel ranks (with --num_stages: replicas)")
    add("--num_stages", type=int, default=1, help="pipeline ranks of a replica")
    add("--schedule", default="1f1b", type=str.lower, choices=SCHEDULES, help="order of a pipeline's operations")
    add("--scope", default="rank", choices=("rank", "slot"), help="without pipelines: where ranks wait (FSDP: slot)")
    add("--gradient_accumulation_steps", type=int, default=4, help="micro-batches per rank and step")
    add("--per_device_train_batch_size", type=int, default=1, help="documents per micro-batch")
    add("--base_top_p", type=float, default=0.8, help="budget without tuning")
    add("--tolerance", type=float, default=0.1, help="largest loss of coverage; 0: no tuning")
    add("--anchor", default="optimal", choices=ANCHORS, help="what tuning aims at")
    add("--window", type=int, default=4, help="global batches planned together")
    add("--seed", type=int, default=0)
    add("--gantt", metavar="FILE", help="picture of the first step: random order, and balanced and tuned")
    add("--json", action="store_true", help="print JSON")
    return parser


def _check(args: Any) -> None:
    if (args.profile is None) == (args.device is None):
        raise UserError("one of --profile FILE and --device h100 is needed: whose times to simulate with")
    if (args.lengths is None) == (args.distribution is None):
        raise UserError(f"one of --lengths FILE and --distribution ({', '.join(DISTRIBUTIONS)}) is needed")
    if not 0.0 < args.base_top_p <= 1.0 or not 0.0 <= args.tolerance < args.base_top_p:
        raise UserError("--base_top_p must lie in (0, 1], and --tolerance between 0 and below it")
    if args.seed < 0:
        raise UserError(f"--seed must not be negative, got {args.seed}")
    if args.gantt and Path(args.gantt).is_dir():
        raise UserError(f"--gantt {args.gantt} is a folder: name a file")
    for name in (
        "num_ranks",
        "num_stages",
        "gradient_accumulation_steps",
        "per_device_train_batch_size",
        "block_size",
    ):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(args, name)}")


def _workload(args: Any, block_size: int) -> tuple[Workload, str]:
    """The documents, and where their lengths come from."""
    if args.lengths:
        lengths, source = _read_lengths(args.lengths), f"lengths of {args.lengths}"
    else:
        global_batch = args.num_ranks * args.gradient_accumulation_steps * args.per_device_train_batch_size
        count = _BATCHES_SIMULATED * global_batch if args.num_documents is None else args.num_documents
        lengths = sample_lengths(args.distribution, count, args.seed, args.max_length)
        source = f"{count} lengths: {DISTRIBUTIONS[args.distribution][0]}, cut at {args.max_length} tokens"
    curves = read_curves(_read_json(args.curves), f"--curves {args.curves}") if args.curves else []
    spread = args.spread if args.spread is not None else 0.0 if curves else MEASURED_SPREAD
    workload = make_workload(
        lengths,
        block_size=block_size,
        prior=args.density,
        measured=curves,
        spread=spread,
        known=args.known,
        seed=args.seed,
    )
    return workload, source


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--curves {path} cannot be read ({error})") from error


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
