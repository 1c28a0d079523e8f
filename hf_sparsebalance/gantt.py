"""Picture of simulated steps: who works when, one panel per run, all on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.simulation import Bar

__all__ = ["draw_gantt"]

# Told apart by lightness as well as hue; W is what zero-bubble schedules move about.
_COLORS = {"F": "#9ecae1", "B": "#2171b5", "I": "#2171b5", "W": "#fdae6b"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
_MOST_LANES = 32
_MOST_LABELS = 400


def draw_gantt(panels: Sequence[tuple[str, Sequence[Bar]]], path: str | Path, lane_name: str) -> None:
    """Write a PNG (or whatever the suffix says) of one step of each run.

    Args:
        panels: title and bars of each run.
        path: file to write.
        lane_name: what a lane is, for the axis ("rank").

    Raises:
        UserError: the file cannot be written, or its suffix is none that matplotlib knows.
    """
    # Not pyplot: it would keep the figure in a global list.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    longest = max(bar.end_ms for _, bars in panels for bar in bars)
    lanes = min(1 + max(bar.lane for _, bars in panels for bar in bars), _MOST_LANES)
    figure = Figure(figsize=(12, len(panels) * (1.0 + 0.28 * lanes)), layout="constrained")
    for axes, (title, bars) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        shown = [bar for bar in bars if bar.lane < lanes]
        for bar in shown:
            width = bar.end_ms - bar.start_ms
            axes.barh(
                bar.lane,
                width,
                left=bar.start_ms,
                height=0.85,
                color=_COLORS[bar.kind],
                edgecolor="white",
                linewidth=0.5,
            )
            if len(shown) <= _MOST_LABELS and width > longest / 60:
                middle = bar.start_ms + width / 2
                color = "white" if bar.kind in "BI" else "black"
                axes.text(middle, bar.lane, str(bar.micro_batch), ha="center", va="center", fontsize=7, color=color)
        axes.set(xlim=(0, longest * 1.01), ylabel=lane_name, title=title, ylim=(lanes - 0.5, -0.5))
    axes.set_xlabel("simulated milliseconds; numbers are micro-batches")
    kinds = sorted({bar.kind for _, bars in panels for bar in bars}, key="FBIW".index)
    handles = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--gantt {path} cannot be written ({error})") from error
