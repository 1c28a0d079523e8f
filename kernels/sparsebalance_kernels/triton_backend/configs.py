"""Tile sizes, warps and pipeline stages of the kernels, and how much workspace a call may take.

Pure functions of dtype, head dim and block size; nothing is tuned on the device, because another tiling is another
order of summation: a table gives the same bits in every process and in every replay of a checkpointed layer.
The bounds that the tables keep (shared memory, registers without spills, tensor cores) are checked by compiling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# Partial results of one slab of query blocks; a slab ends before it would hold more.
WORKSPACE_BYTES = 512 * 2**20

# Smallest extent of a tensor-core product.
LEAST_TILE = 16


@dataclass(frozen=True)
class TileConfig:
    """One program's tile: ``rows`` queries by ``keys`` keys at a time; most registers per thread, if limited."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def largest_tile(block_size: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``block_size``, a multiple of 16 (in tokens).

    Example: 96 -> 32, whatever ``most`` >= 32 is.
    """
    if block_size % LEAST_TILE:
        raise ValueError(f"block_size must be a multiple of {LEAST_TILE} for the triton backend, got {block_size}")
    return min(block_size & -block_size, most)


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile that holds one head: the next power of two, at least 16."""
    return max(LEAST_TILE, 1 << (head_dim - 1).bit_length())


# Tiles of the forward kernels: (most padded head dim, tile) for 2 and for 4 bytes an element.  128 rows read a key
# from the L2 cache half as often as 64.  More than 32 keys spill on Ampere, whose matrix units read registers only.
# With 128 registers a thread two programs of 8 warps share an SM: while one waits the other computes.
_TILE_FORWARD = {
    2: (
        (64, TileConfig(128, 32, 8, 3, max_registers=128)),
        (128, TileConfig(128, 32, 8, 3)),
        (256, TileConfig(64, 32, 8, 2)),
    ),
    4: ((128, TileConfig(32, 32, 4, 2)), (256, TileConfig(16, 16, 4, 2))),
}
# Items of gather_forward are short and wait for memory most of the time: two are to share an SM.
_GATHER_FORWARD = {
    2: ((128, TileConfig(128, 32, 8, 3, max_registers=128)), (256, TileConfig(64, 32, 8, 2))),
    4: ((128, TileConfig(32, 32, 4, 2)), (256, TileConfig(16, 16, 4, 2))),
}


def query_tile(dtype: torch.dtype, head_dim: int, block_size: int) -> int:
    """Tokens per q tile, on any device: what indexing.tile_lists and the tile kernels of both directions share."""
    return tile_forward_config(dtype, head_dim, block_size).rows


def tile_forward_config(dtype: torch.dtype, head_dim: int, block_size: int) -> TileConfig:
    """Tiles of forward.tile_forward; ``keys`` divides ``rows``, which divides the block."""
    most = _entry(_TILE_FORWARD, dtype, head_dim)
    rows = largest_tile(block_size, most.rows)
    if rows < most.rows:
        warps = max(2, most.num_warps * rows // most.rows)
        if head_dim < padded_head_dim(head_dim):
            # Masks of columns take registers of their own, and so does each stage.
            return TileConfig(rows, min(rows, most.keys), 2 * warps, 2)
        return TileConfig(rows, min(rows, most.keys), warps, most.num_stages)
    return most


def gather_forward_config(dtype: torch.dtype, head_dim: int, block_size: int, hopper: bool = False) -> TileConfig:
    """Tiles of forward.gather_forward; ``rows`` is the most pairs of a list that one item covers."""
    most = _entry(_GATHER_FORWARD, dtype, head_dim)
    if dtype.itemsize == 2 and head_dim <= 128:
        if block_size == largest_tile(block_size, 128 if hopper and head_dim > 64 else 64):
            # The whole block at once: all its loads start early, and no maximum runs.
            return TileConfig(most.rows, block_size, most.num_warps, 1, max_registers=128 if hopper else None)
        if hopper and head_dim <= 64:
            most = replace(most, keys=64)
        elif head_dim < padded_head_dim(head_dim):
            # Masks of columns take registers of their own.
            most = replace(most, max_registers=None)
    return replace(most, keys=largest_tile(block_size, most.keys))


def is_hopper(device: torch.device) -> bool:
    """Whether matrix units read shared memory, of which there are 227 KiB: Hopper and Blackwell of data centres."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device)[0] in (9, 10)


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of the normalised partial outputs of (row, block) pairs: the input's own."""
    return dtype


def dot_precision(device: torch.device) -> str:
    """``input_precision`` of fp32 products: three TF32 products on CUDA, plain fp32 elsewhere (interpreter too)."""
    return "tf32x3" if device.type == "cuda" and torch.version.hip is None else "ieee"


# Tiles of the backward kernels: (most padded head dim, tile) for 2 and for 4 bytes an element.  With 4 warps a program
# may have 168 registers a thread if three, 255 if two of them are to share an SM; while one waits another computes.
_GATHER_DQ = {
    2: ((64, TileConfig(64, 32, 4, 2)), (128, TileConfig(64, 32, 4, 2, 168)), (256, TileConfig(32, 32, 4, 2))),
    4: ((64, TileConfig(32, 32, 4, 2)), (128, TileConfig(16, 32, 4, 2)), (256, TileConfig(16, 16, 4, 2))),
}
_TILE_DQ = {
    2: ((64, TileConfig(64, 32, 4, 3)), (128, TileConfig(64, 32, 4, 3, 168)), (256, TileConfig(32, 32, 4, 3))),
    4: ((64, TileConfig(32, 16, 4, 3)), (128, TileConfig(16, 32, 4, 3)), (256, TileConfig(16, 16, 4, 3))),
}
_DKDV = {
    2: ((64, TileConfig(32, 128, 4, 3)), (128, TileConfig(32, 64, 4, 3)), (256, TileConfig(16, 32, 4, 3))),
    4: ((64, TileConfig(16, 32, 4, 3)), (128, TileConfig(16, 16, 4, 3)), (256, TileConfig(16, 16, 4, 3))),
}
# Hopper multiplies 64 x 64 from shared memory at full speed, 64 x 32 not; two programs still share an SM.
_DKDV_SM90 = TileConfig(64, 64, 4, 3)


def gather_dq_config(dtype: torch.dtype, head_dim: int, block_size: int) -> TileConfig:
    """Tiles of backward_dq.gather_dq; ``rows`` is the most pairs of a list that one item covers."""
    most = _entry(_GATHER_DQ, dtype, head_dim)
    return replace(most, keys=largest_tile(block_size, most.keys))


def tile_dq_config(dtype: torch.dtype, head_dim: int, block_size: int) -> TileConfig:
    """Tiles of backward_dq.tile_dq; ``rows`` divides :func:`query_tile`, both divide the block."""
    most = _entry(_TILE_DQ, dtype, head_dim)
    rows = min(most.rows, query_tile(dtype, head_dim, block_size))
    most = replace(most, keys=largest_tile(block_size, most.keys))
    if rows == most.rows:
        return most
    return replace(most, rows=rows, num_warps=max(1, most.num_warps * rows // most.rows), max_registers=None)


def dkdv_config(dtype: torch.dtype, head_dim: int, block_size: int, sm90: bool = False) -> TileConfig:
    """Tiles of backward_dkdv.dkdv: ``keys`` of a block against ``rows`` of its list at a time."""
    most = _entry(_DKDV, dtype, head_dim)
    keys = largest_tile(block_size, most.keys)
    if sm90 and dtype.itemsize == 2 and head_dim <= 128 and keys >= 64:
        return _DKDV_SM90
    return replace(most, keys=keys)


def dkdv_rows_per_item(num_pairs: int) -> int:
    """Pairs of one item of dK and dV, of a call with so many: pieces of long lists share out what one would do alone.

    Reading 1024 rows outweighs writing the item's sums.  Where there are thousands of items anyway, larger ones leave
    fewer sums to keep, and so fewer slabs: at density 1 and 128K tokens of 28 heads 130 instead of 470.
    """
    return 1024 if num_pairs < 2**25 else 4096


def is_sm90(device: torch.device) -> bool:
    """Hopper alone; Blackwell copies more operands to shared memory, which then holds only one larger program."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device)[0] == 9


def _entry(table: dict[int, tuple[tuple[int, TileConfig], ...]], dtype: torch.dtype, head_dim: int) -> TileConfig:
    for most, config in table[dtype.itemsize]:
        if head_dim <= most:
            return config
    raise ValueError(f"head_dim {head_dim} is above {most}, the most that the triton backend takes")


def launch_options(config: TileConfig, device: torch.device) -> dict[str, int]:
    """Keyword arguments of a launch; only NVIDIA's compiler can be told how many registers to use."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None and device.type == "cuda" and torch.version.hip is None:
        options["maxnreg"] = config.max_registers
    return options
