"""Time and peak memory of one attention layer: dense SDPA, eager, flex_attention and ours, in one process.

    .venv/bin/python evaluation/bench_attention.py --device cpu --json evaluation/results/bench_attention_cpu.json

Each repeat runs every contender, mode and dtype of a length once, in turn and every second time backwards, so that a
slow minute of the machine hits all of them alike; medians are over the repeats, ratios are taken inside a repeat.
The limit is the time of the kept (query, key) pairs' matrix products at the rate of a large product measured between
the contenders; dense contenders keep all causal pairs.  Forward takes two products of a pair; backward five, since the
scores are computed again.  The gate is not in the limit.

Queries are random; the keys of a block share a random offset, so that the gate has something to prefer.  top_p is
searched for the density asked for.  A trained model's gate is another: what is measured are times at a density.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sparsebalance_kernels import BlockSelection, Budget, block_sparse_attention, index, selection, selector

CONTENDERS = ("sdpa", "eager", "flex_attention", "ours")
PRODUCTS = {"forward": 2, "forward+backward": 7}  # matrix products of a kept pair
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEED = 0
KEY_OFFSET_STD = 2.0
LEAST_SECONDS = 0.05  # a short call is repeated until so much time has passed
EAGER_LIMIT_GIB = 4.0
FLEX_BLOCK = 128
LEAST_TOP_P = 1e-6  # keeps the best history block of each row
NEAR_ENOUGH = 0.98  # share of the wanted density at which the search for top_p ends
# What may keep a contender from running; torch.compile raises its own for want of a C++ compiler.
EXPECTED: dict[str, tuple] = dict.fromkeys(CONTENDERS, (torch.OutOfMemoryError, MemoryError))
EXPECTED["flex_attention"] = (RuntimeError, OSError, ImportError)
MEMORY = {
    "reset": "VmHWM, reset through /proc/self/clear_refs after malloc_trim, minus VmRSS then; one call after warm-up",
    "process": "a fresh process each: highest resident memory minus the same once the inputs were there",
    "cuda": "torch.cuda.max_memory_allocated minus memory_allocated before the call",
}


@dataclass(frozen=True)
class Inputs:
    """One document's packed tensors ``[T, heads, D]``, and the gradient of the output."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    d_out: torch.Tensor
    cu_seqlens: torch.Tensor


def make_inputs(length: int, dtype: str, args: argparse.Namespace) -> Inputs:
    generator = torch.Generator().manual_seed(SEED)
    many, few = (length, args.heads, args.head_dim), (length, args.kv_heads, args.head_dim)
    query, key, value, d_out = (torch.randn(*shape, generator=generator) for shape in (many, few, few, many))
    offsets = torch.randn(-(-length // args.block_size), *few[1:], generator=generator) * KEY_OFFSET_STD
    key += offsets.repeat_interleave(args.block_size, dim=0)[:length]
    tensors = (t.to(args.device, DTYPES[dtype]) for t in (query, key, value, d_out))
    return Inputs(*tensors, torch.tensor([0, length], dtype=torch.int32, device=args.device))


def route(inputs: Inputs, top_p: float, block_size: int) -> None:
    """Pooling, scores, selection and index without attending: the one place that knows the operator's inside."""
    boundaries, scale = (0, len(inputs.query)), inputs.query.shape[2] ** -0.5
    budget, words = Budget(block_size, top_p=(top_p,)), selection.words_for(boundaries, block_size)
    bits = selector.select_blocks(inputs.query, inputs.key, boundaries, budget, scale, words)
    for tile in index.history_tiles(boundaries, block_size):
        index.index_tile(BlockSelection(bits, inputs.cu_seqlens, block_size), tile, inputs.key.shape[1])


def attention_of(contender: str, inputs: Inputs, top_p: float, block_size: int) -> Callable:
    """The contender as a function of packed query, key, value; what a model prepares once is prepared here."""
    length, heads, head_dim = inputs.query.shape
    device = inputs.query.device
    if contender == "ours":
        fixed = {"cu_seqlens": inputs.cu_seqlens, "top_p": top_p, "block_size": block_size}
        return lambda q, k, v: block_sparse_attention(q, k, v, **fixed)
    if contender == "sdpa":
        return batched(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    if contender == "flex_attention":
        # Without fullgraph, one failed call makes later ones run uncompiled, over a T x T matrix, and not say so.
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        mask = causal_block_mask(length, device)

        def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if device.type == "cpu" and torch.is_grad_enabled():
                raise NotImplementedError("no backward on CPU")
            return compiled(q, k, v, block_mask=mask, enable_gqa=True)

        return batched(flex)

    gib = heads * length * length * 16 / 2**30  # four matrices of fp32 live at once
    if gib > EAGER_LIMIT_GIB:
        raise MemoryError(f"T x T scores need about {gib:.1f} GiB, more than {EAGER_LIMIT_GIB:g}")
    future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
        scores = (torch.matmul(q, k.transpose(2, 3)) * head_dim**-0.5).masked_fill(future, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)

    return batched(eager)


def batched(attend: Callable) -> Callable:
    """Packed tensors to ``[1, heads, T, D]`` views and back."""
    return lambda *packed: attend(*(t.transpose(0, 1).unsqueeze(0) for t in packed)).squeeze(0).transpose(0, 1)


def causal_block_mask(length: int, device: torch.device) -> BlockMask:
    """flex_attention's causal mask, without the T x T matrix that create_block_mask goes through."""
    blocks = -(-length // FLEX_BLOCK)
    number = torch.arange(blocks, dtype=torch.int32, device=device)
    own, before = (t.expand(1, 1, blocks, blocks).contiguous() for t in (number[:, None], number))
    lists = (torch.ones_like(number)[None, None], own, number[None, None], before)
    options = {"BLOCK_SIZE": FLEX_BLOCK, "seq_lengths": (length, length)}
    return BlockMask.from_kv_blocks(*lists, mask_mod=lambda b, h, q, kv: q >= kv, **options)


def runner(attend: Callable, mode: str, inputs: Inputs) -> Callable:
    """One measured call: forward without a graph, or forward and the gradients of query, key and value."""
    tensors = (inputs.query, inputs.key, inputs.value)
    if mode == "forward":
        return torch.no_grad()(lambda: attend(*tensors))
    leaves = [t.detach().requires_grad_() for t in tensors]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, inputs.d_out)


def choose_top_p(density: Callable[[float], float], target: float) -> float:
    """The largest p whose density is at most ``target``, by bisection; the least p where even that keeps more."""
    low, high, reached = LEAST_TOP_P, 1.0, density(LEAST_TOP_P)
    while reached < NEAR_ENOUGH * target and high - low > 1e-4:
        middle = (low + high) / 2
        there = density(middle)
        low, high, reached = (middle, high, there) if there <= target else (low, middle, reached)
    return low


def seconds(run: Callable, device: str) -> float:
    """Seconds per call, of one long call or of several short ones."""
    calls, elapsed, start = 0, 0.0, time.perf_counter()
    while elapsed < LEAST_SECONDS:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        calls, elapsed = calls + 1, time.perf_counter() - start
    return elapsed / calls


def process_bytes(name: str) -> int:
    """VmRSS or VmHWM (the highest VmRSS) of this process; without /proc always the highest."""
    if not Path("/proc/self/status").exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)[0]) * 1024


def reset_peak() -> bool:
    """Bring this process's VmHWM down to its VmRSS; False where the system does not do that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:  # freed memory that malloc holds back would hide as much of a later peak
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return process_bytes("VmHWM") - process_bytes("VmRSS") < 2**22


def peak_bytes(run: Callable, method: str) -> int:
    """Bytes that one call needs at its peak beyond what was there before."""
    if method == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if method == "reset":
        reset_peak()
    before = process_bytes("VmRSS" if method == "reset" else "VmHWM")
    run()
    return process_bytes("VmHWM") - before


def peak_of_fresh(args: argparse.Namespace, length: int, dtype: str, mode: str, contender: str, top_p: float) -> int:
    """``peak_bytes`` where nothing ran before but the same on two blocks, which loads the libraries."""
    torch.set_num_threads(args.threads)
    runs = []
    for tokens in (2 * args.block_size, length):
        inputs = make_inputs(tokens, dtype, args)
        runs.append(runner(attention_of(contender, inputs, top_p, args.block_size), mode, inputs))
    runs[0]()
    return peak_bytes(runs[1], "process")


def bench_length(length: int, args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Measure one length: (a case per dtype, a measurement per dtype, mode and contender)."""
    torch.compiler.reset()  # else flex_attention reaches the limit of recompilations
    inputs = {dtype: make_inputs(length, dtype, args) for dtype in args.dtypes}

    @torch.no_grad()
    def stats_at(top_p: float, dtype: str) -> Any:
        i, fixed = inputs[dtype], {"block_size": args.block_size, "return_stats": True}
        return block_sparse_attention(i.query, i.key, i.value, cu_seqlens=i.cu_seqlens, top_p=top_p, **fixed)[1]

    top_p = choose_top_p(lambda p: stats_at(p, args.dtypes[0]).density, args.density)
    side = 2048 if args.device == "cpu" else 8192
    causal_pairs = args.heads * (length * (length + 1) // 2)
    cases, rows, runs = [], [], {}
    for dtype in args.dtypes:
        stats = stats_at(top_p, dtype)
        case = {"length": length, "dtype": dtype, "top_p": top_p, "least_budget": top_p == LEAST_TOP_P}
        cases.append(case | {"density": stats.density, "work": stats.work, "coverage": stats.coverage})
        square = torch.randn(side, side, device=args.device).to(DTYPES[dtype])
        runs[dtype, "gemm"] = lambda square=square: torch.mm(square, square)
        runs[dtype, "gemm"]()
        runs[dtype, "routing"] = lambda i=inputs[dtype]: route(i, top_p, args.block_size)
        runs[dtype, "routing"]()
        for contender in args.contenders:
            attend, pairs = None, round(stats.work * causal_pairs) if contender == "ours" else causal_pairs
            for mode, products in PRODUCTS.items():
                row = {"length": length, "dtype": dtype, "mode": mode, "contender": contender, "skipped": None}
                row |= {"kept_pairs": pairs, "flop": 2 * args.head_dim * products * pairs, "peak_bytes": None}
                rows.append(row)
                try:
                    attend = attend or attention_of(contender, inputs[dtype], top_p, args.block_size)
                    run = runner(attend, mode, inputs[dtype])
                    run()
                except EXPECTED[contender] as error:
                    row["skipped"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                    continue
                runs[dtype, mode, contender] = run
                if args.memory != "process":
                    row["peak_bytes"] = peak_bytes(run, args.memory)
                elif contender != "flex_attention":  # a fresh process would count its compiler
                    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                        job = pool.submit(peak_of_fresh, args, length, dtype, mode, contender, top_p)
                    row["peak_bytes"] = job.result()

    times: dict[tuple, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats):
        for name in list(runs)[:: -1 if repeat % 2 else 1]:
            times[name].append(seconds(runs[name], args.device))
    rate = {dtype: 2 * side**3 / statistics.median(times[dtype, "gemm"]) for dtype in args.dtypes}
    for dtype, case in zip(args.dtypes, cases, strict=True):
        routing = times[dtype, "routing"]
        case |= {"gemm_flop_per_s": rate[dtype], "routing_times_s": routing, "routing_s": statistics.median(routing)}
        case["routing_share_of_forward"] = median_ratio(routing, times.get((dtype, "forward", "ours")))
    for row in rows:
        taken, limit = times.get((row["dtype"], row["mode"], row["contender"])), row["flop"] / rate[row["dtype"]]
        row |= {"times_s": taken, "median_s": statistics.median(taken) if taken else None, "limit_s": limit}
        row["share_of_limit"] = limit / row["median_s"] if taken else None
        row["speedup_of_ours"] = median_ratio(taken, times.get((row["dtype"], row["mode"], "ours")))
    return cases, rows


def median_ratio(over: list[float] | None, under: list[float] | None) -> float | None:
    """Median of the repeats' ratios; None where one of the two was not measured."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True)) if over and under else None


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """The document before its measurements."""
    document = provenance("torch", "numpy")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "memory")}
    document["machine"] |= {"threads": torch.get_num_threads(), "gpu": gpu}
    return document | {
        "settings": settings | {"budget": "top_p", "seed": SEED, "key_offset_std": KEY_OFFSET_STD},
        "method": {
            "time": f"seconds per call, median of the repeats; a call repeats until {LEAST_SECONDS} s have passed",
            "limit": f"kept_pairs x products {PRODUCTS} x 2 x head_dim FLOP at gemm_flop_per_s",
            "memory": MEMORY[args.memory],
            "routing": "the torch backend's selector and index, on any device",
            "flex_attention": "torch.compile, causal (dense)",
        },
    }


def show(document: dict[str, Any], console: Console) -> None:
    def number(value: float | None, factor: float = 1.0, unit: str = "", digits: int = 1) -> str:
        return "-" if value is None else f"{value * factor:,.{digits}f}{unit}"

    machine, settings = document["machine"], document["settings"]
    keys = ("heads", "kv_heads", "head_dim", "block_size", "density", "repeats")
    where = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, torch {document['versions']['torch']}"
    console.print(
        f"{where}, {document['date']}\n{', '.join(f'{key} {settings[key]}' for key in keys)}", highlight=False
    )
    table = Table("length", "dtype", "top_p", "density", "work", "GEMM GFLOP/s", "routing ms", "of our forward")
    for case in document["cases"]:
        figures = ["least" if case["least_budget"] else number(case["top_p"], digits=4)]
        figures += [number(case[name], digits=3) for name in ("density", "work")]
        routing = (number(case["routing_s"], 1e3), number(case["routing_share_of_forward"], 100, "%"))
        table.add_row(str(case["length"]), case["dtype"], *figures, number(case["gemm_flop_per_s"], 1e-9), *routing)
    console.print(table)
    table, skips = Table("length", "dtype", "mode", "contender", "ms", "share of limit", "/ ours", "peak MiB"), {}
    for row in document["measurements"]:
        figures = (number(row["median_s"], 1e3), number(row["share_of_limit"], 100, "%"))
        figures += (number(row["speedup_of_ours"], unit="x", digits=2), number(row["peak_bytes"], 2**-20))
        table.add_row(str(row["length"]), row["dtype"], row["mode"], row["contender"], *figures)
        if row["skipped"]:
            why = f"{row['contender']} {row['mode']}: {row['skipped']}"
            skips[why] = [*skips.get(why, []), f"{row['length']} {row['dtype']}"]
    console.print(table)
    for why, where in skips.items():
        console.print(f"skipped {why} ({', '.join(where)})", highlight=False, markup=False, soft_wrap=True)


def count(text: str) -> int:
    found = re.fullmatch(r"0*([1-9]\d{0,8})([kK]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1 (1K is 1024)")
    return int(found[1]) * (1024 if found[2] else 1)


def listed(convert: Callable[[str], Any]) -> Callable[[str], list]:
    return lambda text: list(dict.fromkeys(convert(part.strip()) for part in text.split(",")))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")  # one line, without the usage
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--lengths", type=listed(count), default="1K,2K,4K,8K,16K,32K", help="tokens, with commas (%(default)s)")
    add("--dtypes", type=listed(str), default="fp32,bf16", help="%(default)s; fp16 too")
    add("--contenders", type=listed(str), default=",".join(CONTENDERS), help="%(default)s")
    for name, default in {"heads": 14, "kv-heads": 2, "head-dim": 64, "block-size": 128, "repeats": 3}.items():
        add(f"--{name}", type=count, default=default, help="%(default)s")
    add("--threads", type=count, default=torch.get_num_threads(), help="%(default)s")
    add("--density", type=float, default=0.1, help="share of the history blocks to keep at most (%(default)s)")
    add("--memory", choices=("auto", "process"), default="auto", help="process: a fresh process for each peak")
    add("--json", nargs="?", const="-", metavar="PATH", help="write JSON; without PATH to stdout, the table to stderr")
    args = parser.parse_args()
    for option, known in (("dtypes", DTYPES), ("contenders", CONTENDERS)):
        if not set(getattr(args, option)) <= set(known):
            parser.error(f"--{option} {','.join(getattr(args, option))}: choose among {', '.join(known)}")
    if args.heads % args.kv_heads:
        parser.error(f"--heads ({args.heads}) must be a multiple of --kv-heads ({args.kv_heads})")
    if not 0.0 < args.density <= 1.0:
        parser.error(f"--density must lie in (0, 1], got {args.density}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    if args.json not in (None, "-") and (Path(args.json).is_dir() or not os.access(Path(args.json).parent, os.W_OK)):
        parser.error(f"--json {args.json} must be a file in a folder that exists and can be written")
    if args.device == "cuda" or args.memory == "auto":
        args.memory = "cuda" if args.device == "cuda" else "reset" if reset_peak() else "process"
    return args


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    document = describe(args) | {"cases": [], "measurements": []}
    for length in args.lengths:
        print(f"measuring {length} tokens", file=sys.stderr)
        for name, found in zip(("cases", "measurements"), bench_length(length, args), strict=True):
            document[name] += found
        if args.json not in (None, "-"):  # after each length: a long run may be stopped
            Path(args.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if args.json == "-":
        print(json.dumps(document, indent=2))
    stream = sys.stderr if args.json == "-" else sys.stdout
    show(document, Console(file=stream, width=None if stream.isatty() else 119))
    return 0


if __name__ == "__main__":
    sys.exit(main())
