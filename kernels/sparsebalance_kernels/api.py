"""The operator: checks, dispatch between backends, and the dense shortcut.

The shortcut (``scaled_dot_product_attention``) is taken for documents of which the budget keeps everything, decided
from p, k and the length alone; documents no longer than a block go with the sparse path, whose own blocks they are.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os

import torch
import torch.nn.functional as F

from sparsebalance_kernels import ops
from sparsebalance_kernels.reference import kept_blocks, reference_attention
from sparsebalance_kernels.selection import (
    CURVE_TOP_K,
    CURVE_TOP_P,
    WORD,
    AttentionStats,
    Budget,
    StatsSums,
    words_for,
)

BACKENDS = ("auto", "torch", "triton", "reference")
TRITON_BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
TRITON_MOST_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    top_p: float | torch.Tensor | None = None,
    top_k: int | torch.Tensor | None = None,
    block_size: int = 128,
    min_blocks: int = 0,
    max_blocks: int | None = None,
    sink_blocks: int = 0,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, AttentionStats]:
    """Causal attention in which each query token and head attends its own block and the history blocks it selects.

    The gate is MoBA's (arXiv 2502.13189): the score of a history block is ``scale * q . mean(k in block)`` in fp32,
    post-RoPE, per query head.  ``top_p`` keeps, in descending order of the softmax over the history blocks, each
    block before which less than p has been kept; ``top_k`` keeps the k - 1 best beside the own block.  The output
    equals dense attention under the resulting mask; gradients hold the selection fixed.

    Args:
        query: ``[T, H, D]`` packed tokens, any strides; float32, bfloat16, float16 or float64.
        key, value: ``[T, Hkv, D]``, H a multiple of Hkv.
        cu_seqlens: int32 or int64 ``[n + 1]``, document starts in tokens, 0 first and T last.
        top_p: p in (0, 1]: a number, a 0-d tensor, or one per document ``[n]``.  Exactly one of top_p and top_k.
        top_k: k >= 1 blocks, the own one included: a number, a 0-d tensor, or one per document ``[n]``.
        block_size: tokens per block, aligned to each document's start.
        min_blocks, max_blocks: bounds on the history blocks a row keeps, after p or k.
        sink_blocks: so many first blocks of each document are kept in any case and fill the budget first.
        scale: score factor, default ``D ** -0.5``.
        backend: "torch" (any device), "triton" (GPU), "reference" (slow oracle) or "auto": triton where it can run.
        return_stats: also return :class:`AttentionStats`.

    Returns:
        Output ``[T, H, D]`` in the dtype of ``query``; with ``return_stats`` the pair (output, stats).

    Raises:
        ValueError: naming the argument, for shapes, dtypes, devices or budgets that do not fit.
    """
    out, vector = attention_and_stats(
        query,
        key,
        value,
        cu_seqlens,
        top_p,
        top_k,
        block_size,
        min_blocks,
        max_blocks,
        sink_blocks,
        scale,
        backend,
        return_stats,
    )
    return (out, AttentionStats.from_vector(vector)) if return_stats else out


def attention_and_stats(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    top_p: float | torch.Tensor | None,
    top_k: int | torch.Tensor | None,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
    scale: float | None,
    backend: str,
    return_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`block_sparse_attention` with the statistics as a vector (``AttentionStats.from_vector`` reads it).

    Under torch.compile nothing is read on the host: values go unchecked, and there is no dense shortcut.
    """
    _check_tensors(query, key, value)
    _check_options(top_p, top_k, block_size, min_blocks, max_blocks, sink_blocks)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    backend = _choose_backend(backend, query, block_size)
    bounds = (min_blocks, max_blocks, sink_blocks)
    if torch.compiler.is_compiling() and backend != "reference":
        n = cu_seqlens.shape[0] - 1
        p = None if top_p is None else torch.as_tensor(top_p, dtype=torch.float64).expand(n)
        k = None if top_k is None else torch.as_tensor(top_k, dtype=torch.int64).expand(n)
        words = torch.sym_max(1, (query.shape[0] // block_size + WORD - 1) // WORD)
        gate = (query.detach(), key.detach())  # no gradient flows through the gate
        bits, stats = ops.select(*gate, cu_seqlens, p, k, block_size, *bounds, scale, words, backend, return_stats)
        return ops.attend(query, key, value, bits, cu_seqlens, block_size, scale, backend)[0], stats

    boundaries = _check_boundaries(cu_seqlens, query.shape[0])
    budget = _check_budget(len(boundaries) - 1, top_p, top_k, block_size, *bounds)
    if backend == "reference":
        return _reference(query, key, value, boundaries, budget, scale, return_stats)
    lengths = [stop - start for start, stop in itertools.pairwise(boundaries)]
    is_dense = [
        length > block_size and budget.keeps_everything(number, length) for number, length in enumerate(lengths)
    ]
    if any(is_dense):
        return _partly_dense(query, key, value, boundaries, is_dense, budget, scale, backend, return_stats)
    bits, stats = _select(query, key, cu_seqlens, boundaries, budget, scale, backend, return_stats)
    return ops.attend(query, key, value, bits, cu_seqlens, block_size, scale, backend)[0], stats


def _select(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seqlens: torch.Tensor,
    boundaries: list[int],
    budget: Budget,
    scale: float,
    backend: str,
    return_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.select(  # type: ignore[no-any-return]
        query.detach(),
        key.detach(),
        cu_seqlens,
        None if budget.top_p is None else torch.tensor(budget.top_p, dtype=torch.float64),
        None if budget.top_k is None else torch.tensor(budget.top_k, dtype=torch.int64),
        budget.block_size,
        budget.min_blocks,
        budget.max_blocks,
        budget.sink_blocks,
        scale,
        words_for(boundaries, budget.block_size),
        backend,
        return_stats,
    )


def _partly_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: list[int],
    is_dense: list[bool],
    budget: Budget,
    scale: float,
    backend: str,
    return_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense documents through scaled_dot_product_attention, the others packed together; outputs back in order."""
    pieces = [tuple(t.split([b - a for a, b in itertools.pairwise(boundaries)])) for t in (query, key, value)]
    outputs = {
        number: _dense_document(*(piece[number] for piece in pieces), scale)
        for number, dense in enumerate(is_dense)
        if dense
    }
    sparse = [number for number, dense in enumerate(is_dense) if not dense]
    stats = torch.empty(0)
    if return_stats:
        # A dense document has a gate, a coverage and a curve as well.
        cu_seqlens = torch.tensor(boundaries, device=query.device)
        _, stats = _select(query, key, cu_seqlens, boundaries, budget, scale, backend, return_stats=True)
    if sparse:
        q, k, v = (torch.cat([piece[number] for number in sparse]) for piece in pieces)
        starts = [0, *itertools.accumulate(len(pieces[0][number]) for number in sparse)]
        cu_seqlens = torch.tensor(starts, device=query.device)
        bits, _ = _select(q, k, cu_seqlens, starts, _take(budget, sparse), scale, backend, return_stats=False)
        out = ops.attend(q, k, v, bits, cu_seqlens, budget.block_size, scale, backend)[0]
        outputs.update(zip(sparse, out.split([b - a for a, b in itertools.pairwise(starts)]), strict=True))
    return torch.cat([outputs[number] for number in range(len(is_dense))]), stats


def _choose_backend(backend: str, query: torch.Tensor, block_size: int) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend not in ("auto", "triton"):
        return backend
    obstacle = _obstacle_to_triton(query, block_size)
    if backend == "triton" and obstacle:
        raise ValueError(f"backend='triton' {obstacle}: use backend='torch'")
    return "torch" if obstacle or (backend == "auto" and query.device.type == "cpu") else "triton"


def _obstacle_to_triton(query: torch.Tensor, block_size: int) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on a GPU, or on the CPU under TRITON_INTERPRET=1"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    if query.dtype == torch.float64:
        return "computes in float32 and has no float64"
    if block_size not in TRITON_BLOCK_SIZES:
        return f"takes block_size {', '.join(map(str, TRITON_BLOCK_SIZES))}, not {block_size}"
    if query.shape[2] > TRITON_MOST_HEAD_DIM:
        return f"takes a head_dim of at most {TRITON_MOST_HEAD_DIM}, not {query.shape[2]}"
    return None


def _dense_document(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    # Autocast would change the dtype the caller asked for.
    with torch.autocast(query.device.type, enabled=False):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _take(budget: Budget, documents: list[int]) -> Budget:
    return Budget(
        budget.block_size,
        None if budget.top_p is None else tuple(budget.top_p[number] for number in documents),
        None if budget.top_k is None else tuple(budget.top_k[number] for number in documents),
        budget.min_blocks,
        budget.max_blocks,
        budget.sink_blocks,
    )


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 3:
            raise ValueError(f"{name} must be packed as [tokens, heads, head_dim], got shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, but query is {query.dtype} on {query.device}"
            )
    if key.shape != value.shape or key.shape[0] != query.shape[0] or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must both be [tokens, kv_heads, head_dim] with "
            f"the tokens and head_dim of query {tuple(query.shape)}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"query heads ({query.shape[1]}) must be a multiple of key heads ({key.shape[1]})")


def _check_boundaries(cu_seqlens: torch.Tensor, num_tokens: int) -> list[int]:
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.numel() == 0:
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [documents + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    boundaries: list[int] = cu_seqlens.tolist()
    rising = all(start <= stop for start, stop in itertools.pairwise(boundaries))
    if boundaries[0] != 0 or boundaries[-1] != num_tokens or not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens ({num_tokens}), got {boundaries[:8]}..."
        )
    return boundaries


def _per_document(value: float | int | torch.Tensor, num_documents: int, name: str) -> list[float]:
    if not isinstance(value, torch.Tensor):
        return [value] * num_documents
    if value.ndim == 0:
        return [value.item()] * num_documents
    if value.shape != (num_documents,):
        raise ValueError(f"{name} must be a number or one per document ({num_documents}), got {tuple(value.shape)}")
    numbers: list[float] = value.tolist()
    return numbers


def _check_options(
    top_p: float | torch.Tensor | None,
    top_k: int | torch.Tensor | None,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
) -> None:
    if (top_p is None) == (top_k is None):
        raise ValueError("give exactly one of top_p and top_k")
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be a whole number of at least 1, got {block_size}")
    if min_blocks < 0 or sink_blocks < 0:
        raise ValueError(f"min_blocks and sink_blocks must not be negative, got {min_blocks} and {sink_blocks}")
    if max_blocks is not None and max_blocks < max(min_blocks, sink_blocks):
        raise ValueError(
            f"max_blocks ({max_blocks}) is below min_blocks ({min_blocks}) or sink_blocks ({sink_blocks})"
        )


def _check_budget(
    num_documents: int,
    top_p: float | torch.Tensor | None,
    top_k: int | torch.Tensor | None,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
) -> Budget:
    probabilities: tuple[float, ...] | None = None
    counts: tuple[int, ...] | None = None
    if top_p is not None:
        probabilities = tuple(_per_document(top_p, num_documents, "top_p"))
        if not all(0.0 < p <= 1.0 for p in probabilities):
            raise ValueError(f"top_p must lie in (0, 1], got {probabilities[:8]}")
    if top_k is not None:
        numbers = _per_document(top_k, num_documents, "top_k")
        if not all(k >= 1 and float(k).is_integer() for k in numbers):
            raise ValueError(f"top_k must be a whole number of at least 1 (the own block), got {numbers[:8]}")
        counts = tuple(int(k) for k in numbers)
    return Budget(block_size, probabilities, counts, min_blocks, max_blocks, sink_blocks)


def _reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: list[int],
    budget: Budget,
    scale: float,
    return_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Autocast would take the gate's scores, which are fp32 by definition, to half precision.
    with torch.autocast(query.device.type, enabled=False):
        out = reference_attention(query, key, value, boundaries, budget, scale)
        if not return_stats:
            return out, torch.empty(0)
        stats = StatsSums(top_k=budget.top_k is not None)
        _reference_stats(query, key, boundaries, budget, scale, stats)
        return out, stats.finish()


def _reference_stats(
    query: torch.Tensor, key: torch.Tensor, boundaries: list[int], budget: Budget, scale: float, stats: StatsSums
) -> None:
    """Count kept blocks and mass one row at a time."""
    num_heads, group = query.shape[1], query.shape[1] // key.shape[1]
    for document, (first, stop) in enumerate(itertools.pairwise(boundaries)):
        stats.add_document(stop - first, budget.block_size, num_heads)
        grid = CURVE_TOP_K if stats.top_k else CURVE_TOP_P
        for token in range(first + budget.block_size, stop):
            for head in range(num_heads):
                row = (query, key, first, token, head, group, document)
                kept, mass = kept_blocks(*row, budget, scale)
                stats.kept += len(kept)
                stats.attended_pairs += len(kept) * budget.block_size
                stats.mass += sum(mass[block] for block in kept)
                for number, point in enumerate(grid):
                    at = _at_grid_point(budget, point, len(boundaries) - 1)
                    there, _ = kept_blocks(*row, at, scale)
                    stats.curve[number] += sum(mass[b] for b in there) if stats.top_k else len(there)


def _at_grid_point(budget: Budget, point: float, num_documents: int) -> Budget:
    bounds = (budget.min_blocks, budget.max_blocks, budget.sink_blocks)
    if budget.top_k is not None:
        return Budget(budget.block_size, None, (int(point),) * num_documents, *bounds)
    return Budget(budget.block_size, (point,) * num_documents, None, *bounds)
