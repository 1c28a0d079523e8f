"""One budget for all layers, or more where coverage is cheap: what a split at equal mean coverage saves.

    .venv/bin/python evaluation/layer_split.py runs/density_curves/passes_*.json --model runs/density_curves/smollm2

Reads the passes that evaluation/density_curves.py recorded.  For each length and base budget p, the split is made from
the first pass (mean curve of each layer over the documents): least sum of the layers' densities such that the mean of
the layers' budgets is p and none lies below p - tolerance; greedy along the convex hull of each layer's curve.  It is
judged on the second pass, after training: density and work (attended / visible pairs, own blocks included) beside one
budget for all layers.  Time saved: the work saved times attention's share of the step, at --attention_share.

With --model, the price beyond coverage: the loss per token of dense attention, of one budget and of the split, over
the same documents of one length (--loss_length), each layer given its own budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from provenance import provenance
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_sparsebalance  # noqa: F401  (registers the attention)
from sparsebalance_kernels import CURVE_TOP_P

BASE_BUDGETS = (0.5, 0.7, 0.8, 0.9)
TOLERANCES = (0.1, 0.2)
GRID = np.round(np.arange(0.01, 1.005, 0.01), 2)


def split_budget(curves_LG: np.ndarray, p: float, tolerance: float) -> np.ndarray:
    """Budgets ``[L]`` with mean p, each in [p - tolerance, 1], of least total density.

    Args:
        curves_LG: each layer's density at GRID, non-decreasing.
    """
    low = int(np.searchsorted(GRID, max(p - tolerance, GRID[0]) - 1e-9))
    steps = [  # (density per budget, layer, budget gained) of each edge of the layers' lower convex hulls
        (slope, layer, width)
        for layer, curve in enumerate(curves_LG)
        for slope, width in hull_edges(GRID[low:], curve[low:])
    ]
    budgets, left = np.full(len(curves_LG), GRID[low]), len(curves_LG) * (p - GRID[low])
    for _, layer, width in sorted(steps):
        gain = min(width, left)
        budgets[layer] += gain
        left -= gain
    return budgets


def hull_edges(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """(slope, width) of the edges of the lower convex hull of points with rising x, from left to right."""
    edges: list[tuple[float, float]] = []
    for slope, width in zip(np.diff(y) / np.diff(x), np.diff(x), strict=True):
        while edges and edges[-1][0] >= slope:
            before, previous = edges.pop()
            slope, width = (before * previous + slope * width) / (previous + width), previous + width
        edges.append((float(slope), float(width)))
    return edges


def work_of(density: float, length: int, block_size: int) -> float:
    """Attended / visible (query, key) pairs of a document: kept history blocks and the own one."""
    position = np.arange(length)
    history = int((position // block_size).sum()) * block_size
    visible = length * (length + 1) // 2
    return (density * history + visible - history) / visible


def layer_curves(recorded: dict[str, Any], number: int, members: list[int]) -> np.ndarray:
    """``[documents, L, G]``: densities at GRID in one of the passes."""
    return np.array(
        [
            [np.interp(GRID, (0.0, *CURVE_TOP_P), (0.0, *layer)) for layer in recorded["passes"][number][i]["layers"]]
            for i in members
        ]
    )


def density_at(curves_DLG: np.ndarray, budgets_L: np.ndarray) -> float:
    """Mean density over documents and layers, each layer at its budget."""
    densities = [
        np.interp(p, GRID, curve) for layers in curves_DLG for p, curve in zip(budgets_L, layers, strict=True)
    ]
    return float(np.mean(densities))


def measure(recorded: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    lengths = [document["length"] for document in recorded["documents"]]
    for length in sorted(set(lengths)):
        members = [i for i, each in enumerate(lengths) if each == length]
        first, second = (layer_curves(recorded, number, members) for number in (0, 1))
        for p in BASE_BUDGETS:
            uniform = density_at(second, np.full(second.shape[1], p))
            for tolerance in TOLERANCES:
                budgets = split_budget(first.mean(axis=0), p, tolerance)
                split = density_at(second, budgets)
                work = [work_of(density, length, args.block_size) for density in (uniform, split)]
                rows.append(
                    {"length": length, "top_p": p, "tolerance": tolerance, "budgets": budgets.round(3).tolist()}
                    | {"density": [uniform, split], "work": work, "work_saved": 1.0 - work[1] / work[0]}
                    | {"time_saved": args.attention_share * (1.0 - work[1] / work[0])}
                )
    return rows


def measure_losses(rows: list[dict], recorded: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Loss per token of one budget and of the split, over the English documents of one length."""
    model = AutoModelForCausalLM.from_pretrained(
        args.model, attn_implementation="sparsebalance", dtype=torch.bfloat16
    ).eval()
    model.config.sparse_attention = {"block_size": args.block_size, "top_p": 1.0}
    tokenizer = AutoTokenizer.from_pretrained(args.model, model_max_length=10**9)
    names = [d["name"] for d in recorded["documents"] if (d["kind"], d["length"]) == ("english", args.loss_length)]
    texts = [torch.tensor([tokenizer(topics[name])["input_ids"][: args.loss_length]]) for name in names]

    def loss(budgets: list[float]) -> float:
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                lambda _, positional, keywords, p=p: (positional, {**keywords, "sparse_top_p": p}), with_kwargs=True
            )
            for layer, p in zip(model.model.layers, budgets, strict=True)
        ]
        with torch.no_grad():
            found = statistics.mean(model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in texts)
        for hook in hooks:
            hook.remove()
        return found

    layers = len(model.model.layers)
    dense = loss([1.0] * layers)
    chosen = [row for row in rows if row["length"] == args.loss_length and row["top_p"] in args.loss_budgets]
    uniform = {p: loss([p] * layers) for p in {row["top_p"] for row in chosen}}
    return [
        {key: row[key] for key in ("length", "top_p", "tolerance", "work")}
        | {"documents": len(texts), "dense": dense, "uniform": uniform[row["top_p"]], "split": loss(row["budgets"])}
        for row in chosen
    ]


def show(document: dict[str, Any], console: Console) -> None:
    table = Table("length", "p", "tolerance", "density", "split", "work", "split", "work saved", "time saved")
    for row in document["splits"]:
        cells = [f"{value:.3f}" for value in (*row["density"], *row["work"])]
        cells += [f"{100 * row[name]:.1f}%" for name in ("work_saved", "time_saved")]
        table.add_row(str(row["length"]), f"{row['top_p']:g}", f"{row['tolerance']:g}", *cells)
    console.print(table)
    if document["losses"]:
        table = Table("length", "p", "tolerance", "work", "split", "dense loss", "one budget", "split")
        for row in document["losses"]:
            cells = [f"{value:.3f}" for value in row["work"]]
            cells += [f"{row[name]:.4f}" for name in ("dense", "uniform", "split")]
            table.add_row(str(row["length"]), f"{row['top_p']:g}", f"{row['tolerance']:g}", *cells)
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("passes", type=Path, help="file that evaluation/density_curves.py keeps in its --cache")
    add("--block_size", type=int, default=64, help="of the recorded passes (%(default)s)")
    add("--attention_share", type=float, default=0.6, help="of a step's time (%(default)s)")
    add("--model", type=Path, help="model folder: measure losses as well")
    add("--loss_length", type=int, default=1024, help="tokens of the documents for the losses (%(default)s)")
    add("--loss_budgets", type=float, nargs="+", default=[0.5], help="%(default)s")
    add("--threads", type=int, default=torch.get_num_threads(), help="%(default)s")
    add("--json", type=Path, help="write the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recorded = json.loads(args.passes.read_text(encoding="utf-8"))
    splits = measure(recorded, args)
    document = provenance("torch", "numpy") | {
        "splits": splits,
        "losses": measure_losses(splits, recorded, args) if args.model else [],
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document, Console(width=None if sys.stdout.isatty() else 119))
    return 0


if __name__ == "__main__":
    sys.exit(main())
