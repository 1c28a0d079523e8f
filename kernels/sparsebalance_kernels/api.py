"""The operator: checks, dispatch between backends, and the dense shortcut.

The shortcut (``scaled_dot_product_attention``) is taken for documents of which the budget keeps everything, decided
from p, k and the length alone; documents no longer than a block go with the sparse path, whose own blocks they are.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from sparsebalance_kernels import ops
from sparsebalance_kernels.checks import (
    check_block_size,
    check_boundaries,
    check_budget,
    check_options,
    check_tensors,
    choose_backend,
    half_backend,
    score_scale,
)
from sparsebalance_kernels.reference import kept_blocks, reference_attention
from sparsebalance_kernels.selection import (
    CURVE_TOP_K,
    CURVE_TOP_P,
    WORD,
    AttentionStats,
    BlockSelection,
    Budget,
    StatsSums,
    words_for,
)


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


def select_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
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
) -> BlockSelection:
    """The first half of :func:`block_sparse_attention`: which history blocks each row keeps.  Same arguments.

    Raises:
        ValueError: as :func:`block_sparse_attention`; and for backend "reference", which never forms a selection.
    """
    check_tensors(query, key, key)
    check_options(top_p, top_k, block_size, min_blocks, max_blocks, sink_blocks)
    boundaries = check_boundaries(cu_seqlens, query.shape[0])
    budget = check_budget(len(boundaries) - 1, top_p, top_k, block_size, min_blocks, max_blocks, sink_blocks)
    backend = half_backend(backend, query, block_size)
    bits, _ = _select(
        query, key, cu_seqlens, boundaries, budget, score_scale(query, scale), backend, return_stats=False
    )
    return BlockSelection(bits, cu_seqlens, block_size)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    selection: BlockSelection,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second half: attention over own blocks and the history of any selection, made by whatever selector.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, Hkv, D]``, as in :func:`block_sparse_attention`.
        selection: kept blocks, a constant of the gradient.  That its bits name visible blocks only is not checked.
        scale: score factor, default ``D ** -0.5``.
        backend: "torch", "triton" or "auto".

    Returns:
        (output ``[T, H, D]``, natural log-sum-exp ``[H, T]`` in fp32 (fp64 for fp64), without a gradient).

    Raises:
        ValueError: naming the argument, for shapes, dtypes or devices that do not fit.
    """
    check_tensors(query, key, value)
    check_block_size(selection.block_size)
    boundaries = check_boundaries(selection.cu_seqlens, query.shape[0])
    bits, words = selection.bits, words_for(boundaries, selection.block_size)
    shape_fits = bits.ndim == 3 and bits.shape[0::2] == (query.shape[1], query.shape[0]) and bits.shape[1] >= words
    if bits.dtype != torch.int32 or bits.device != query.device or not shape_fits:
        raise ValueError(
            f"selection.bits must be int32 [{query.shape[1]} heads, at least {words} words, {query.shape[0]} tokens], "
            f"on {query.device}, got {bits.dtype} {tuple(bits.shape)} on {bits.device}"
        )
    backend = half_backend(backend, query, selection.block_size)
    given = (bits, selection.cu_seqlens, selection.block_size)
    return ops.attend(query, key, value, *given, score_scale(query, scale), backend)  # type: ignore[no-any-return]


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
    check_tensors(query, key, value)
    check_options(top_p, top_k, block_size, min_blocks, max_blocks, sink_blocks)
    scale = score_scale(query, scale)
    backend = choose_backend(backend, query, block_size)
    bounds = (min_blocks, max_blocks, sink_blocks)
    if torch.compiler.is_compiling() and backend != "reference":
        n = cu_seqlens.shape[0] - 1
        p = None if top_p is None else torch.as_tensor(top_p, dtype=torch.float64).expand(n)
        k = None if top_k is None else torch.as_tensor(top_k, dtype=torch.int64).expand(n)
        words = torch.sym_max(1, (query.shape[0] // block_size + WORD - 1) // WORD)
        gate = (query.detach(), key.detach())  # no gradient flows through the gate
        bits, stats = ops.select(*gate, cu_seqlens, p, k, block_size, *bounds, scale, words, backend, return_stats)
        return ops.attend(query, key, value, bits, cu_seqlens, block_size, scale, backend)[0], stats

    boundaries = check_boundaries(cu_seqlens, query.shape[0])
    budget = check_budget(len(boundaries) - 1, top_p, top_k, block_size, *bounds)
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
