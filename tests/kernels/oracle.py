"""The operator's definition written once more, slowly, for the tests; shares no code with it.

Inputs lie on a coarse grid (:func:`grid_batch`), so that gate scores are exact in fp32 in any order of summation: ties
are ties, and the operator's selection must equal the one below to the last row.  The sums of softmax weights are the
only thing rounded; :func:`select` refuses inputs whose choice hangs on that rounding.
"""

import math
from dataclasses import dataclass

import torch

SCALE = 0.125
FP32_ROUNDOFF = torch.finfo(torch.float32).eps / 2


class Undecided(Exception):
    """The choice hangs on fp32 rounding: the inputs are no test of it."""


@dataclass(frozen=True)
class Selection:
    """What one document's rows keep: bool ``kept`` and fp64 gate ``mass``, both ``[L, H, complete blocks]``."""

    kept: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True)
class Counted:
    """Sums over documents, counted row by row."""

    density: float
    work: float
    coverage: float
    mass_error: float


def grid_batch(lengths, *, block_size, kv_heads=1, group=1, dim=64, seed=0):
    """fp64 query, key, value, output gradient; query and key are multiples of 1/4 below 4, exact in every dtype.

    Keys of one block share an offset, so that the gate prefers some blocks.  With block sizes that are powers of two
    up to 64 and a scale of 1/8 every partial sum of a score is a multiple of 2^-13 below 2^6: exact in 24 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def on_grid(rows, heads):
        return torch.randint(-7, 8, (rows, heads, dim), generator=generator) / 4

    query, noise = on_grid(tokens, kv_heads * group), on_grid(tokens, kv_heads)
    starts = [start for length in lengths for start in range(0, length, block_size)]
    sizes = [min(block_size, length - start) for length in lengths for start in range(0, length, block_size)]
    offset = on_grid(len(starts), kv_heads).repeat_interleave(torch.tensor(sizes, dtype=torch.long), dim=0)
    value = torch.randn(tokens, kv_heads, dim, generator=generator)
    grad = torch.randn(query.shape, generator=generator)
    # Multiples of 1/16 below 8 are exact in bf16 and fp16: all dtypes see the same inputs.
    value, grad = ((tensor.clamp(-7.9, 7.9) * 16).round() / 16 for tensor in (value, grad))
    return query.double(), (noise + offset).double(), value.double(), grad.double()


def cumulative(lengths):
    """Document starts as the operator takes them."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def split(tensor, lengths):
    """The packed tensor's documents."""
    return tensor.split(list(lengths))


def gate_scores(query, key, block_size, scale):
    """fp64 ``[L, H, complete blocks]`` of one document."""
    length, heads, _ = query.shape
    blocks = length // block_size
    scores = torch.zeros(length, heads, blocks, dtype=torch.float64)
    for block in range(blocks):
        mean = key[block * block_size : (block + 1) * block_size].double().mean(0)
        for head in range(heads):
            scores[:, head, block] = query[:, head].double() @ mean[head // (heads // key.shape[1])] * scale
    return scores


def keep_row(scores, *, top_p, top_k, min_blocks, max_blocks, sink_blocks, score_error):
    """One row's kept blocks and masses from its visible blocks' scores; raises if rounding may change them."""
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    total = math.fsum(weights)
    mass = [weight / total for weight in weights]
    sinks = [block for block in range(len(scores)) if block < sink_blocks]
    others = [block for block in range(len(scores)) if block >= sink_blocks]
    order = sorted(sinks, key=lambda b: (-scores[b], -b)) + sorted(others, key=lambda b: (-scores[b], -b))
    kept = []
    for number, block in enumerate(order):
        if top_k is not None:
            wanted = number < top_k - 1
        elif top_p == 1.0:
            wanted = True
        else:
            before = math.fsum(mass[other] for other in order[:number])
            if abs(before - top_p) <= mass_error(len(scores), score_error):
                raise Undecided("p falls on a sum: take another seed")
            wanted = before < top_p
        wanted = wanted or number < min_blocks or block < sink_blocks
        if max_blocks is not None and number >= max_blocks:
            wanted = False
        if wanted:
            kept.append(block)
    if kept and len(kept) < len(order) and score_error:
        gap = scores[order[len(kept) - 1]] - scores[order[len(kept)]]
        if gap <= 2 * score_error:
            raise Undecided("two scores are too close: take another seed")
    return kept, mass


def mass_error(blocks, score_error=0.0):
    """Bound on the error of a sum of fp32 softmax weights over so many blocks.

    Each exp is off by two roundings and twice the error of its score, the denominator by one rounding per term, the
    quotient by one, the running sum by one per term, the final difference by one; all relative to at most 1.
    """
    return (2 * blocks + 6) * FP32_ROUNDOFF + 4 * score_error


def select(query, key, lengths, block_size, *, top_p=None, top_k=None, scale=SCALE, score_error=0.0, **bounds):
    """The kept blocks of every row: one :class:`Selection` per document.

    ``top_p`` and ``top_k`` are numbers or one number per document; ``bounds`` are min_blocks, max_blocks, sink_blocks.
    """
    bounds = {"min_blocks": 0, "max_blocks": None, "sink_blocks": 0} | bounds
    selections = []
    for number, (q, k) in enumerate(zip(split(query, lengths), split(key, lengths), strict=True)):
        p = top_p[number] if isinstance(top_p, (list, tuple)) else top_p
        count = top_k[number] if isinstance(top_k, (list, tuple)) else top_k
        scores = gate_scores(q, k, block_size, scale)
        kept, mass = torch.zeros(scores.shape, dtype=torch.bool), torch.zeros_like(scores)
        table = scores.tolist()
        for position in range(block_size, q.shape[0]):
            visible = position // block_size
            for head in range(q.shape[1]):
                row = table[position][head][:visible]
                blocks, masses = keep_row(row, top_p=p, top_k=count, score_error=score_error, **bounds)
                kept[position, head, blocks] = True
                mass[position, head, :visible] = torch.tensor(masses, dtype=torch.float64)
        selections.append(Selection(kept, mass))
    return selections


def token_mask(kept, block_size):
    """Bool ``[H, L, L]`` of one document: kept history blocks and the own block, causal."""
    length, heads, blocks = kept.shape
    mask = torch.zeros(heads, length, length, dtype=torch.bool)
    for block in range(blocks):
        mask[:, :, block * block_size : (block + 1) * block_size] = kept[:, :, block].T[:, :, None]
    for start in range(0, length, block_size):
        mask[:, start : start + block_size, start : start + block_size] = True
    return mask & torch.ones(length, length, dtype=torch.bool).tril()


def dense(query, key, value, selections, lengths, block_size, scale=SCALE):
    """Masked dense attention in the dtype of the inputs, every step rounded to it."""
    outputs = []
    parts = (split(tensor, lengths) for tensor in (query, key, value))
    for q, k, v, selection in zip(*parts, selections, strict=True):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * scale
        hidden = ~token_mask(selection.kept, block_size)
        probabilities = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        outputs.append(torch.matmul(probabilities, v.transpose(0, 1)).transpose(0, 1))
    return torch.cat(outputs) if outputs else query * 1.0


def rounding_bounds(query, key, value, grad, selections, lengths, block_size, unit, scale=SCALE, out_unit=0.0):
    """Elementwise bounds on how far two evaluations with unit roundoff ``unit`` differ: output, dq, dk, dv.

    First order, from |fl(sum of n products) - sum| <= n * unit * sum of the absolute products, carried through
    softmax attention and its gradient.  With a = the largest scale * |q| . |k| of a document and n attended keys:
    a score is off by (D + 1) a units, the log-sum-exp by as much and n + ln n + a, an exponent's own rounding by
    2 (a + ln n); 24 covers exp, quotient, merging of partial results and the scalings.  Each further sum adds its
    number of terms (n, D twice, group * L).  Two evaluations: twice.  The backward pass reads grad . out from the
    output as it was stored, rounded with unit roundoff ``out_unit``.
    """
    bounds = ([], [], [], [])
    parts = (split(tensor.double().abs(), lengths) for tensor in (query, key, value, grad))
    signed = (split(tensor.double(), lengths) for tensor in (query, key))
    for q, k, v, g, sq, sk, selection in zip(*parts, *signed, selections, strict=True):
        length, heads, dim = q.shape
        group = heads // k.shape[1]
        q, g, sq = q.transpose(0, 1), g.transpose(0, 1), sq.transpose(0, 1)
        k, v, sk = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v, sk))
        mask = token_mask(selection.kept, block_size)
        magnitude = float((q @ k.transpose(1, 2)).masked_fill(~mask, 0.0).amax()) * scale if length else 0.0
        probabilities = torch.softmax((sq @ sk.transpose(1, 2) * scale).masked_fill(~mask, -math.inf), dim=-1)
        logarithm = math.log(length) if length else 0.0
        roundings = (
            2 * (dim + 1) * magnitude + 4 * (magnitude + logarithm) + 2 * length + 2 * dim + group * length + 24
        )
        factor = 2 * roundings * unit
        out = probabilities @ v
        d_scores = probabilities * (g @ v.transpose(1, 2) + (g * out).sum(-1, keepdim=True))
        d_query, d_key = d_scores @ k * scale, d_scores.transpose(1, 2) @ q * scale
        d_value = probabilities.transpose(1, 2) @ g
        stored = probabilities * (g * out).sum(-1, keepdim=True) * out_unit
        more = (0, stored @ k * scale, stored.transpose(1, 2) @ q * scale, 0)
        for store, bound, also in zip(bounds, (out, d_query, d_key, d_value), more, strict=True):
            store.append((bound * factor + also).transpose(0, 1))
        for store in bounds[2:]:
            store[-1] = store[-1].unflatten(1, (-1, group)).sum(2)
    return tuple(torch.cat(parts) for parts in bounds)


def count(selections, lengths, block_size):
    """Density, work and coverage of a selection by their definitions, one row at a time."""
    kept = visible = attended = causal = rows = 0
    masses, longest = [], 1
    for length, selection in zip(lengths, selections, strict=True):
        for position in range(length):
            history = position // block_size
            longest = max(longest, history)
            for head in range(selection.kept.shape[1]):
                row = selection.kept[position, head, :history]
                here = int(row.sum())
                kept += here
                visible += history
                attended += here * block_size + position % block_size + 1
                causal += position + 1
                if history:
                    rows += 1
                    masses.append(float(selection.mass[position, head, :history][row].sum()))
    return Counted(
        density=kept / visible if visible else 1.0,
        work=attended / causal if causal else 1.0,
        coverage=math.fsum(masses) / rows if rows else 1.0,
        mass_error=mass_error(longest),
    )
