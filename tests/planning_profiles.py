"""Synthetic profiles with a known formula, for the tests of the planning modules.

One layer, forward: dense c + d * L * L; sparse c + a * L * L * density + b * L; backward twice that. With a > d and a
cost b of the gate, the dense kernel beats the sparse one above some density, as on real devices.
"""

from __future__ import annotations

from hf_sparsebalance.density import DensityCurve
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile, LengthRow, ProfileContext, SparsePoint

BLOCK_SIZE = 64
NUM_LAYERS = 4
LENGTHS = tuple(64 * 2**i for i in range(10))
DENSITIES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
DENSE_MS = 4e-8  # per pair
SPARSE_MS = 6e-8  # per kept pair
GATE_MS = 2e-6  # per token
FLOOR_MS = 0.03


def context(**changes: object) -> ProfileContext:
    values: dict[str, object] = {
        "device": "toy",
        "num_threads": 2,
        "num_processes": 1,
        "attention": "sparsebalance",
        "backend": "torch",
        "dtype": "float32",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "num_layers": NUM_LAYERS,
        "num_dense_layers": 0,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 256,
        "block_size": BLOCK_SIZE,
        "gradient_checkpointing": False,
        "versions": {"torch": "2.13.0", "transformers": "5.0.0"},
    }
    return ProfileContext(**{**values, **changes})  # type: ignore[arg-type]


def dense_ms(length: float, floor_ms: float = FLOOR_MS) -> float:
    return floor_ms + DENSE_MS * length * length


def sparse_ms(length: float, density: float, floor_ms: float = FLOOR_MS) -> float:
    return floor_ms + SPARSE_MS * length * length * density + GATE_MS * length


def profile(floor_ms: float = FLOOR_MS) -> LatencyProfile:
    rows = tuple(
        LengthRow(
            length,
            dense_ms(length, floor_ms),
            2 * dense_ms(length, floor_ms),
            tuple(
                SparsePoint(d, sparse_ms(length, d, floor_ms), 2 * sparse_ms(length, d, floor_ms)) for d in DENSITIES
            ),
        )
        for length in LENGTHS
    )
    return LatencyProfile(context(), rows, 5e-4, 1e-3, 0.2, 0.3)


def predictor() -> LatencyPredictor:
    return LatencyPredictor(profile())


def peaked_curve(sharpness: float) -> DensityCurve:
    """density = p ** sharpness on a grid of .1: the larger the sharpness, the more peaked the gate."""
    grid = tuple(i / 10 for i in range(1, 11))
    return DensityCurve.from_measured(grid, tuple(p**sharpness for p in grid))
