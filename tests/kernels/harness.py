"""Runs the operator with gradients for the tests, and reads its BlockSelection back into masks."""

import oracle
import torch

from sparsebalance_kernels import Budget, block_sparse_attention
from sparsebalance_kernels.selection import select_blocks


def run(query, key, value, grad, lengths, **options):
    """Output and the gradients of query, key and value."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    options = {"scale": oracle.SCALE, "cu_seqlens": oracle.cumulative(lengths)} | options
    out = block_sparse_attention(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def run_dense(query, key, value, grad, selections, lengths, block_size, scale=oracle.SCALE):
    """The same four from the oracle's masked dense attention."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    out = oracle.dense(*leaves, selections, lengths, block_size, scale)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def assert_within(found, expected, bounds):
    """Each of the four results within its elementwise bound."""
    for name, a, b, bound in zip(("out", "dq", "dk", "dv"), found, expected, bounds, strict=True):
        assert a.shape == b.shape, name
        excess = ((a.double() - b.double()).abs() - bound).amax() if a.numel() else torch.tensor(0.0)
        assert excess <= 0, f"{name}: {float(excess)} above its rounding bound"


def budget_of(lengths, block_size, *, top_p=None, top_k=None, **bounds):
    """Budget for direct calls of the selector; numbers or one number per document."""

    def per_document(value):
        return None if value is None else tuple(value) if isinstance(value, list) else (value,) * len(lengths)

    return Budget(block_size, per_document(top_p), per_document(top_k), **bounds)


def select(query, key, lengths, block_size, *, scale=oracle.SCALE, **options):
    """The operator's own selection of all documents."""
    boundaries = oracle.cumulative(lengths).tolist()
    budget = budget_of(lengths, block_size, **options)
    return select_blocks(query, key, boundaries, range(len(lengths)), budget, scale)


def decode(selection, lengths, heads, kv_heads):
    """Bool ``[L, H, complete blocks]`` per document from the block-major index (``rows`` and ``pair_counts``)."""
    size, group = selection.block_size, heads // kv_heads
    starts = oracle.cumulative(lengths).tolist()
    masks = [torch.zeros(length, heads, length // size, dtype=torch.bool) for length in lengths]
    document_at = {start: number for number, start in enumerate(starts[:-1]) if lengths[number]}
    for tile in selection.tiles:
        rows = iter(tile.rows.tolist())
        for kv_head, counts in enumerate(tile.pair_counts):
            for block, pairs in enumerate(counts):
                for _ in range(pairs):
                    token, member = divmod(next(rows), group)
                    position = tile.start - tile.document_start + token
                    masks[document_at[tile.document_start]][position, kv_head * group + member, block] = True
        assert next(rows, None) is None
    return masks
