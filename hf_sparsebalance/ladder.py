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

__all__ = [
    "Booleans",
    "Floats",
    "Indices",
    "Ladder",
    "fastest",
    "group_sums",
    "last",
    "pareto",
    "pick",
    "top_up",
    "trim",
]

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]
Booleans: TypeAlias = NDArray[np.bool_]

_TILE = 512  # items looked at together: intermediate results stay in the cache
_ON_THE_LINE = 1e-9  # relative difference of two slopes that are one


def pick(values_MC: Floats, choice_M: Indices) -> Floats:
    """Each item's value at its chosen option."""
    picked: Floats = values_MC[np.arange(len(choice_M)), choice_M]
    return picked


def group_sums(values_M: Floats, group_M: Indices, num_groups: int) -> Floats:
    """Sum of the values of each group's items."""
    return np.bincount(group_M, weights=values_M, minlength=num_groups).astype(np.float64, copy=False)


def fastest(times_MC: Floats) -> Indices:
    """Each item's fastest option, of equally fast ones that of most gain."""
    return last(times_MC == times_MC.min(axis=1, keepdims=True))


def last(fits_MC: Booleans) -> Indices:
    """Each item's last option that fits: the one of most gain; where none fits, the last of all."""
    option_M: Indices = fits_MC.shape[1] - 1 - fits_MC[:, ::-1].argmax(axis=1)
    return option_M


def pareto(times_MC: Floats, gains_MC: Floats, wanted_MC: Booleans | None = None) -> tuple[Indices, Indices]:
    """(item, option) of the options that no other one of their item beats in gain without costing more time.

    Of these only the wanted ones (default: all). Sorted by item; along the options of one both time and gain rise. One
    with infinite time is never among them.
    """
    later_MC = np.empty_like(times_MC)
    later_MC[:, -1] = np.inf
    np.minimum.accumulate(times_MC[:, :0:-1], axis=1, out=later_MC[:, -2::-1])
    kept_MC = times_MC < later_MC
    item_H, option_H = _entries(kept_MC if wanted_MC is None else kept_MC & wanted_MC)
    # Of options with one gain only the first, which is the fastest of those left, can stay.
    gain_H = gains_MC[item_H, option_H]
    more_H = (np.diff(gain_H, prepend=-np.inf) > 0.0) | (np.diff(item_H, prepend=-1) > 0)
    return item_H[more_H], option_H[more_H]


def _entries(chosen_MC: Booleans) -> tuple[Indices, Indices]:
    """`np.nonzero`, faster where much is chosen."""
    item_H = np.repeat(np.arange(len(chosen_MC)), np.count_nonzero(chosen_MC, axis=1))
    return item_H, np.flatnonzero(chosen_MC.ravel()) - chosen_MC.shape[1] * item_H


class Ladder:
    """The options on each item's concave hull of time and gain, as upward moves, best gain per time first.

    Moves of one item keep their order, since slopes fall along its hull. After the first n moves a group's items are
    at a solution of the relaxed problem (most gain for that total time), which is what makes bisection over n exact.
    Items must have a finite time somewhere.
    """

    def __init__(self, times_MC: Floats, gains_MC: Floats, group_M: Indices, num_groups: int) -> None:
        # An option under the line between two others is under the hull whether these stay or not, so all such options
        # go at once: first those under their neighbours', nearly all, then of what is left until none is.
        tiles = range(0, len(times_MC), _TILE)
        found = [_above_neighbours(times_MC[at : at + _TILE], gains_MC[at : at + _TILE]) for at in tiles]
        item_H = np.concatenate([items + at for at, (items, _) in zip(tiles, found, strict=True)])
        option_H = np.concatenate([options for _, options in found])
        time_H, gain_H = times_MC[item_H, option_H], gains_MC[item_H, option_H]
        stays = np.zeros(1, dtype=bool)
        while not stays.all():
            stays = np.ones(len(item_H), dtype=bool)
            stays[1:-1] = ~(_under(np.diff(time_H), np.diff(gain_H)) & (item_H[:-2] == item_H[2:]))
            item_H, option_H, time_H, gain_H = item_H[stays], option_H[stays], time_H[stays], gain_H[stays]
        first = np.append(True, item_H[1:] != item_H[:-1])
        self.start_M: Indices = option_H[first]
        moves = np.flatnonzero(~first)
        more_ms, more_gain = time_H[moves] - time_H[moves - 1], gain_H[moves] - gain_H[moves - 1]
        slope = more_gain / more_ms
        order = _descending(slope)
        # Of the smallest integers that hold them: those are sorted in linear time.
        groups = group_M.astype(np.min_scalar_type(num_groups))
        order = order[np.argsort(groups[item_H[moves[order]]], kind="stable")]
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
        moves = moves[_descending(self._slope_V[moves])]
        gain = self._total_gain[self._first_G].sum() + np.cumsum(self._more_gain_V[moves])
        return self._made(moves[: int(np.searchsorted(gain, target)) + 1])

    def _made(self, moves: Indices) -> Indices:
        choice_M = self.start_M.copy()
        choice_M[self._item_V[moves]] = self._option_V[moves]  # of an item's moves the last one counts
        return choice_M


def top_up(times_MC: Floats, gains_MC: Floats, choice_M: Indices, group_M: Indices, limit_G: Floats) -> Indices:
    """Raise single items, in each group the largest gain first, while the group's total still fits."""
    choice_M = choice_M.copy()
    time_M, gain_M = pick(times_MC, choice_M), pick(gains_MC, choice_M)

    def room_M() -> Floats:
        """The most time that each item may take while the others stay: it never grows when one of them is raised."""
        spare_G = limit_G - group_sums(time_M, group_M, len(limit_G))
        room: Floats = time_M + spare_G[group_M]
        return room

    item_H, option_H = _entries((times_MC <= room_M()[:, None]) & (gains_MC > gain_M[:, None]))
    time_H, gain_H = times_MC[item_H, option_H], gains_MC[item_H, option_H]
    while len(item_H):
        more_H, group_H, most_G = gain_H - gain_M[item_H], group_M[item_H], np.zeros(len(limit_G))
        np.maximum.at(most_G, group_H, more_H)
        winners = np.flatnonzero(more_H == most_G[group_H])
        winners = winners[np.unique(group_H[winners], return_index=True)[1]]  # one in each group
        raised = item_H[winners]
        choice_M[raised], time_M[raised], gain_M[raised] = option_H[winners], time_H[winners], gain_H[winners]
        stays = (time_H <= room_M()[item_H]) & (gain_H > gain_M[item_H])
        item_H, option_H, time_H, gain_H = item_H[stays], option_H[stays], time_H[stays], gain_H[stays]
    return choice_M


def trim(times_MC: Floats, gains_MC: Floats, choice_M: Indices, target: float) -> Indices:
    """Lower items, largest saving of time first, while the total gain still reaches the target."""
    choice_M = choice_M.copy()
    while True:
        time_M, gain_M = pick(times_MC, choice_M), pick(gains_MC, choice_M)
        spare = gain_M.sum() - target
        option_M = np.where(gains_MC >= (gain_M - spare)[:, None], times_MC, np.inf).argmin(axis=1)
        saved_M, lost_M = time_M - pick(times_MC, option_M), gain_M - pick(gains_MC, option_M)
        lowered = np.flatnonzero(saved_M > 0.0)
        if not len(lowered):
            return choice_M
        lowered = lowered[_descending(saved_M[lowered])]
        # As many as fit together, the largest saving always among them.
        fit = np.searchsorted(np.cumsum(np.maximum(lost_M[lowered], 0.0)), spare, side="right")
        lowered = lowered[: max(1, int(fit))]
        choice_M[lowered] = option_M[lowered]


def _above_neighbours(times_MC: Floats, gains_MC: Floats) -> tuple[Indices, Indices]:
    """The options of `pareto` that are not under the line between their item's options before and after."""
    wanted_MC = np.ones(times_MC.shape, dtype=bool)
    with np.errstate(invalid="ignore"):  # differences of infinite times: `pareto` leaves such options out anyway
        wanted_MC[:, 1:-1] = ~_under(np.diff(times_MC), np.diff(gains_MC))
    return pareto(times_MC, gains_MC, wanted_MC)


def _under(more_ms_V: Floats, more_gain_V: Floats) -> Booleans:
    """Whether the option between two moves is under, or but for rounding on, the line that spans both moves."""
    under: Booleans = (
        more_gain_V[..., :-1] * more_ms_V[..., 1:] <= (1 + _ON_THE_LINE) * more_gain_V[..., 1:] * more_ms_V[..., :-1]
    )
    return under


def _descending(values: Floats) -> Indices:
    """Order from the largest to the smallest value, equal ones in the order given."""
    order = np.argsort(-values)  # several times faster than a stable sort, which is seldom needed
    if (np.diff(values[order]) == 0.0).any():
        order = np.argsort(-values, kind="stable")
    return order
