"""Choosing one option of each of many items: most gain for the time, or least time for the gain.

The items are micro-batches (or whole slots), the options their budgets, each with a time and a gain (tokens x budget);
gains never fall from option to option. Items belong to groups, whose times add up. All groups are handled at once, in
numpy: sizes of a thousand ranks must be planned in tens of milliseconds.

Dimension letters: M items, C options, G groups, V moves.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Booleans", "Floats", "Indices", "Ladder", "fastest", "group_sums", "pareto", "pick", "top_up", "trim"]

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]
Booleans: TypeAlias = NDArray[np.bool_]


def pick(values_MC: Floats, choice_M: Indices) -> Floats:
    """Each item's value at its chosen option."""
    picked: Floats = values_MC[np.arange(len(choice_M)), choice_M]
    return picked


def group_sums(values_M: Floats, group_M: Indices, num_groups: int) -> Floats:
    """Sum of the values of each group's items."""
    return np.bincount(group_M, weights=values_M, minlength=num_groups).astype(np.float64, copy=False)


def fastest(times_MC: Floats) -> Indices:
    """Each item's fastest option, of equally fast ones that of most gain."""
    last: Indices = times_MC.shape[1] - 1 - times_MC[:, ::-1].argmin(axis=1)
    return last


def pareto(times_MC: Floats, gains_MC: Floats) -> Booleans:
    """Options that no other one of their item beats in gain without costing more time; along them both rise.

    An option with infinite time is never among them.
    """
    later_MC = np.full_like(times_MC, np.inf)
    later_MC[:, :-1] = np.minimum.accumulate(times_MC[:, :0:-1], axis=1)[:, ::-1]
    kept: Booleans = times_MC < later_MC
    # Of options with one gain only the first, which is the fastest of those left, can stay.
    best_MC = np.maximum.accumulate(np.where(kept, gains_MC, -np.inf), axis=1)
    kept[:, 1:] &= gains_MC[:, 1:] > best_MC[:, :-1]
    return kept


class Ladder:
    """The options on each item's concave hull of time and gain, as upward moves, best gain per time first.

    Moves of one item keep their order, since slopes fall along its hull. After the first n moves a group's items are
    at a solution of the relaxed problem (most gain for that total time), which is what makes bisection over n exact.
    Items must have a finite time somewhere.
    """

    def __init__(self, times_MC: Floats, gains_MC: Floats, group_M: Indices, num_groups: int) -> None:
        item_H, option_H = np.nonzero(pareto(times_MC, gains_MC))
        time_H, gain_H = times_MC[item_H, option_H], gains_MC[item_H, option_H]
        # An option under the line between its two neighbours is under the hull whether these stay or not, so all such
        # options go at once, until none is left.
        while len(item_H) > 2:
            left, here, right = slice(None, -2), slice(1, -1), slice(2, None)
            rise_H, run_H = gain_H[here] - gain_H[left], time_H[here] - time_H[left]
            under = rise_H * (time_H[right] - time_H[left]) <= (gain_H[right] - gain_H[left]) * run_H
            stays = np.ones(len(item_H), dtype=bool)
            stays[here] = ~((item_H[left] == item_H[right]) & under)
            if stays.all():
                break
            item_H, option_H, time_H, gain_H = item_H[stays], option_H[stays], time_H[stays], gain_H[stays]
        first = np.append(True, item_H[1:] != item_H[:-1])
        self.start_M: Indices = option_H[first]
        moves = np.flatnonzero(~first)
        more_ms, more_gain = time_H[moves] - time_H[moves - 1], gain_H[moves] - gain_H[moves - 1]
        slope = more_gain / more_ms
        order = np.argsort(-slope, kind="stable")
        order = order[np.argsort(group_M[item_H[moves[order]]], kind="stable")]
        self._item_V: Indices = item_H[moves[order]]
        self._option_V: Indices = option_H[moves[order]]
        self._slope_V, self._more_gain_V = slope[order], more_gain[order]
        self._group_V = group_M[self._item_V]
        # Totals of each group: at its start, then after each of its moves, one group after the other.
        self._count_G: Indices = np.bincount(self._group_V, minlength=num_groups)
        self._first_G: Indices = np.cumsum(self._count_G + 1) - self._count_G - 1
        self._number_V: Indices = np.arange(len(order)) - self._first_G[self._group_V] + self._group_V  # in its group
        self._total_ms = self._totals(group_sums(time_H[first], group_M, num_groups), more_ms[order])
        self._total_gain = self._totals(group_sums(gain_H[first], group_M, num_groups), more_gain[order])
        self.longest_ms = float(more_ms.max(initial=0.0))

    def _totals(self, start_G: Floats, more_V: Floats) -> Floats:
        totals = np.empty(len(more_V) + len(start_G))
        totals[self._first_G] = 0.0
        totals[self._first_G[self._group_V] + 1 + self._number_V] = more_V
        totals = np.cumsum(totals)
        return totals - np.repeat(totals[self._first_G] - start_G, self._count_G + 1)

    @property
    def start_ms_G(self) -> Floats:
        """Each group's least time."""
        return self._total_ms[self._first_G]

    @property
    def num_moves(self) -> int:
        """Moves of all groups."""
        return len(self._item_V)

    @property
    def total_gain_V(self) -> Floats:
        """Gain at the start and after each move, for a ladder of one group."""
        return self._total_gain

    def moves_within(self, limit_G: Floats) -> Indices:
        """How many moves each group can make within its limit (0 too where even the start is above it)."""
        low_G, high_G = np.zeros_like(self._count_G), self._count_G.copy()
        while (low_G < high_G).any():  # all groups' binary searches at once
            middle_G = (low_G + high_G + 1) // 2
            fits_G = self._total_ms[self._first_G + middle_G] <= limit_G
            low_G, high_G = np.where(fits_G, middle_G, low_G), np.where(fits_G, high_G, middle_G - 1)
        return low_G

    def gain_within(self, limit_G: Floats, *, relaxed: bool) -> float:
        """Total gain of all groups after the moves within their limits; relaxed: with a fraction of one more."""
        moves_G = self.moves_within(limit_G)
        at_G = self._first_G + moves_G
        gain_G = self._total_gain[at_G]
        if relaxed:
            next_G = np.where(moves_G < self._count_G, at_G + 1, at_G)
            more_ms = np.maximum(self._total_ms[next_G] - self._total_ms[at_G], 1e-300)
            share_G = np.clip((limit_G - self._total_ms[at_G]) / more_ms, 0.0, 1.0)
            gain_G = gain_G + share_G * (self._total_gain[next_G] - gain_G)
        return float(gain_G.sum())

    def after(self, moves_G: Indices) -> Indices:
        """Option of each item after the first moves of its group."""
        return self._made(np.flatnonzero(self._number_V < moves_G[self._group_V]))

    def best_moves(self, moves_G: Indices, target: float) -> Indices:
        """Option of each item after the best gain per time of all groups' first moves, until the gain is enough."""
        moves = np.flatnonzero(self._number_V < moves_G[self._group_V])
        moves = moves[np.argsort(-self._slope_V[moves], kind="stable")]
        gain = self._total_gain[self._first_G].sum() + np.cumsum(self._more_gain_V[moves])
        return self._made(moves[: int(np.searchsorted(gain, target)) + 1])

    def _made(self, moves: Indices) -> Indices:
        choice_M = self.start_M.copy()
        choice_M[self._item_V[moves]] = self._option_V[moves]  # of an item's moves the last one counts
        return choice_M


def top_up(times_MC: Floats, gains_MC: Floats, choice_M: Indices, group_M: Indices, limit_G: Floats) -> Indices:
    """Raise single items, in each group the largest gain first, while the group's total still fits."""
    choice_M = choice_M.copy()
    live = np.arange(len(choice_M))
    while len(live):
        spare_G = limit_G - group_sums(pick(times_MC, choice_M), group_M, len(limit_G))
        now_L = choice_M[live]
        times_LC, gains_LC = times_MC[live], gains_MC[live]
        within_L = pick(times_LC, now_L) + spare_G[group_M[live]]
        option_L = np.where(times_LC <= within_L[:, None], gains_LC, -np.inf).argmax(axis=1)
        more_L = np.where(pick(times_LC, option_L) <= within_L, pick(gains_LC, option_L) - pick(gains_LC, now_L), 0.0)
        most_G = np.zeros(len(limit_G))
        np.maximum.at(most_G, group_M[live], more_L)
        winners = np.flatnonzero((more_L > 0.0) & (more_L == most_G[group_M[live]]))
        groups, first = np.unique(group_M[live[winners]], return_index=True)
        choice_M[live[winners[first]]] = option_L[winners[first]]
        raised_G = np.zeros(len(limit_G), dtype=bool)
        raised_G[groups] = True
        live = live[raised_G[group_M[live]]]
    return choice_M


def trim(times_MC: Floats, gains_MC: Floats, choice_M: Indices, target: float) -> Indices:
    """Lower items, largest saving of time first, while the total gain still reaches the target."""
    choice_M = choice_M.copy()
    while True:
        now_ms, now_gain = pick(times_MC, choice_M), pick(gains_MC, choice_M)
        spare = now_gain.sum() - target
        saved_MC = np.where(now_gain[:, None] - gains_MC <= spare, now_ms[:, None] - times_MC, 0.0)
        option_M = saved_MC.argmax(axis=1)
        saved_M, lost_M = pick(saved_MC, option_M), now_gain - pick(gains_MC, option_M)
        order = np.argsort(-saved_M, kind="stable")
        order = order[saved_M[order] > 0.0]
        # As many as fit together, the largest saving always among them.
        lowered = order[np.cumsum(np.maximum(lost_M[order], 0.0)) <= spare]
        if not len(order):
            return choice_M
        if not len(lowered):
            lowered = order[:1]
        choice_M[lowered] = option_M[lowered]
