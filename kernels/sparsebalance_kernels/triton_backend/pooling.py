"""Mean key of every block: what a query is compared with to choose its blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsebalance_kernels.triton_backend.layout import BlockTable

# Keys summed at once; 32 x 128 fp32 numbers are 32 registers of a thread.
POOL_TOKENS = 32


def pooled_keys(key: torch.Tensor, table: BlockTable) -> torch.Tensor:
    """fp32 ``[N, Hkv, D]``: mean of each block's keys, accumulated in fp32 in an order that only depends on the block.

    The mean of an incomplete block is that of the keys it has; nothing may choose it.

    Args:
        key: ``[T, Hkv, D]``, any strides.
        table: the blocks.
    """
    _, num_kv_heads, dim = key.shape
    pooled = torch.empty(table.num_blocks, num_kv_heads, dim, dtype=torch.float32, device=key.device)
    if table.num_blocks:
        _pool[(table.num_blocks, num_kv_heads)](
            key,
            table.starts,
            table.stops,
            pooled,
            *key.stride(),
            num_kv_heads,
            dim,
            BLOCK_T=POOL_TOKENS,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            num_warps=8,  # with 4, ptxas spills a predicate on sm_86 at head_dim 80
        )
    return pooled


@triton.jit(do_not_specialize=["num_kv_heads", "dim"])
def _pool(
    key_ptr,
    starts_ptr,
    stops_ptr,
    pooled_ptr,
    stride_t,
    stride_h,
    stride_d,
    num_kv_heads,
    dim,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts_ptr + block), tl.load(stops_ptr + block)
    columns = tl.arange(0, BLOCK_D)
    keys = key_ptr + head.to(tl.int64) * stride_h + columns.to(tl.int64) * stride_d
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for offset in range(start, stop, BLOCK_T):
        tokens = offset + tl.arange(0, BLOCK_T)
        mask = (tokens < stop)[:, None] & (columns < dim)[None, :]
        total += tl.load(keys[None, :] + tokens.to(tl.int64)[:, None] * stride_t, mask=mask, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(total, axis=0), tl.full([BLOCK_D], 1.0, tl.float32) * (stop - start))
    row = block.to(tl.int64) * num_kv_heads + head
    tl.store(pooled_ptr + row * dim + columns, mean, mask=columns < dim)
