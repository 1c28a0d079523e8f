"""``sparsebalance profile``: measure this device and model, and write what training plans with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_sparsebalance.attention import ATTENTION_NAME, SparseAttentionDefaults
from hf_sparsebalance.cli.models import load_config
from hf_sparsebalance.cli.parsing import Parser
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.prediction_error import prediction_errors
from hf_sparsebalance.profiling import ProfileRequest, measure_profile, model_context


def run(arguments: Sequence[str]) -> None:
    """Measure and write the profile; the file appears only when all is measured."""
    parser = Parser(prog="sparsebalance profile", description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="model folder or hub name (its config is read)")
    parser.add_argument("--output", default="profile.json", help="file to write (default: %(default)s)")
    parser.add_argument("--max_length", type=int, default=32768, help="longest document, tokens")
    parser.add_argument(
        "--processes", type=int, default=None, help="training processes on this host (default: GPUs, or 1)"
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="CPU threads of each (default: OMP_NUM_THREADS, or 1)"
    )
    parser.add_argument(
        "--attn_implementation",
        default=ATTENTION_NAME,
        help="attention that training will use (default: %(default)s; else as in from_pretrained)",
    )
    parser.add_argument("--block_size", type=int, default=None, help="default: the model's, else 128")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="compute dtype")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="training will use it")
    parser.add_argument("--quick", action="store_true", help="a coarser grid")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="also measure packed micro-batches off the grid, and print how well the profile predicts them, beside "
        "fits to FLOPs and to lengths alone",
    )
    parser.add_argument("--json", action="store_true", help="also print the profile, and what --validate found")
    args = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    processes = args.processes if args.processes is not None else max(1, gpus)
    # What a rank gets from accelerate launch and torchrun unless it is told otherwise.
    inherited = os.environ.get("OMP_NUM_THREADS", "1")
    threads = args.threads if args.threads is not None else int(inherited) if inherited.isdecimal() else 1
    for name, value in (("processes", processes), ("threads", threads), ("max_length", args.max_length - 1)):
        if value < 1:
            raise UserError(f"--{name} is too small: at least 1 (max_length: 2)")
    folder = os.path.dirname(os.path.abspath(args.output))
    if os.path.isdir(args.output) or not os.access(folder, os.W_OK):
        raise UserError(f"--output {args.output} must be a file in a folder that exists and can be written")
    config = load_config(args.model_name_or_path)
    if args.block_size is not None:
        config.sparse_attention = {**(getattr(config, "sparse_attention", None) or {}), "block_size": args.block_size}
    block_size = SparseAttentionDefaults.of(config).block_size
    context = model_context(
        config,
        block_size=block_size,
        dtype=args.dtype,
        device=torch.device("cuda", 0) if gpus else torch.device("cpu"),
        num_threads=threads,
        num_processes=processes,
        gradient_checkpointing=args.gradient_checkpointing,
        attention=args.attn_implementation,
    )
    console = Console(stderr=True)
    with Progress(console=console) as bar:
        task = bar.add_task(f"profiling {processes} x {threads} threads", total=None)
        profile, held_out = measure_profile(
            ProfileRequest(config, context, args.max_length, args.quick),
            lambda done, total: bar.update(task, completed=done, total=total),
            validate=args.validate,
        )
    profile.save(args.output)
    errors = prediction_errors(LatencyPredictor(profile), held_out) if held_out else []
    if args.json:
        found = {"validation": [asdict(error) for error in errors]} if errors else {}
        print(json.dumps({**profile.to_json(), **found}))
        return
    console.print(f"{args.output}: {len(profile.attention)} lengths up to {args.max_length}")
    if errors:
        table = Table("predictor", "MAPE", "95th percentile", "pairs in order", title="held-out micro-batches")
        for error in errors:
            table.add_row(error.name, f"{error.mape:.1%}", f"{error.p95:.1%}", f"{error.ordered:.1%} of {error.pairs}")
        console.print(table)
