"""Measures a latency profile on the device at hand: what latency.py reads.

Attention is measured per (length, density) for one layer, everything else on the whole model with short documents,
reduced to a time per token and a constant.  Of another attention than ``sparsebalance`` only the whole model can be
asked: it is measured at every length, and what does not grow like the tokens is the attention.  As many processes run
side by side as training will have: they share the host's memory bandwidth and caches, and a lone process would look
faster than training is.  All points are measured in turn, several times over, so that a slow minute of the machine
hits none of them alone.  Nearly all of the time goes to the longest documents: those points need no warm-up, are
measured twice, and every second density is left out.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing.queues
import os
import platform
import queue
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig

from hf_sparsebalance.arguments import SparseBalanceArguments
from hf_sparsebalance.attention import ATTENTION_NAME, SparseAttentionDefaults
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile, LengthRow, ProfileContext, SparsePoint
from hf_sparsebalance.measuring import WAIT_S, AttentionPoint, ModelPoint, Point, Result, Task, run_worker
from hf_sparsebalance.prediction_error import HeldOut
from sparsebalance_kernels.checks import choose_backend

DENSITIES = (0.03, 0.06, 0.12, 0.25, 0.5, 0.8)
QUICK_DENSITIES = (0.06, 0.25, 0.6)
LINEAR_TOKENS = (256, 512, 1024, 2048)
ROUNDS = 3
# A point that takes longer is measured twice, without a warm-up: it averages over much time by itself.
LONG_S = 0.5
# A density whose point would take longer, by the one of half its length, may be left out: time is a line in density.
TOO_LONG_S = 2.0
HELD_OUT = 24
QUICK_HELD_OUT = 8


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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if attention == ATTENTION_NAME:
        query = torch.empty(0, heads, head_dim, dtype=getattr(torch, dtype), device=device)
        backend = choose_backend("auto", query, block_size)
        dense_layers = len(set(SparseAttentionDefaults.of(config).dense_layers))
    else:
        backend, dense_layers, block_size = "transformers", config.num_hidden_layers, 128
    return ProfileContext(
        device=device_name(device),
        # Where an accelerator computes, the host's threads change nothing.
        num_threads=num_threads if device.type == "cpu" else 0,
        num_processes=num_processes,
        attention=attention,
        backend=backend,
        dtype=dtype,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        num_layers=config.num_hidden_layers,
        num_dense_layers=dense_layers,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 0,
        vocab_size=config.vocab_size,
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


def measure_profile(
    request: ProfileRequest, progress: Callable[[int, int], None] | None = None, *, validate: bool = False
) -> tuple[LatencyProfile, list[HeldOut]]:
    """Measure with ``request.context.num_processes`` processes side by side; their mean is the profile.

    Args:
        request: what to measure.
        progress: called with (points done, points in all).
        validate: also measure packed micro-batches off the grid, in the same rounds.

    Returns:
        (profile, held-out micro-batches: empty unless ``validate``).

    Raises:
        UserError: the model cannot attend in this way, or a process died (out of memory, for instance).
    """
    context = request.context
    points = [*points_of(request), *(_held_out_points(request) if validate else ())]
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(context.num_processes)
    results: multiprocessing.Queue[Result] = spawn.Queue()
    tasks: list[multiprocessing.queues.SimpleQueue[Task]] = [spawn.SimpleQueue() for _ in range(context.num_processes)]
    workers = [
        spawn.Process(
            target=run_worker,
            args=(request.config, context, points, request.quick, rank, barrier, mine, results),
            daemon=True,
        )
        for rank, mine in enumerate(tasks)
    ]
    for worker in workers:
        worker.start()
    # Values of all processes, round after round, and how long each point took at first.
    seen: list[list[list[float]]] = [[] for _ in points]
    took_s: dict[Point, float] = {}
    try:
        for round_number in range(ROUNDS + 1):
            order = list(range(len(points)))
            if round_number:  # mixed, as in training, where lengths change from one micro-batch to the next
                random.Random(round_number).shuffle(order)
            for done, number in enumerate(order, start=round_number * len(points) + 1):
                point = points[number]
                if is_due(request, point, round_number, took_s):
                    for mine in tasks:
                        mine.put((number, round_number == 0))
                    values = [_next_result(results, workers) for _ in workers]
                    took_s.setdefault(point, max(each[1] + each[2] for each in values) / 1000.0)
                    if round_number or took_s[point] > LONG_S:
                        seen[number].append([statistics.fmean(column) for column in zip(*values, strict=True)])
                if progress is not None:
                    progress(done, (ROUNDS + 1) * len(points))
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    points, seen = [point for point in points if point in took_s], [rows for rows in seen if rows]
    # Over the rounds the median, as one of them may have stalled; of two the faster one.
    medians = [[statistics.median_low(column) for column in zip(*rows, strict=True)] for rows in seen]
    profile = _assemble(request, points, medians)
    held_out = [
        HeldOut(
            lengths=point.lengths,
            density=median[0],
            dense=point.top_p == 1.0,
            flops=median[3],
            times_ms=tuple(row[1] + row[2] for row in rows),
        )
        for point, rows, median in zip(points, seen, medians, strict=True)
        if isinstance(point, ModelPoint) and point.held_out
    ]
    return profile, held_out


def is_due(request: ProfileRequest, point: Point, round_number: int, took_s: dict[Point, float]) -> bool:
    """Whether a point is measured in a round (0: the warm-up), from how long the points before it took at first."""
    if round_number:
        return point in took_s and (round_number == 1 or took_s[point] <= LONG_S)
    if not isinstance(point, AttentionPoint) or point.top_p not in _densities(request)[1::2]:
        return True
    lengths = _lengths(request)
    before = lengths[max(lengths.index(point.length) - 1, 0)]
    # One block has no such points; elsewhere a shorter one that was left out was too long already.
    unknown_s = 0.0 if before == request.context.block_size else math.inf
    return took_s.get(AttentionPoint(before, point.top_p), unknown_s) * (point.length / before) ** 2 <= TOO_LONG_S


def _densities(request: ProfileRequest) -> tuple[float, ...]:
    return QUICK_DENSITIES if request.quick else DENSITIES


def _lengths(request: ProfileRequest) -> list[int]:
    """From one block, doubling, to the longest document."""
    lengths = [request.context.block_size]
    while lengths[-1] * 2 < request.max_length:
        lengths.append(lengths[-1] * 2)
    return [*lengths, max(request.max_length, lengths[-1] + 1)]


def points_of(request: ProfileRequest) -> Iterator[Point]:
    """What the profile is made from, in the order measured."""
    # The whole model first: one that cannot be used is found at once.
    shorter: Sequence[int] = [tokens for tokens in LINEAR_TOKENS if tokens <= request.max_length]
    if len(shorter) < 2:
        shorter = (max(1, request.max_length // 2), request.max_length)
    if request.context.attention != ATTENTION_NAME:
        yield from (ModelPoint((length,), 1.0) for length in sorted({*shorter, *_lengths(request)}))
        return
    yield from (ModelPoint((length,), 0.1) for length in shorter)
    for length in _lengths(request):
        yield AttentionPoint(length, 1.0)
        if length > request.context.block_size:
            for top_p in _densities(request):
                yield AttentionPoint(length, top_p)


def _held_out_points(request: ProfileRequest) -> list[Point]:
    """Micro-batches of one to four packed documents, log-uniform in length, every fourth dense; none on the grid."""
    rng = random.Random(0)
    longest = math.log(request.max_length)
    shortest = min(math.log(max(2, request.context.block_size)), longest)
    attention = request.context.attention
    only_dense = attention != ATTENTION_NAME
    # The others compute all pairs of a micro-batch and mask those between its documents: one document each.
    most = 4 if not only_dense or "flash" in attention or "flex" in attention else 1
    points: list[Point] = []
    for number in range(QUICK_HELD_OUT if request.quick else HELD_OUT):
        lengths: list[int] = []
        for _ in range(rng.randint(1, most)):
            length = round(math.exp(rng.uniform(shortest, longest)))
            if not lengths or sum(lengths) + length <= request.max_length:
                lengths.append(length)
        dense = only_dense or number % 4 == 3
        points.append(ModelPoint(tuple(lengths), 1.0 if dense else rng.uniform(0.05, 0.9), held_out=True))
    return points


def _next_result(results: multiprocessing.Queue[Result], workers: Sequence[Any]) -> list[float]:
    waited = 0.0
    while waited < WAIT_S:
        try:
            values = results.get(timeout=1.0)
        except queue.Empty:
            waited += 1.0
        else:
            if isinstance(values, str):
                raise UserError(values)
            return values
        dead = [worker.exitcode for worker in workers if worker.exitcode not in (None, 0)]
        if dead:
            break
    raise UserError(
        "sparsebalance profile: a measuring process died or hung (see above; out of memory?): lower --max_length or "
        "--processes"
    )


def _assemble(request: ProfileRequest, points: Sequence[Point], medians: Sequence[Sequence[float]]) -> LatencyProfile:
    """Rows of the table from the attention points, then the linear part from what the whole model took beyond it."""
    whole = [
        (sum(point.lengths), median)
        for point, median in zip(points, medians, strict=True)
        if isinstance(point, ModelPoint) and not point.held_out
    ]
    if request.context.attention != ATTENTION_NAME:
        return assemble_dense(request.context, [(length, median[1], median[2]) for length, median in whole])
    rows: list[LengthRow] = []
    for length in _lengths(request):
        dense: tuple[float, float] | None = None
        sparse: list[SparsePoint] = []
        for point, (density, forward_ms, backward_ms, *_) in zip(points, medians, strict=True):
            if not isinstance(point, AttentionPoint) or point.length != length:
                continue
            if point.top_p == 1.0:
                dense = (forward_ms, backward_ms)
            elif not sparse or density > sparse[-1].density:
                # Few blocks leave few densities: neighbouring p then keep the same blocks.
                sparse.append(SparsePoint(density, forward_ms, backward_ms))
        assert dense is not None
        rows.append(LengthRow(length, *dense, tuple(sparse) or (SparsePoint(1.0, *dense),)))
    attention = LatencyPredictor(LatencyProfile(request.context, tuple(rows), 0.0, 0.0, 0.0, 0.0))
    lines = []
    for part in (0, 1):
        rest = []
        for length, median in whole:
            predicted = attention.document(length, median[0])
            rest.append(max(0.0, median[1 + part] - (predicted.forward_ms, predicted.backward_ms)[part]))
        lines.append(fit_powers([length for length, _ in whole], rest, 1))
    (forward_constant, forward_slope), (backward_constant, backward_slope) = lines
    return LatencyProfile(
        request.context, tuple(rows), forward_slope, backward_slope, forward_constant, backward_constant
    )


def assemble_dense(context: ProfileContext, whole: Sequence[tuple[int, float, float]]) -> LatencyProfile:
    """From (length, forward_ms, backward_ms) of the whole model: attention is what a line does not explain.

    Half of what a document takes at least is left to its row, whatever the line says: between rows times follow a
    power of the length, which needs rows well above 0.
    """
    lengths = [length for length, *_ in whole]
    # A parabola holds only for short documents: longer ones leave the caches.
    short = max(3, sum(length <= LINEAR_TOKENS[-1] for length in lengths))
    parts: list[list[float]] = []
    lines: list[tuple[float, float]] = []
    for times_ms in list(zip(*whole, strict=True))[1:]:
        constant, slope, _ = fit_powers(lengths[:short], times_ms[:short], 2)
        constant = min(constant, 0.9 * min(times_ms))
        beyond = [ms - constant for ms in times_ms]
        slope = min(slope, *(0.5 * ms / length for ms, length in zip(beyond, lengths, strict=True)))
        lines.append((constant, slope))
        parts.append([(ms - slope * length) / context.num_layers for ms, length in zip(beyond, lengths, strict=True)])
    rows = [
        LengthRow(length, *times, (SparsePoint(1.0, *times),)) for length, *times in zip(lengths, *parts, strict=True)
    ]
    (forward_constant, forward_slope), (backward_constant, backward_slope) = lines
    return LatencyProfile(context, tuple(rows), forward_slope, backward_slope, forward_constant, backward_constant)


def fit_powers(tokens: Sequence[int], times_ms: Sequence[float], degree: int) -> list[float]:
    """Coefficients of tokens^0, ^1, ... ^degree, none negative, with least squared relative error of the times.

    Each choice of powers is fitted without the bound; of those whose coefficients keep it, the best is the answer.
    """
    weight_N = 1.0 / np.maximum(np.asarray(times_ms, dtype=np.float64), 1e-6)
    scale = float(max(tokens))
    design_NK = np.vander(np.asarray(tokens) / scale, degree + 1, increasing=True) * weight_N[:, None]
    wanted_N = np.asarray(times_ms) * weight_N
    best, least = np.zeros(degree + 1), math.inf
    for size in range(degree + 1, 0, -1):
        for powers in itertools.combinations(range(degree + 1), size):
            found = np.linalg.lstsq(design_NK[:, powers], wanted_N, rcond=None)[0]
            error = float(np.sum((design_NK[:, powers] @ found - wanted_N) ** 2))
            if np.all(found >= 0.0) and error < least:
                best, least = np.zeros(degree + 1), error
                best[list(powers)] = found
    return [float(value) / scale**power for power, value in enumerate(best)]
