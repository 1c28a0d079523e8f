"""Measures a latency profile on the device at hand: what latency.py reads.

Attention is measured per (length, density) for one layer, forward and backward, with random keys and a nearly uniform
gate, so that the density follows p; everything else is measured on the whole model with short documents and reduced to
a time per token and a constant.  As many processes run side by side as training will have: they share the host's
memory bandwidth and caches, and a lone process would look faster than training is.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_sparsebalance.arguments import SparseBalanceArguments
from hf_sparsebalance.attention import (
    ATTENTION_NAME,
    NO_SPARSE_ATTENTION,
    SparseAttentionDefaults,
    StatsCollector,
)
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile, LengthRow, ProfileContext, SparsePoint
from sparsebalance_kernels import block_sparse_attention

DENSITIES = (0.03, 0.06, 0.12, 0.25, 0.5, 0.8)
QUICK_DENSITIES = (0.06, 0.25, 0.6)
LINEAR_TOKENS = (256, 512, 1024, 2048)
# A point is repeated until it has run so long, at least twice; the first run, which warms up, never counts.
SECONDS_PER_POINT = 0.15
QUICK_SECONDS_PER_POINT = 0.03
# Generous: the longest point at 128K dense on one CPU thread takes minutes.
WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to measure.

    Attributes:
        config: the model's configuration.
        context: what the profile will hold for.
        max_length: longest document, tokens.
        quick: a coarser grid, for tests and first looks.
    """

    config: PreTrainedConfig
    context: ProfileContext
    max_length: int
    quick: bool = False


def training_context(
    config: PreTrainedConfig, args: SparseBalanceArguments, block_size: int, device: torch.device
) -> ProfileContext:
    """The context of this training process, to compare with a profile's."""
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(config.dtype or torch.float32).split(".")[-1]
    return model_context(
        config,
        block_size=block_size,
        dtype=dtype,
        device=device,
        num_threads=torch.get_num_threads(),
        num_processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        gradient_checkpointing=bool(args.gradient_checkpointing),
        attention=str(config._attn_implementation),
    )


def model_context(
    config: PreTrainedConfig,
    *,
    block_size: int,
    dtype: str,
    device: torch.device,
    num_threads: int,
    num_processes: int,
    gradient_checkpointing: bool,
    attention: str = ATTENTION_NAME,
) -> ProfileContext:
    """What a profile of this model on this device, run this way, holds for."""
    heads = config.num_attention_heads
    return ProfileContext(
        device=device_name(device),
        # Where an accelerator computes, the host's threads change nothing.
        num_threads=num_threads if device.type == "cpu" else 0,
        num_processes=num_processes,
        attention=attention,
        backend="torch",
        dtype=dtype,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        num_layers=config.num_hidden_layers,
        num_dense_layers=len(set(SparseAttentionDefaults.of(config).dense_layers)),
        hidden_size=config.hidden_size,
        block_size=block_size,
        gradient_checkpointing=gradient_checkpointing,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def device_name(device: torch.device) -> str:
    """Name of the accelerator as torch reports it, or of the CPU as the system does."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def measure_profile(request: ProfileRequest, progress: Callable[[int, int], None] | None = None) -> LatencyProfile:
    """Measure with ``request.context.num_processes`` processes side by side; their mean is the profile.

    Args:
        request: what to measure.
        progress: called with (points done, points in all).

    Raises:
        UserError: the model cannot attend sparsely, or a process died (out of memory, for instance).
    """
    context = request.context
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(context.num_processes)
    results: multiprocessing.Queue[_Result] = spawn.Queue()
    workers = [
        spawn.Process(target=_worker, args=(request, rank, barrier, results), daemon=True)
        for rank in range(context.num_processes)
    ]
    for worker in workers:
        worker.start()
    try:
        points = list(_points(request))
        seen: dict[int, list[list[float]]] = {}
        for done in range(len(points) * len(workers)):
            number, values = _next_result(results, workers)
            seen.setdefault(number, []).append(values)
            if progress is not None:
                progress((done + 1) // len(workers), len(points))
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    means = [[statistics.fmean(column) for column in zip(*seen[number], strict=True)] for number in range(len(points))]
    return _assemble(request, points, means)


# A measuring process sends a point's number with its values, or with the message of a UserError.
_Result = tuple[int, "list[float] | str"]


@dataclass(frozen=True, slots=True)
class _Point:
    """One thing to measure: attention at (length, top_p), or the whole model at a length (top_p None)."""

    length: int
    top_p: float | None


def _lengths(request: ProfileRequest) -> list[int]:
    """From one block, doubling, to the longest document."""
    lengths = [request.context.block_size]
    while lengths[-1] * 2 < request.max_length:
        lengths.append(lengths[-1] * 2)
    return [*lengths, max(request.max_length, lengths[-1] + 1)]


def _points(request: ProfileRequest) -> Iterator[_Point]:
    # The whole model first: one that cannot be used is found at once.
    shorter = [tokens for tokens in LINEAR_TOKENS if tokens <= request.max_length]
    for length in shorter if len(shorter) > 1 else (max(1, request.max_length // 2), request.max_length):
        yield _Point(length, None)
    for length in _lengths(request):
        yield _Point(length, 1.0)
        if length > request.context.block_size:
            for top_p in QUICK_DENSITIES if request.quick else DENSITIES:
                yield _Point(length, top_p)


def _worker(request: ProfileRequest, rank: int, barrier: Barrier, results: multiprocessing.Queue[_Result]) -> None:
    """Measure every point in step with the other processes; sends a result each, or what the user did wrong."""
    try:
        _measure_points(request, rank, barrier, results)
    except UserError as error:
        results.put((0, str(error)))


def _measure_points(
    request: ProfileRequest, rank: int, barrier: Barrier, results: multiprocessing.Queue[_Result]
) -> None:
    if request.context.num_threads:
        torch.set_num_threads(request.context.num_threads)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    seconds = QUICK_SECONDS_PER_POINT if request.quick else SECONDS_PER_POINT
    model: torch.nn.Module | None = None
    for number, point in enumerate(_points(request)):
        if point.top_p is not None:
            values = _measure_attention(request, point.length, point.top_p, device, barrier, seconds)
        else:
            model = model or _build_model(request, device)
            values = _measure_model(model, point.length, request.context, device, barrier, seconds)
        results.put((number, values))


def _next_result(results: multiprocessing.Queue[_Result], workers: Sequence[Any]) -> tuple[int, list[float]]:
    waited = 0.0
    while waited < WAIT_S:
        try:
            number, values = results.get(timeout=1.0)
        except queue.Empty:
            waited += 1.0
        else:
            if isinstance(values, str):
                raise UserError(values)
            return number, values
        dead = [worker.exitcode for worker in workers if worker.exitcode not in (None, 0)]
        if dead:
            break
    raise UserError(
        "sparsebalance profile: a measuring process died or hung (see above; out of memory?): lower --max_length or "
        "--processes"
    )


def _dtype(context: ProfileContext) -> torch.dtype:
    dtype = getattr(torch, context.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _measure_attention(
    request: ProfileRequest, length: int, top_p: float, device: torch.device, barrier: Barrier, seconds: float
) -> list[float]:
    """[density, forward_ms, backward_ms] of one layer over one document."""
    context, dtype = request.context, _dtype(request.context)
    shapes = [(length, heads, context.head_dim) for heads in (context.num_heads, *[context.num_kv_heads] * 2)]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    # Small queries make the gate nearly uniform, in a random order: density close to p, no favourite blocks.
    q *= 0.05
    starts = torch.tensor([0, length], device=device)
    with torch.no_grad():
        _, stats = block_sparse_attention(
            q, k, v, cu_seqlens=starts, top_p=top_p, block_size=context.block_size, return_stats=True
        )
    tensors = [tensor.requires_grad_() for tensor in (q, k, v)]

    def plain() -> torch.Tensor:
        return block_sparse_attention(*tensors, cu_seqlens=starts, top_p=top_p, block_size=context.block_size)

    def forward() -> torch.Tensor:
        # With statistics, as in training.
        out, _ = block_sparse_attention(
            *tensors, cu_seqlens=starts, top_p=top_p, block_size=context.block_size, return_stats=True
        )
        return out

    forward_ms, backward_ms = _time(forward, torch.randn_like(q), device, barrier, seconds)
    if context.gradient_checkpointing:
        backward_ms += _time(plain, torch.randn_like(q), device, barrier, seconds)[0]
    return [stats.density, forward_ms, backward_ms]


def _build_model(request: ProfileRequest, device: torch.device) -> torch.nn.Module:
    try:
        model = AutoModelForCausalLM.from_config(
            request.config, attn_implementation=ATTENTION_NAME, dtype=_dtype(request.context)
        )
    except (KeyError, ValueError) as error:
        raise UserError(NO_SPARSE_ATTENTION) from error
    model.config.use_cache = False
    if request.context.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model.to(device).train()


def _measure_model(
    model: torch.nn.Module,
    length: int,
    context: ProfileContext,
    device: torch.device,
    barrier: Barrier,
    seconds: float,
) -> list[float]:
    """[density, forward_ms, backward_ms] of the whole model with loss, over one document at a low budget."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=device)

    def forward() -> torch.Tensor:
        return model(input_ids=ids, labels=ids, sparse_top_p=0.1).loss

    collector = StatsCollector()
    with torch.no_grad():
        model(input_ids=ids, sparse_top_p=0.1, sparse_stats=collector)
    if not collector.layers:
        raise UserError(NO_SPARSE_ATTENTION)
    # The table is read at the density of the layers that have a gate; those that are always dense are priced apart.
    gated = [stats.density for stats in collector.layers.values() if stats is not None]
    density = statistics.fmean(gated) if gated else 1.0
    return [density, *_time(forward, None, device, barrier, seconds)]


def _time(
    forward: Callable[[], torch.Tensor],
    gradient: torch.Tensor | None,
    device: torch.device,
    barrier: Barrier,
    seconds: float,
) -> tuple[float, float]:
    """Median (forward_ms, backward_ms) of repeated runs, started together with the other processes."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    forward().backward(gradient)
    times: list[tuple[float, float]] = []
    barrier.wait(WAIT_S)
    began = now()
    while len(times) < 2 or now() - began < seconds:
        start = now()
        out = forward()
        middle = now()
        out.backward(gradient)
        times.append((middle - start, now() - middle))
    return (
        statistics.median(forward_s for forward_s, _ in times) * 1000.0,
        statistics.median(backward_s for _, backward_s in times) * 1000.0,
    )


def _assemble(request: ProfileRequest, points: Sequence[_Point], means: Sequence[Sequence[float]]) -> LatencyProfile:
    """Rows of the table from the attention points, then the linear part from what the whole model took beyond it."""
    rows: list[LengthRow] = []
    for length in _lengths(request):
        dense: tuple[float, float] | None = None
        sparse: list[SparsePoint] = []
        for point, (density, forward_ms, backward_ms) in zip(points, means, strict=True):
            if point.length != length or point.top_p is None:
                continue
            if point.top_p == 1.0:
                dense = (forward_ms, backward_ms)
            elif not sparse or density > sparse[-1].density:
                # Few blocks leave few densities: neighbouring p then keep the same blocks.
                sparse.append(SparsePoint(density, forward_ms, backward_ms))
        assert dense is not None
        rows.append(LengthRow(length, *dense, tuple(sparse) or (SparsePoint(1.0, *dense),)))
    attention = LatencyPredictor(LatencyProfile(request.context, tuple(rows), 0.0, 0.0, 0.0, 0.0))
    whole = [(point.length, mean) for point, mean in zip(points, means, strict=True) if point.top_p is None]
    lines = []
    for part in (0, 1):
        rest = []
        for length, mean in whole:
            predicted = attention.document(length, mean[0])
            rest.append(max(0.0, mean[1 + part] - (predicted.forward_ms, predicted.backward_ms)[part]))
        lines.append(_fit_line([length for length, _ in whole], rest))
    (forward_slope, forward_constant), (backward_slope, backward_constant) = lines
    return LatencyProfile(
        request.context, tuple(rows), forward_slope, backward_slope, forward_constant, backward_constant
    )


def _fit_line(tokens: Sequence[int], times_ms: Sequence[float]) -> tuple[float, float]:
    """(ms per token, ms constant), neither negative, with least squared relative error."""
    weights = [1.0 / max(ms, 1e-6) ** 2 for ms in times_ms]
    total = math.fsum(weights)
    mean_x = math.fsum(w * x for w, x in zip(weights, tokens, strict=True)) / total
    mean_y = math.fsum(w * y for w, y in zip(weights, times_ms, strict=True)) / total
    spread = math.fsum(w * (x - mean_x) ** 2 for w, x in zip(weights, tokens, strict=True))
    joint = math.fsum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, tokens, times_ms, strict=True))
    slope = max(0.0, joint / spread)
    constant = mean_y - slope * mean_x
    if constant < 0.0:
        square = math.fsum(w * x * x for w, x in zip(weights, tokens, strict=True))
        product = math.fsum(w * x * y for w, x, y in zip(weights, tokens, times_ms, strict=True))
        return max(0.0, product / square), 0.0
    return slope, constant
