"""What passes between selecting and attending: budgets, the selection, and the statistics of a call.

``BlockSelection`` is the seam.  A selector (selector.py, triton_backend/routing.py, or another one) sets its bits; the
attention reads nothing else of it.  Both directions of the index are made from the bits when they are needed, forward
and again backward: a bit for each visible block is smaller than any list above a density of 1/64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

CURVE_TOP_P = (0.02, *(round(0.05 * i, 2) for i in range(1, 20)), 0.98, 1.0)
CURVE_TOP_K = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WORD = 32  # bits in an int32


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

    @classmethod
    def from_vector(cls, vector: torch.Tensor) -> AttentionStats:
        """Read the fp64 vector (density, work, coverage, *curve) that ``sparsebalance::select`` returns."""
        density, work, coverage = vector[:3].tolist()
        return cls(density, work, coverage, vector[3:])


@dataclass(frozen=True)
class BlockSelection:
    """Which history blocks each query row keeps.  Every row also attends its own block, causally: that has no bit.

    Attributes:
        bits: int32 ``[H, words, T]``; bit j of ``bits[h, w, t]`` is set iff query token t and head h keep history
            block ``WORD * w + j`` of t's own document.  Only blocks that end before t's own block may have a bit.
        cu_seqlens: int32 or int64 ``[n + 1]`` document starts in packed tokens, on the device of ``bits``.
        block_size: tokens per block, aligned to each document's start.
    """

    bits: torch.Tensor
    cu_seqlens: torch.Tensor
    block_size: int

    def density(self) -> float:
        """Kept / visible (token, head, block) triples, counted from the bits; 1.0 where nothing has history."""
        lengths = self.cu_seqlens.diff().tolist()
        visible = self.bits.shape[0] * sum(visible_blocks(length, self.block_size) for length in lengths)
        return int(count_bits(self.bits).sum()) / visible if visible else 1.0


def visible_blocks(length: int, block_size: int) -> int:
    """(token, history block) pairs of one document and head: what a selection may keep."""
    blocks, tail = divmod(length, block_size)
    return block_size * blocks * (blocks - 1) // 2 + tail * blocks


def words_for(boundaries: Sequence[int], block_size: int) -> int:
    """Words per row that hold a bit for every complete block of the longest document; at least 1."""
    longest = max((stop - start for start, stop in itertools.pairwise(boundaries)), default=0)
    return max(1, -(-(longest // block_size) // WORD))


def count_bits(words: torch.Tensor) -> torch.Tensor:
    """Number of set bits of each int32, as int32 of the same shape."""
    # The sums of 1, 2, 4 and 8 neighbouring bits in turn; masks keep the sign bit of >> out.
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101 >> 24) & 0xFF


def pack_bits(keep: torch.Tensor) -> torch.Tensor:
    """Bool ``[..., blocks]`` -> int32 ``[..., ceil(blocks / WORD)]``, block j of a word in bit j."""
    keep = F.pad(keep, (0, -keep.shape[-1] % WORD))
    if keep.device.type == "cpu":  # 25 times faster than shifting and adding
        flat = np.packbits(keep.flatten().numpy(), bitorder="little")
        return torch.from_numpy(flat).view(torch.int32).view(*keep.shape[:-1], keep.shape[-1] // WORD)
    return _pack_by_shifts(keep)


def unpack_bits(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[..., words]`` -> bool ``[..., words * WORD]``; the inverse of :func:`pack_bits`."""
    if words.device.type == "cpu":
        flat = np.unpackbits(np.frombuffer(words.numpy().tobytes(), dtype=np.uint8), bitorder="little")
        return torch.from_numpy(flat).view(torch.bool).view(*words.shape[:-1], words.shape[-1] * WORD)
    return _unpack_by_shifts(words)


def _pack_by_shifts(keep: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(WORD, dtype=torch.int32, device=keep.device)
    return (keep.unflatten(-1, (-1, WORD)).int() << shifts).sum(-1, dtype=torch.int32)


def _unpack_by_shifts(words: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)


@dataclass
class StatsSums:
    """Sums behind :class:`AttentionStats`, added up over documents; counts are in triples, pairs and rows.

    ``top_k`` says what the curve is taken over, and ``points`` where, if not on the fixed grid.
    """

    top_k: bool
    points: Sequence[float] = ()
    kept: int | torch.Tensor = 0
    visible: int = 0
    attended_pairs: int | torch.Tensor = 0
    causal_pairs: int = 0
    mass: float | torch.Tensor = 0.0
    rows_with_history: int = 0
    curve: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.points = self.points or (CURVE_TOP_K if self.top_k else CURVE_TOP_P)
        self.curve = torch.zeros(len(self.points), dtype=torch.float64)

    def add_document(self, length: int, block_size: int, num_heads: int) -> None:
        """Count what holds whatever is kept: visible triples, causal and own-block pairs, rows with history."""
        blocks, tail = divmod(length, block_size)
        self.visible += num_heads * visible_blocks(length, block_size)
        self.causal_pairs += num_heads * (length * (length + 1) // 2)
        own = blocks * block_size * (block_size + 1) // 2 + tail * (tail + 1) // 2
        self.attended_pairs += num_heads * own
        self.rows_with_history += num_heads * max(0, length - block_size)

    def finish(self) -> torch.Tensor:
        """The vector of :meth:`AttentionStats.from_vector`, fp64 on the CPU."""
        density = int(self.kept) / self.visible if self.visible else 1.0
        work = int(self.attended_pairs) / self.causal_pairs if self.causal_pairs else 1.0
        coverage = float(self.mass) / self.rows_with_history if self.rows_with_history else 1.0
        over = (self.rows_with_history if self.top_k else self.visible) or 1
        curve = self.curve.cpu() / over if self.visible else torch.ones(len(self.curve), dtype=torch.float64)
        return torch.cat([torch.tensor([density, work, coverage], dtype=torch.float64), curve])
