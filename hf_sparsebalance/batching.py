"""Which sample runs in which step, rank and micro-batch: sparsity-aware batching (SAB) and its rivals by name.

Every sample appears exactly once an epoch, and every rank has exactly `num_slots` non-empty micro-batches each step. A
plan is a pure function of the arguments: all ranks compute the same one without talking, a resumed run again.
The strategies themselves are in `sparsity_aware` and `rivals`; here are what they share: the plan, the checks, and how
far a plan moves samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_sparsebalance import rivals
from hf_sparsebalance.epoch import Epoch, Step
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.sparsity_aware import sparsity_aware

__all__ = ["COST_STRATEGIES", "STRATEGIES", "BatchPlan", "displacements", "plan_batches"]

_BY_LENGTH = {
    "random": rivals.random_order,
    "length_partition": rivals.length_partition,
    "length_group": rivals.length_group,
    "batch_rebalance": rivals.batch_rebalance,
    "karmarkar_karp": rivals.karmarkar_karp,
}
COST_STRATEGIES = ("wlb", "sparsity_aware")  # need cost_ms
STRATEGIES = (*_BY_LENGTH, *COST_STRATEGIES)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The order of one epoch: steps[step][rank][slot] is the tuple of sample indices packed into a micro-batch."""

    steps: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return len(self.steps)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.steps[0])

    @property
    def num_slots(self) -> int:
        """Micro-batches of each rank in each step."""
        return len(self.steps[0][0])

    def micro_batch(self, step: int, rank: int, slot: int) -> tuple[int, ...]:
        """Sample indices of one micro-batch."""
        return self.steps[step][rank][slot]


def plan_batches(
    lengths: Sequence[int],
    *,
    strategy: str,
    num_ranks: int,
    num_slots: int,
    batch_size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    window: int = 1,
    max_tokens: int | None = None,
    cost_ms: Sequence[float] | None = None,
    least_ms: Sequence[float] | None = None,
    num_stages: int = 1,
    slowness: Sequence[float] = (),
) -> BatchPlan:
    """Plan one epoch.

    A global batch is num_ranks * num_slots * batch_size samples, and there are len(lengths) // that many steps. The
    remaining samples are spread evenly over the steps, as extra documents in micro-batches that hold little: at
    most one a step unless there are more of them than steps.

    Args:
        lengths: tokens of each sample, >= 1.
        strategy: one of STRATEGIES. `random`: a seeded shuffle, dealt slot by slot and rank by rank. `sparsity_aware`:
            rank sums even by `cost_ms`. The others: see `hf_sparsebalance.rivals`.
        num_ranks: data-parallel ranks.
        num_slots: micro-batches per rank and step (gradient_accumulation_steps).
        batch_size: samples per micro-batch (per_device_train_batch_size).
        seed, epoch: what the shuffles depend on.
        window: global batches that `sparsity_aware` plans together; with 1 each step holds the same samples as
            `random` does, hence the same gradient. The other strategies take no notice of it.
        max_tokens: most tokens of a micro-batch (memory). With it `sparsity_aware` may put any number of documents
            into a micro-batch; without it each holds batch_size (and the extra ones). `wlb` delays samples for it. The
            other rivals do not repack for it: a micro-batch above it is an error.
        cost_ms: predicted time of each sample at base budget, needed by COST_STRATEGIES.
        least_ms: predicted time of each sample at the smallest budget that tuning may choose; default: cost_ms, no
            tuning. Only `sparsity_aware` looks at it.
        num_stages: pipeline stages. Above 1 `sparsity_aware` lets samples of like time meet in a step where a 1F1B
            pipeline is quicker for it, and puts each rank's small micro-batches first and last.
        slowness: how many times as long as predicted each rank takes; default: all alike. Only `sparsity_aware` looks
            at it: a slow rank gets less.

    Raises:
        UserError: an argument is out of range, fewer samples than one global batch, no (or not one) cost per sample
            for COST_STRATEGIES, or max_tokens cannot be kept.

    Example: lengths (5, 1, 4, 2), num_ranks 2, num_slots 2 and `length_partition` give one step whose ranks both hold
    6 tokens: {0, 1} and {2, 3}.
    """
    shape = Epoch(lengths, num_ranks, num_slots, batch_size, seed, epoch, max_tokens)
    _check(shape, strategy, window, num_stages)
    if strategy in COST_STRATEGIES:
        costs = _checked_ms("cost_ms", cost_ms, strategy, len(lengths))
    if strategy == "sparsity_aware":
        least = costs if least_ms is None else _checked_ms("least_ms", least_ms, strategy, len(lengths))
        steps = sparsity_aware(shape, costs, least, window, num_stages, slowness)
    elif strategy == "wlb":
        steps = rivals.wlb(shape, costs)
    else:
        steps = _BY_LENGTH[strategy](shape)
    _check_tokens(steps, shape)
    return BatchPlan(tuple(tuple(tuple(rank) for rank in step) for step in steps))


def displacements(plan: BatchPlan, reference: BatchPlan) -> list[int]:
    """How many steps later (or, negative, earlier) each sample runs in a plan than in another one of the same epoch.

    Against `random` this is how far batching moves a sample from its drawn place: none under `length_partition`,
    `karmarkar_karp`, `batch_rebalance` and `sparsity_aware` with window 1, less than `window` steps with a larger one,
    any number of steps under `length_group` (most of an epoch for the longest sample) and `wlb`.

    Raises:
        ValueError: the two plans do not hold the same samples.
    """
    at, before = _step_of(plan), _step_of(reference)
    if at.keys() != before.keys():
        raise ValueError("the two plans do not hold the same samples")
    return [at[sample] - before[sample] for sample in sorted(at)]


def _step_of(plan: BatchPlan) -> dict[int, int]:
    return {
        sample: number for number, step in enumerate(plan.steps) for rank in step for slot in rank for sample in slot
    }


def _check(shape: Epoch, strategy: str, window: int, num_stages: int) -> None:
    lengths, max_tokens = shape.lengths, shape.max_tokens
    if strategy not in STRATEGIES:
        raise UserError(f"batching strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    for name, value in (
        ("num_ranks", shape.num_ranks),
        ("num_slots", shape.num_slots),
        ("batch_size", shape.batch_size),
        ("num_stages", num_stages),
    ):
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if window < 1:
        raise UserError(f"window must be at least 1, not {window}: 1 keeps the samples of each step")
    if len(lengths) < shape.global_batch:
        raise UserError(
            f"{len(lengths)} samples are fewer than one global batch of {shape.global_batch} ({shape.num_ranks} ranks "
            f"x {shape.num_slots} micro-batches x {shape.batch_size}): lower per_device_train_batch_size or "
            "gradient_accumulation_steps, or add data"
        )
    if min(lengths) < 1:
        raise UserError("every sample needs at least one token: remove empty documents from the data")
    if max_tokens is not None and max(lengths) > max_tokens:
        raise UserError(
            f"max_tokens {max_tokens} is below the longest document ({max(lengths)} tokens): raise max_tokens or "
            "truncate the documents"
        )


def _checked_ms(name: str, ms: Sequence[float] | None, strategy: str, num_samples: int) -> list[float]:
    if ms is None or len(ms) != num_samples:
        found = "none" if ms is None else str(len(ms))
        raise UserError(
            f"{strategy} batching needs one predicted {name} per sample ({num_samples}), {found} given: pass a "
            "latency profile, or use length_partition"
        )
    checked = [float(value) for value in ms]
    if not all(math.isfinite(value) and value >= 0.0 for value in checked):
        raise UserError(f"{name} must be finite and not negative: run `sparsebalance profile` to write a new profile")
    return checked


def _check_tokens(steps: list[Step], shape: Epoch) -> None:
    if shape.max_tokens is None:
        return
    largest = max(sum(shape.lengths[i] for i in slot) for step in steps for rank in step for slot in rank)
    if largest > shape.max_tokens:
        raise UserError(
            f"a micro-batch of this strategy holds {largest} tokens, above max_tokens {shape.max_tokens}: raise "
            "max_tokens, lower per_device_train_batch_size, or use sparsity_aware batching, which packs under it"
        )
