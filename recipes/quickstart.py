"""The main job on two CPU processes: profile, then the same fine-tuning four times, then a table and a picture.

    dense     SDPA, random order
    sparse    block-sparse, one budget for all, random order
    grouped   block-sparse, one budget for all, batches grouped by length
    balanced  block-sparse, budgets tuned (DST), batches composed by predicted time (SAB)

All train on exactly the same documents, whole and without padding.  Run it with `make quickstart`; everything it
writes lies in runs/quickstart.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from hf_sparsebalance import balance_share, draw_timeline, read_run, render_table, summarise

try:
    from recipes.toy import build_documents, build_model
except ImportError:  # run as a script: Python then looks beside this file
    from toy import build_documents, build_model

CONFIG = Path(__file__).with_name("quickstart.yaml")
RANKS = 2
SPARSE = ["--attn_implementation", "sparsebalance"]
RUNS = {
    "dense": ["--attn_implementation", "sdpa", "--batching", "random", "--tolerance", "0"],
    "sparse": [*SPARSE, "--batching", "random", "--tolerance", "0"],
    "grouped": [*SPARSE, "--batching", "length_group", "--tolerance", "0"],
    "balanced": [*SPARSE, "--batching", "sparsity_aware", "--tolerance", "0.1", "--anchor", "optimal"],
}
BASELINE = "sparse"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="folder for everything")
    parser.add_argument("--documents", type=int, default=80, help="training documents, a multiple of 8")
    parser.add_argument("--heldout", type=int, default=8, help="held-out documents")
    parser.add_argument("--max_length", type=int, default=16384, help="longest document, tokens")
    parser.add_argument("--quick_profile", action="store_true", help="a coarser profile")
    args = parser.parse_args()
    if args.documents % 8 or args.documents < 8:
        parser.error("--documents must be a multiple of 8: two ranks with four micro-batches each")
    started = time.perf_counter()
    console = Console()
    # Only what an earlier quickstart wrote: the folder may hold other things.
    for name in ("model", *RUNS):
        shutil.rmtree(args.output / name, ignore_errors=True)
    model = build_model(args.output / "model")
    train, heldout = build_documents(
        args.output, num_train=args.documents, num_heldout=args.heldout, max_bytes=args.max_length
    )
    profile = args.output / "profile.json"
    console.rule("profile")
    run_profile(model, profile, args.max_length, args.quick_profile)
    for name, options in RUNS.items():
        console.rule(name)
        options = [*options, "--profile", str(profile)] if "sparsity_aware" in options else options
        run_training(name, options, model, train, heldout, args)
    runs = [read_run(args.output / name) for name in RUNS]
    baseline = runs[list(RUNS).index(BASELINE)]
    summaries = [summarise(run, baseline) for run in runs]
    draw_timeline([run for run in runs if run.name in (BASELINE, "balanced")], args.output / "timeline.png")
    summary = {"runs": summaries, "environment": runs[-1].environment}
    (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.rule()
    console.print(render_table(summaries, [balance_share(run) for run in runs]))
    console.print(f"{args.output}/summary.json and timeline.png written after {time.perf_counter() - started:.0f} s")
    return 0


def run_profile(model: Path, output: Path, max_length: int, quick: bool, processes: int = RANKS) -> None:
    """Measure one-thread processes side by side, as the training will run."""
    command = [sys.executable, "-m", "hf_sparsebalance", "profile", "--model_name_or_path", str(model)]
    command += ["--output", str(output), "--max_length", str(max_length), "--block_size", "128"]
    command += ["--processes", str(processes), "--threads", "1", *(["--quick"] if quick else [])]
    subprocess.run(command, check=True, env=environment())


def run_training(
    name: str, options: list[str], model: Path, train: Path, heldout: Path, args: argparse.Namespace
) -> None:
    """One fine-tuning run on two CPU processes."""
    command = ["-m", "hf_sparsebalance", "train", "--config", str(CONFIG), "--model_name_or_path", str(model)]
    command += ["--data", str(train), "--eval_data", str(heldout), "--output_dir", str(args.output / name)]
    launch([*command, "--max_length", str(args.max_length), *options])


def launch(program: list[str], processes: int = RANKS) -> None:
    """Run a program (a script, or -m and a module, and its arguments) on CPU processes, two unless told otherwise."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    # --cpu alone would start one process; with --multi_gpu and ACCELERATE_USE_CPU there are more, joined by gloo.
    command += ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port", free_port()]
    subprocess.run([*command, *program], check=True, env=environment())


def environment() -> dict[str, str]:
    """This process's, with one compute thread per rank and the ranks on the CPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
