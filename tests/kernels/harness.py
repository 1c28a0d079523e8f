"""Runs the operator with gradients for the tests, and reads its BlockSelection back into masks."""

import oracle
import torch

from sparsebalance_kernels import BlockSelection, Budget, block_sparse_attention, ops
from sparsebalance_kernels.selection import unpack_bits, words_for
from sparsebalance_kernels.selector import select_blocks


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
    """The torch selector's selection of all documents."""
    cu_seqlens = oracle.cumulative(lengths)
    boundaries = cu_seqlens.tolist()
    budget = budget_of(lengths, block_size, **options)
    bits = select_blocks(query, key, boundaries, budget, scale, words_for(boundaries, block_size))
    return BlockSelection(bits, cu_seqlens, block_size)


def attend(query, key, value, selection, scale=oracle.SCALE, backend="torch"):
    """Output and log-sum-exp under a given selection."""
    given = (selection.bits, selection.cu_seqlens, selection.block_size)
    return ops.attend(query, key, value, *given, scale, backend)


def decode(selection, lengths):
    """Bool ``[L, H, complete blocks]`` per document from the bits; no bit may stand anywhere else."""
    masks = unpack_bits(selection.bits.permute(2, 0, 1)).split(list(lengths))
    size = selection.block_size
    assert not any(mask[..., len(mask) // size :].any() for mask in masks)
    return [mask[..., : len(mask) // size] for mask in masks]
