"""The operator: checks, dispatch between backends, and the dense shortcut.

The shortcut (``scaled_dot_product_attention``) is taken for documents of which the budget keeps everything, decided
from p, k and the length alone; documents no longer than a block go with the sparse path, whose own blocks they are.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F

from sparsebalance_kernels.reference import kept_blocks, reference_attention
from sparsebalance_kernels.selection import CURVE_TOP_K, CURVE_TOP_P, AttentionStats, Budget, StatsSums, select_blocks
from sparsebalance_kernels.torch_backend import attend

BACKENDS = ("auto", "torch", "reference")
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
        backend: "torch" (any device), "reference" (slow oracle) or "auto" (the fastest that is there: torch).
        return_stats: also return :class:`AttentionStats`.

    Returns:
        Output ``[T, H, D]`` in the dtype of ``query``; with ``return_stats`` the pair (output, stats).

    Raises:
        ValueError: naming the argument, for shapes, dtypes, devices or budgets that do not fit.
    """
    _check_tensors(query, key, value)
    boundaries = _check_boundaries(cu_seqlens, query.shape[0])
    budget = _check_budget(len(boundaries) - 1, top_p, top_k, block_size, min_blocks, max_blocks, sink_blocks)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    stats = StatsSums(top_k=budget.top_k is not None) if return_stats else None
    # Autocast would take the gate's scores, which are fp32 by definition, to half precision.
    with torch.autocast(query.device.type, enabled=False):
        if backend == "reference":
            out = reference_attention(query, key, value, boundaries, budget, scale)
            if stats is not None:
                _reference_stats(query, key, boundaries, budget, scale, stats)
        else:
            out = _torch_attention(query, key, value, boundaries, budget, scale, stats)
    return out if stats is None else (out, stats.finish())


def _torch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: list[int],
    budget: Budget,
    scale: float,
    stats: StatsSums | None,
) -> torch.Tensor:
    """Split the documents between the dense shortcut and the sparse path, and put the outputs back in order."""
    lengths = [stop - start for start, stop in itertools.pairwise(boundaries)]
    dense = [
        number
        for number, length in enumerate(lengths)
        if length > budget.block_size and budget.keeps_everything(number, length)
    ]
    is_dense = set(dense)
    sparse = [number for number in range(len(lengths)) if number not in is_dense]
    if stats is not None and dense:
        select_blocks(query, key, boundaries, dense, budget, scale, stats, index=False)
    if not dense:
        selection = select_blocks(query, key, boundaries, sparse, budget, scale, stats)
        return attend(query, key, value, selection, scale)[0]

    outputs: dict[int, torch.Tensor] = {}
    for number in dense:
        tokens = slice(boundaries[number], boundaries[number + 1])
        outputs[number] = _dense_document(query[tokens], key[tokens], value[tokens], scale)
    if sparse:
        q, k, v = (
            torch.cat([t[boundaries[number] : boundaries[number + 1]] for number in sparse])
            for t in (query, key, value)
        )
        starts = [0, *itertools.accumulate(lengths[number] for number in sparse)]
        part = _take(budget, sparse)
        selection = select_blocks(q, k, starts, range(len(sparse)), part, scale, stats)
        pieces = attend(q, k, v, selection, scale)[0].split([lengths[number] for number in sparse])
        outputs.update(zip(sparse, pieces, strict=True))
    return torch.cat([outputs[number] for number in range(len(lengths))])


def _dense_document(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
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


def _check_budget(
    num_documents: int,
    top_p: float | torch.Tensor | None,
    top_k: int | torch.Tensor | None,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
) -> Budget:
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
