"""What one measuring process of ``sparsebalance profile`` runs: the points it is told, in step with the others."""

from __future__ import annotations

import multiprocessing.queues
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_sparsebalance.attention import ATTENTION_NAME, NO_SPARSE_ATTENTION, StatsCollector
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency_profile import ProfileContext
from sparsebalance_kernels import block_sparse_attention

# A point is repeated within a round until it has run so long; warming up, it runs once.
SECONDS_PER_POINT = 0.05
QUICK_SECONDS_PER_POINT = 0.01
# Generous: the longest point at 128K dense on one CPU thread takes minutes.
WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """One layer's attention over one document; the gate is nearly uniform, so that the density follows ``top_p``."""

    length: int
    top_p: float


@dataclass(frozen=True, slots=True)
class ModelPoint:
    """The whole model with its loss, over documents packed into one micro-batch."""

    lengths: tuple[int, ...]
    top_p: float
    held_out: bool = False


Point: TypeAlias = AttentionPoint | ModelPoint
# (number of the point, whether it only warms up).
Task: TypeAlias = tuple[int, bool]
# [density, forward_ms, backward_ms, flops], or the message of a UserError.
Result: TypeAlias = "list[float] | str"


def run_worker(
    config: PreTrainedConfig,
    context: ProfileContext,
    points: Sequence[Point],
    quick: bool,
    rank: int,
    barrier: Barrier,
    tasks: multiprocessing.queues.SimpleQueue[Task],
    results: multiprocessing.Queue[Result],
) -> None:
    """Measure the points whose numbers come in, without end; sends each result."""
    try:
        worker = _Worker(config, context, QUICK_SECONDS_PER_POINT if quick else SECONDS_PER_POINT, rank, barrier)
        while True:
            number, warm_up = tasks.get()
            results.put(worker.measure(points[number], warm_up))
    except UserError as error:
        results.put(str(error))


class _Worker:
    def __init__(
        self, config: PreTrainedConfig, context: ProfileContext, seconds: float, rank: int, barrier: Barrier
    ) -> None:
        if context.num_threads:
            torch.set_num_threads(context.num_threads)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        torch.manual_seed(rank)
        self.config, self.context, self.seconds, self.barrier = config, context, seconds, barrier
        self.sparse = context.attention == ATTENTION_NAME
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.model = self._build_model()
        embeddings = self.model.get_input_embeddings().weight
        output = self.model.get_output_embeddings().weight
        # A row of the input embeddings is copied, not multiplied, unless the output layer shares it.
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        self.weights = weights - (0 if output is embeddings else embeddings.numel())

    def _build_model(self) -> torch.nn.Module:
        try:
            model = AutoModelForCausalLM.from_config(
                self.config, attn_implementation=self.context.attention, dtype=self.dtype
            )
        except (KeyError, ValueError, ImportError) as error:
            if self.sparse:
                raise UserError(NO_SPARSE_ATTENTION) from error
            raise UserError(f"--attn_implementation {self.context.attention}: {error}") from error
        model.config.use_cache = False
        if self.context.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model = model.to(self.device).train()
        if not self.sparse:
            self._check_attention(model)
        return model

    def _check_attention(self, model: torch.nn.Module) -> None:
        """Not every attention runs on every device, or backward there: found now, not in the first measurement."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        try:
            model(input_ids=ids, labels=ids).loss.backward()
        except (ValueError, ImportError, RuntimeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(f"--attn_implementation {self.context.attention} does not run here: {reason}") from error

    def measure(self, point: Point, warm_up: bool) -> list[float]:
        """[density, forward_ms, backward_ms, flops]; a single run where it only warms up."""
        seconds = 0.0 if warm_up else self.seconds
        if isinstance(point, AttentionPoint):
            return self._measure_attention(point, seconds)
        return self._measure_model(point, seconds)

    def _measure_attention(self, point: AttentionPoint, seconds: float) -> list[float]:
        context = self.context
        shapes = [(point.length, n, context.head_dim) for n in (context.num_heads, *[context.num_kv_heads] * 2)]
        q, k, v = (torch.randn(shape, device=self.device, dtype=self.dtype) for shape in shapes)
        # Small queries make the gate nearly uniform, in a random order: density close to p, no favourite blocks.
        q *= 0.05
        starts = torch.tensor([0, point.length], device=self.device)
        tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
        density = 1.0

        def plain() -> torch.Tensor:
            return block_sparse_attention(
                *tensors, cu_seqlens=starts, top_p=point.top_p, block_size=context.block_size
            )

        def forward() -> torch.Tensor:
            # With statistics, as in training.
            nonlocal density
            out, stats = block_sparse_attention(
                *tensors, cu_seqlens=starts, top_p=point.top_p, block_size=context.block_size, return_stats=True
            )
            density = stats.density
            return out

        forward_ms, backward_ms = self._time(forward, torch.randn_like(q), seconds)
        if context.gradient_checkpointing:
            backward_ms += self._time(plain, torch.randn_like(q), seconds)[0]
        return [density, forward_ms, backward_ms, 0.0]

    def _measure_model(self, point: ModelPoint, seconds: float) -> list[float]:
        tokens = sum(point.lengths)
        ids = torch.randint(0, self.config.vocab_size, (1, tokens), device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in point.lengths])[None]
        budget: dict[str, Any] = {"sparse_top_p": torch.tensor(point.top_p)} if self.sparse else {}
        collector = StatsCollector()

        def forward() -> torch.Tensor:
            nonlocal collector
            collector = StatsCollector()
            statistics_of = {"sparse_stats": collector} if self.sparse else {}
            return self.model(input_ids=ids, labels=ids, position_ids=positions, **budget, **statistics_of).loss

        forward_ms, backward_ms = self._time(forward, None, seconds)
        if self.sparse and not collector.layers:
            raise UserError(NO_SPARSE_ATTENTION)
        # The table is read at the density of the layers with a gate; those that are always dense are priced apart.
        gated = [stats for stats in collector.layers.values() if stats is not None]
        density = statistics.fmean(stats.density for stats in gated) if gated else 1.0
        pairs = sum(length * (length + 1) // 2 for length in point.lengths)
        context = self.context
        work = float(context.num_layers)
        if self.sparse:
            work = sum(1.0 if stats is None else stats.work for stats in collector.layers.values())
        # Two products of a pair forward and five backward (the scores again), 2 FLOPs a multiplication.
        attention_flops = 14.0 * context.num_heads * context.head_dim * pairs * work
        return [density, forward_ms, backward_ms, 6.0 * self.weights * tokens + attention_flops]

    def _time(
        self, forward: Callable[[], torch.Tensor], gradient: torch.Tensor | None, seconds: float
    ) -> tuple[float, float]:
        """Median (forward_ms, backward_ms) of repeated runs, started together with the other processes."""

        def now() -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter()

        times: list[tuple[float, float]] = []
        self.barrier.wait(WAIT_S)
        began = now()
        while not times or now() - began < seconds:
            start = now()
            out = forward()
            middle = now()
            out.backward(gradient)
            times.append((middle - start, now() - middle))
        return (
            statistics.median(forward_s for forward_s, _ in times) * 1000.0,
            statistics.median(backward_s for _, backward_s in times) * 1000.0,
        )
