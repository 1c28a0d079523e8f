"""What plans are made of: settings of a run, the plan of a step, and what a micro-batch showed.  Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_sparsebalance.density import DensityCurve

__all__ = ["Measured", "PlanSettings", "StepPlan"]


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What the plan depends on beside the data.

    Attributes:
        batching: strategy of :func:`plan_batches`.
        num_ranks, num_slots: data-parallel ranks, and micro-batches per rank and step.
        batch_size: documents per micro-batch.
        seed: seed of the shuffles.
        window: global batches planned together.
        max_tokens: most tokens of a micro-batch, or None.
        base_top_p: budget without tuning, in (0, 1]; None for dense attention, or with base_top_k.
        tolerance: largest loss of coverage; 0 turns the tuning off.
        anchor, scope: see :func:`tune_sparsity`.
        block_size: tokens per attention block.
        refit: whether measured times move the predictor's constants.
        base_top_k: budget without tuning, in blocks, the own one included; None for dense attention, or with
            base_top_p.
        least_top_k: the smallest k that makes a difference: 1 + what min_blocks or sink_blocks keep in any case.
        num_stages: stages of each rank's pipeline; 1 without pipelines.
        rank_speed: whether ranks that take longer than others for the same work get less of it.
    """

    batching: str
    num_ranks: int
    num_slots: int
    batch_size: int
    seed: int
    window: int
    max_tokens: int | None
    base_top_p: float | None
    tolerance: float
    anchor: str
    scope: str
    block_size: int
    refit: bool
    base_top_k: int | None = None
    least_top_k: int = 1
    num_stages: int = 1
    rank_speed: bool = False

    @property
    def base(self) -> float | None:
        """The budget without tuning, a p or a k; None for dense attention."""
        return self.base_top_p if self.base_top_k is None else self.base_top_k

    @property
    def global_batch(self) -> int:
        """Documents of one optimizer step."""
        return self.num_ranks * self.num_slots * self.batch_size

    @property
    def tunes(self) -> bool:
        """Whether budgets move at all."""
        return self.tolerance > 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What one micro-batch showed.

    Attributes:
        samples: its sample numbers.
        top_p: the budget it ran with; None for dense attention and for a top_k.
        total_ms: its forward and backward time; None where that is not its own (it waited for other ranks).
        curve: its density curve, or None when no gate was computed, or with a top_k.
        density: its density, averaged over all layers, always dense ones included; None when no gate was computed.
    """

    samples: tuple[int, ...]
    top_p: float | None
    total_ms: float | None
    curve: DensityCurve | None
    density: float | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step was planned to do; sequences in the order of :meth:`Planner.micro_batches`.

    Attributes:
        top_p, top_k: budget of each micro-batch, a p or the k of its anchor; both None for dense attention.
        predicted_ms: predicted time of each micro-batch; None without a predictor.
        scales: how far the predictor's attention and linear times have drifted from the profile's; None without one.
        anchor_ms, num_missed: see :class:`~hf_sparsebalance.tuning.Tuning`; None and 0 without tuning.
    """

    top_p: tuple[float, ...] | None
    predicted_ms: tuple[float, ...] | None
    scales: tuple[float, float] | None
    anchor_ms: float | None = None
    num_missed: int = 0
    top_k: tuple[int, ...] | None = None

    @classmethod
    def from_json(
        cls,
        top_p: Sequence[float] | None,
        predicted_ms: Sequence[float] | None,
        scales: Sequence[float] | None,
        anchor_ms: float | None,
        num_missed: int,
        top_k: Sequence[int] | None,
    ) -> StepPlan:
        """From the fields of one, in order, as JSON holds them."""
        budgets, times = (None if values is None else tuple(map(float, values)) for values in (top_p, predicted_ms))
        drift = None if scales is None else (float(scales[0]), float(scales[1]))
        anchor_ms = None if anchor_ms is None else float(anchor_ms)
        blocks = None if top_k is None else tuple(map(int, top_k))
        return cls(budgets, times, drift, anchor_ms, int(num_missed), blocks)
