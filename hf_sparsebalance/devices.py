"""A latency profile to simulate with where there is no device to measure: an H100, from published kernel times.

Source: the profile that DistCA (arXiv 2510.18121) published of FlashAttention's causal forward pass, 64 query heads, 4
key heads of 128, bf16, and of the linear layers at 32K tokens (2.60 + 1.45 + 12.2 ms). Everything else is assumed:
- backward takes twice the forward;
- sparse attention takes the dense kernel's time x the attended share of the pairs, but never less than the shortest
  kernel (.0284 ms); scoring and selecting blocks is free;
- 36 layers (as Qwen2.5-3B has; a factor on everything), no constant cost per micro-batch.
With these numbers dense attention costs as much as the linear layers at 10.3K tokens.
"""

from __future__ import annotations

from hf_sparsebalance.latency_profile import LatencyProfile, LengthRow, ProfileContext, SparsePoint
from hf_sparsebalance.workloads import attended_share

__all__ = ["DEVICES", "H100_ASSUMPTIONS", "h100_profile"]

DEVICES = ("h100",)
H100_ASSUMPTIONS = (
    "built-in H100 table (64 heads of 128, 36 layers): published FlashAttention forward and linear times; assumed: "
    "backward = 2 x forward, sparse = attended share x dense with a floor of .0284 ms, selection free"
)

_FORWARD_MS = {
    64: 0.0284,
    128: 0.0304,
    256: 0.0366,
    512: 0.0613,
    1024: 0.133,
    2048: 0.355,
    4096: 1.055,
    8192: 3.707,
    16384: 13.50,
    32768: 51.89,
    65536: 206.29,
}
_LINEAR_MS = (2.60 + 1.45 + 12.2) / 32768  # per token and layer, forward
_NUM_LAYERS = 36
_BACKWARD = 2.0
_DENSITIES = tuple(i / 20 for i in range(21))


def h100_profile(block_size: int = 256) -> LatencyProfile:
    """The table as a profile, for attention in blocks of `block_size` tokens (the paper's 256)."""
    floor_ms = min(_FORWARD_MS.values())
    rows = []
    for length, dense_ms in _FORWARD_MS.items():
        sparse_ms = [max(floor_ms, dense_ms * attended_share(length, block_size, d)) for d in _DENSITIES]
        points = [SparsePoint(d, ms, _BACKWARD * ms) for d, ms in zip(_DENSITIES, sparse_ms, strict=True)]
        rows.append(LengthRow(length, dense_ms, _BACKWARD * dense_ms, tuple(points)))
    context = ProfileContext(
        device="NVIDIA H100 (built-in table)",
        num_threads=0,
        num_processes=1,
        attention="sparsebalance",
        backend="table",
        dtype="bfloat16",
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        num_layers=_NUM_LAYERS,
        num_dense_layers=0,
        hidden_size=8192,
        intermediate_size=0,
        vocab_size=0,
        block_size=block_size,
        gradient_checkpointing=False,
        versions={},
    )
    linear_ms = _LINEAR_MS * _NUM_LAYERS
    return LatencyProfile(context, tuple(rows), linear_ms, _BACKWARD * linear_ms, 0.0, 0.0)
