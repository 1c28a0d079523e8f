"""transformers <-> operator: shapes, padding, packing, caches, and the budget of each forward call.

Prefill and training attend sparsely.  A query over a KV cache (decode, chunked prefill) attends densely: one new token
reads the whole cache.  Everything the operator cannot honour is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from hf_sparsebalance.errors import UserError
from sparsebalance_kernels import AttentionStats, ops
from sparsebalance_kernels.api import attention_and_stats
from sparsebalance_kernels.checks import score_scale

ATTENTION_NAME = "sparsebalance"
NO_SPARSE_ATTENTION = (
    "the model never calls the sparsebalance attention, because it does not use transformers' attention interface: "
    "choose another model, or --attn_implementation eager with --tolerance 0"
)


@dataclass(frozen=True)
class SparseAttentionDefaults:
    """The defaults of a model, kept in ``config.sparse_attention`` as a plain dict (and so in config.json).

    Attributes:
        block_size: tokens per block.
        top_p: share of the gate's mass to keep, in (0, 1]; None when top_k is set.
        top_k: blocks per row, the own one included; None when top_p is set.
        min_blocks, max_blocks, sink_blocks: see ``block_sparse_attention``.
        dense_layers: layer numbers that always attend densely.

    Raises:
        UserError: for an unknown key or a value out of range, naming it.
    """

    block_size: int = 128
    top_p: float | None = None
    top_k: int | None = None
    min_blocks: int = 0
    max_blocks: int | None = None
    sink_blocks: int = 0
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.top_p is None) == (self.top_k is None):
            raise UserError("sparse_attention needs exactly one of top_p and top_k")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise UserError(f"sparse_attention.top_p must lie in (0, 1], got {self.top_p}")
        for name, least in (("block_size", 1), ("top_k", 1), ("min_blocks", 0), ("max_blocks", 0), ("sink_blocks", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UserError(f"sparse_attention.{name} must be a whole number from {least} up, got {value!r}")
        if self.max_blocks is not None and self.max_blocks < max(self.min_blocks, self.sink_blocks):
            raise UserError(
                f"sparse_attention.max_blocks ({self.max_blocks}) is below min_blocks ({self.min_blocks}) or "
                f"sink_blocks ({self.sink_blocks}): raise it, or leave it out for no bound"
            )

    @classmethod
    def of(cls, config: PreTrainedConfig) -> SparseAttentionDefaults:
        """Read ``config.sparse_attention``; a model without it gets top_p 0.8 in blocks of 128."""
        given: Mapping[str, Any] = getattr(config, "sparse_attention", None) or {}
        # Names written into the class, not dataclasses.fields: torch.compile reads this function, and not that one.
        unknown = [name for name in given if name not in cls.__match_args__]
        if unknown:
            known = ", ".join(cls.__match_args__)
            raise UserError(f"sparse_attention has unknown keys {sorted(unknown)}; known are {known}")
        settings = dict(given)
        if settings.get("top_p") is None and settings.get("top_k") is None:
            settings["top_p"] = 0.8
        settings["dense_layers"] = tuple(settings.get("dense_layers") or ())
        layers = config.num_hidden_layers
        absent = [layer for layer in settings["dense_layers"] if not 0 <= layer < layers]
        if absent:
            raise UserError(f"sparse_attention.dense_layers names layers {absent}: the model has 0 to {layers - 1}")
        return cls(**settings)


class StatsCollector:
    """Collects the attention statistics of one forward call; pass a new one as the keyword ``sparse_stats``.

    It travels with the call, so that a checkpointed block that recomputes later reports to its own micro-batch.

    Attributes:
        vectors: by layer, what ``AttentionStats.from_vector`` reads; None for a layer that is always dense.
        top_k: by layer, the k it attended with, where it had to keep a tolerance: the ``sparse_top_k`` of the call, or
            more.  A layer that recomputes reads its k here.
    """

    def __init__(self) -> None:
        self.vectors: dict[int, torch.Tensor | None] = {}
        self.top_k: dict[int, torch.Tensor] = {}

    @property
    def layers(self) -> dict[int, AttentionStats | None]:
        """Statistics by layer; None for a layer that is dense whatever the budget."""
        return {
            layer: None if vector is None else AttentionStats.from_vector(vector)
            for layer, vector in self.vectors.items()
        }

    def mean(self) -> AttentionStats | None:
        """Density, work and coverage over all layers, the curve over those that have a gate; None if none has."""
        layers = self.layers
        seen = [stats for stats in layers.values() if stats is not None]
        if not seen:
            return None
        num_dense, num_layers = len(layers) - len(seen), len(layers)
        return AttentionStats(
            density=(sum(stats.density for stats in seen) + num_dense) / num_layers,
            work=(sum(stats.work for stats in seen) + num_dense) / num_layers,
            coverage=(sum(stats.coverage for stats in seen) + num_dense) / num_layers,
            curve=torch.stack([stats.curve for stats in seen]).mean(0),
        )


def register() -> None:
    """Make ``attn_implementation="sparsebalance"`` known to transformers: the attention and its mask function."""
    AttentionInterface.register(ATTENTION_NAME, sparsebalance_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sparsebalance_mask)


def sparsebalance_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that reaches :func:`sparsebalance_attention`: bool ``[batch, keys]`` (True = real token), or None.

    Without a registered mask function transformers drops padding silently.  A static cache hands out keys that are not
    written yet; where no mask tells them apart, one is made.

    Raises:
        UserError: when a model combines the causal mask with a function of its own (or_mask, and_mask).
    """
    if use_vmap:
        raise UserError(
            "sparsebalance attention cannot honour this model's own mask function; use attn_implementation='sdpa'"
        )
    if q_length == 1:
        # A decoded token sees every written key; a static cache keeps their number on the device, and it stays there.
        if attention_mask is not None and attention_mask.shape[-1] < kv_length:
            return attention_mask
        if isinstance(q_offset, torch.Tensor) or kv_length > q_offset + 1:
            written = (torch.arange(kv_length, device=device) <= q_offset).expand(batch_size, -1)
            return written if attention_mask is None else attention_mask & written
        return None if attention_mask is None else attention_mask[:, -kv_length:]
    # As wide as what is written, so that the last query stands at the last column, padding or not.
    num_written = int(q_offset) + q_length
    if attention_mask is not None:
        return attention_mask[:, :num_written][:, -kv_length:]
    return torch.ones(batch_size, num_written, dtype=torch.bool, device=device) if kv_length > num_written else None


def sparsebalance_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    sparse_top_p: torch.Tensor | float | None = None,
    sparse_top_k: torch.Tensor | int | None = None,
    sparse_base_top_k: torch.Tensor | int | None = None,
    sparse_tolerance: torch.Tensor | float | None = None,
    sparse_stats: StatsCollector | None = None,
    output_attentions: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Block-sparse attention behind transformers' attention interface.

    Args:
        query: ``[batch, H, Tq, D]``; key, value: ``[batch, Hkv, Tk, D]``, heads not repeated, any strides.
        attention_mask: None, or bool ``[batch, keys]`` from :func:`sparsebalance_mask`.
        position_ids: ``[1 or batch, Tq]``; where they do not rise by one (beside a mask: do not rise) a new document
            starts, unless ``cu_seq_lens_q`` (int ``[documents + 1]`` over the flattened batch) says it better.
        sparse_top_p, sparse_top_k: the budget of this call, a number, a 0-d tensor or one per document; without them
            ``config.sparse_attention`` holds.
        sparse_base_top_k, sparse_tolerance: with a ``sparse_top_k`` of one number, the largest loss of coverage
            against a base k: each layer attends with the smallest k from ``sparse_top_k`` up that keeps to it
            (arXiv 2604.13847, Algorithm 1), the coverage taken over all documents of the call.
        sparse_stats: filled with the statistics of this layer when given.

    Returns:
        (output ``[batch, Tq, H, D]``, None).

    Raises:
        UserError: for a 4-D mask, dropout, a window shorter than the keys, output_attentions, score caps or attention
            sinks, and non-causal attention; the message names the way out.
    """
    # Under autocast the values come in its dtype, but rotary embedding has left queries and keys in fp32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    _refuse_unsupported(module, key, attention_mask, dropout, sliding_window, output_attentions, softcap, s_aux)
    if attention_mask is not None:
        # Keys beyond the mask are those of a static cache that nothing has written yet.
        width = attention_mask.shape[-1]
        key, value = key[:, :, :width], value[:, :, :width]
    if query.shape[2] != key.shape[2]:
        return _attend_cache(query, key, value, attention_mask, scaling), None

    if attention_mask is not None and cu_seq_lens_q is not None:
        raise UserError("give attention_mask or cu_seq_lens_q, not both: packed documents need no mask")
    defaults = SparseAttentionDefaults.of(module.config)
    top_p, top_k = _budget(defaults, sparse_top_p, sparse_top_k, sparse_base_top_k, sparse_tolerance)
    dense = module.layer_idx in defaults.dense_layers
    batch, _, length, _ = query.shape
    packed = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    real = None
    if attention_mask is not None:
        real = attention_mask.flatten().nonzero().squeeze(1)
        packed = [tensor.index_select(0, real) for tensor in packed]
    boundaries = cu_seq_lens_q
    if boundaries is None:
        boundaries = _document_starts(batch, length, attention_mask, position_ids, query.device)
    if sparse_base_top_k is not None and sparse_tolerance is not None and not dense:
        kept = {} if sparse_stats is None else sparse_stats.top_k
        if module.layer_idx not in kept:
            kept[module.layer_idx] = ops.feasible_top_k(
                packed[0].detach(),  # no gradient flows through the gate
                packed[1].detach(),
                boundaries,
                torch.as_tensor(top_k),
                torch.as_tensor(sparse_base_top_k),
                torch.as_tensor(sparse_tolerance),
                defaults.block_size,
                defaults.min_blocks,
                defaults.max_blocks,
                defaults.sink_blocks,
                score_scale(query, scaling),
            )
        top_k = kept[module.layer_idx]
    # The curve costs a search per row: only for a collector, and not again when a checkpointed layer recomputes.
    collect = sparse_stats is not None and module.layer_idx not in sparse_stats.vectors
    out, stats = attention_and_stats(
        *packed,
        cu_seqlens=boundaries,
        top_p=1.0 if dense else top_p,
        top_k=None if dense else top_k,
        block_size=defaults.block_size,
        min_blocks=defaults.min_blocks,
        max_blocks=None if dense else defaults.max_blocks,
        sink_blocks=defaults.sink_blocks,
        scale=scaling,
        backend="auto",
        return_stats=collect and not dense,
    )
    if sparse_stats is not None and collect:
        sparse_stats.vectors[module.layer_idx] = None if dense else stats
    if real is not None:
        out = out.new_zeros(batch * length, *out.shape[1:]).index_copy(0, real, out)
    return out.unflatten(0, (batch, length)), None


def _budget(
    defaults: SparseAttentionDefaults,
    top_p: torch.Tensor | float | None,
    top_k: torch.Tensor | int | None,
    base_top_k: torch.Tensor | int | None,
    tolerance: torch.Tensor | float | None,
) -> tuple[torch.Tensor | float | None, torch.Tensor | int | None]:
    """The (top_p, top_k) of this call: its keyword, else the model's default."""
    if top_p is not None and top_k is not None:
        raise UserError("give one of the forward keywords sparse_top_p and sparse_top_k, not both")
    tolerates = base_top_k is not None
    if tolerates != (tolerance is not None) or (tolerates and (top_k is None or torch.as_tensor(top_k).ndim)):
        raise UserError(
            "the forward keywords sparse_base_top_k and sparse_tolerance go together, and with a sparse_top_k of one "
            "number for all documents: give all three, or sparse_top_k alone"
        )
    if top_p is None and top_k is None:
        return defaults.top_p, defaults.top_k
    return top_p, top_k


def _refuse_unsupported(
    module: nn.Module,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    sliding_window: int | None,
    output_attentions: bool | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> None:
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UserError(
            f"sparsebalance attention takes a 2-D attention_mask [batch, keys], got {attention_mask.ndim} dimensions; "
            "use packing (cu_seq_lens_q, position_ids) or attn_implementation='sdpa'"
        )
    if dropout:
        raise UserError("sparsebalance attention has no dropout: set config.attention_dropout = 0.0")
    if sliding_window is not None and sliding_window < key.shape[2]:
        raise UserError(
            f"sparsebalance attention has no sliding window (layer {module.layer_idx}: {sliding_window} tokens, "
            f"{key.shape[2]} keys): set config.sliding_window = None, or use attn_implementation='sdpa'"
        )
    if output_attentions:
        raise UserError("sparsebalance attention never forms its weights: output_attentions needs 'eager' attention")
    if softcap is not None or s_aux is not None:
        raise UserError(
            "sparsebalance attention has no score caps or attention sinks: this model needs its own attention"
        )
    if not getattr(module, "is_causal", True):
        raise UserError("sparsebalance attention is causal; this module is not")


def _attend_cache(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Dense attention of the last Tq tokens over Tk > Tq cached keys: ``[batch, Tq, H, D]``."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    column = torch.arange(num_keys, device=query.device)
    visible = (column <= column[-num_queries:, None])[None, None]
    if mask is not None:
        visible = visible & mask[:, None, None, :]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


def _document_starts(
    batch: int,
    length: int,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Document starts among the real tokens of the flattened batch (``mask`` None: all are), ``[documents + 1]``.

    Every row starts one.  Without a mask so does a position that does not follow its predecessor, transformers' own
    rule; with one only a position that does not rise, since a mask may leave gaps.
    """
    token = torch.arange(batch * length, device=device)
    real = torch.ones_like(token, dtype=torch.bool) if mask is None else mask.flatten().bool()
    # The real token before each token, by shapes known beforehand: others would break torch.compile's graph.
    previous = F.pad(torch.where(real, token, -1).cummax(0).values, (1, 0), value=-1)[:-1]
    start = (previous < 0) | (token // length != previous // length)
    if position_ids is not None and position_ids.ndim == 2 and position_ids.shape[1] == length:
        position = position_ids.expand(batch, -1).flatten()
        step = position - position[previous.clamp(min=0)]
        start |= step != 1 if mask is None else step <= 0
    rank = real.cumsum(0) - 1
    return torch.cat([rank[start & real], real.sum()[None]])
