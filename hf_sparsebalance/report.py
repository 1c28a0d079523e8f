"""Run folders -> the table of results and the picture of who waits for whom.

Everything is computed from measured times in the run logs, nothing from predictions; matplotlib is imported only where
a picture is drawn.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from rich.table import Table
from rich.text import Text

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.runlog import MicroBatch, Run, Step, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

__all__ = ["Run", "Summary", "balance_share", "draw_timeline", "read_run", "render_table", "summarise"]


class Summary(TypedDict):
    """A row of the table of results; None where nothing was measured or nothing can be compared."""

    name: str
    attention: str
    batching: str
    tuning: bool | str
    base_top_p: float | None
    base_top_k: float | None
    tolerance: float | None
    steps: int
    documents: int
    total_s: float
    step_s_mean: float
    step_s_median: float
    step_s_p95: float
    speedup: float | None
    perfect_balance_speedup: float | None
    imbalance_microbatch: float
    imbalance_rank: float
    density: float | None
    work: float | None
    coverage: float | None
    tokens_per_s: float
    heldout_loss_before: float | None
    heldout_loss_after: float | None
    planning_ms: float | None


def summarise(run: Run, baseline: Run) -> Summary:
    """The figures of a run, its speedups against the baseline's total time.

    `perfect_balance_speedup` is the bound: what the run would reach if, in each step, its measured micro-batch times
    were spread perfectly evenly over the ranks and all else (gradient sync, optimizer) took as long as it did. Both
    speedups are None unless the two runs trained the same documents in the same epochs: totals of different work say
    nothing.
    """
    seconds = np.array([step.step_s for step in run.steps])
    busy_ms = np.stack([step.rank_busy_ms(run.num_ranks) for step in run.steps])
    evened_s = (seconds + (busy_ms.mean(axis=1) - busy_ms.max(axis=1)) / 1000.0).sum()
    same_work = _trained(run) == _trained(baseline)
    micro_batches = [micro_batch for step in run.steps for micro_batch in step.micro_batches]
    by_step = [np.array([micro_batch.busy_ms for micro_batch in step.micro_batches]) for step in run.steps]
    planning_ms = [step.planning_ms for step in run.steps if step.planning_ms is not None]
    return Summary(
        name=run.name,
        attention=run.attention,
        batching=run.batching,
        tuning=run.tuning,
        base_top_p=run.base_top_p,
        base_top_k=run.base_top_k,
        tolerance=run.tolerance,
        steps=len(run.steps),
        documents=run.documents,
        total_s=run.total_s,
        step_s_mean=float(seconds.mean()),
        step_s_median=float(np.median(seconds)),
        step_s_p95=float(np.percentile(seconds, 95)),
        speedup=baseline.total_s / run.total_s if same_work else None,
        perfect_balance_speedup=float(baseline.total_s / evened_s) if same_work else None,
        imbalance_microbatch=_mean_imbalance(by_step),
        imbalance_rank=_mean_imbalance(busy_ms),
        density=_mean([(micro_batch.causal_pairs, micro_batch.density) for micro_batch in micro_batches]),
        work=_mean([(micro_batch.causal_pairs, micro_batch.work) for micro_batch in micro_batches]),
        coverage=_mean([(micro_batch.tokens, micro_batch.coverage) for micro_batch in micro_batches]),
        tokens_per_s=sum(micro_batch.tokens for micro_batch in micro_batches) / run.total_s,
        heldout_loss_before=run.heldout_loss_before,
        heldout_loss_after=run.heldout_loss_after,
        planning_ms=float(np.mean(planning_ms)) if planning_ms else None,
    )


def balance_share(run: Run) -> float:
    """Share of perfect balance, 0 to 1: the mean rank's time over the slowest rank's, each summed over the steps."""
    busy_ms = np.stack([step.rank_busy_ms(run.num_ranks) for step in run.steps])
    return float(busy_ms.mean(axis=1).sum() / busy_ms.max(axis=1).sum())


def render_table(summaries: Sequence[Summary], balance_shares: Sequence[float] | None = None) -> Table:
    """The table of results, one column per run: two dozen figures side by side would fit no terminal.

    Args:
        summaries: from `summarise`, all against the same baseline.
        balance_shares: from `balance_share`, of the same runs in the same order; adds a line.
    """
    table = Table(caption="-: not measured, or other documents than the baseline's", caption_justify="left")
    table.add_column("run", no_wrap=True)
    for summary in summaries:
        table.add_column(Text(summary["name"]), justify="right", overflow="fold")

    def add(title: str, cells: Iterable[str], *, end: bool = False) -> None:
        table.add_row(title, *map(Text, cells), end_section=end)

    add("attention", (row["attention"] for row in summaries))
    add("batching", (row["batching"] for row in summaries))
    add("tuning", (_tuning(row["tuning"]) for row in summaries))
    add("base top_p", (_shown(row["base_top_p"], ".2f") for row in summaries))
    if any(row["base_top_k"] is not None for row in summaries):
        add("base top_k", (_shown(row["base_top_k"], ".0f") for row in summaries))
    add("tolerance", (_shown(row["tolerance"], ".2f") for row in summaries), end=True)
    add("documents", (f"{row['documents']:,}" for row in summaries))
    add("steps", (f"{row['steps']:,}" for row in summaries))
    add("total, s", (f"{row['total_s']:.1f}" for row in summaries))
    add("step, s: mean", (f"{row['step_s_mean']:.3f}" for row in summaries))
    add("         median", (f"{row['step_s_median']:.3f}" for row in summaries))
    add("         p95", (f"{row['step_s_p95']:.3f}" for row in summaries))
    add("tokens per s", (f"{row['tokens_per_s']:,.0f}" for row in summaries))
    add("speedup", (_shown(row["speedup"], ".2f", "x") for row in summaries))
    add(
        "  if balance were perfect",
        (_shown(row["perfect_balance_speedup"], ".2f", "x") for row in summaries),
        end=True,
    )
    if balance_shares is not None:
        if len(balance_shares) != len(summaries):
            raise ValueError(f"{len(balance_shares)} balance shares for {len(summaries)} runs")
        add("share of perfect balance", (f"{share:.1%}" for share in balance_shares))
    add("max/mean: ranks", (f"{row['imbalance_rank']:.2f}" for row in summaries))
    add("          micro-batches", (f"{row['imbalance_microbatch']:.2f}" for row in summaries))
    add("planning, ms per step", (_shown(row["planning_ms"], ".1f") for row in summaries), end=True)
    add("density", (_shown(row["density"], ".3f") for row in summaries))
    add("work", (_shown(row["work"], ".3f") for row in summaries))
    add("coverage", (_shown(row["coverage"], ".3f") for row in summaries), end=True)
    add("held-out loss: before", (_shown(row["heldout_loss_before"], ".4f") for row in summaries))
    add("               after", (_shown(row["heldout_loss_after"], ".4f") for row in summaries))
    return table


def draw_timeline(runs: Sequence[Run], path: str | Path, max_steps: int = 6) -> None:
    """Draw who works and who waits: a PNG with one panel per run, ranks as rows, micro-batches as bars over time.

    Colour is the budget `top_p`, or the tokens where a run has no budgets. The pale part of a bar is the forward pass.
    All panels share the time axis, so a shorter panel is a faster run.

    Args:
        runs: at least one.
        path: of the PNG; its folder is made if missing.
        max_steps: how many steps to draw, the last ones of each run: the first ones are slowed by warming up.

    Raises:
        UserError: if there is nothing to draw.
    """
    if not runs or max_steps < 1:
        raise UserError("a timeline needs at least one run folder and at least one step")
    # Imported here: a second of start-up and a display backend that reading and tabulating do without.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    windows = [run.steps[-max_steps:] for run in runs]
    by_budget = [any(micro_batch.top_p is not None for micro_batch in _micro_batches(window)) for window in windows]
    scales: dict[bool, ScalarMappable] = {}
    for budget in set(by_budget):
        of_kind = [window for window, kind in zip(windows, by_budget, strict=True) if kind is budget]
        coloured = [_colour_value(micro_batch, budget) for window in of_kind for micro_batch in _micro_batches(window)]
        values = [value for value in coloured if value is not None]
        low, high = min(values), max(values)
        margin = 0.0 if high > low else 0.05 * abs(high) or 1.0
        norm = Normalize(low - margin, high + margin)
        scales[budget] = ScalarMappable(norm, "viridis" if budget else "YlOrBr")

    heights = [0.34 * run.num_ranks + 0.75 for run in runs]
    figure = Figure(figsize=(12, sum(heights) + 0.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    longest_s = max(sum(step.step_s for step in window) for window in windows)
    for axis, run, window, budget in zip(axes, runs, windows, by_budget, strict=True):
        _draw_panel(axis, run, window, scales[budget], budget, longest_s)
    axes[-1].set_xlabel(
        "seconds (pale: forward, full: backward, grey: the rank waits, or synchronises gradients and updates weights)"
    )
    for budget, scale in sorted(scales.items(), reverse=True):
        of_kind_axes = [axis for axis, kind in zip(axes, by_budget, strict=True) if kind is budget]
        figure.colorbar(scale, ax=of_kind_axes, label="budget top_p" if budget else "tokens", pad=0.01, fraction=0.03)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_panel(
    axis: "Axes", run: Run, window: Sequence[Step], scale: "ScalarMappable", budget: bool, longest_s: float
) -> None:
    window_s = sum(step.step_s for step in window)
    busy_s = sum(micro_batch.busy_ms for micro_batch in _micro_batches(window)) / 1000.0
    idle = 1.0 - busy_s / (run.num_ranks * window_s)
    axis.set_title(
        f"{run.name}: steps {window[0].step}-{window[-1].step} in {window_s:.2f} s, ranks idle {idle:.0%} of it",
        loc="left", fontsize=10, pad=14,
    )  # fmt: skip
    for rank in range(run.num_ranks):
        axis.broken_barh([(0.0, window_s)], (rank - 0.4, 0.8), facecolor="#e4e4e4", edgecolor="none")
    start_s = 0.0
    for step in window:
        for micro_batch in step.micro_batches:
            value = _colour_value(micro_batch, budget)
            colour = "white" if value is None else scale.to_rgba(value)
            left, row = start_s + micro_batch.start_ms / 1000.0, (micro_batch.rank - 0.4, 0.8)
            width, forward = micro_batch.busy_ms / 1000.0, micro_batch.forward_ms / 1000.0
            axis.broken_barh([(left, width)], row, facecolor=colour, edgecolor="black", linewidth=0.5)
            axis.broken_barh([(left, forward)], row, facecolor="white", alpha=0.3, edgecolor="none")
            if width > 0.035 * longest_s:
                dark = value is not None and np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.5
                label = "dense" if value is None else f"{value:.2f}" if budget else f"{value / 1024:.3g}k"
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
                axis.text(left + width / 2, micro_batch.rank, label, color="white" if dark else "black", **style)
        if step.step_s > 0.012 * longest_s:
            axis.text(start_s + step.step_s / 2, -0.55, str(step.step), ha="center", va="bottom", fontsize=7)
        start_s += step.step_s
        axis.axvline(start_s, color="black", linewidth=1.2)
    axis.axvline(0.0, color="black", linewidth=1.2)
    axis.set_xlim(0.0, longest_s * 1.005)
    axis.set_ylim(run.num_ranks - 0.5, -0.5)
    axis.set_yticks(range(run.num_ranks), [f"rank {rank}" for rank in range(run.num_ranks)], fontsize=8)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _micro_batches(steps: Iterable[Step]) -> Iterable[MicroBatch]:
    return (micro_batch for step in steps for micro_batch in step.micro_batches)


def _colour_value(micro_batch: MicroBatch, budget: bool) -> float | None:
    return micro_batch.top_p if budget else float(micro_batch.tokens)


def _tuning(tuning: bool | str) -> str:
    return tuning if isinstance(tuning, str) else ("on" if tuning else "off")


def _shown(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def _mean_imbalance(times_by_step: Iterable[np.ndarray]) -> float:
    """Mean over steps of max/mean."""
    return float(np.mean([times.max() / times.mean() for times in times_by_step]))


def _mean(weighted: Sequence[tuple[int, float | None]]) -> float | None:
    """Mean of the measures that are there, by their weights; None if none is."""
    known = [(weight, value) for weight, value in weighted if value is not None]
    total = sum(weight for weight, _ in known)
    return float(sum(weight * value for weight, value in known) / total) if total else None


def _trained(run: Run) -> set[tuple[int, int]]:
    """(epoch, document) pairs; a set, as filling up a last batch with a repeated document is not more training."""
    return {(step.epoch, document) for step in run.steps for mb in step.micro_batches for document in mb.documents}
