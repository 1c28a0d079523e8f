"""What a simulated run trains on: lengths of documents, and how sparse each of them is.

Lengths come from published histograms, log-uniform inside a bucket, or from a user's own list. Densities come from an
analytic prior (a uniform gate), from a table measured on a trained model, or from curves measured by the user; two
documents of one length differ by a lognormal factor. What the planner knows of a document is either its own curve, as
after a first epoch, or only the middle curve of its length, as before it. Pure; everything depends on the seed only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_sparsebalance.density import TOP_P_GRID, DensityCurve, uniform_curve
from hf_sparsebalance.errors import UserError

__all__ = [
    "DENSITY_PRIORS",
    "DISTRIBUTIONS",
    "MEASURED_SPREAD",
    "Workload",
    "attended_share",
    "make_workload",
    "read_curves",
    "sample_lengths",
    "trained_curve",
]

DENSITY_PRIORS = ("trained", "uniform")
# Standard deviation of log density between files of one length, from the range over 10 files (range / 3.08).
MEASURED_SPREAD = 0.06


class _Bucket(NamedTuple):
    """Lengths from above `low` up to `high` tokens, and their share of all documents in percent."""

    low: int
    high: int
    percent: float
    uniform: bool = False  # log-uniform otherwise


K = 1024
# The first bucket's lower end is set so that its mean length is the published one.
DISTRIBUTIONS: dict[str, tuple[str, tuple[_Bucket, ...]]] = {
    "wikipedia": (
        "Wikipedia, 1,000,000 lengths published with FlexSP (arXiv 2412.01523)",
        (
            _Bucket(48, K, 78.81),
            _Bucket(K, 2 * K, 10.84),
            _Bucket(2 * K, 4 * K, 5.96),
            _Bucket(4 * K, 8 * K, 2.80),
            _Bucket(8 * K, 16 * K, 1.12),
            _Bucket(16 * K, 32 * K, 0.347),
            _Bucket(32 * K, 64 * K, 0.103),
            _Bucket(64 * K, 128 * K, 0.0228),
            _Bucket(128 * K, 256 * K, 0.0042),
            _Bucket(256 * K, 1820 * K, 0.0007),
        ),
    ),
    "prolong": (
        "ProLong-like, 77,932 lengths published with DistCA (arXiv 2510.18121)",
        (
            _Bucket(700, K, 14.97),
            _Bucket(K, 2 * K, 38.41),
            _Bucket(2 * K, 4 * K, 26.95),
            _Bucket(4 * K, 8 * K, 14.41),
            _Bucket(8 * K, 16 * K, 4.27),
            _Bucket(16 * K, 32 * K, 0.779),
            _Bucket(32 * K, 64 * K, 0.146),
            _Bucket(64 * K, 128 * K, 0.038),
            _Bucket(128 * K, 256 * K, 0.017),
            _Bucket(256 * K, 332 * K, 0.005),
        ),
    ),
    "wlb": (
        "WLB-LLM-like, 99,519 lengths published with DistCA (arXiv 2510.18121)",
        (
            _Bucket(210, K, 15.96),
            _Bucket(K, 2 * K, 15.79),
            _Bucket(2 * K, 4 * K, 31.95),
            _Bucket(4 * K, 8 * K, 33.93),
            _Bucket(8 * K, 16 * K, 1.04),
            _Bucket(16 * K, 32 * K, 0.451),
            _Bucket(32 * K, 64 * K, 0.355),
            _Bucket(64 * K, 122 * K, 0.531),
        ),
    ),
    "longalign": (
        "synthetic, after what is said of LongAlign-10k: 41 % even in 8-16K, 59 % falling from 16K to 72K",
        (_Bucket(8 * K, 16 * K, 41.0, True), _Bucket(16 * K, 72 * K, 59.0)),
    ),
    "chatqa2": (
        "synthetic, after what is said of ChatQA2-Long-SFT: half even in 256-4K, half even in 16-32K",
        (_Bucket(256, 4 * K, 50.0, True), _Bucket(16 * K, 32 * K, 50.0, True)),
    ),
}

# Density at each budget by length: SmolLM2-135M-Instruct, 30 layers, blocks of 64, 10 files a length (Python sources
# and English documentation). Beyond its ends density goes on as length ** -.35, its slope inside.
_TRAINED_TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_TRAINED = {
    1024: (0.26, 0.40, 0.50, 0.64, 0.75, 0.89),
    2048: (0.18, 0.29, 0.38, 0.50, 0.62, 0.79),
    4096: (0.12, 0.21, 0.28, 0.39, 0.50, 0.68),
}
_EXPONENT = -0.35


@dataclass(frozen=True, slots=True)
class Workload:
    """Documents of a simulated run.

    Attributes:
        lengths: tokens of each document.
        curves: each document's own density curve, on TOP_P_GRID: what its time follows.
        known_curves: what the planner takes for it.
        description: one sentence on where lengths and densities come from.
    """

    lengths: tuple[int, ...]
    curves: tuple[DensityCurve, ...]
    known_curves: tuple[DensityCurve, ...]
    description: str


def sample_lengths(distribution: str, num_documents: int, seed: int, max_length: int) -> list[int]:
    """Lengths drawn from a built-in distribution; longer documents are cut at max_length.

    Raises:
        UserError: unknown distribution, or a number below 1.
    """
    if distribution not in DISTRIBUTIONS:
        raise UserError(f"--distribution must be one of {', '.join(DISTRIBUTIONS)}, not {distribution!r}")
    if num_documents < 1 or max_length < 1:
        raise UserError(f"--num_documents and --max_length must be at least 1, not {num_documents} and {max_length}")
    buckets = DISTRIBUTIONS[distribution][1]
    random = np.random.default_rng(seed)
    percent = np.array([bucket.percent for bucket in buckets])
    chosen_N = random.choice(len(buckets), size=num_documents, p=percent / percent.sum())
    low_N = np.array([float(bucket.low) for bucket in buckets])[chosen_N]
    high_N = np.array([float(bucket.high) for bucket in buckets])[chosen_N]
    uniform_N = np.array([bucket.uniform for bucket in buckets])[chosen_N]
    draw_N = random.random(num_documents)
    tokens_N = np.where(uniform_N, low_N + draw_N * (high_N - low_N), low_N * (high_N / low_N) ** draw_N)
    lengths: list[int] = np.minimum(np.ceil(tokens_N), max_length).astype(int).tolist()
    return lengths


def make_workload(
    lengths: Sequence[int],
    *,
    block_size: int,
    prior: str = "trained",
    measured: Sequence[tuple[int, DensityCurve]] = (),
    spread: float = MEASURED_SPREAD,
    known: str = "length",
    seed: int = 0,
) -> Workload:
    """Give every document a density curve.

    Args:
        lengths: tokens of each document.
        block_size: tokens of an attention block.
        prior: where curves come from without measured ones: "trained" (`trained_curve`) or "uniform" (a gate without
            preferences, the upper end).
        measured: (length, curve) pairs of real documents; a simulated one takes one of the eight nearest in length,
            scaled by length ** -.35. They differ among themselves, so `spread` comes on top of a real spread.
        spread: standard deviation of the lognormal factor on a document's densities.
        known: "length" (the planner knows the middle curve of the length) or "sample" (each document's own).
        seed: of the spread and of the choice among measured curves.

    Raises:
        UserError: prior or known unknown, or spread negative or not finite.
    """
    if prior not in DENSITY_PRIORS:
        raise UserError(f"--density must be one of {', '.join(DENSITY_PRIORS)}, not {prior!r}")
    if known not in ("length", "sample"):
        raise UserError(f"--known must be length or sample, not {known!r}")
    if not 0.0 <= spread < math.inf:
        raise UserError(f"--spread must be at least 0, not {spread}: 0 makes all documents of a length alike")
    random = np.random.default_rng((seed, 1))
    factor_N = np.exp(spread * random.standard_normal(len(lengths)))
    if measured:
        ordered = sorted(measured, key=lambda pair: pair[0])
        log_M = np.log([length for length, _ in ordered])
        density_MP = np.array([curve.at_many(np.array(TOP_P_GRID)) for _, curve in ordered])
        near = min(8, len(ordered))
        pick_N = random.integers(near, size=len(lengths))
        middle_NP, own_NP = [], []
        for length, pick in zip(lengths, pick_N.tolist(), strict=True):
            nearest = np.argsort(np.abs(log_M - math.log(length)), kind="stable")[:near]
            scaled = density_MP[nearest] * np.exp(_EXPONENT * (math.log(length) - log_M[nearest]))[:, None]
            middle_NP.append(scaled.mean(axis=0))
            own_NP.append(scaled[pick])
        middle = [_curve(row, length <= block_size) for row, length in zip(middle_NP, lengths, strict=True)]
        source = f"densities from {len(ordered)} measured curves"
    else:
        make = trained_curve if prior == "trained" else uniform_curve
        rounded = [_rounded(length, block_size) for length in lengths]
        made = {length: make(length, block_size) for length in set(rounded)}
        middle = [made[length] for length in rounded]
        own_NP = [np.array(curve.density) for curve in middle]
        source = {
            "trained": "densities of a trained model (SmolLM2-135M at 1K-4K, as length ** -.35 beyond)",
            "uniform": "densities of a uniform gate (a trained model stays below)",
        }[prior]
    own = [
        _curve(row * factor, length <= block_size)
        for row, factor, length in zip(own_NP, factor_N.tolist(), lengths, strict=True)
    ]
    return Workload(
        tuple(lengths),
        tuple(own),
        tuple(middle if known == "length" else own),
        f"{source}, lognormal spread {spread:g} at equal length; the planner knows "
        + ("the middle curve of each length" if known == "length" else "each document's curve"),
    )


def trained_curve(length: int, block_size: int) -> DensityCurve:
    """Curve of a document in a trained model, interpolated in log length between the measured 1K, 2K and 4K.

    Between budgets it is linear, from density 0 at p = 0 to 1 at p = 1; a document within one block has density 1.
    """
    if length <= block_size:
        return DensityCurve(TOP_P_GRID, (1.0,) * len(TOP_P_GRID))
    inside = min(max(length, min(_TRAINED)), max(_TRAINED))
    at = np.log(list(_TRAINED))
    log_density = [np.interp(math.log(inside), at, np.log(column)) for column in zip(*_TRAINED.values(), strict=True)]
    density = np.minimum(np.exp(log_density) * (length / inside) ** _EXPONENT, 1.0)
    return _curve(np.interp(TOP_P_GRID, (0.0, *_TRAINED_TOP_P, 1.0), (0.0, *density, 1.0)), False)


def attended_share(length: int, block_size: int, density: float) -> float:
    """Attended / causally visible (query, key) pairs of a document, its own blocks included."""
    whole, rest = divmod(length, block_size)
    own = whole * block_size * (block_size + 1) // 2 + rest * (rest + 1) // 2
    visible = length * (length + 1) // 2
    return (own + density * (visible - own)) / visible


def read_curves(data: Any, where: str) -> list[tuple[int, DensityCurve]]:
    """(length, curve) of each entry of a curves file: a list of {"length", "top_p": [...], "density": [...]}.

    Raises:
        UserError: an entry is not of that form; `where` names the file.
    """
    remedy = 'a list of {"length": tokens, "top_p": [...], "density": [...]} is read'
    if not isinstance(data, list) or not data:
        raise UserError(f"{where}: {remedy}")
    curves = []
    for number, entry in enumerate(data, start=1):
        try:
            length = int(entry["length"])
            if length < 1:
                raise ValueError(f"length {length}")
            curves.append((length, DensityCurve.from_measured(entry["top_p"], entry["density"])))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}, entry {number}: {error!r}: {remedy}") from error
    return curves


def _rounded(length: int, block_size: int) -> int:
    """A length within 3 % that many documents share: curves of 100,000 documents are made in no time."""
    return length if length <= block_size else max(round(2 ** (round(math.log2(length) * 12) / 12)), block_size + 1)


def _curve(density_P: NDArray[np.float64], dense: bool) -> DensityCurve:
    if dense:
        return DensityCurve(TOP_P_GRID, (1.0,) * len(TOP_P_GRID))
    return DensityCurve.from_measured(TOP_P_GRID, density_P.tolist())
