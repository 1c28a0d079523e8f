"""What the operator refuses, and what it makes of its arguments: one line that names the argument and the way out."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os

import torch

from sparsebalance_kernels.selection import Budget

BACKENDS = ("auto", "torch", "triton", "reference")
TRITON_BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
TRITON_MOST_HEAD_DIM = 256
MOST_BLOCKS = 2**31  # numbers of blocks and tokens are int32 on the way
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def score_scale(query: torch.Tensor, scale: float | None) -> float:
    """The factor of the scores: ``D ** -0.5`` unless given, and finite."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Under torch.compile the value may be a symbol, which has no isfinite; values go unchecked there.
    if not torch.compiler.is_compiling() and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def half_backend(backend: str, query: torch.Tensor, block_size: int) -> str:
    """A backend that has a selection: any but the reference."""
    chosen = choose_backend(backend, query, block_size)
    if chosen == "reference":
        raise ValueError("backend='reference' computes both halves at once: use block_sparse_attention")
    return chosen


def choose_backend(backend: str, query: torch.Tensor, block_size: int) -> str:
    """The backend that will run: "torch", "triton" or "reference"."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend not in ("auto", "triton"):
        return backend
    obstacle = _obstacle_to_triton(query, block_size)
    if backend == "triton" and obstacle:
        raise ValueError(f"backend='triton' {obstacle}: use backend='torch'")
    return "torch" if obstacle or (backend == "auto" and query.device.type == "cpu") else "triton"


def _obstacle_to_triton(query: torch.Tensor, block_size: int) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on a GPU, or on the CPU under TRITON_INTERPRET=1"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    if query.dtype == torch.float64:
        return "computes in float32 and has no float64"
    if block_size not in TRITON_BLOCK_SIZES:
        return f"takes block_size {', '.join(map(str, TRITON_BLOCK_SIZES))}, not {block_size}"
    if query.shape[2] > TRITON_MOST_HEAD_DIM:
        return f"takes a head_dim of at most {TRITON_MOST_HEAD_DIM}, not {query.shape[2]}"
    return None


def check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ValueError unless query, key and value fit each other."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 3:
            raise ValueError(f"{name} must be packed as [tokens, heads, head_dim], got shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, but query is {query.dtype} on {query.device}"
            )
    if key.shape != value.shape or key.shape[0] != query.shape[0] or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must both be [tokens, kv_heads, head_dim] with "
            f"the tokens and head_dim of query {tuple(query.shape)}"
        )
    if 0 in query.shape[1:]:
        raise ValueError(f"query needs at least one head and a head_dim of at least 1, got shape {tuple(query.shape)}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"query heads ({query.shape[1]}) must be a multiple of key heads ({key.shape[1]})")


def check_options(
    top_p: float | torch.Tensor | None,
    top_k: int | torch.Tensor | None,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
) -> None:
    """Raise ValueError for options that are wrong whatever the tensors hold."""
    if (top_p is None) == (top_k is None):
        raise ValueError("give exactly one of top_p and top_k")
    check_block_size(block_size)
    for name, number in (("min_blocks", min_blocks), ("sink_blocks", sink_blocks), ("max_blocks", max_blocks)):
        if number is None and name == "max_blocks":
            continue
        if not isinstance(number, int) or not 0 <= number < MOST_BLOCKS:
            raise ValueError(f"{name} must be a whole number from 0 to 2**31 - 1, got {number!r}")
    if max_blocks is not None and max_blocks < max(min_blocks, sink_blocks):
        raise ValueError(
            f"max_blocks ({max_blocks}) is below min_blocks ({min_blocks}) or sink_blocks ({sink_blocks})"
        )


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless it is a whole number above 0."""
    if not isinstance(block_size, int) or not 1 <= block_size < MOST_BLOCKS:
        raise ValueError(f"block_size must be a whole number from 1 to 2**31 - 1, got {block_size!r}")


def check_boundaries(cu_seqlens: torch.Tensor, num_tokens: int) -> list[int]:
    """Document starts as host integers; ValueError unless they rise from 0 to ``num_tokens``."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise ValueError(f"cu_seqlens must be an int32 or int64 tensor [documents + 1], got {cu_seqlens!r}")
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.numel() == 0:
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [documents + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    boundaries: list[int] = cu_seqlens.tolist()
    rising = all(start <= stop for start, stop in itertools.pairwise(boundaries))
    if boundaries[0] != 0 or boundaries[-1] != num_tokens or not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens ({num_tokens}), got {boundaries[:8]}..."
        )
    return boundaries


def _per_document(value: float | int | torch.Tensor, num_documents: int, name: str) -> list[float]:
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} must be a number, or a tensor with one per document, got {value!r}")
        return [value] * num_documents
    if value.ndim == 0:
        return [value.item()] * num_documents
    if value.shape != (num_documents,):
        raise ValueError(f"{name} must be a number or one per document ({num_documents}), got {tuple(value.shape)}")
    numbers: list[float] = value.tolist()
    return numbers


def check_budget(
    num_documents: int,
    top_p: float | torch.Tensor | None,
    top_k: int | torch.Tensor | None,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    sink_blocks: int,
) -> Budget:
    """The budget of each document as host numbers; ValueError for values out of range."""
    probabilities: tuple[float, ...] | None = None
    counts: tuple[int, ...] | None = None
    if top_p is not None:
        probabilities = tuple(_per_document(top_p, num_documents, "top_p"))
        if not all(0.0 < p <= 1.0 for p in probabilities):
            raise ValueError(f"top_p must lie in (0, 1], got {probabilities[:8]}")
    if top_k is not None:
        numbers = _per_document(top_k, num_documents, "top_k")
        if not all(k >= 1 and float(k).is_integer() for k in numbers):
            raise ValueError(f"top_k must be a whole number of at least 1 (the own block), got {numbers[:8]}")
        counts = tuple(min(int(k), MOST_BLOCKS - 1) for k in numbers)
    return Budget(block_size, probabilities, counts, min_blocks, max_blocks, sink_blocks)
