"""What a latency profile holds: the measured table, what it was measured on, and its JSON file.

`sparsebalance profile` writes it, latency.py reads it. Every field is checked on the way in: a profile is a user's
file, and a wrong number in it would not show but in a bad plan.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hf_sparsebalance.errors import UserError

__all__ = ["LatencyProfile", "LengthRow", "ProfileContext", "SparsePoint"]

PROFILE_FORMAT = 2
_REMEDY = "run `sparsebalance profile` to write a new one"


@dataclass(frozen=True, slots=True)
class ProfileContext:
    """What a profile holds for; a profile is refused wherever one of these differs.

    Attributes:
        device: name of the device, as torch reports it ("NVIDIA H200") or a CPU's model name.
        num_threads: compute threads of one process; 0 on an accelerator, where they change nothing.
        num_processes: processes that share the host.
        attention: name of the attention implementation ("sparsebalance", "sdpa").
        backend: backend of the operator ("torch", "triton"); "transformers" for another attention.
        dtype: dtype of the activations ("bfloat16").
        num_heads, num_kv_heads, head_dim, num_layers, hidden_size, intermediate_size, vocab_size: shape of the model;
            0 where its configuration has no such field.
        num_dense_layers: layers that attend densely whatever the budget; all of them with another attention.
        block_size: tokens of an attention block; 128 with another attention, which has none.
        gradient_checkpointing: whether the backward times include a recomputed forward.
        versions: library name -> exact version string (torch, transformers).
    """

    device: str
    num_threads: int
    num_processes: int
    attention: str
    backend: str
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    num_dense_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    gradient_checkpointing: bool
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class SparsePoint:
    """Sparse attention of one layer over one document at one density (kept / visible history blocks)."""

    density: float
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Attention of ONE layer over one document of `length` tokens: dense kernel, and sparse at several densities."""

    length: int
    dense_forward_ms: float
    dense_backward_ms: float
    points: tuple[SparsePoint, ...]


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """A measured profile: attention rows by length, the model's linear part, and what they hold for.

    Attributes:
        context: what the numbers hold for.
        attention: at least two rows, strictly increasing in length, each with points of increasing density.
        forward_ms_per_token, backward_ms_per_token: everything but attention, whole model.
        forward_ms_constant, backward_ms_constant: fixed cost of one micro-batch, whole model.

    Raises:
        UserError: a number is missing, negative or not finite, or rows or points are out of order.
    """

    context: ProfileContext
    attention: tuple[LengthRow, ...]
    forward_ms_per_token: float
    backward_ms_per_token: float
    forward_ms_constant: float
    backward_ms_constant: float

    def __post_init__(self) -> None:
        if not 0 <= self.context.num_dense_layers <= self.context.num_layers or self.context.num_layers < 1:
            raise _bad("num_layers must be at least 1, and num_dense_layers no more than it")
        if len(self.attention) < 2:
            raise _bad("needs at least two profiled lengths")
        for name in _LINEAR_FIELDS:
            _check_ms(getattr(self, name), name)
        previous_length = 0
        for row in self.attention:
            where = f"attention row of length {row.length}"
            if not row.length > previous_length:
                raise _bad("attention rows must be strictly increasing in length, from 1")
            previous_length = row.length
            _check_ms(row.dense_forward_ms, f"{where}: dense_forward_ms")
            _check_ms(row.dense_backward_ms, f"{where}: dense_backward_ms")
            if not row.points:
                raise _bad(f"{where}: no sparse points")
            previous_density = -1.0
            for point in row.points:
                _check_ms(point.forward_ms, f"{where}: forward_ms")
                _check_ms(point.backward_ms, f"{where}: backward_ms")
                if not (0.0 <= point.density <= 1.0 and point.density > previous_density):
                    raise _bad(f"{where}: densities must be strictly increasing in [0, 1]")
                previous_density = point.density

    def to_json(self) -> dict[str, Any]:
        """The profile as plain JSON-able data, with its format number."""
        return {"format": PROFILE_FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LatencyProfile:
        """Read a profile written by `save`.

        Raises:
            UserError: file missing or unreadable, not JSON, of another format, or with missing or impossible values.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--profile {path}: cannot be read ({error.strerror}): {_REMEDY}") from error
        except ValueError as error:
            raise UserError(f"--profile {path}: not valid JSON ({error}): {_REMEDY}") from error
        try:
            return cls.from_json(data)
        except UserError as error:
            raise UserError(str(error).replace("--profile:", f"--profile {path}:", 1)) from error

    @classmethod
    def from_json(cls, data: object) -> LatencyProfile:
        """Build a profile from `to_json()` data; raises UserError as `load` does."""
        top = _mapping(data, "the file")
        if top.get("format") != PROFILE_FORMAT:
            raise _bad(f"format {top.get('format')!r} where {PROFILE_FORMAT} is read")
        context = _mapping(_get(top, "context"), "context")
        values: dict[str, Any] = {}
        for entry in fields(ProfileContext):
            values[entry.name] = value = _get(context, entry.name)
            if type(value) is not _CONTEXT_TYPES[entry.type]:
                raise _bad(f"context field {entry.name} must be {entry.type}, not {value!r}")
        rows = []
        for raw in _list(_get(top, "attention"), "attention"):
            row = _mapping(raw, "attention row")
            length = _get(row, "length")
            if type(length) is not int:
                raise _bad(f"length must be a whole number, not {length!r}")
            points = [_mapping(point, "point") for point in _list(_get(row, "points"), "points")]
            rows.append(
                LengthRow(
                    length,
                    _number(row, "dense_forward_ms"),
                    _number(row, "dense_backward_ms"),
                    tuple(SparsePoint(*(_number(p, f.name) for f in fields(SparsePoint))) for p in points),
                )
            )
        return cls(ProfileContext(**values), tuple(rows), *(_number(top, name) for name in _LINEAR_FIELDS))

    def check(self, context: ProfileContext) -> None:
        """Refuse to be used where it does not hold.

        Raises:
            UserError: listing every field that differs, with the profile's and the present value.
        """
        differing = []
        for entry in fields(ProfileContext):
            ours, theirs = getattr(self.context, entry.name), getattr(context, entry.name)
            if entry.name == "versions":
                differing += [
                    f"{name} {ours.get(name, 'none')} (now {theirs.get(name, 'none')})"
                    for name in sorted(ours.keys() | theirs.keys())
                    if ours.get(name) != theirs.get(name)
                ]
            elif ours != theirs:
                differing.append(f"{entry.name} {ours} (now {theirs})")
        if differing:
            raise UserError(
                f"--profile was measured with other settings: {', '.join(differing)}: {_REMEDY} (--threads, "
                "--processes, --dtype, --block_size, --attn_implementation and --gradient_checkpointing say for what)"
            )


_LINEAR_FIELDS = ("forward_ms_per_token", "backward_ms_per_token", "forward_ms_constant", "backward_ms_constant")
# Keyed by the annotation as written: annotations are strings in this module.
_CONTEXT_TYPES: dict[Any, type] = {"str": str, "int": int, "bool": bool, "dict[str, str]": dict}


def _bad(what: str) -> UserError:
    return UserError(f"--profile: {what}: {_REMEDY}")


def _check_ms(value: float, where: str) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise _bad(f"{where} must be a time of at least 0 ms, not {value}")


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(f"{where} must be an object")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(f"{where} must be a list")
    return value


def _get(data: dict[str, Any], name: str) -> Any:
    if name not in data:
        raise _bad(f"field {name} is missing")
    return data[name]


def _number(data: dict[str, Any], name: str) -> float:
    value = _get(data, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(f"{name} must be a number, not {value!r}")
    return float(value)
