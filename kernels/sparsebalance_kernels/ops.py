"""The operator's halves as torch.library ops: torch.compile sees them whole and never breaks its graph there.

``sparsebalance::select`` has no gradient and is an op of its own, so that selective checkpointing can keep its result,
one bit for each visible block, instead of selecting again.  ``sparsebalance::attend`` saves the selection for its
backward pass.  ``sparsebalance::feasible_top_k`` comes before both, where a k has to keep a tolerance.  What must be
read on the host (document starts, budgets) is read inside the ops.
"""

import torch
from torch import Tensor

from sparsebalance_kernels import selector, torch_backend
from sparsebalance_kernels.selection import CURVE_TOP_K, CURVE_TOP_P, BlockSelection, Budget, StatsSums


@torch.library.custom_op("sparsebalance::select", mutates_args=())
def select(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor,
    top_p: Tensor | None,
    top_k: Tensor | None,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
    scale: float,
    words: int,
    backend: str,
    with_stats: bool,
) -> tuple[Tensor, Tensor]:
    """Bits of a ``BlockSelection`` and the vector of ``AttentionStats.from_vector`` (empty unless wanted).

    Args:
        query: ``[T, H, D]``; key: ``[T, Hkv, D]``.
        top_p, top_k: one number per document, on any device; the other is None.
        words: int32 words per row, enough for the longest document.
        backend: "torch" or "triton".
    """
    budget = Budget(
        block_size,
        None if top_p is None else tuple(top_p.tolist()),
        None if top_k is None else tuple(top_k.tolist()),
        min_blocks,
        max_blocks,
        sink_blocks,
    )
    # Autocast would take the gate's scores, which are fp32 by definition, to half precision.
    with torch.autocast(query.device.type, enabled=False), torch.cuda.device_of(query):
        if backend == "triton":
            from sparsebalance_kernels.triton_backend import backend as triton_backend

            bits, stats = triton_backend.select(query, key, cu_seqlens, budget, scale, words, with_stats)
        else:
            sums = StatsSums(top_k=top_k is not None) if with_stats else None
            bits = selector.select_blocks(query, key, cu_seqlens.tolist(), budget, scale, words, sums)
            stats = torch.empty(0, dtype=torch.float64) if sums is None else sums.finish()
    return bits, stats


@select.register_fake
def _(query, key, cu_seqlens, top_p, top_k, *options):  # type: ignore[no-untyped-def]
    words, _, with_stats = options[-3:]
    bits = query.new_empty(query.shape[1], words, query.shape[0], dtype=torch.int32)
    grid = CURVE_TOP_P if top_k is None else CURVE_TOP_K
    return bits, torch.empty(3 + len(grid) if with_stats else 0, dtype=torch.float64, device="cpu")


@torch.library.custom_op("sparsebalance::feasible_top_k", mutates_args=())
def feasible_top_k(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor,
    top_k: Tensor,
    base_top_k: Tensor,
    tolerance: Tensor,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
    scale: float,
) -> Tensor:
    """``selector.feasible_top_k`` of 0-d tensors, on any device: 0-d int64 on the CPU, one k for all documents."""
    wanted = (int(top_k),) * (cu_seqlens.shape[0] - 1)
    budget = Budget(block_size, None, wanted, min_blocks, max_blocks, sink_blocks)
    with torch.autocast(query.device.type, enabled=False), torch.cuda.device_of(query):
        found = selector.feasible_top_k(
            query, key, cu_seqlens.tolist(), budget, int(base_top_k), float(tolerance), scale
        )
    return torch.tensor(found)


@feasible_top_k.register_fake
def _(query, *options):  # type: ignore[no-untyped-def]
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("sparsebalance::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Attention over own blocks and the kept history: output ``[T, H, D]`` and log-sum-exp ``[H, T]`` (no gradient).

    Args:
        query: ``[T, H, D]``; key, value: ``[T, Hkv, D]``, any strides.
        bits, cu_seqlens, block_size: the fields of a ``BlockSelection``; constants of the gradient.
        backend: "torch" or "triton".
    """
    selection = BlockSelection(bits, cu_seqlens, block_size)
    # A kernel is launched on the current device, which need not be the tensors'.
    with torch.autocast(query.device.type, enabled=False), torch.cuda.device_of(query):
        return _implementation(backend).attend_forward(query, key, value, selection, scale)


@torch.library.custom_op("sparsebalance::attend_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bits: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value under the saved selection."""
    selection = BlockSelection(bits, cu_seqlens, block_size)
    with torch.autocast(query.device.type, enabled=False), torch.cuda.device_of(query):
        return _implementation(backend).attend_backward(grad_out, query, key, value, out, lse, selection, scale)


def _implementation(backend: str):  # type: ignore[no-untyped-def]
    if backend == "triton":
        from sparsebalance_kernels.triton_backend import backend as triton_backend

        return triton_backend
    return torch_backend


@attend.register_fake
def _(query, key, value, bits, cu_seqlens, block_size, scale, backend):  # type: ignore[no-untyped-def]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[1], query.shape[0], dtype=dtype
    )


@attend_backward.register_fake
def _(grad_out, query, key, value, out, lse, bits, cu_seqlens, block_size, scale, backend):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, bits, cu_seqlens, ctx.block_size, ctx.scale, ctx.backend = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, out, lse, bits, cu_seqlens)


def _backward(ctx, grad_out, _grad_lse):  # type: ignore[no-untyped-def]
    grads = attend_backward(grad_out, *ctx.saved_tensors, ctx.block_size, ctx.scale, ctx.backend)
    return *grads, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)
