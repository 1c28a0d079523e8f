"""What the parts of device_check.py share, and its checks against fp64; device_check.METHOD has their rules."""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsebalance_kernels import block_sparse_attention, ops
from sparsebalance_kernels import selection as bitset

if TYPE_CHECKING:
    from device_check import Case, Sizes

NAMES = ("out", "dq", "dk", "dv")
FACTORS = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}  # of the error of PyTorch's dense attention
SPOTS = 8  # tokens of a long document that are checked against fp64
KEY_OFFSET_STD = 1.0  # keys of a block share an offset, so that the gate has something to prefer


class Results:
    """Writes the rows of one part, each as soon as it exists, and counts the checks that do not hold."""

    def __init__(self, path: Path, part: str, fails: bool) -> None:
        self.path, self.part, self.fails, self.broken = path, part, fails, 0

    def write(self, kind: str, row: dict[str, Any]) -> None:
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        self.broken += row.get("holds") is False
        with self.path.open("a", encoding="utf-8") as stream:  # one write: parts that run at once share the file
            stream.write(json.dumps({"kind": kind, "part": self.part, **row}) + "\n")
        if self.fails and kind != "machine":
            sys.exit("made to fail by --fail")

    def accuracy(self, where: dict[str, Any], found: Any, rounded: Any, exact: Any) -> None:
        """One check per result: its largest error against ``exact``, and that of the same dtype in PyTorch."""
        for name, ours, theirs, truth in zip(NAMES, found, rounded, exact, strict=True):
            error, reference = (float((t.double() - truth).abs().max()) for t in (ours, theirs))
            row = where | {"check": "accuracy", "result": name, "error": error, "reference_error": reference}
            self.write("check", row | {"factor": FACTORS[name], "holds": error <= FACTORS[name] * reference})


@dataclass(frozen=True)
class Inputs:
    """Packed documents ``[T, heads, D]`` and the gradient of the output."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    d_out: torch.Tensor
    cu_seqlens: torch.Tensor
    block_size: int

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    def to(self, dtype: torch.dtype) -> Inputs:
        tensors = {name: getattr(self, name).to(dtype) for name in ("query", "key", "value", "d_out")}
        return replace(self, **tensors)

    @torch.no_grad()
    def select(self, backend: str, top_p: float | None, top_k: int | None) -> torch.Tensor:
        """The operator's selection: ``bits`` of a ``BlockSelection``."""
        boundaries = self.cu_seqlens.tolist()
        p, k = (
            None if value is None else torch.full((len(boundaries) - 1,), value, dtype=dtype)
            for value, dtype in ((top_p, torch.float64), (top_k, torch.int64))
        )
        words = bitset.words_for(boundaries, self.block_size)
        fixed = (self.block_size, 0, None, 0, self.scale, words, backend, False)
        return ops.select(self.query, self.key, self.cu_seqlens, p, k, *fixed)[0]

    def attend_with_lse(self, bits: torch.Tensor, *qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.attend(*qkv, bits, self.cu_seqlens, self.block_size, self.scale, "triton")

    def attend(self, bits: torch.Tensor, *qkv: torch.Tensor) -> torch.Tensor:
        return self.attend_with_lse(bits, *qkv)[0]


def make_inputs(shape: tuple[int, int, int], lengths: tuple[int, ...], size: int, dtype: str, device: str) -> Inputs:
    heads, kv_heads, head_dim = shape
    tokens = sum(lengths)
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device}
    many, few = (tokens, heads, head_dim), (tokens, kv_heads, head_dim)
    query, key, value, d_out = (torch.randn(*wanted, **options) for wanted in (many, few, few, many))
    starts = list(itertools.accumulate(lengths, initial=0))
    for first, stop in itertools.pairwise(starts):
        offsets = torch.randn(-(-(stop - first) // size), *few[1:], **options) * KEY_OFFSET_STD
        key[first:stop] += offsets.repeat_interleave(size, dim=0)[: stop - first]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    return Inputs(query, key, value, d_out, cu_seqlens, size).to(getattr(torch, dtype))


def gradients(attend: Callable, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Output and the gradients of query, key and value."""
    leaves = [t.detach().requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.d_out)


def same_bits(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def token_mask(bits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Bool ``[H, T, T]``: the keys that each query attends, read from the bits."""
    starts = inputs.cu_seqlens
    token = torch.arange(bits.shape[2], device=bits.device)
    document = torch.searchsorted(starts[1:].long(), token, right=True)
    block = ((token - starts[document]) // inputs.block_size).int()
    kept = (bits[:, block // bitset.WORD] >> (block % bitset.WORD)[:, None]) & 1  # [H, key, query]
    seen = (document[:, None] == document) & (token[:, None] >= token)
    return ((kept.transpose(1, 2) != 0) | (block[:, None] == block)) & seen


def dense(mask: torch.Tensor, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Masked dense attention in the dtype of its inputs."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, -math.inf)
    return (torch.softmax(scores, dim=-1) @ v).transpose(0, 1)


def correct(case: Case, sizes: Sizes, device: str, results: Results) -> None:
    shape = (case.heads, case.kv_heads, case.head_dim)
    for dtype in sizes.check_dtypes:
        where = {"case": case.name, "dtype": dtype}
        inputs = make_inputs(shape, case.lengths, case.block_size, dtype, device)
        budget: dict[str, Any] = {"top_p": case.top_p, "top_k": case.top_k}
        bits = inputs.select("triton", **budget)
        fixed = {"cu_seqlens": inputs.cu_seqlens, "block_size": case.block_size, "backend": "triton", **budget}
        operator = functools.partial(block_sparse_attention, **fixed)
        found, again = gradients(operator, inputs), gradients(operator, inputs)
        masked = functools.partial(dense, token_mask(bits, inputs), inputs.scale)
        results.accuracy(where, found, gradients(masked, inputs), gradients(masked, inputs.to(torch.float64)))
        equal = same_bits((*found, bits), (*again, inputs.select("triton", **budget)))
        results.write("check", where | {"check": "run twice", "holds": equal})
        results.write("check", where | {"check": "selection"} | selection_check(inputs, bits, case))


def selection_check(inputs: Inputs, bits: torch.Tensor, case: Case) -> dict[str, Any]:
    """Compare with the exact order of scores, and with the torch selector; METHOD["selection"] has the rule."""
    wrong = unsure_rows = rows = 0
    theirs = inputs.select("torch", case.top_p, case.top_k)
    differs = (theirs != bits).any(dim=1).T  # [T, H]
    unexplained = 0
    for first, stop in itertools.pairwise(inputs.cu_seqlens.tolist()):
        query, key = inputs.query[first:stop].double(), inputs.key[first:stop].double()
        blocks, size = (stop - first) // case.block_size, case.block_size
        groups = query.unflatten(1, (case.kv_heads, -1))
        scores, reach = (
            torch.einsum("tkgd,bkd->tkgb", q, k[: blocks * size].unflatten(0, (blocks, size)).mean(1)).flatten(1, 2)
            * inputs.scale
            for q, k in ((groups, key), (groups.abs(), key.abs()))
        )
        position = torch.arange(stop - first, device=query.device)
        visible = (torch.arange(blocks, device=query.device) < (position // size)[:, None])[:, None]
        error = (reach * visible).amax(-1, keepdim=True) if blocks else reach[..., :0]
        error = error * (case.head_dim + size + 16) * 2.0**-23
        scores = scores.masked_fill(~visible, -math.inf)
        if case.top_k is not None:
            weight, target, slack = visible.double().expand_as(scores), case.top_k - 1, torch.zeros_like(error)
        else:
            weight = torch.softmax(scores, dim=-1).nan_to_num(0.0)
            target, slack = case.top_p, (2 * blocks + 6) * 2.0**-24 + 4 * error
        kept = bitset.unpack_bits(bits[:, :, first:stop].permute(2, 0, 1))[..., :blocks]
        unsure = kept.new_zeros(kept.shape[:2])
        for block in range(blocks):
            own = scores[..., block : block + 1]
            above = (weight * (scores > own + 2 * error)).sum(-1)
            possible = (weight * (scores >= own - 2 * error)).sum(-1) - weight[..., block]
            seen = visible[..., block].expand_as(unsure)
            keep = seen & (possible < target - slack[..., 0])
            drop = ~seen | (above >= target + slack[..., 0])
            wrong += int(((keep & ~kept[..., block]) | (drop & kept[..., block])).sum())
            unsure |= ~(keep | drop)
        unexplained += int((differs[first:stop] & ~unsure).sum())
        unsure_rows, rows = unsure_rows + int(unsure.sum()), rows + unsure.numel()
    return {
        "wrong_blocks": wrong,
        "unsure_rows_share": unsure_rows / rows,
        "rows_unlike_torch_share": float(differs.double().mean()),
        "unexplained_rows": unexplained,
        "holds": wrong == 0 and unexplained == 0,
    }


def twice(shape: str, sizes: Sizes, device: str, results: Results) -> None:
    """At full length: two runs give the same bits, and a few tokens agree with fp64."""
    work = [(length, f"k={sizes.top_k}") for length in sizes.k_lengths]
    work += [(sizes.k_lengths[0], f"density={density:g}") for density in (sizes.densities[0], 1.0)]
    for length, selection in work:
        where = {"shape": shape, "length": length, "selection": selection, "dtype": sizes.dtype}
        inputs = make_inputs(sizes.shapes[shape], (length,), sizes.block_size, sizes.dtype, device)
        bits = bits_for(selection, inputs)
        runs = [gradients(functools.partial(inputs.attend, bits), inputs) for _ in range(2)]
        equal = same_bits(*runs) and torch.equal(bits, bits_for(selection, inputs))
        results.write("check", where | {"check": "run twice", "holds": equal})
        lse = inputs.attend_with_lse(bits, inputs.query, inputs.key, inputs.value)[1]
        spots = torch.randint(length, (SPOTS,), generator=torch.Generator().manual_seed(1)).to(device)
        spots[0] = length - 1  # of the longest row; the first token would not do: its gradient is nothing but rounding
        found = [tensor[spots] for tensor in runs[0]]
        rounded, exact = (
            spot_results(inputs.to(dtype), bits, spots, runs[0][0].to(dtype), lse)
            for dtype in (inputs.query.dtype, torch.float64)
        )
        results.accuracy(where, found, rounded, exact)
    for length in sizes.lengths:  # compiles the kernels of the other lengths
        inputs = make_inputs(sizes.shapes[shape], (length,), sizes.block_size, sizes.dtype, device)
        first, second = (inputs.select("triton", None, sizes.top_k) for _ in range(2))
        where = {"shape": shape, "length": length, "selection": f"k={sizes.top_k}", "dtype": sizes.dtype}
        results.write("check", where | {"check": "select twice", "holds": torch.equal(first, second)})


def spot_results(
    inputs: Inputs, bits: torch.Tensor, spots: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """out and dq of the tokens ``spots`` as queries, dk and dv of them as keys, in the dtype of ``inputs``.

    Keys need the log-sum-exp and the output of all queries: those are the kernels' own, which the queries check.
    """
    k, v, scale, dtype = inputs.key, inputs.value, inputs.scale, inputs.key.dtype
    wide = torch.promote_types(dtype, torch.float32)  # softmax and its gradient, as PyTorch's own
    q, d_out, out = (t.unflatten(1, (k.shape[1], -1)) for t in (inputs.query, inputs.d_out, out))  # [T, Hkv, G, D]
    token = torch.arange(len(k), device=k.device)
    block = token // inputs.block_size
    kept = bitset.unpack_bits(bits[:, :, spots].transpose(1, 2))[:, :, block] | (block[spots, None] == block)
    mask = (kept & (spots[:, None] >= token)).unflatten(0, q.shape[1:3])  # [Hkv, G, query, key]
    scores = torch.einsum("skgd,tkd->kgst", q[spots], k) * scale
    p = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    spot_out = torch.einsum("kgst,tkd->skgd", p, v)
    d_p = torch.einsum("skgd,tkd->kgst", d_out[spots], v).to(wide)
    delta = (d_out[spots].to(wide) * spot_out.to(wide)).sum(-1).permute(1, 2, 0)[..., None]
    dq = torch.einsum("kgst,tkd->skgd", (p * (d_p - delta)).to(dtype), k) * scale

    at = block[spots].int()
    kept = ((bits[:, at // bitset.WORD] >> (at % bitset.WORD)[:, None]) & 1) != 0  # [H, key, query]
    mask = ((kept | (block[spots, None] == block)) & (spots[:, None] <= token)).unflatten(0, q.shape[1:3])
    scores = (torch.einsum("tkgd,skd->kgst", q, k[spots]) * scale).to(wide)
    p = torch.exp(scores - lse.to(wide).unflatten(0, q.shape[1:3])[:, :, None]).masked_fill(~mask, 0.0).to(dtype)
    delta = (d_out.to(wide) * out.to(wide)).sum(-1).permute(1, 2, 0)[:, :, None]
    d_p = torch.einsum("tkgd,skd->kgst", d_out, v[spots]).to(wide)
    dk = torch.einsum("kgst,tkgd->skd", (p * (d_p - delta)).to(dtype), q) * scale
    dv = torch.einsum("kgst,tkgd->skd", p, d_out)
    return spot_out.flatten(1, 2), dq.flatten(1, 2), dk, dv


def bits_for(selection: str, inputs: Inputs) -> torch.Tensor:
    """Bits of one document: "k=8" selects, "density=0.1" sets each visible bit at random with that probability."""
    kind, _, value = selection.partition("=")
    if kind == "k":
        return inputs.select("triton", None, int(value))
    length, heads, device = len(inputs.query), inputs.query.shape[1], inputs.query.device
    words = bitset.words_for((0, length), inputs.block_size)
    bits = torch.empty(heads, words, length, dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(2)
    visible = torch.arange(length, device=device)[:, None] // inputs.block_size
    for word in range(bits.shape[1]):
        keep = torch.arange(bitset.WORD * word, bitset.WORD * (word + 1), device=device) < visible
        keep = keep & (torch.rand(heads, length, bitset.WORD, generator=generator, device=device) < float(value))
        bits[:, word] = bitset.pack_bits(keep)[..., 0]
    return bits
