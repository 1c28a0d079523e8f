"""The oracle: the definition written out with explicit loops and masks, in the dtype of its inputs.

Slow on purpose (one Python loop per document, head and token for the selection).  Nothing but tests uses it, through
``backend="reference"``; differentiable by autograd.
"""

from __future__ import annotations

import math

import torch

from sparsebalance_kernels.selection import Budget


def keep_mask(
    query: torch.Tensor, key: torch.Tensor, boundaries: list[int], budget: Budget, scale: float
) -> torch.Tensor:
    """Bool ``[H, T, T]``: which key each query may attend, from query ``[T, H, D]`` and key ``[T, Hkv, D]``."""
    num_tokens, num_heads, _ = query.shape
    group = num_heads // key.shape[1]
    mask = torch.zeros(num_heads, num_tokens, num_tokens, dtype=torch.bool)
    for document, (first, stop) in enumerate(zip(boundaries[:-1], boundaries[1:], strict=True)):
        for head in range(num_heads):
            for token in range(first, stop):
                kept, _ = kept_blocks(query, key, first, token, head, group, document, budget, scale)
                own = (token - first) // budget.block_size
                for block in [*kept, own]:
                    start = first + block * budget.block_size
                    mask[head, token, start : min(start + budget.block_size, token + 1)] = True
    return mask


@torch.no_grad()
def kept_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    first: int,
    token: int,
    head: int,
    group: int,
    document: int,
    budget: Budget,
    scale: float,
) -> tuple[list[int], list[float]]:
    """History blocks that one (token, head) keeps, and the gate mass of every history block (by block number)."""
    size = budget.block_size
    visible = (token - first) // size
    if visible == 0:
        return [], []
    scores = []
    for block in range(visible):
        keys = key[first + block * size : first + (block + 1) * size, head // group].double()
        scores.append(float(query[token, head].double() @ keys.mean(0)) * scale)
    top = max(scores)
    exponentials = [math.exp(score - top) for score in scores]
    mass = [value / sum(exponentials) for value in exponentials]
    sinks = min(budget.sink_blocks, visible)
    order = sorted(range(visible), key=lambda block: (block >= sinks, -scores[block], -block))
    if budget.top_k is not None:
        count = budget.top_k[document] - 1
    elif budget.top_p is not None and budget.top_p[document] >= 1.0:
        count = visible
    else:
        assert budget.top_p is not None
        count, before = 0, 0.0
        while count < visible and before < budget.top_p[document]:
            before += mass[order[count]]
            count += 1
    count = min(max(count, budget.min_blocks, sinks), visible)
    if budget.max_blocks is not None:
        count = min(count, budget.max_blocks)
    return sorted(order[:count]), mass


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: list[int],
    budget: Budget,
    scale: float,
) -> torch.Tensor:
    """Masked dense attention under :func:`keep_mask`; ``[T, H, D]``, any float dtype, autograd through everything."""
    group = query.shape[1] // key.shape[1]
    mask = keep_mask(query, key, boundaries, budget, scale).to(query.device)
    keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    probabilities = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", probabilities, values)
