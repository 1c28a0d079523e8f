"""Which history blocks each query row keeps: budgets, the selection type, and the selector.

Formula, per query head and token at document position t, over the history blocks i with (i + 1) * B <= t:
    s_i = scale * q . mean(k in block i)        fp32
    top_p: w = softmax(s); in descending order a block is kept iff the sum of those before it is < p
    top_k: the k - 1 largest s
Ties go to the more recent block.  The own block is always attended and is no candidate: its mean holds future keys.

Cost: one [SELECT_TOKENS, H, blocks] score slab at a time, one stable sort per row.  The keep mask of one tile is the
largest temporary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

CURVE_TOP_P = (0.02, *(round(0.05 * i, 2) for i in range(1, 20)), 0.98, 1.0)
CURVE_TOP_K = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

# 512 query tokens keep a score slab of 2 heads x 128 blocks inside a 2 MiB L2; 4096-token tiles bound the pair buffer
# of the attention (selection of 16K tokens, one thread: 0.29 s with whole-document slabs, 0.11 s with these).
SELECT_TOKENS = 512
TILE_TOKENS = 4096


@dataclass(frozen=True)
class Budget:
    """How much each document of a packed batch may attend; exactly one of ``top_p`` and ``top_k`` is set.

    Attributes:
        block_size: tokens per block, aligned to each document's start.
        top_p: one p in (0, 1] per document, or None.
        top_k: one k >= 1 per document, the own block included, or None.
        min_blocks, max_blocks: bounds on the history blocks kept per row (``max_blocks`` None: no bound).
        sink_blocks: so many first blocks of a document are kept in any case and fill the budget first.
    """

    block_size: int
    top_p: tuple[float, ...] | None = None
    top_k: tuple[int, ...] | None = None
    min_blocks: int = 0
    max_blocks: int | None = None
    sink_blocks: int = 0

    def keeps_everything(self, document: int, length: int) -> bool:
        """Whether every visible history block of a document of ``length`` tokens is kept, known without scores."""
        most_visible = (length - 1) // self.block_size
        if most_visible <= 0:
            return True
        if self.max_blocks is not None and self.max_blocks < most_visible:
            return False
        if self.top_p is not None:
            return self.top_p[document] >= 1.0
        assert self.top_k is not None
        return self.top_k[document] - 1 >= most_visible


@dataclass(frozen=True)
class AttentionStats:
    """What one call attended.

    Attributes:
        density: kept / visible (token, head, history block) triples; 1.0 where nothing has history.
        work: attended / causally visible (query, key) pairs, own blocks included.
        coverage: mean gate mass of the kept history blocks over (token, head) rows that have history; else 1.0.
        curve: fp64 CPU tensor; density at each p of ``CURVE_TOP_P``, or coverage at each k of ``CURVE_TOP_K``.
    """

    density: float
    work: float
    coverage: float
    curve: torch.Tensor


@dataclass(frozen=True)
class Tile:
    """The kept history of up to ``TILE_TOKENS`` consecutive query tokens of one document, indexed both ways.

    A row is (kv head g, token, head in group), numbered g * R + (token * G + head) with R = tokens * G.  A pair is
    (row, kept block).  Pairs are stored block-major: sorted by kv head, block, row.

    Attributes:
        document_start: packed index of the document's first token.
        start, stop: packed range of the query tokens.
        rows: int32 [pairs], row of each pair, local to its kv head (0 .. R-1).
        pair_counts: [Hkv][blocks], pairs of each kv head and block (host numbers: they are loop bounds).
        slots: int32 [pairs], pair numbers in row-major order (ascending block within a row).
        row_offsets: int32 [Hkv * R + 1], first position in ``slots`` of each row.
    """

    document_start: int
    start: int
    stop: int
    rows: torch.Tensor
    pair_counts: tuple[tuple[int, ...], ...]
    slots: torch.Tensor
    row_offsets: torch.Tensor


@dataclass(frozen=True)
class BlockSelection:
    """The seam between selecting and attending: everything the attention needs to know of a selection.

    Attributes:
        block_size: tokens per block.
        own_blocks: (packed start, tokens) of every block of every document, in packed order; each row attends its own
            block causally.
        tiles: the kept history, see :class:`Tile`.  Rows outside all tiles have none.
    """

    block_size: int
    own_blocks: tuple[tuple[int, int], ...]
    tiles: tuple[Tile, ...]


@dataclass
class StatsSums:
    """Sums behind :class:`AttentionStats`, added up over documents; counts are in triples, pairs and rows."""

    top_k: bool
    kept: int = 0
    visible: int = 0
    attended_pairs: int = 0
    causal_pairs: int = 0
    mass: float = 0.0
    rows_with_history: int = 0
    curve: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.curve = torch.zeros(len(CURVE_TOP_K if self.top_k else CURVE_TOP_P), dtype=torch.float64)

    def add_document(self, length: int, block_size: int, num_heads: int) -> int:
        """Count what holds whatever is kept: visible triples, causal and own-block pairs, rows with history."""
        blocks, tail = divmod(length, block_size)
        visible = num_heads * (block_size * blocks * (blocks - 1) // 2 + tail * blocks)
        self.visible += visible
        self.causal_pairs += num_heads * (length * (length + 1) // 2)
        own = blocks * block_size * (block_size + 1) // 2 + tail * (tail + 1) // 2
        self.attended_pairs += num_heads * own
        self.rows_with_history += num_heads * max(0, length - block_size)
        return visible

    def finish(self) -> AttentionStats:
        over = (self.rows_with_history if self.top_k else self.visible) or 1
        curve = self.curve / over if self.visible else torch.ones_like(self.curve)
        return AttentionStats(
            density=self.kept / self.visible if self.visible else 1.0,
            work=self.attended_pairs / self.causal_pairs if self.causal_pairs else 1.0,
            coverage=self.mass / self.rows_with_history if self.rows_with_history else 1.0,
            curve=curve,
        )


def document_blocks(boundaries: Sequence[int], block_size: int) -> tuple[tuple[int, int], ...]:
    """(packed start, tokens) of every block of every document; the last block of a document may be short.

    Example: boundaries (0, 5, 6), block_size 4 -> ((0, 4), (4, 1), (5, 1)).
    """
    return tuple(
        (start, min(block_size, stop - start))
        for first, stop in zip(boundaries[:-1], boundaries[1:], strict=True)
        for start in range(first, stop, block_size)
    )


def pooled_keys(key: torch.Tensor, block_size: int) -> torch.Tensor:
    """Mean key of each complete block of one document, accumulated in fp32: [L, Hkv, D] -> [L // B, Hkv, D]."""
    blocks = key.shape[0] // block_size
    return key[: blocks * block_size].unflatten(0, (blocks, block_size)).mean(dim=1, dtype=torch.float32)


@torch.no_grad()
def select_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    boundaries: Sequence[int],
    documents: Sequence[int],
    budget: Budget,
    scale: float,
    stats: StatsSums | None = None,
    index: bool = True,
) -> BlockSelection:
    """Select history blocks for every row of the named documents.

    Args:
        query: ``[T, H, D]``; key: ``[T, Hkv, D]``, post-RoPE; any strides.
        boundaries: ``n + 1`` packed document starts as host integers.
        documents: which documents to select for, by number; ``budget`` is indexed by the same numbers.
        scale: factor of the scores (``D ** -0.5``); it shapes the softmax of top_p.
        stats: when given, what was kept is added to it, the curve included (one more search per row).
        index: False skips building the index (the stats of a document that is attended densely).

    Returns:
        BlockSelection whose own blocks and tiles cover just these documents.
    """
    own_blocks: list[tuple[int, int]] = []
    tiles: list[Tile] = []
    for document in documents:
        first, stop = boundaries[document], boundaries[document + 1]
        own_blocks += document_blocks((first, stop), budget.block_size)
        if stats is not None:
            stats.add_document(stop - first, budget.block_size, query.shape[1])
        pooled = pooled_keys(key[first:stop], budget.block_size)
        for start in range(first + budget.block_size, stop, TILE_TOKENS):
            end = min(start + TILE_TOKENS, stop)
            keep = _keep_mask(query[start:end], pooled, start - first, document, budget, scale, stats)
            if index:
                tiles.append(_build_tile(keep, first, start, end, key.shape[1]))
    return BlockSelection(budget.block_size, tuple(own_blocks), tuple(tiles))


def _keep_mask(
    query: torch.Tensor,
    pooled: torch.Tensor,
    position: int,
    document: int,
    budget: Budget,
    scale: float,
    stats: StatsSums | None,
) -> torch.Tensor:
    """Bool ``[S, H, blocks]``: which history blocks the tokens at document positions ``position ..`` keep."""
    num_tokens, num_heads, _ = query.shape
    num_blocks = min(pooled.shape[0], (position + num_tokens - 1) // budget.block_size)
    keep = torch.zeros(num_tokens, num_heads, num_blocks, dtype=torch.bool, device=query.device)
    for offset in range(0, num_tokens, SELECT_TOKENS):
        rows = query[offset : offset + SELECT_TOKENS]
        first = position + offset
        blocks = min(num_blocks, (first + rows.shape[0] - 1) // budget.block_size)
        if blocks > 0:
            visible = torch.arange(first, first + rows.shape[0], device=query.device) // budget.block_size
            scores = _scores(rows, pooled[:blocks], scale)
            keep[offset : offset + rows.shape[0], :, :blocks] = _keep_rows(scores, visible, document, budget, stats)
    return keep


def _scores(query: torch.Tensor, pooled: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32 gate scores ``[S, H, blocks]``; query ``[S, H, D]``, pooled ``[blocks, Hkv, D]``."""
    num_kv_heads = pooled.shape[1]
    grouped = query.float().unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2) * scale
    scores = torch.bmm(grouped, pooled.permute(1, 2, 0))
    return scores.unflatten(1, (query.shape[0], -1)).transpose(0, 1).flatten(1, 2)


def _keep_rows(
    scores: torch.Tensor, visible: torch.Tensor, document: int, budget: Budget, stats: StatsSums | None
) -> torch.Tensor:
    """Apply the budget to one slab of scores ``[S, H, blocks]``; ``visible [S]``: history blocks per token."""
    blocks = scores.shape[-1]
    # The most recent block first, so that a stable sort gives ties to recency.
    scores = scores.flip(-1)
    number = torch.arange(blocks - 1, -1, -1, device=scores.device)
    visible = visible[:, None].expand(scores.shape[:2])
    scores = scores.masked_fill(number >= visible[..., None], -math.inf)
    if budget.sink_blocks:
        sinks = (number < budget.sink_blocks) & (number < visible[..., None])
        order = torch.sort(scores.masked_fill(sinks, math.inf), dim=-1, descending=True, stable=True).indices
        ranked = scores.gather(-1, order)
    else:
        ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)

    mass_before = None
    if budget.top_p is not None or stats is not None:
        weights = torch.softmax(ranked, dim=-1)
        mass_before = weights.cumsum(-1) - weights
        # Rounding may make the difference fall; the rule and the search below need it monotone.
        mass_before = mass_before.cummax(-1).values if stats is not None else mass_before
    if budget.top_p is None:
        assert budget.top_k is not None
        count = torch.full_like(visible, budget.top_k[document] - 1)
    elif budget.top_p[document] >= 1.0:
        count = visible
    else:
        assert mass_before is not None
        count = (mass_before < budget.top_p[document]).sum(-1)
    count = _clamp_count(count, visible, budget)
    if stats is not None:
        assert mass_before is not None
        _add_stats(stats, count, visible, mass_before, budget)

    rank = torch.arange(blocks, device=scores.device)
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, rank < count[..., None])
    # Hidden blocks may rank among the visible ones where a row's own scores are -inf.
    return (keep & (number < visible[..., None])).flip(-1)


def _clamp_count(count: torch.Tensor, visible: torch.Tensor, budget: Budget) -> torch.Tensor:
    least = max(budget.min_blocks, budget.sink_blocks)
    count = count.clamp(min=least, max=budget.max_blocks)
    return torch.minimum(count, visible)


def _add_stats(
    stats: StatsSums, count: torch.Tensor, visible: torch.Tensor, mass_before: torch.Tensor, budget: Budget
) -> None:
    kept = int(count.sum())
    stats.kept += kept
    stats.attended_pairs += kept * budget.block_size
    with_history = visible > 0
    covered = torch.cat([mass_before, mass_before.new_ones(*mass_before.shape[:-1], 1)], dim=-1)
    # Kept everything: the mass is 1 by definition, whatever the rounding of the sum.
    covered = covered.masked_fill(torch.arange(covered.shape[-1], device=covered.device) >= visible[..., None], 1.0)
    mass = covered.gather(-1, count[..., None]).squeeze(-1)
    stats.mass += float(mass[with_history].sum(dtype=torch.float64))
    if stats.top_k:
        grid = torch.tensor([k - 1 for k in CURVE_TOP_K], device=count.device).expand(*count.shape, -1)
        at = _clamp_count(grid, visible[..., None], budget)
        curve = covered.gather(-1, at)[with_history].sum(0, dtype=torch.float64)
    else:
        points = torch.tensor(CURVE_TOP_P, device=count.device, dtype=mass_before.dtype)
        at = torch.searchsorted(mass_before.contiguous(), points.expand(*count.shape, -1).contiguous())
        at[..., -1] = visible
        curve = _clamp_count(at, visible[..., None], budget).sum((0, 1), dtype=torch.float64)
    stats.curve += curve.cpu()


def _build_tile(keep: torch.Tensor, document_start: int, start: int, stop: int, num_kv_heads: int) -> Tile:
    """Index a keep mask ``[S, H, blocks]`` block-major and row-major, by counting and prefix sums only."""
    num_tokens, num_heads, blocks = keep.shape
    num_rows = num_tokens * num_heads // num_kv_heads
    by_block = keep.unflatten(1, (num_kv_heads, -1)).permute(1, 3, 0, 2).reshape(num_kv_heads, blocks, num_rows)
    rows = by_block.flatten(0, 1).nonzero()[:, 1].int()
    pair_number = by_block.flatten().cumsum(0, dtype=torch.int32).view_as(by_block) - 1
    slots = pair_number.transpose(1, 2)[by_block.transpose(1, 2)]
    row_counts = by_block.sum(1).flatten()
    offsets = torch.zeros(row_counts.numel() + 1, dtype=torch.int32, device=keep.device)
    torch.cumsum(row_counts, 0, dtype=torch.int32, out=offsets[1:])
    pair_counts = tuple(tuple(counts) for counts in by_block.sum(2).tolist())
    return Tile(document_start, start, stop, rows, pair_counts, slots, offsets)
