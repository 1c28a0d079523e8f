"""The programs that measure the sources of density curves and the split over layers, at tiny sizes."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import density_curves
import layer_split
import numpy as np
import pytest

from hf_sparsebalance import DensityCurve
from recipes.toy import build_model

EVALUATION = Path(__file__).resolve().parents[1] / "evaluation"
SIZES = ("--lengths=128,192,256", "--documents=2", "--steps=2", "--block_size=16", "--threads=1")


def run_program(name, *options):
    root = EVALUATION.parent
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    command = [sys.executable, str(EVALUATION / f"{name}.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """Folder of a run on the toy model, and its model."""
    folder = tmp_path_factory.mktemp("curves")
    model = build_model(folder / "model", num_layers=3)
    files = (f"--cache={folder / 'cache'}", f"--json={folder / 'out.json'}", f"--curves={folder / 'curves.json'}")
    run_program("density_curves", f"--model={model}", *SIZES, *files)
    return folder, model


@pytest.mark.slow
def test_every_source_is_measured_on_every_stream(small_run):
    """The document names machine, versions and settings and has a row for each source and stream."""
    document = json.loads((small_run[0] / "out.json").read_text(encoding="utf-8"))
    expected = {"command", "date", "machine", "versions", "settings", "imbalance_of", "training_losses"}
    assert set(document) == expected | {"sources", "spread"}
    found = {(row["source"], row["stream"]) for row in document["sources"]}
    sources = ("prior", "bucket", "borrowed", "probe 1", "probe 2", "memory")
    assert found == set(itertools.product(sources, ("python", "english", "mixed")))
    for row in document["sources"]:
        assert row["error"] >= 0.0 and abs(row["bias"]) <= row["error"] + 1e-12 and row["imbalance"] >= 0.0
    groups = {(row["length"], row["kind"]) for row in document["spread"]}
    assert groups == set(itertools.product((128, 192, 256), ("python", "english")))


@pytest.mark.slow
def test_curves_file_holds_every_document(small_run):
    """The simulator's file has one valid curve per document, with its length and kind."""
    curves = json.loads((small_run[0] / "curves.json").read_text(encoding="utf-8"))
    assert len(curves) == 2 * 2 * 3
    for row in curves:
        assert set(row) == {"length", "top_p", "density", "kind"}
        DensityCurve(tuple(row["top_p"]), tuple(row["density"]))


@pytest.mark.slow
def test_split_and_losses_of_a_recorded_run(small_run):
    """The split runs on the record, keeps the mean budget and its bound, and measures the losses of both."""
    folder, model = small_run
    (passes,) = (folder / "cache").glob("passes_*.json")
    options = ("--block_size=16", "--loss_length=192", "--loss_budgets", "0.5", "--threads=1")
    run_program("layer_split", str(passes), f"--model={model}", f"--json={folder / 'split.json'}", *options)
    document = json.loads((folder / "split.json").read_text(encoding="utf-8"))
    assert len(document["splits"]) == 3 * 4 * 2
    for row in document["splits"]:
        assert np.mean(row["budgets"]) == pytest.approx(row["top_p"], abs=2e-3)
        assert min(row["budgets"]) >= row["top_p"] - row["tolerance"] - 1e-9 and max(row["budgets"]) <= 1.0
    assert [row["top_p"] for row in document["losses"]] == [0.5, 0.5]
    assert all(row[name] > 0 for row in document["losses"] for name in ("dense", "uniform", "split"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("p", "tolerance"), [(0.5, 0.2), (0.8, 0.1), (0.9, 0.2)])
def test_split_is_the_best_of_all_splits(seed, p, tolerance):
    """For convex curves no split on the grid with the same mean and bound has less density."""
    exponents = np.random.default_rng(seed).uniform(1.0, 8.0, size=3)
    curves = layer_split.GRID[None, :] ** exponents[:, None]
    budgets = layer_split.split_budget(curves, p, tolerance)
    assert budgets.mean() == pytest.approx(p) and budgets.min() >= p - tolerance - 1e-9 and budgets.max() <= 1.0 + 1e-9
    low, hundredths = round(100 * (p - tolerance)), round(300 * p)
    best = min(
        sum((each / 100) ** exponent for each, exponent in zip((a, b, hundredths - a - b), exponents, strict=True))
        for a in range(low, 101)
        for b in range(low, 101)
        if low <= hundredths - a - b <= 100
    )
    found = sum(np.interp(each, layer_split.GRID, curve) for each, curve in zip(budgets, curves, strict=True))
    assert found == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("length", "block"), [(10, 4), (64, 16), (37, 5), (3, 8)])
def test_work_counts_pairs(length, block):
    """Work is kept pairs over visible pairs, counted one by one: all of the own block, the density of the history."""
    own = sum(t // block == s // block for t in range(length) for s in range(t + 1))
    visible = length * (length + 1) // 2
    assert layer_split.work_of(0.25, length, block) == pytest.approx((own + 0.25 * (visible - own)) / visible)
    assert layer_split.work_of(1.0, length, block) == 1.0


def test_errors_cost_balance():
    """Without errors, or with one common to all, perfect balance stays; with errors it is lost."""
    assert density_curves.imbalance(np.zeros(9)) == density_curves.imbalance(np.full(9, 0.5)) == 0.0
    small, large = (density_curves.imbalance(np.array([-e, e])) for e in (0.02, 0.1))
    assert 0.0 < small < large
    # The largest of 8 sums of 4 signs: about 1.42 standard deviations of .6 x .1 / 2 above the mean.
    assert 0.03 < large < 0.045


@pytest.mark.slow
def test_texts_are_used_once(small_run):
    """No text stands for two documents, and each is as long as it should be."""
    (passes,) = (small_run[0] / "cache").glob("passes_*.json")
    documents = json.loads(passes.read_text(encoding="utf-8"))["documents"]
    assert len({(d["kind"], d["name"]) for d in documents}) == len(documents) == 12
    assert sorted(d["length"] for d in documents) == sorted([128, 192, 256] * 4)
