"""Block-sparse attention in plain torch operations, forward and backward, on any device.

Own blocks are batched causal products.  History is key-block-major: the rows that keep one key block are gathered and
multiplied, a few such lists at a time; their partial results (unnormalised output, maximum, sum) go to one slot per
pair, and an ``embedding_bag`` sums each row's slots.  Nothing of size T x T exists.

Workspace: slots of the largest tile * (D + 2) floats, plus inputs in the compute dtype.
Compute dtype is fp32 (fp64 for fp64 inputs); bf16 and fp16 are converted once per call.  For bf16 inputs on a CPU the
products may use its bf16 matrix unit: their operands are rounded to bf16, sums and all else stay fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sparsebalance_kernels.index import (
    SCORES_AT_ONCE,
    HistoryIndex,
    Tile,
    document_blocks,
    history_tiles,
    index_tile,
)
from sparsebalance_kernels.precision import cpu_matmul_precision
from sparsebalance_kernels.selection import BlockSelection

# Documents of a few tokens each: many of them make one product.
SHORT_BLOCKS_AT_ONCE = 64

# What a hidden score becomes before the maximum is taken.
HIDDEN = -1e30

# Least exponent of a probability: below it torch's exp is 20 to 90 times slower (subnormal results), and e^-87 is lost
# in any sum.  Hidden probabilities are set to 0 afterwards.
LEAST_EXPONENT = -87.0


def attend_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: BlockSelection, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over own blocks and the selected history.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, Hkv, D]``, any strides.
        selection: kept blocks.

    Returns:
        (output ``[T, H, D]`` in the dtype of ``query``, log-sum-exp ``[H, T]`` in the compute dtype).
    """
    boundaries = selection.cu_seqlens.tolist()
    q, k, v = (_by_kv_head(tensor, key.shape[1]) for tensor in (query, key, value))
    q, k, v = q.mul_(scale), k.squeeze(2), v.squeeze(2)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])

    workspace = _Workspace(q)
    with cpu_matmul_precision(_precision(query)):
        for batch in _own_batches(boundaries, selection.block_size, q):
            _own_forward(q, k, v, batch, out, lse)
        for tile in reversed(history_tiles(boundaries, selection.block_size)):
            index = index_tile(selection, tile, key.shape[1])
            if index.rows.numel():
                _history_forward(q, k, v, selection.block_size, tile, index, workspace, out, lse)
    return _by_token(out, query), lse.transpose(1, 2).reshape(query.shape[1], query.shape[0]).contiguous()


def attend_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    selection: BlockSelection,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, in their shapes and dtypes; ``out`` and ``lse`` from the forward pass."""
    boundaries = selection.cu_seqlens.tolist()
    num_kv_heads = key.shape[1]
    q, k, v, d_out = (_by_kv_head(tensor, num_kv_heads) for tensor in (query, key, value, grad_out))
    q, k, v = q.mul_(scale), k.squeeze(2), v.squeeze(2)
    delta = (d_out * _by_kv_head(out, num_kv_heads)).sum(-1)
    lse = lse.unflatten(0, (num_kv_heads, -1)).transpose(1, 2).contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    workspace = _Workspace(q)
    with cpu_matmul_precision(_precision(query)):
        for batch in _own_batches(boundaries, selection.block_size, q):
            _own_backward(q, k, v, batch, lse, delta, d_out, dq, dk, dv)
        for tile in reversed(history_tiles(boundaries, selection.block_size)):
            index = index_tile(selection, tile, num_kv_heads)
            if index.rows.numel():
                _history_backward(q, k, v, selection.block_size, tile, index, workspace, lse, delta, d_out, dq, dk, dv)
    return _by_token(dq.mul_(scale), query), _by_token(dk.unsqueeze(2), key), _by_token(dv.unsqueeze(2), value)


def _by_kv_head(tensor: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[T, Hkv * G, D]`` -> contiguous ``[Hkv, T, G, D]`` in the compute dtype: a kv head's rows lie together."""
    by_head = tensor.unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    # A copy in any case: the caller scales it in place.
    return torch.empty(by_head.shape, dtype=dtype, device=tensor.device).copy_(by_head)


def _precision(query: torch.Tensor) -> str | None:
    """For bf16 inputs on a CPU, oneDNN multiplies fp32 tensors in bf16 (AMX, AVX512-BF16): 1.5 times faster.

    Keys and values are bf16 numbers and lose nothing; scaled queries, probabilities and their gradients are rounded
    once more, as flash attention rounds the last two.  Elsewhere fp32 as the process has it set.
    """
    return "bf16" if query.dtype == torch.bfloat16 and query.device.type == "cpu" else None


def _by_token(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[Hkv, T, G, D]`` -> contiguous ``[T, Hkv * G, D]`` in the dtype of ``like``; the inverse of _by_kv_head."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    result.unflatten(1, (tensor.shape[0], -1)).copy_(tensor.transpose(0, 1))
    return result


class _Workspace:
    """Buffers that serve all tiles of a call: fresh pages for each product cost as much as filling them."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Uninitialised memory of this shape, valid until the name is taken again."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self._like.new_empty(size)
        return self._buffers[name][:size].view(shape)

    def gather(self, name: str, rows: torch.Tensor, index: torch.Tensor, *shape: int) -> torch.Tensor:
        """``rows[index]`` in the memory of that name, seen in this shape."""
        return torch.index_select(rows, 0, index, out=self.take(name, len(index), *rows.shape[1:])).view(shape)


@dataclass(frozen=True)
class _OwnBatch:
    """A few own blocks as one batched product, the shorter ones filled up with their last token.

    Attributes:
        num_blocks: N; width: tokens of the longest block, W.
        tokens: int64 [N * W], packed token at each place.
        real: int64, the places that are no filling; None where all are real.
        ceiling: [N or 1, W * G, W], HIDDEN where a row must not see a key, else +inf.
        visible: the same shape, 1 where a row sees a key, else 0.
    """

    num_blocks: int
    tokens: torch.Tensor
    real: torch.Tensor | None
    ceiling: torch.Tensor
    visible: torch.Tensor

    def take(self, tensor: torch.Tensor, *last: int) -> torch.Tensor:
        """``[Hkv, T, G, *last]`` or ``[Hkv, T, *last]`` -> ``[Hkv * N, W * G or W, *last]``."""
        return tensor.index_select(1, self.tokens).reshape(tensor.shape[0] * self.num_blocks, -1, *last)

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of :meth:`take`: writes the real tokens' rows of ``tensor``."""
        values = values.reshape(tensor.shape[0], -1, *tensor.shape[2:])
        if self.real is None:
            tensor.index_copy_(1, self.tokens, values)
        else:
            tensor.index_copy_(1, self.tokens.index_select(0, self.real), values.index_select(1, self.real))

    def hide(self, scores: torch.Tensor) -> torch.Tensor:
        """Lower hidden scores ``[Hkv * N, W * G, W]`` to HIDDEN, whatever they are: four times faster than a fill."""
        by_block = scores.unflatten(0, (-1, self.num_blocks))
        torch.fmin(by_block, self.ceiling, out=by_block)
        return scores

    def exponentiate(self, scores: torch.Tensor) -> torch.Tensor:
        """exp in place, exactly 0 where hidden."""
        scores.clamp_min_(LEAST_EXPONENT).exp_()
        scores.unflatten(0, (-1, self.num_blocks)).mul_(self.visible)
        return scores


def _own_batches(boundaries: list[int], block_size: int, q: torch.Tensor) -> list[_OwnBatch]:
    """Batches of own blocks, complete blocks first: those need no filling and share one causal mask."""
    group, device = q.shape[2], q.device

    def masks(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.repeat_interleave(group, dim=1)
        return q.new_full(hidden.shape, torch.inf).masked_fill_(hidden, HIDDEN), (~hidden).to(q.dtype)

    blocks = document_blocks(boundaries, block_size)
    complete = [start for start, length in blocks if length == block_size]
    short = [(start, length) for start, length in blocks if length < block_size]
    at_once = max(1, SCORES_AT_ONCE // (block_size * block_size * group))
    batches = []
    if complete:
        place = torch.arange(block_size, device=device)
        causal = masks((place[:, None] < place)[None])
    for first in range(0, len(complete), at_once):
        starts = torch.tensor(complete[first : first + at_once], device=device)
        batches.append(_OwnBatch(len(starts), (starts[:, None] + place).flatten(), None, *causal))
    at_once = max(at_once, SHORT_BLOCKS_AT_ONCE)
    for first in range(0, len(short), at_once):
        batch = short[first : first + at_once]
        starts = torch.tensor([start for start, _ in batch], device=device)[:, None]
        lengths = torch.tensor([length for _, length in batch], device=device)[:, None]
        offset = torch.arange(max(length for _, length in batch), device=device)
        tokens = starts + torch.minimum(offset, lengths - 1)
        filling = offset >= lengths
        hidden = (offset[:, None] < offset) | filling[:, None, :] | filling[:, :, None]
        # A filled row sees its own key: it has a finite sum, and no one reads it.
        hidden &= ~torch.eye(len(offset), dtype=torch.bool, device=device)
        real = (~filling).flatten().nonzero().squeeze(1)
        batches.append(_OwnBatch(len(batch), tokens.flatten(), real, *masks(hidden)))
    return batches


def _own_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: _OwnBatch, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Causal attention inside own blocks; writes their rows of out ``[Hkv, T, G, D]`` and lse ``[Hkv, T, G]``."""
    dim = q.shape[-1]
    scores = batch.hide(torch.bmm(batch.take(q, dim), batch.take(k, dim).transpose(1, 2)))
    maximum = scores.amax(-1, keepdim=True)
    probabilities = batch.exponentiate(scores.sub_(maximum))
    total = probabilities.sum(-1, keepdim=True)
    batch.put(out, torch.bmm(probabilities, batch.take(v, dim)).div_(total))
    batch.put(lse, total.log_().add_(maximum))


def _own_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: _OwnBatch,
    lse: torch.Tensor,
    delta: torch.Tensor,
    d_out: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Gradients of the own-block part under the whole row's log-sum-exp; overwrites dq, dk and dv of these tokens."""
    dim = q.shape[-1]
    queries, grads = batch.take(q, dim), batch.take(d_out, dim)
    keys, values = batch.take(k, dim), batch.take(v, dim)
    scores = torch.bmm(queries, keys.transpose(1, 2)).sub_(batch.take(lse)[..., None])
    # A hidden score may exceed the log-sum-exp and overflow.
    probabilities = batch.exponentiate(batch.hide(scores))
    d_scores = torch.bmm(grads, values.transpose(1, 2)).sub_(batch.take(delta)[..., None]).mul_(probabilities)
    batch.put(dq, torch.bmm(d_scores, keys))
    batch.put(dk, torch.bmm(d_scores.transpose(1, 2), queries))
    batch.put(dv, torch.bmm(probabilities.transpose(1, 2), grads))


def _rows_of(tensor: torch.Tensor, tile: Tile, *last: int) -> torch.Tensor:
    """The tile's rows of ``[Hkv, T, G, *last]``, and one of zeros for the filling: ``[num_rows + 1, *last]``."""
    rows = tensor[:, tile.start : tile.stop].reshape(-1, *last)
    return torch.cat([rows, rows.new_zeros(1, *last)])


def _key_blocks(tensor: torch.Tensor, tile: Tile, num_blocks: int, block_size: int) -> torch.Tensor:
    """The history that a tile can see, ``[Hkv, T, D]`` -> ``[Hkv, num_blocks, B, D]`` without a copy."""
    seen = tensor[:, tile.document_start : tile.document_start + num_blocks * block_size]
    return seen.unflatten(1, (num_blocks, block_size))


def _history_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_size: int,
    tile: Tile,
    index: HistoryIndex,
    workspace: _Workspace,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge one tile's kept history into out and lse."""
    dim = q.shape[-1]
    rows = _rows_of(q, tile, dim)
    keys = _key_blocks(k, tile, index.num_blocks, block_size).flatten(0, 1)
    values = _key_blocks(v, tile, index.num_blocks, block_size).flatten(0, 1)
    num_slots = len(index.rows)
    partial = workspace.take("partial", num_slots, dim)
    maximum, total = q.new_empty(num_slots), q.new_empty(num_slots)
    for batch in index.batches:
        slots, shape = batch.slots, (len(batch.lists), batch.rows)
        lists = torch.tensor(batch.lists, device=q.device)
        queries = workspace.gather("queries", rows, index.rows[slots], *shape, dim)
        item_keys, item_values = keys.index_select(0, lists), values.index_select(0, lists)
        scores = torch.bmm(queries, item_keys.transpose(1, 2), out=workspace.take("scores", *shape, block_size))
        torch.amax(scores, dim=-1, out=maximum[slots].view(shape))
        scores.sub_(maximum[slots].view(*shape, 1)).clamp_min_(LEAST_EXPONENT).exp_()
        torch.sum(scores, dim=-1, out=total[slots].view(shape))
        torch.bmm(scores, item_values, out=partial[slots].view(*shape, dim))

    own_lse = _rows_of(lse, tile)
    reference = own_lse.scatter_reduce(0, index.rows.long(), maximum, "amax")
    weight = maximum.sub_(reference.index_select(0, index.rows)).exp_()
    own_weight, reference = (own_lse - reference).exp_()[:-1], reference[:-1]

    def sum_slots(values: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each row's slots, by ascending block: an order that no later row can change."""
        return F.embedding_bag(
            index.slots,
            values,
            index.row_offsets,
            mode="sum",
            per_sample_weights=weight.index_select(0, index.slots),
            include_last_offset=True,
        )

    row_total = sum_slots(total[:, None]).squeeze(1).add_(own_weight)
    history = sum_slots(partial)
    rows_of_tile = slice(tile.start, tile.stop)
    history.addcmul_(out[:, rows_of_tile].reshape(-1, dim), own_weight[:, None]).div_(row_total[:, None])
    out[:, rows_of_tile] = history.view_as(out[:, rows_of_tile])
    lse[:, rows_of_tile] = row_total.log_().add_(reference).view_as(lse[:, rows_of_tile])


def _history_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_size: int,
    tile: Tile,
    index: HistoryIndex,
    workspace: _Workspace,
    lse: torch.Tensor,
    delta: torch.Tensor,
    d_out: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Add one tile's kept history to dq, dk and dv; probabilities are recomputed from the saved log-sum-exp."""
    dim = q.shape[-1]
    rows, grad_rows = _rows_of(q, tile, dim), _rows_of(d_out, tile, dim)
    lse_rows, delta_rows = _rows_of(lse, tile), _rows_of(delta, tile)
    keys = _key_blocks(k, tile, index.num_blocks, block_size).flatten(0, 1)
    values = _key_blocks(v, tile, index.num_blocks, block_size).flatten(0, 1)
    d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
    partial = workspace.take("partial", len(index.rows), dim)
    for batch in index.batches:
        slots, shape = batch.slots, (len(batch.lists), batch.rows)
        row, lists = index.rows[slots], torch.tensor(batch.lists, device=q.device)
        queries = workspace.gather("queries", rows, row, *shape, dim)
        grads = workspace.gather("grads", grad_rows, row, *shape, dim)
        item_keys, item_values = keys.index_select(0, lists), values.index_select(0, lists)
        row_lse, row_delta = lse_rows.index_select(0, row), delta_rows.index_select(0, row)
        scores = torch.bmm(queries, item_keys.transpose(1, 2), out=workspace.take("scores", *shape, block_size))
        scores.sub_(row_lse.view(*shape, 1)).clamp_min_(LEAST_EXPONENT).exp_()
        d_scores = torch.bmm(grads, item_values.transpose(1, 2), out=workspace.take("d_scores", *shape, block_size))
        d_scores.sub_(row_delta.view(*shape, 1)).mul_(scores)
        # One by one: index_add_ takes 50 times as long on rows of this length.
        products = torch.bmm(scores.transpose(1, 2), grads), torch.bmm(d_scores.transpose(1, 2), queries)
        for number, d_value, d_key in zip(batch.lists, *products, strict=True):
            d_values[number].add_(d_value)
            d_keys[number].add_(d_key)
        torch.bmm(d_scores, item_keys, out=partial[slots].view(*shape, dim))
    history = F.embedding_bag(index.slots, partial, index.row_offsets, mode="sum", include_last_offset=True)
    dq[:, tile.start : tile.stop] += history.view_as(dq[:, tile.start : tile.stop])
    _key_blocks(dk, tile, index.num_blocks, block_size).add_(d_keys.view(len(k), index.num_blocks, block_size, dim))
    _key_blocks(dv, tile, index.num_blocks, block_size).add_(d_values.view(len(v), index.num_blocks, block_size, dim))
