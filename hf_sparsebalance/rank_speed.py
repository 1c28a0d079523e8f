"""How much longer each rank takes than the others for the same work: clusters of unlike machines, or one that ails.

A rank's slowness is its measured time over its predicted time, both of a whole step, against the middle rank's (of an
even number the faster of two).  The median over the last steps is taken, so that a stall of one step says nothing.
Beyond the paper (arXiv 2604.13847), whose ranks are alike.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["RankSpeeds"]

_STEPS_KEPT = 16
_STEPS_NEEDED = 3
_NOISE = 0.05  # ranks of one machine differ by less in the mean of three steps


class RankSpeeds:
    """Slowness of each rank, learned step by step.

    Args:
        num_ranks: data-parallel ranks.

    The state depends only on the order of `observe` calls, so all ranks hold the same.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Replaced, never changed: it is read while another thread learns.
        self._steps: tuple[tuple[float, ...], ...] = ()

    def observe(self, measured_ms: Sequence[float], predicted_ms: Sequence[float]) -> None:
        """Learn from one step.

        Args:
            measured_ms, predicted_ms: each rank's time of the same micro-batches.

        Raises:
            ValueError: not one time per rank.
        """
        if not len(measured_ms) == len(predicted_ms) == self._num_ranks:
            raise ValueError(f"{self._num_ranks} ranks, {len(measured_ms)} and {len(predicted_ms)} times")
        ratios = np.asarray(measured_ms, dtype=np.float64) / np.maximum(predicted_ms, 1e-9)
        middle = np.sort(ratios)[(self._num_ranks - 1) // 2]
        self._steps = (*self._steps, tuple((ratios / middle).tolist()))[-_STEPS_KEPT:]

    def slowness(self) -> tuple[float, ...]:
        """Of each rank: 2.0 takes twice as long as the middle one; 1.0 within the noise, and before three steps."""
        if len(self._steps) < _STEPS_NEEDED:
            return (1.0,) * self._num_ranks
        medians = np.median(np.array(self._steps), axis=0)
        return tuple(np.where(np.abs(medians - 1.0) <= _NOISE, 1.0, medians).tolist())

    def state(self) -> list[list[float]]:
        """What was learned, as JSON data."""
        return [list(step) for step in self._steps]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        """Take over a state.

        Raises:
            ValueError: it is not one of so many ranks.
        """
        if any(len(step) != self._num_ranks for step in state):
            raise ValueError(f"rank speeds of another number of ranks than {self._num_ranks}")
        self._steps = tuple(tuple(map(float, step)) for step in state)[-_STEPS_KEPT:]
