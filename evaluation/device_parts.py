"""The parts of device_check.py: timings, training, compiling, and by name those that device_accuracy.py has."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
import math
import os
import platform
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from device_accuracy import NAMES, Inputs, Results, bits_for, correct, gradients, make_inputs, twice
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from sparsebalance_kernels import block_sparse_attention
from sparsebalance_kernels import selection as bitset

if TYPE_CHECKING:
    from device_check import Sizes

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = {"forward+backward": 7, "forward": 2}  # matrix products of a kept pair
SECONDS_PER_SAMPLE = 0.02  # short calls are repeated, so that launching them is not what is measured


@dataclass
class Contender:
    """One thing to time: a call, the pairs it attends, and what its routing costs beside it."""

    name: str
    selection: str
    mode: str
    run: Callable[[], Any]
    pairs: int
    routing: str | None = None  # the selection whose routing time is to be added
    peak_bytes: int | None = None


def contenders_of(
    inputs: Inputs, selections: list[str], rivals: tuple[str, ...], modes: tuple[str, ...]
) -> tuple[list[Contender], dict[str, Callable], dict[str, float]]:
    """(all to be timed, routing calls by selection, densities by selection); "flex" takes part per selection."""
    length, heads, size = len(inputs.query), inputs.query.shape[1], inputs.block_size
    causal = heads * length * (length + 1) // 2
    own = heads * sum(n * (n + 1) // 2 for n in (min(size, length - at) for at in range(0, length, size)))
    visible = heads * sum(position // size for position in range(length))
    attends = [(rival, "dense", dense_rival(rival), causal, None) for rival in rivals if rival != "flex"]
    routing: dict[str, Callable] = {}
    densities: dict[str, float] = {"dense": 1.0, "p=1": 1.0}
    for selection in selections:
        fixed: dict[str, Any] = {"cu_seqlens": inputs.cu_seqlens, "block_size": size, "backend": "triton"}
        kind, _, value = selection.partition("=")
        if kind == "p":
            operator = functools.partial(block_sparse_attention, top_p=float(value), **fixed)
            attends.append(("ours", selection, operator, causal, None))
            continue
        bits = bits_for(selection, inputs)
        kept = int(bitset.count_bits(bits).sum())
        densities[selection] = kept / visible
        pairs = own + kept * size
        if kind == "k":
            operator = functools.partial(block_sparse_attention, top_k=int(value), **fixed)
            routing[selection] = functools.partial(inputs.select, "triton", None, int(value))
            attends.append(("ours", selection, operator, pairs, None))
        else:
            if float(value) < 1.0:
                most = 1 + round(float(value) * (length // size))  # as many of the last block's history
                routing[selection] = functools.partial(inputs.select, "triton", None, most)
            added = selection if selection in routing else None
            attends.append(("ours", selection, functools.partial(inputs.attend, bits), pairs, added))
        if "flex" in rivals:
            attends.append(("flex", selection, flex_rival(bits, inputs), pairs, None))
    contenders = [
        Contender(name, selection, mode, runner(attend, mode, inputs), pairs, added)
        for mode in modes
        for name, selection, attend, pairs, added in attends
    ]
    return contenders, routing, densities


def runner(attend: Callable, mode: str, inputs: Inputs) -> Callable[[], Any]:
    if mode == "forward":
        return torch.no_grad()(functools.partial(attend, inputs.query, inputs.key, inputs.value))
    return functools.partial(gradients, attend, inputs)


def batched(attend: Callable) -> Callable:
    """Packed tensors to ``[1, heads, T, D]`` views and back."""
    return lambda *packed: attend(*(t.transpose(0, 1).unsqueeze(0) for t in packed)).squeeze(0).transpose(0, 1)


def dense_rival(name: str) -> Callable:
    kernel = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if name == "cudnn":  # PyTorch gives it no groups of heads
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return batched(attend)


def flex_rival(bits: torch.Tensor, inputs: Inputs) -> Callable:
    """flex_attention under the same bits: blocks that some row keeps, the whole ones without a mask."""
    size, length = inputs.block_size, bits.shape[2]
    blocks = -(-length // size)
    kept = bitset.unpack_bits(bits.transpose(1, 2))[..., :blocks]
    kept = kept.unflatten(1, (blocks, size))  # all lengths here are multiples of the block
    whole, some = kept.all(2), kept.any(2)
    some = (some & ~whole) | torch.eye(blocks, dtype=torch.bool, device=bits.device)

    def ordered(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = wanted.int().argsort(dim=-1, descending=True, stable=True).int()
        return wanted.sum(-1, dtype=torch.int32)[None], order[None]

    def mask_mod(batch, head, q, kv):  # type: ignore[no-untyped-def]
        block = kv // size
        bit = (bits[head, block // bitset.WORD, q] >> (block % bitset.WORD)) & 1
        return (q >= kv) & ((bit == 1) | (q // size == block))

    lists = (*ordered(some), *ordered(whole))
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(length, length))
    on_gpu = bits.device.type == "cuda"
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True) if on_gpu else flex_attention
    return batched(lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=True))


def seconds(run: Callable, calls: int, device: str) -> float:
    """Seconds per call."""
    if device == "cpu":
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begun) / calls
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / calls


def peak_bytes(run: Callable) -> int:
    """Bytes of GPU memory that one call takes beyond what was there; also warms up."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def alternate(runs: dict[Any, Callable], device: str) -> dict[Any, list[float]]:
    """Times of several warmed-up calls, all in turn, every second time backwards."""
    if device == "cpu":
        return {name: [seconds(run, 1, device)] for name, run in runs.items()}
    estimates = {name: seconds(run, 1, device) for name, run in runs.items()}
    calls = {name: min(20, max(1, round(SECONDS_PER_SAMPLE / taken))) for name, taken in estimates.items()}
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for repeat in range(5 if sum(estimates.values()) < 2.0 else 3):
        for name in list(runs)[:: -1 if repeat % 2 else 1]:
            times[name].append(seconds(runs[name], calls[name], device))
    return times


def measure(
    shape: str,
    length: int,
    selections: list[str],
    sizes: Sizes,
    device: str,
    results: Results,
    rivals: tuple[str, ...] = ("flash",),
) -> None:
    """Time one shape and length: a row for each rival and selection, forward+backward and forward."""
    torch.compiler.reset()  # else flex_attention reaches the limit of recompilations
    inputs = make_inputs(sizes.shapes[shape], (length,), sizes.block_size, sizes.dtype, device)
    # flex_attention has no backward pass on the CPU.
    modes = ("forward",) if device == "cpu" and "flex" in rivals else tuple(PRODUCTS)
    contenders, routing, densities = contenders_of(inputs, selections, rivals, modes)
    for one in contenders if device == "cuda" else ():
        one.peak_bytes = peak_bytes(one.run)
    if "flex" in rivals:
        compare_with_flex(contenders, inputs, {"shape": shape, "length": length}, results)
    square = torch.randn(sizes.matmul_side, sizes.matmul_side, device=device).to(inputs.query.dtype)
    runs: dict[Any, Callable] = {number: one.run for number, one in enumerate(contenders)}
    runs |= routing | {"matmul": functools.partial(torch.mm, square, square)}
    for name in [*routing, "matmul"]:
        runs[name]()
    times = alternate(runs, device)
    matmul = 2 * sizes.matmul_side**3 / statistics.median(times["matmul"])
    totals = {number: times[number] for number in range(len(contenders))}
    for number, one in enumerate(contenders):
        if one.routing:
            totals[number] = [a + b for a, b in zip(times[number], times[one.routing], strict=True)]
    flash = {one.mode: totals[number] for number, one in enumerate(contenders) if one.name == "flash"}
    for number, one in enumerate(contenders):
        total = statistics.median(totals[number])
        flop = 2 * PRODUCTS[one.mode] * inputs.query.shape[2] * one.pairs
        row = {"shape": shape, "length": length, "dtype": sizes.dtype, "selection": one.selection, "mode": one.mode}
        row |= {"contender": one.name, "density": densities[one.selection], "kept_pairs": one.pairs}
        row |= {"times_s": times[number], "routing_times_s": times.get(one.selection) if one.name == "ours" else None}
        row |= {"routing_s": None if row["routing_times_s"] is None else statistics.median(row["routing_times_s"])}
        row |= {"routing_added": one.routing is not None, "total_times_s": totals[number], "median_s": total}
        row |= {"flop": flop, "flop_per_s": flop / total, "matmul_flop_per_s": matmul}
        row |= {"share_of_matmul": flop / total / matmul, "peak_bytes": one.peak_bytes}
        ratios = [a / b for a, b in zip(flash[one.mode], totals[number], strict=True)]
        results.write("timing", row | {"speedup_over_flash": statistics.median(ratios)})


def compare_with_flex(contenders: list[Contender], inputs: Inputs, where: dict[str, Any], results: Results) -> None:
    """ours and flex_attention under the same bits: relative difference in the 2-norm.

    Each rounds the probabilities and the output (gradients: P, dS, out, the gradient) to the dtype: at most half an
    eps each, so 2 eps between two outputs, 4 between gradients.
    """
    pairs: dict[tuple, dict[str, Contender]] = {}
    for one in contenders:
        pairs.setdefault((one.selection, one.mode), {})[one.name] = one
    for (selection, mode), both in pairs.items():
        if "flex" in both:
            found, theirs = (both[name].run() for name in ("ours", "flex"))
            found, theirs = ((found,), (theirs,)) if mode == "forward" else (found, theirs)
            for name, a, b in zip(NAMES, found, theirs, strict=False):
                difference = float((a.double() - b.double()).norm() / b.double().norm())
                limit = (2 if name == "out" else 4) * torch.finfo(a.dtype).eps
                row = where | {"check": "flex", "selection": selection, "mode": mode, "result": name}
                results.write("check", row | {"error": difference, "limit": limit, "holds": difference <= limit})


def register_attention() -> None:
    """hf_sparsebalance's attention alone: the package itself imports datasets, which a GPU machine may lack."""
    package = types.ModuleType("hf_sparsebalance")
    package.__path__ = [str(ROOT / "hf_sparsebalance")]
    sys.modules["hf_sparsebalance"] = package
    importlib.import_module("hf_sparsebalance.attention").register()


def make_model(sizes: Sizes, attention: str, dtype: torch.dtype, device: str, layers: int | None = None) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    settings = sizes.model_settings | ({} if layers is None else {"num_hidden_layers": layers})
    config = Qwen2Config(**settings, tie_word_embeddings=True)
    config.sparse_attention = {"block_size": sizes.block_size, "top_k": sizes.top_k}
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def train(sizes: Sizes, device: str, results: Results) -> None:
    """A training step with our attention and with SDPA, in turn."""
    register_attention()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(
        sizes.model_settings["vocab_size"], (1, sizes.train_length), generator=generator, device=device
    )
    steps, losses, peaks = {}, {}, dict.fromkeys(("sparsebalance", "sdpa"))
    for attention in peaks:
        model = make_model(sizes, attention, dtype, device).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
        steps[attention] = functools.partial(train_step, model, optimizer, ids, sizes.loss_chunk)
        losses[attention] = float(steps[attention]())  # also makes the optimizer's state
    if device == "cuda":
        peaks = {attention: peak_bytes(step) for attention, step in steps.items()}
    times = alternate(steps, device)
    expected = math.log(sizes.model_settings["vocab_size"])
    for attention in peaks:
        row = {"attention": attention, "length": sizes.train_length, "dtype": str(dtype).removeprefix("torch.")}
        row |= {"times_s": times[attention], "median_s": statistics.median(times[attention])}
        results.write("training", row | {"first_loss": losses[attention], "peak_bytes": peaks[attention]})
        # The logits of a new model are small, and its targets random.
        near = abs(losses[attention] - expected) < 0.5
        found = {"check": "first loss near ln(vocabulary)", "error": losses[attention] - expected, "limit": 0.5}
        results.write("check", {"attention": attention, **found, "holds": near})


def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    def loss_of(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    pieces = zip(hidden.split(chunk), ids[0, 1:].split(chunk), strict=True)
    loss = sum(checkpoint(loss_of, *piece, use_reentrant=False) for piece in pieces) / len(hidden)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@torch.no_grad()
def compile_model(sizes: Sizes, device: str, results: Results) -> None:
    """Two layers compile without a graph break; the error against higher precision is that of the eager model."""
    register_attention()
    low, high = (torch.bfloat16, torch.float32) if device == "cuda" else (torch.float32, torch.float64)
    ids = torch.randint(sizes.model_settings["vocab_size"], (1, sizes.compile_length), device=device)
    model = make_model(sizes, "sparsebalance", low, device, layers=2).eval()
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    ours, eager = (run(input_ids=ids, use_cache=False).logits.double() for run in (compiled, model))
    exact = model.to(high)(input_ids=ids, use_cache=False).logits.double()
    error, reference = (float((logits - exact).norm() / exact.norm()) for logits in (ours, eager))
    row = {"check": "torch.compile(fullgraph=True)", "error": error, "reference_error": reference, "factor": 2.0}
    results.write("check", row | {"holds": error <= 2.0 * reference})


def describe(device: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    capability = list(torch.cuda.get_device_capability()) if device == "cuda" else None
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")}
    machine = {"gpu": gpu, "capability": capability, "cpu": platform.machine(), "cores": os.cpu_count()}
    return machine | {"python": platform.python_version(), "cuda": torch.version.cuda} | versions


def work_of(part: str, sizes: Sizes, device: str, results: Results) -> None:
    name, _, shape = part.partition("-")
    every = [f"k={sizes.top_k}", *(f"density={density:g}" for density in sizes.densities)]
    run = functools.partial(measure, sizes=sizes, device=device, results=results)
    k_work = list(itertools.product(sizes.k_lengths, sizes.shapes))
    first_work = list(itertools.product(sizes.density_lengths, sizes.shapes))
    if name == "correct":
        correct(next(case for case in sizes.cases if case.name == part), sizes, device, results)
    elif name == "twice":
        twice(shape, sizes, device, results)
    elif name == "compile":
        compile_model(sizes, device, results)
    elif name == "train":
        train(sizes, device, results)
    elif name == "top_k":
        for length, head_shape in k_work:
            run(head_shape, length, every[:1])
    elif name == "density":
        for length, head_shape in first_work:
            run(head_shape, length, [every[1]])
        for head_shape in sizes.shapes:
            run(head_shape, sizes.density_lengths[0], ["density=1", "p=1"])
    elif name == "grid":
        for length in sizes.lengths:
            done = [every[0]] * (length in sizes.k_lengths) + [every[1]] * (length in sizes.density_lengths)
            done += ["density=1", "p=1"] * (length == sizes.density_lengths[0])
            run(shape, length, [selection for selection in [*every, "p=1"] if selection not in done])
    elif name == "cudnn":
        for length, head_shape in k_work:
            run(head_shape, length, [], rivals=("flash", "cudnn"))
    else:
        for length, head_shape in itertools.product(sizes.flex_lengths, sizes.shapes):
            run(head_shape, length, every, rivals=("flash", "flex"))


def run(part: str, sizes: Sizes, device: str, lines: Path, fails: bool) -> int:
    """Run one part; 1 if a check does not hold."""

    def report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        # CUDA's errors end with advice: the last line should say what happened.
        traceback.print_exception(kind, error, trace)
        print(f"{kind.__name__}: {str(error).strip().partition(chr(10))[0]}", file=sys.stderr)

    sys.excepthook = report
    results = Results(lines, part, fails)
    results.write("machine", describe(device))
    work_of(part, sizes, device, results)
    if results.broken:
        print(f"{results.broken} checks do not hold", file=sys.stderr)
    return 1 if results.broken else 0
