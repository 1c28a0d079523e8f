"""What a run plans and what it learns: batches per epoch, budgets per step, and the state that a resumed run needs.

Every rank holds the same planner, feeds it the same measurements in the same order, and so plans the same without
talking.  The batches of an epoch depend only on the seed, the epoch, the lengths and a snapshot taken when the epoch
is first planned; the budgets also depend on what was measured since.  Steps planned ahead of time are part of the
state: a resumed run takes them as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hf_sparsebalance.batching import COST_STRATEGIES, BatchPlan, plan_batches
from hf_sparsebalance.density import CurveStore, DensityCurve, share_curve, share_density, top_k_density
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor
from hf_sparsebalance.plans import Measured, PlanSettings, StepPlan
from hf_sparsebalance.rank_speed import RankSpeeds
from hf_sparsebalance.tuning import MicroBatch, Tuning, candidate_budgets, tune_sparsity, tune_top_k

_SAME_NAME = (
    *("batching", "seed", "max_tokens", "window", "rank_speed"),
    *("base_top_p", "base_top_k", "tolerance", "block_size"),
)
# What a user calls the things that the order of documents depends on.
_OPTIONS = {
    "lengths": "--data or --max_length (digest)",
    "profile": "--profile (digest)",
    "num_ranks": "num_ranks",
    "num_slots": "--gradient_accumulation_steps",
    "batch_size": "--per_device_train_batch_size",
    "num_stages": "--pipeline_parallel_size",
    **{name: f"--{name}" for name in _SAME_NAME},
}

# Of each document: length, density, whether the dense kernel runs.
_Documents: TypeAlias = tuple[list[int], list[float], list[bool]]

# Long enough for a stable fit, short enough to follow a machine that slows down; of many ranks a sample will do.
STEPS_KEPT = 64
OBSERVATIONS_PER_STEP = 32


class Planner:
    """Plans one training run from its lengths.

    Args:
        settings: see :class:`PlanSettings`.
        lengths: tokens of each sample.
        predictor: needed by ``sparsity_aware`` and ``wlb`` batching and by tuning.
        num_epochs: how many epochs to try out at once under ``max_tokens``.

    Raises:
        UserError: a predictor is needed and missing, or an epoch cannot be planned.
    """

    def __init__(
        self,
        settings: PlanSettings,
        lengths: Sequence[int],
        predictor: LatencyPredictor | None = None,
        num_epochs: int = 1,
    ) -> None:
        if predictor is None and (settings.tunes or settings.batching in COST_STRATEGIES):
            raise UserError(
                "--profile is needed for batching=sparsity_aware or wlb and for tolerance > 0: run `sparsebalance "
                "profile`, or use --batching random --tolerance 0"
            )
        self.settings = settings
        self.lengths = lengths
        self.predictor = predictor
        self.curves = CurveStore(settings.block_size)
        self.speeds = RankSpeeds(settings.num_ranks)
        self._observations: deque[list[tuple[float, float, float]]] = deque(maxlen=STEPS_KEPT)
        self._snapshot: tuple[int, dict[str, Any]] | None = None
        self._plan: tuple[int, BatchPlan] | None = None
        self._ahead: dict[tuple[int, int], StepPlan] = {}
        self._untaught = self._learned()
        # Refuses what cannot be planned before anything has been trained: every epoch draws other batches.
        # Only max_tokens can fail for one and not for another.
        for epoch in range(num_epochs if settings.max_tokens is not None else 1):
            self._plan_epoch(epoch, self._untaught)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch; the same for every epoch."""
        return len(self.lengths) // self.settings.global_batch

    def batches(self, epoch: int) -> BatchPlan:
        """The batches of an epoch; planned once, from the state at the first call for that epoch."""
        if self._plan is None or self._plan[0] != epoch:
            if self._snapshot is None or self._snapshot[0] != epoch:
                self._snapshot = (epoch, self._learned())
            try:
                plan = self._plan_epoch(epoch, self._snapshot[1])
            except UserError:
                # Under a tight max_tokens learned costs may pack worse than the profile's, which were tried.
                plan = self._plan_epoch(epoch, self._untaught)
            self._plan = (epoch, plan)
        return self._plan[1]

    def budgets(self, epoch: int, step: int) -> Tuning | None:
        """The budgets of one step of an epoch, in the order of :meth:`micro_batches`; None without tuning."""
        settings = self.settings
        if not settings.tunes:
            return None
        micro_batches = self.micro_batches(epoch, step)
        assert self.predictor is not None
        if settings.base_top_k is not None:
            return tune_top_k(
                micro_batches,
                self.predictor,
                base_top_k=settings.base_top_k,
                anchor=settings.anchor,
                scope=settings.scope,
                least_top_k=settings.least_top_k,
                slowness=self._slowness(),
            )
        assert settings.base_top_p is not None
        return tune_sparsity(
            micro_batches,
            self.predictor,
            base_top_p=settings.base_top_p,
            tolerance=settings.tolerance,
            anchor=settings.anchor,
            scope=settings.scope,
            num_stages=settings.num_stages,
            slowness=self._slowness(),
        )

    def plan_ahead(self, epoch: int, step: int) -> None:
        """Plan a step now, with what is known now, for :meth:`take`; nothing where it is planned already."""
        if (epoch, step) not in self._ahead:
            self._ahead[epoch, step] = self._plan_step(epoch, step)

    def is_planned(self, epoch: int, step: int) -> bool:
        """Whether :meth:`take` has nothing left to plan."""
        return (epoch, step) in self._ahead

    def take(self, epoch: int, step: int) -> StepPlan:
        """The plan of the step that runs now; planned now unless it was planned ahead."""
        plan = self._ahead.pop((epoch, step), None)
        return plan if plan is not None else self._plan_step(epoch, step)

    def micro_batches(self, epoch: int, step: int) -> list[MicroBatch]:
        """The micro-batches of one step, rank by rank and slot by slot, with the curves known now."""
        return [
            MicroBatch(
                rank,
                slot,
                tuple(self.lengths[sample] for sample in samples),
                tuple(self.curves.lookup(sample, self.lengths[sample]) for sample in samples),
            )
            for rank, slots in enumerate(self.batches(epoch).steps[step])
            for slot, samples in enumerate(slots)
        ]

    def base_densities(self) -> list[float]:
        """Density of each sample at the base budget, as known now."""
        return self._at(range(len(self.lengths)), self.settings.base, self.curves)[1]

    def observe(self, measured: Sequence[Measured]) -> None:
        """Learn from one step: the curves seen, and, with ``refit``, the times. Same order on every rank."""
        if self.predictor is not None:
            # Of each micro-batch whose time is its own: where ranks wait for each other most are not.
            timed = [(self._realised(seen), seen.total_ms) for seen in measured if seen.total_ms is not None]
            if self.settings.refit:
                some = timed[:: max(1, -(-len(timed) // OBSERVATIONS_PER_STEP))]
                self._observations.append([(*self.predictor.components(*own), total_ms) for own, total_ms in some])
                self.predictor = self.predictor.refit(tuple(self._observations))
            if len(timed) == self.settings.num_ranks * self.settings.num_slots:
                self._observe_speeds(self.predictor, *zip(*timed, strict=True))
        for seen in measured:
            for sample, curve in zip(seen.samples, self._curves_of(seen), strict=False):
                self.curves.observe(sample, self.lengths[sample], curve)

    def _observe_speeds(
        self, predictor: LatencyPredictor, documents: Sequence[_Documents], times_ms: Sequence[float]
    ) -> None:
        lengths, densities, dense = (list(chain.from_iterable(each)) for each in zip(*documents, strict=True))
        first_M = np.cumsum([0, *[len(each[0]) for each in documents[:-1]]])
        attention_M = np.add.reduceat(predictor.attention_ms(lengths, densities, dense).sum(axis=0), first_M)
        linear_M = predictor.linear_ms(np.add.reduceat(lengths, first_M)).sum(axis=0)
        by_rank = (self.settings.num_ranks, self.settings.num_slots)
        sums = [np.reshape(each, by_rank).sum(axis=1).tolist() for each in (times_ms, attention_M + linear_M)]
        self.speeds.observe(*sums)

    def _slowness(self) -> tuple[float, ...]:
        """What the plan reckons with; empty where ranks count as alike."""
        return self.speeds.slowness() if self.settings.rank_speed else ()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data from which a resumed run plans on as this one would."""
        snapshot = None if self._snapshot is None else {"epoch": self._snapshot[0], "learned": self._snapshot[1]}
        return {
            "order": self._order(),
            "learned": self._learned(),
            "observations": [[list(observation) for observation in step] for step in self._observations],
            "snapshot": snapshot,
            "ahead": {
                "budgets": self._budget_options(),
                "steps": [[*position, *astuple(plan)] for position, plan in sorted(self._ahead.items())],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of :meth:`state_dict`.

        Raises:
            UserError: the state is not one of these, or it belongs to a run with another order of documents.
        """
        self._check_order(state)
        try:
            curves = CurveStore.from_state_dict(state["learned"]["curves"])
            if curves.block_size == self.settings.block_size:  # else they are densities of other blocks
                self.curves = curves
            self.predictor = _scaled(self.predictor, state["learned"]["scales"])
            self.speeds.load(state["learned"]["speeds"])
            self._observations.clear()
            self._observations.extend([(float(a), float(b), float(c)) for a, b, c in s] for s in state["observations"])
            snapshot = state["snapshot"]
            self._snapshot = None if snapshot is None else (int(snapshot["epoch"]), dict(snapshot["learned"]))
            # With other options for the budgets they are planned anew.
            ahead = state["ahead"]["steps"] if state["ahead"]["budgets"] == self._budget_options() else []
            self._ahead = {(epoch, step): StepPlan.from_json(*plan) for epoch, step, *plan in ahead}
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"the checkpoint's balance state is damaged ({error!r}): resume from an earlier checkpoint"
            ) from error
        self._plan = None

    def _check_order(self, state: Mapping[str, Any]) -> None:
        before, now = state.get("order"), self._order()
        if not isinstance(before, dict):
            raise UserError("the checkpoint's balance state is damaged (no order): resume from an earlier checkpoint")
        changed = [
            f"{_OPTIONS.get(name, name)} {before.get(name)} (now {now.get(name)})"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise UserError(
                f"--resume_from_checkpoint: that run had {', '.join(changed)}: documents would be repeated or lost; "
                "resume with the same options and data, or start a new run"
            )

    def _order(self) -> dict[str, Any]:
        """What the order of documents depends on, beside what was learned."""
        settings = self.settings
        names = ["batching", "num_ranks", "num_slots", "batch_size", "seed", "max_tokens"]
        order: dict[str, Any] = {"lengths": _digest(list(self.lengths))}
        if settings.batching in COST_STRATEGIES:
            assert self.predictor is not None
            names += ["base_top_p", "base_top_k", "block_size"]
            if settings.batching == "sparsity_aware":
                names += ["window", "tolerance", "num_stages", "rank_speed"]
            order["profile"] = _digest(self.predictor.profile.to_json())
        return {**order, **{name: getattr(settings, name) for name in names}}

    def _budget_options(self) -> list[Any]:
        """What budgets depend on, beside the order and what was learned."""
        settings, profile = self.settings, self.predictor and _digest(self.predictor.profile.to_json())
        base = [settings.base_top_p, settings.base_top_k, settings.least_top_k, settings.block_size]
        how = [settings.tolerance, settings.anchor, settings.scope, settings.num_stages, settings.rank_speed]
        return [*base, *how, settings.refit, profile]

    def _plan_step(self, epoch: int, step: int) -> StepPlan:
        predictor, settings = self.predictor, self.settings
        scales = None if predictor is None else (predictor.attention_scale, predictor.linear_scale)
        tuning = self.budgets(epoch, step)
        if tuning is not None:
            missed = tuning.anchor_ms, tuning.num_missed
            return StepPlan(tuning.top_p or None, tuning.predicted_ms, scales, *missed, tuning.top_k or None)
        batches = [samples for slots in self.batches(epoch).steps[step] for samples in slots]
        predicted_ms = None
        if predictor is not None:
            slowness = self._slowness() or (1.0,) * settings.num_ranks
            predicted_ms = tuple(
                self._predict_ms(samples) * slowness[number // settings.num_slots]
                for number, samples in enumerate(batches)
            )
        top_p = None if settings.base_top_p is None else (settings.base_top_p,) * len(batches)
        top_k = None if settings.base_top_k is None else (settings.base_top_k,) * len(batches)
        return StepPlan(top_p, predicted_ms, scales, top_k=top_k)

    def _learned(self) -> dict[str, Any]:
        scales = None if self.predictor is None else [self.predictor.attention_scale, self.predictor.linear_scale]
        return {"curves": self.curves.state_dict(), "scales": scales, "speeds": self.speeds.state()}

    def _plan_epoch(self, epoch: int, learned: Mapping[str, Any]) -> BatchPlan:
        settings = self.settings
        costs_ms = least_ms = None
        speeds = RankSpeeds(settings.num_ranks)
        speeds.load(learned["speeds"])
        if settings.batching in COST_STRATEGIES:
            # From the snapshot only: what has been learned since must not change a resumed run's order.
            predictor = _scaled(self.predictor, learned["scales"])
            curves = CurveStore.from_state_dict(learned["curves"])
            assert predictor is not None
            costs_ms = self._costs_ms(predictor, curves, settings.base)
            if settings.tunes:
                reached: list[float | None] = [None]  # dense
                # How far below its base a k may fall is known in the forward pass only.
                if settings.base_top_p is not None:
                    reached.append(candidate_budgets(settings.base_top_p, settings.tolerance)[0])
                others = [self._costs_ms(predictor, curves, budget) for budget in reached]
                least_ms = np.minimum.reduce([costs_ms, *others]).tolist()
        return plan_batches(
            self.lengths,
            strategy=settings.batching,
            num_ranks=settings.num_ranks,
            num_slots=settings.num_slots,
            batch_size=settings.batch_size,
            seed=settings.seed,
            epoch=epoch,
            window=settings.window,
            max_tokens=settings.max_tokens,
            cost_ms=costs_ms,
            least_ms=least_ms,
            num_stages=settings.num_stages,
            slowness=speeds.slowness() if settings.rank_speed else (),
        )

    def _costs_ms(self, predictor: LatencyPredictor, curves: CurveStore, budget: float | None) -> list[float]:
        """Predicted time of each sample alone at a budget, without the constant of its micro-batch."""
        attention_ms = predictor.attention_ms(*self._at(range(len(self.lengths)), budget, curves)).sum(axis=0)
        linear_ms = predictor.linear_ms(self.lengths).sum(axis=0)
        costs_ms: list[float] = (attention_ms + linear_ms - predictor.linear(0).total_ms).tolist()
        return costs_ms

    def _predict_ms(self, samples: Sequence[int]) -> float:
        assert self.predictor is not None
        return self.predictor.predict(*self._at(samples, self.settings.base, self.curves)).total_ms

    def _at(self, samples: Sequence[int], budget: float | None, curves: CurveStore) -> _Documents:
        lengths = [self.lengths[sample] for sample in samples]
        if budget is None or (budget == 1.0 and self.settings.base_top_k is None):
            return lengths, [1.0] * len(lengths), [True] * len(lengths)
        if self.settings.base_top_k is not None:
            return _by_density(lengths, top_k_density(lengths, budget, self.settings.block_size))
        known = [curves.lookup(sample, length) for sample, length in zip(samples, lengths, strict=True)]
        return lengths, [curve.at(budget) for curve in known], [False] * len(lengths)

    def _realised(self, seen: Measured) -> _Documents:
        """What a micro-batch's documents attended: at a top_k as measured, since layers may have raised the k."""
        lengths = [self.lengths[sample] for sample in seen.samples]
        if self.settings.base_top_k is not None and seen.density is not None:
            assert self.predictor is not None
            context = self.predictor.profile.context
            always_dense = context.num_dense_layers / context.num_layers
            density = (seen.density - always_dense) / (1.0 - always_dense)
            return _by_density(lengths, share_density(lengths, density, self.settings.block_size))
        if seen.top_p is None or seen.top_p == 1.0 or seen.curve is None:
            return self._at(seen.samples, seen.top_p, self.curves)
        return lengths, [curve.at(seen.top_p) for curve in self._curves_of(seen)], [False] * len(lengths)

    def _curves_of(self, seen: Measured) -> list[DensityCurve]:
        """The density curve of each document of a micro-batch, as far as it was seen; empty if none was."""
        if seen.curve is None or len(seen.samples) == 1:
            return [] if seen.curve is None else [seen.curve]
        lengths = [self.lengths[sample] for sample in seen.samples]
        known = list(map(self.curves.lookup, seen.samples, lengths))
        return share_curve(seen.curve, known, lengths, self.settings.block_size)


def _by_density(lengths: list[int], densities: NDArray[np.float64]) -> _Documents:
    """At a top_k the dense kernel runs where nothing is dropped."""
    return lengths, densities.tolist(), (densities == 1.0).tolist()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _scaled(predictor: LatencyPredictor | None, scales: Sequence[float] | None) -> LatencyPredictor | None:
    return predictor if predictor is None or scales is None else predictor.with_scales(*map(float, scales))
