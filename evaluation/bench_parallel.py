"""Step time, tokens per second and memory of data parallelism and pipelines on CPU processes, balanced and not.

    .venv/bin/python evaluation/bench_parallel.py --json evaluation/results/bench_parallel_cpu.json

Two parts.  Time: all runs of one number of processes are trained in one job, an optimizer step of each in turn
(`alternating_runs.py`), on the same documents; beside each stands what the simulator makes of its plan: the predicted
micro-batch times of the profile, placed by the schedule's own order of operations.  `random` has one budget and
random batches, `balanced` SAB with window 4 and DST with anchor optimal.  Profiles are measured with as many processes
side by side as then train; more of them than cores share these, and a simulation that knows no such sharing is then
only a guide.  Memory: what parameters, gradients and Adam's moments take up on each process, and the most memory the
process ever held beyond its start, in a job of its own per topology with a larger model and short documents.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from provenance import provenance  # noqa: E402

from hf_sparsebalance import Latency, read_run, simulate_step  # noqa: E402
from hf_sparsebalance.torch_schedules import operation_order  # noqa: E402
from recipes.quickstart import CONFIG, SPARSE, launch, run_profile  # noqa: E402
from recipes.toy import build_documents, build_model  # noqa: E402

RANDOM = ["--batching", "random", "--tolerance", "0"]
BALANCED = ["--batching", "sparsity_aware", "--window", "4", "--tolerance", "0.1", "--anchor", "optimal"]
ZERO_BUBBLE = "interleavedzerobubble"
# Processes, pipeline size, schedule, micro-batches of each data-parallel rank: eight documents a step everywhere.
LAYOUTS = {
    "DP 2": (2, 1, None, 4),
    "PP 2, 1F1B": (2, 2, "1f1b", 8),
    "PP 2, zero-bubble": (2, 2, ZERO_BUBBLE, 8),
    "DP 2 x PP 2, 1F1B": (4, 2, "1f1b", 4),
}
MEMORY = ("ddp", "fsdp", "pp")


def predicted_s(folder: Path, pipeline_size: int, schedule: str | None) -> float:
    """Mean step time that the simulator makes of a run's plan."""
    run = read_run(folder)
    seconds = []
    for step in run.steps:
        times: list[list[Latency]] = [[] for _ in range(run.num_ranks)]
        for m in step.micro_batches:
            # The plan predicts the sum; the profile's parts are a third and two thirds, nearly everywhere.
            times[m.rank].append(Latency(m.predicted_ms / 3.0, m.predicted_ms * 2.0 / 3.0))
        if pipeline_size == 1:
            cost = simulate_step(times)
        else:
            order = operation_order(schedule, pipeline_size, len(times[0]))
            cost = simulate_step(times, num_stages=pipeline_size, schedule=order)
        seconds.append(cost.step_ms / 1000.0)
    return statistics.fmean(seconds)


def time_layouts(args: argparse.Namespace, console: Console) -> list[dict]:
    """A row per layout, plan and repeat."""
    model = build_model(args.output / "model", num_layers=4)  # zero-bubble cuts two stages for each process
    profiles = {}
    for processes in sorted({layout[0] for layout in LAYOUTS.values()}):
        profiles[processes] = args.output / f"profile-{processes}.json"
        if not profiles[processes].exists():
            run_profile(model, profiles[processes], args.max_length, quick=args.small, processes=processes)
    train, _ = build_documents(args.output, num_train=args.documents, num_heldout=8, max_bytes=args.max_length)
    common = ["--config", str(CONFIG), "--model_name_or_path", str(model), "--data", str(train)]
    common += ["--max_length", str(args.max_length), "--disable_tqdm", "true", *SPARSE]
    rows = []
    for repeat in range(args.repeats):
        for processes, profile in profiles.items():
            place = args.output / f"{repeat}-{processes}"
            trials = {}
            for name, (wanted, size, schedule, slots) in LAYOUTS.items():
                for plan, options in (("random", RANDOM), ("balanced", BALANCED)) if wanted == processes else ():
                    folder = place / f"{name}-{plan}".replace(" ", "_").replace(",", "")
                    arguments = [*common, *options, "--num_ranks", str(processes), "--profile", str(profile)]
                    arguments += ["--gradient_accumulation_steps", str(slots), "--output_dir", str(folder)]
                    arguments += ["--pipeline_parallel_size", str(size)]
                    arguments += ["--pipeline_schedule", schedule] if schedule else []
                    trials[f"{name}: {plan}"] = {"arguments": arguments, "matches": None}
            place.mkdir(parents=True, exist_ok=True)
            (place / "trials.json").write_text(json.dumps(trials), encoding="utf-8")
            console.rule(f"{processes} processes, repeat {repeat + 1}")
            launch([str(ROOT / "evaluation" / "alternating_runs.py"), str(place / "trials.json")], processes)
            for name, trial in trials.items():
                layout = LAYOUTS[name.split(":")[0]]
                folder = Path(trial["arguments"][trial["arguments"].index("--output_dir") + 1])
                run = read_run(folder)
                tokens = sum(m.tokens for step in run.steps for m in step.micro_batches)
                rows.append(
                    {
                        "name": name,
                        "repeat": repeat,
                        "step_s": run.total_s / len(run.steps),
                        "tokens_per_s": tokens / run.total_s,
                        "predicted_step_s": predicted_s(folder, *layout[1:3]),
                    }
                )
    return rows


def measure_memory(args: argparse.Namespace, console: Console) -> list[dict]:
    """A row per topology and process."""
    rows = []
    for topology in MEMORY:
        console.rule(f"memory of {topology}")
        folder = args.output / "memory" / topology
        folder.mkdir(parents=True, exist_ok=True)
        launch([str(ROOT / "evaluation" / "parallel_memory.py"), topology, str(folder), str(args.memory_layers)], 2)
        rows += [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    return rows


def show(rows: list[dict], memory: list[dict], console: Console) -> None:
    """Medians over the repeats."""
    shown = Table(title="time: medians over the repeats")
    for name in ("run", "s per step", "tokens/s", "simulated s per step", "over random"):
        shown.add_column(name, justify="left" if name == "run" else "right")
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        base = [row for row in rows if row["name"] == name.split(":")[0] + ": random"]
        gains = [b["step_s"] / row["step_s"] for row, b in zip(mine, base, strict=True)]
        simulated = statistics.median(row["predicted_step_s"] for row in mine)
        shown.add_row(
            name,
            f"{statistics.median(row['step_s'] for row in mine):.2f}",
            f"{statistics.median(row['tokens_per_s'] for row in mine):,.0f}",
            f"{simulated:.2f}",
            f"{statistics.median(gains):.2f}x",
        )
    console.print(shown)
    shown = Table(title="memory of each process, MiB")
    for name in ("topology", "rank", "parameters", "gradients", "optimizer", "peak beyond the start"):
        shown.add_column(name, justify="left" if name == "topology" else "right")
    for row in memory:
        sizes = [f"{row[key] / 2**20:.0f}" for key in ("parameters", "gradients", "optimizer", "peak")]
        shown.add_row(row["topology"], str(row["rank"]), *sizes)
    console.print(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "bench_parallel", help="folder for the runs")
    parser.add_argument("--repeats", type=int, help="default: 3")
    parser.add_argument("--documents", type=int, help="a multiple of 8 (40)")
    parser.add_argument("--max_length", type=int, help="longest document, tokens (8192)")
    parser.add_argument("--memory_layers", type=int, help="layers of the model whose memory is measured (8)")
    parser.add_argument("--small", action="store_true", help="a tiny size where none is given, to see that it runs")
    parser.add_argument("--json", type=Path, help="file for all rows")
    args = parser.parse_args()
    defaults = {"repeats": (3, 1), "documents": (40, 16), "max_length": (8192, 512), "memory_layers": (8, 4)}
    for name, (usual, small) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, small if args.small else usual)
    if args.documents % 8 or args.documents < 8:
        parser.error("--documents must be a multiple of 8, a step's documents")
    os.environ["MALLOC_ARENA_MAX"] = "1"  # as in compare_balance.py: each run is a thread
    console = Console()
    memory = measure_memory(args, console)
    rows = time_layouts(args, console)
    show(rows, memory, console)
    if args.json:
        document = provenance("torch", "transformers", "accelerate", "numpy") | {"time": rows, "memory": memory}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
