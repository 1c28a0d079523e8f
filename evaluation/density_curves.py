"""Where density curves come from, and how far each source is off: measured on a pretrained model's own activations.

    .venv/bin/python evaluation/density_curves.py --json evaluation/results/density_curves_cpu.json

Documents of two kinds, Python's standard library and its language reference (pydoc's topics, English), cut to
--lengths, pass through the model twice, with --steps optimizer steps of LoRA on further Python sources in between, as
one epoch later in a fine-tuning run.  Every pass records each layer's density curve.  Sources of a document's curve:

    prior     a uniform gate
    bucket    CurveStore that has seen all other documents
    borrowed  CurveStore that has seen all other lengths but not the document's
    probe n   the gate curves of the first n layers, mapped to the whole model's by least squares over all others
    memory    CurveStore that has seen the document itself, an epoch earlier

Error: mean absolute relative error of the density over documents and budgets .5 to .9.  Imbalance: what it costs a
step that is otherwise balanced perfectly (largest over mean of the ranks' times - 1; see `imbalance`), to hold against
the price of a probe, its share of a training step's FLOPs.

The pass records are kept in --cache and used again; --curves writes the whole-model curves for `sparsebalance
simulate`.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import json
import random
import re
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from provenance import provenance
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparsebalance import DensityCurve, StatsCollector
from hf_sparsebalance.density import CurveStore
from sparsebalance_kernels import CURVE_TOP_P

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
KINDS = ("python", "english")
SEED = 0
LEARNING_RATE = 2e-4
PROBE_LAYERS = (1, 2, 4, 8)
SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
# The step that an error is priced on: 8 ranks x 4 micro-batches, attention 60 % of the time.
RANKS, SLOTS, ATTENTION_SHARE = 8, 4, 0.6
PRICED = 3  # number of its budget in BUDGETS


def texts_of(kind: str) -> list[tuple[str, str]]:
    """(name, text) of all texts of a kind."""
    if kind == "english":
        return sorted(topics.items())
    library = Path(sysconfig.get_paths()["stdlib"])
    return [(path.name, path.read_text(encoding="utf-8")) for path in sorted(library.glob("*.py"))]


def choose_documents(
    tokenizer: Any, lengths: list[int], number: int, steps: int
) -> tuple[list[dict], list[list[int]]]:
    """``number`` documents of each kind and length, and ``steps`` further Python texts to train on, no text twice."""
    documents, further = [], []
    middle = statistics.median_low(lengths)
    for kind in KINDS:
        texts = sorted(
            ((tokenizer(text)["input_ids"], name) for name, text in texts_of(kind)), key=lambda t: len(t[0])
        )
        wanted = [(length, False) for length in lengths * number]
        wanted += [(middle, True)] * (steps if kind == "python" else 0)
        for length, is_training in sorted(wanted):
            # The shortest text that is long enough, so that the long ones last.
            position = bisect.bisect_left(texts, length, key=lambda t: len(t[0]))
            if position == len(texts):
                raise SystemExit(f"too few {kind} texts of {length} tokens: lower --documents, --steps or --lengths")
            ids, name = texts.pop(position)
            if is_training:
                further.append(ids[:length])
            else:
                documents.append({"kind": kind, "name": name, "length": length, "ids": ids[:length]})
    random.Random(SEED).shuffle(documents)
    return documents, further


def record_pass(model: Any, documents: list[dict], top_p: float, label: str) -> list[dict[str, Any]]:
    """Forward each document alone: per layer the density curve over CURVE_TOP_P, and the loss per token."""
    model.eval()
    seen = []
    for number, document in enumerate(documents, start=1):
        print(f"{label}: {number} of {len(documents)}", end="\r", file=sys.stderr, flush=True)
        stats, ids = StatsCollector(), torch.tensor([document["ids"]])
        with torch.no_grad():
            out = model(
                input_ids=ids, labels=ids, sparse_top_p=torch.tensor(top_p), sparse_stats=stats, use_cache=False
            )
        layers = [[round(d, 5) for d in layer.curve.tolist()] for _, layer in sorted(stats.layers.items())]
        seen.append({"layers": layers, "loss": out.loss.item()})
    print(file=sys.stderr)
    return seen


def train(model: Any, texts: list[list[int]], top_p: float) -> list[float]:
    """One AdamW step of LoRA per text; returns the losses."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    losses = []
    for number, text in enumerate(texts, start=1):
        print(f"training step {number} of {len(texts)}", end="\r", file=sys.stderr, flush=True)
        ids = torch.tensor([text])
        loss = model(input_ids=ids, labels=ids, sparse_top_p=torch.tensor(top_p), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(file=sys.stderr)
    return losses


def record(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both passes, with the training in between."""
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=10**9)
    documents, further = choose_documents(tokenizer, args.lengths, args.documents, args.steps)
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sparsebalance", dtype=args.dtype)
    base.config.sparse_attention = {"block_size": args.block_size, "top_p": args.top_p}
    first = record_pass(base, documents, args.top_p, "first pass")
    torch.manual_seed(SEED)
    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    losses = train(model, further, args.top_p)
    second = record_pass(model, documents, args.top_p, "second pass")
    named = [{key: document[key] for key in ("kind", "name", "length")} for document in documents]
    shape = {key: getattr(base.config, key) for key in SHAPE_KEYS}
    return {"documents": named, "passes": [first, second], "training_losses": losses, "config": shape}


def whole_model(seen: dict[str, Any], layers: int | None = None) -> DensityCurve:
    """The mean of the first so many layers' curves (None: of all)."""
    return DensityCurve.from_measured(CURVE_TOP_P, np.mean(seen["layers"][:layers], axis=0).tolist())


def predict(recorded: dict[str, Any], members: list[int], block_size: int) -> dict[str, np.ndarray]:
    """By source, the densities ``[members, BUDGETS]`` that it predicts for each document; see the module."""
    documents, (first, _) = recorded["documents"], recorded["passes"]
    lengths = {i: documents[i]["length"] for i in members}
    curves = {i: whole_model(first[i]) for i in members}
    truth = {i: curves[i].at_many(BUDGETS) for i in members}
    probes = [n for n in PROBE_LAYERS if n < recorded["config"]["num_hidden_layers"]]
    gates = {n: {i: whole_model(first[i], n).at_many(BUDGETS) for i in members} for n in probes}

    def looked_up(number: int, seen: list[int]) -> np.ndarray:
        store = CurveStore(block_size)
        for other in seen:
            store.observe(other, lengths[other], curves[other])
        return store.lookup(number, lengths[number]).at_many(BUDGETS)

    def probed(number: int, seen: list[int], gate: dict[int, np.ndarray]) -> list[float]:
        densities = []
        for b in range(len(BUDGETS)):
            features = {i: [gate[i][b], np.log2(lengths[i]), 1.0] for i in (*seen, number)}
            fitted = np.linalg.lstsq([features[i] for i in seen], [truth[i][b] for i in seen], rcond=1e-6)[0]
            densities.append(float(features[number] @ fitted))
        return densities

    predicted: dict[str, list[Any]] = {}
    for number in members:
        others = [i for i in members if i != number]
        found = {
            "prior": looked_up(number, []),
            "bucket": looked_up(number, others),
            "borrowed": looked_up(number, [i for i in others if lengths[i] != lengths[number]]),
            **{f"probe {n}": probed(number, others, gate) for n, gate in gates.items()},
            "memory": looked_up(number, [number]),
        }
        for source, densities in found.items():
            predicted.setdefault(source, []).append(densities)
    return {source: np.array(densities) for source, densities in predicted.items()}


def imbalance(errors: np.ndarray) -> float:
    """Mean over drawn steps of max / mean of the ranks' times, - 1, where each micro-batch's attention is off by one
    of the relative errors; their mean is taken out, since a predictor's re-fit removes it."""
    generator = np.random.default_rng(SEED)
    drawn = generator.choice(errors - errors.mean(), size=(2000, RANKS, SLOTS))
    ranks = 1.0 + ATTENTION_SHARE * drawn.mean(axis=2)
    return float((ranks.max(axis=1) / ranks.mean(axis=1) - 1.0).mean())


def probe_share(config: dict[str, int], layers: int, length: int, density: float) -> float:
    """FLOPs of a forward pass through the first layers, over those of a training step (3 forward passes of all)."""
    width, head_dim = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = width * (2 * query + 2 * kv + 3 * config["intermediate_size"])
    layer = 2 * weights * length + 4 * query * density * length**2 / 2
    return layers * layer / (3 * (config["num_hidden_layers"] * layer + 2 * width * config["vocab_size"] * length))


def measure_sources(recorded: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per stream of documents (each kind alone, both mixed) and source."""
    documents, (first, second) = recorded["documents"], recorded["passes"]
    rows = []
    for stream in (*KINDS, "mixed"):
        members = [i for i, document in enumerate(documents) if stream in ("mixed", document["kind"])]
        for source, predicted in predict(recorded, members, args.block_size).items():
            truth = second if source == "memory" else first
            errors = predicted / [whole_model(truth[i]).at_many(BUDGETS) for i in members] - 1.0
            row = {"stream": stream, "source": source, "documents": len(errors)}
            row |= {"error": float(np.abs(errors).mean()), "bias": float(errors.mean())}
            row |= {"error_by_budget": dict(zip(map(str, BUDGETS), np.abs(errors).mean(axis=0), strict=True))}
            row["imbalance"] = imbalance(errors[:, PRICED])
            if source.startswith("probe"):
                n, length = int(source.split()[1]), statistics.median_low(args.lengths)
                row["probe_share"] = probe_share(recorded["config"], n, length, 0.4)
            rows.append(row)
    return rows


def measure_spread(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """Per kind, length and budget: density between documents, and between layers (means over the documents)."""
    rows = []
    documents, first = recorded["documents"], recorded["passes"][0]
    for length in sorted({document["length"] for document in documents}):
        for kind in KINDS:
            members = [i for i, d in enumerate(documents) if (d["kind"], d["length"]) == (kind, length)]
            whole = np.array([whole_model(first[i]).at_many(BUDGETS) for i in members])
            layers = np.mean([first[i]["layers"] for i in members], axis=0)
            layers = np.array([np.interp(BUDGETS, CURVE_TOP_P, layer) for layer in layers])
            for b, p in enumerate(BUDGETS):
                row = {"length": length, "kind": kind, "top_p": float(p), "mean": float(whole[:, b].mean())}
                row["documents"] = [float(whole[:, b].min()), float(whole[:, b].max())]
                row["layers"] = [float(layers[:, b].min()), float(layers[:, b].max())]
                rows.append(row | {"relative_std": float(whole[:, b].std() / whole[:, b].mean())})
    return rows


def show(document: dict[str, Any], console: Console) -> None:
    losses = document["training_losses"]
    if losses:
        half = len(losses) // 2
        early, late = statistics.mean(losses[: half or 1]), statistics.mean(losses[half:])
        console.print(f"{len(losses)} LoRA steps between the passes, loss {early:.3f} -> {late:.3f}", highlight=False)
    table = Table(
        "source", "stream", "error", "bias", *(f"p {p:g}" for p in BUDGETS), "imbalance", "price of the probe"
    )
    for row in sorted(document["sources"], key=lambda row: row["stream"]):
        cells = [f"{100 * row[name]:.1f}%" for name in ("error", "bias")]
        cells += [f"{100 * error:.1f}%" for error in row["error_by_budget"].values()]
        cells += [f"{100 * row['imbalance']:.2f}%"]
        price = f"{100 * row['probe_share']:.1f}% of a step" if "probe_share" in row else "-"
        table.add_row(row["source"], row["stream"], *cells, price)
    console.print(table)
    table = Table("length", "kind", "p", "density", "between documents", "std / mean", "between layers")
    for row in document["spread"]:
        if row["top_p"] in (0.5, 0.7, 0.9):
            ranges = [f"{low:.3f}-{high:.3f}" for low, high in (row["documents"], row["layers"])]
            cells = [str(row["length"]), row["kind"], f"{row['top_p']:g}", f"{row['mean']:.3f}", ranges[0]]
            table.add_row(*cells, f"{100 * row['relative_std']:.1f}%", ranges[1])
    console.print(table)


def describe(args: argparse.Namespace) -> dict[str, Any]:
    document = provenance("torch", "numpy", "transformers")
    document["machine"]["threads"] = args.threads
    return document | {
        "settings": recording_settings(args) | {"seed": SEED, "learning_rate": LEARNING_RATE},
        "imbalance_of": {
            "ranks": RANKS,
            "micro_batches": SLOTS,
            "attention_share": ATTENTION_SHARE,
            "top_p": BUDGETS[PRICED],
        },
    }


def recording_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the recorded passes depend on."""
    names = ("lengths", "documents", "steps", "block_size", "top_p", "dtype")
    return {"model": None if args.model is None else str(args.model), **{name: getattr(args, name) for name in names}}


def count(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d{0,8})([kK]?)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1 (1K is 1024)")
    return int(found[1]) * (1024 if found[2] else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="model folder (SmolLM2, made in the cache folder by recipes/smollm2.py)")
    add("--cache", type=Path, default=Path("runs/density_curves"), help="folder for model and records (%(default)s)")
    add("--lengths", default="512,1K,2K,4K", help="tokens, with commas (%(default)s)")
    add("--documents", type=count, default=3, help="of each kind and length (%(default)s)")
    add("--steps", type=int, default=12, help="optimizer steps between the passes (%(default)s)")
    add("--block_size", type=count, default=64, help="tokens (%(default)s)")
    add("--top_p", type=float, default=1.0, help="budget of passes and training (%(default)s: dense)")
    add("--dtype", default="bfloat16", help="%(default)s")
    add("--threads", type=count, default=torch.get_num_threads(), help="%(default)s")
    add("--small", action="store_true", help="tiny sizes, for a trial: 256 to 1K tokens, 2 documents, 2 steps")
    add("--curves", type=Path, help="write the whole-model curves for `sparsebalance simulate`")
    add("--json", type=Path, help="write the results")
    args = parser.parse_args()
    if args.small:
        args.lengths, args.documents, args.steps, args.block_size = "256,512,1K", 2, 2, 32
    args.lengths = sorted({count(part) for part in args.lengths.split(",")})
    return args


def recorded_passes(args: argparse.Namespace) -> dict[str, Any]:
    """The two passes, from the cache where it holds them for the same settings."""
    settings = recording_settings(args)
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    path = args.cache / f"passes_{name}.json"
    if not path.exists():
        folder = args.model
        if folder is None:
            folder = args.cache / "smollm2"
            if not (folder / "config.json").exists():
                command = [sys.executable, str(ROOT / "recipes" / "smollm2.py"), "--output", str(folder)]
                if subprocess.run(command).returncode:
                    raise SystemExit("or name a model folder with --model")
        args.cache.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record(folder, args)), encoding="utf-8")
    print(f"passes: {path}", file=sys.stderr)
    return json.loads(path.read_text(encoding="utf-8"))


def curves_of(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """The first pass's whole-model curves as the simulator reads them."""
    curves = []
    for document, seen in zip(recorded["documents"], recorded["passes"][0], strict=True):
        curve = whole_model(seen)
        rounded = [round(density, 4) for density in curve.density]
        curves.append(
            {"length": document["length"], "top_p": list(curve.top_p), "density": rounded, "kind": document["kind"]}
        )
    return curves


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    recorded = recorded_passes(args)
    document = describe(args) | {"training_losses": recorded["training_losses"]}
    document |= {"sources": measure_sources(recorded, args), "spread": measure_spread(recorded)}
    if args.curves:
        args.curves.write_text(json.dumps(curves_of(recorded)) + "\n", encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document, Console(width=None if sys.stdout.isatty() else 119))
    return 0


if __name__ == "__main__":
    sys.exit(main())
