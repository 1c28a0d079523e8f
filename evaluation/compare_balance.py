"""Real fine-tuning on two CPU processes: every batching strategy and tuning on the same documents, with controls.

    .venv/bin/python evaluation/compare_balance.py --json evaluation/results/compare_balance_cpu.json

Each repeat trains everything once, an optimizer step of each run in turn (`alternating_runs.py`), every second time in
the opposite order; ratios are taken inside a repeat.  Repeats that are there already are kept: a comparison that was
stopped goes on with the same command.  A gain is split into balance (evener ranks), fewer attended pairs, and cheaper
ones.  The controls have one budget for all micro-batches: `same work` attends as many pairs as the tuned run plans to,
`same coverage` has its mean budget over the tokens with history.  For the anchor `optimal` that mean is the base
budget, so that its control with the same coverage is the run without tuning.

Corpora: `library`, the source files of Python's standard library, whole; `bimodal`, pieces of the same text, half of
them short and half long; `equal`, pieces of one length, on which only `random` runs: what its ranks still differ by is
the machine's doing, so no strategy can show more.  The model is a random toy: what is measured is balance and time,
not quality.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from provenance import provenance  # noqa: E402

from hf_sparsebalance import balance_share, read_run, summarise  # noqa: E402
from hf_sparsebalance.batching import STRATEGIES  # noqa: E402
from recipes.quickstart import CONFIG, SPARSE, launch, run_profile  # noqa: E402
from recipes.toy import build_documents, build_model  # noqa: E402

CORPORA = ("library", "bimodal", "equal")
OFF = ["--tolerance", "0"]
SAB = ["--batching", "sparsity_aware", "--window", "4"]


@dataclass(frozen=True)
class Trial:
    """One run: its name, its options, and which other run decides its budget.

    Attributes:
        name: shown, and the name of its folder.
        options: of ``sparsebalance train``.
        matches: (name of another trial, weight): the uniform budget is the mean of what that run plans, weighted by
            ``causal_pairs`` (same work, as the gate of a random model is uniform: density follows p) or ``history``.
    """

    name: str
    options: list[str]
    matches: tuple[str, str] | None = None


def trials(profile: Path) -> list[Trial]:
    """Everything that is compared; the profile is one of sparse attention."""
    sparse = [*SPARSE, "--profile", str(profile)]
    random_order = [*sparse, "--batching", "random"]
    mean, best = ["--tolerance", "0.1", "--anchor", "mean"], ["--tolerance", "0.1", "--anchor", "optimal"]
    rivals = [name for name in STRATEGIES if name not in ("random", "sparsity_aware")]
    return [
        Trial("dense", ["--attn_implementation", "sdpa", "--batching", "random", *OFF]),
        Trial("random", [*random_order, *OFF]),
        *(Trial(name, [*sparse, "--batching", name, *OFF]) for name in rivals),
        Trial("sab w1", [*sparse, "--batching", "sparsity_aware", "--window", "1", *OFF]),
        Trial("sab w4", [*sparse, *SAB, *OFF]),
        Trial("dst mean", [*random_order, *mean]),
        Trial("dst mean: same work", [*random_order, *OFF], ("dst mean", "causal_pairs")),
        Trial("dst mean: same coverage", [*random_order, *OFF], ("dst mean", "history")),
        Trial("dst optimal", [*random_order, *best]),
        Trial("dst optimal: same work", [*random_order, *OFF], ("dst optimal", "causal_pairs")),
        Trial("sab w4 + dst", [*sparse, *SAB, *best]),
        Trial("sab w4 + dst: same work", [*sparse, *SAB, *OFF], ("sab w4 + dst", "causal_pairs")),
    ]


def cut_documents(folder: Path, corpus: str, count: int, longest: int) -> Path:
    """Pieces of the library's sources: `equal`, a third of ``longest`` each; `bimodal`, half of them up to a sixteenth
    of ``longest``, half from a third of it on."""
    train, _ = build_documents(folder, num_train=400, num_heldout=8, max_bytes=longest)
    texts = [json.loads(line)["text"] for line in train.read_text(encoding="utf-8").splitlines()]
    rng, whole = random.Random(0), "".join(texts)
    pieces, at = [], 0
    for number in range(count):
        low, high = (longest // 64, longest // 16) if number % 2 else (longest // 3, longest)
        size = longest // 3 if corpus == "equal" else rng.randint(max(low, 2), high)
        pieces.append(whole[at : at + size])
        at += size
    if len(pieces[-1]) < 2:
        raise SystemExit(f"--documents {count}: the library's text is too short for so many of {longest} bytes")
    rng.shuffle(pieces)
    lines = (json.dumps({"text": text, "name": str(number)}) + "\n" for number, text in enumerate(pieces))
    train.write_text("".join(lines), encoding="utf-8")
    return train


def run_corpus(
    corpus: str, chosen: list[Trial], common: list[str], args: argparse.Namespace, console: Console
) -> list[dict]:
    """Summaries of all repeats of all trials on one corpus; `common` are options that all of them share."""
    folder = args.output / corpus
    if corpus == "library":
        train, _ = build_documents(folder, num_train=args.documents, num_heldout=8, max_bytes=args.max_length)
    else:
        train = cut_documents(folder, corpus, args.documents, args.max_length)
    options = {trial.name: [*common, "--data", str(train), *trial.options] for trial in chosen}
    rows = []
    for repeat in range(args.repeats):
        place = folder / str(repeat)
        folders = {trial.name: place / trial.name.replace(" ", "_").replace(":", "") for trial in chosen}
        if not all((run / "run.json").exists() for run in folders.values()):  # written when a run has ended
            console.rule(f"{corpus}, repeat {repeat + 1}")
            specification = {}
            for trial in chosen if repeat % 2 == 0 else reversed(chosen):
                matches = None
                if trial.matches is not None:
                    other, weight = trial.matches
                    matches = [[*options[other], "--output_dir", str(place)], weight]
                arguments = [*options[trial.name], "--output_dir", str(folders[trial.name])]
                specification[trial.name] = {"arguments": arguments, "matches": matches}
            place.mkdir(parents=True, exist_ok=True)
            (place / "trials.json").write_text(json.dumps(specification), encoding="utf-8")
            launch([str(ROOT / "evaluation" / "alternating_runs.py"), str(place / "trials.json")])
        runs = {name: read_run(run) for name, run in folders.items()}
        for name, run in runs.items():
            summary = summarise(run, runs["random"])
            # Of the mean rank, forward and backward passes.
            busy_s = sum(m.busy_ms for step in run.steps for m in step.micro_batches) / run.num_ranks / 1000.0
            shares = {"balance_share": balance_share(run), "busy_s": busy_s}
            rows.append({**summary, **shares, "name": name, "repeat": repeat})
    return rows


def table(corpus: str, rows: list[dict], chosen: list[Trial]) -> Table:
    """Medians over the repeats; the gain over random order, and how much of the work it did."""
    shown = Table(title=f"{corpus}: medians over {1 + max(row['repeat'] for row in rows)} repeats; ratios to random")
    for name in ("run", "total s", "gain", "range", "perfect balance", "rank max/mean", "work", "coverage", "plan %"):
        shown.add_column(name, justify="left" if name == "run" else "right")
    for trial in chosen:
        mine = [row for row in rows if row["name"] == trial.name]

        def middle(key: str, mine: list[dict] = mine) -> float | None:
            values = [row[key] for row in mine if row[key] is not None]
            return statistics.median(values) if values else None

        gains = [row["speedup"] for row in mine]
        step_ms = 1000.0 * middle("step_s_mean")
        work, coverage, planning_ms = middle("work"), middle("coverage"), middle("planning_ms")
        shown.add_row(
            trial.name,
            f"{middle('total_s'):.1f}",
            f"{statistics.median(gains):.2f}x",
            f"{min(gains):.2f}-{max(gains):.2f}",
            f"{middle('balance_share'):.1%}",
            f"{middle('imbalance_rank'):.3f}",
            "-" if work is None else f"{work:.3f}",
            "-" if coverage is None else f"{coverage:.3f}",
            "-" if planning_ms is None else f"{planning_ms / step_ms:.2%}",
        )
    return shown


def split(rows: list[dict], tuned: str, control: str, before: str) -> dict[str, float]:
    """Factors of a tuned run's gain over random order, geometric means over the repeats; they multiply to `total`.

    Args:
        rows: of one corpus.
        tuned: the run whose gain is split.
        control: the run with one budget and the same work.
        before: the run without tuning, in the same order of documents.

    Returns:
        `total`; `batching` and `tuning`: how much evener the order and then the budgets make the ranks, with whatever
        work; `fewer_pairs`: busy time that the control saves; `cheaper_pairs`: busy time that the tuned run saves
        beyond it with as many pairs (where dense attention is faster than sparse, pairs are cheaper there); `rest`:
        time outside micro-batches, and noise.
    """
    found = {(row["name"], row["repeat"]): row for row in rows}
    repeats = sorted({row["repeat"] for row in rows})

    def ratio(key: str, over: str, under: str) -> float:
        return statistics.geometric_mean(found[over, i][key] / found[under, i][key] for i in repeats)

    parts = {
        "batching": ratio("balance_share", before, "random"),
        "tuning": ratio("balance_share", tuned, before),
        "fewer_pairs": ratio("busy_s", before, control),
        "cheaper_pairs": ratio("busy_s", control, tuned),
    }
    total = ratio("total_s", "random", tuned)
    return {"total": total, **parts, "rest": total / math.prod(parts.values())}


def faster(rows: list[dict], one: str, other: str) -> dict[str, object]:
    """How many times as fast one run is as another, inside each repeat: median and range over the repeats."""
    total_s = {(row["name"], row["repeat"]): row["total_s"] for row in rows}
    gains = [total_s[other, i] / total_s[one, i] for i in sorted({row["repeat"] for row in rows})]
    return {"run": one, "over": other, "median": statistics.median(gains), "least": min(gains), "most": max(gains)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "compare_balance", help="folder for the runs")
    parser.add_argument("--corpora", default=",".join(CORPORA), help="with commas (%(default)s)")
    parser.add_argument("--repeats", type=int, help="default: 3")
    parser.add_argument("--documents", type=int, help="a multiple of 8 (80)")
    parser.add_argument("--max_length", type=int, help="longest document, tokens (16384)")
    parser.add_argument("--runs", help="only these, with commas, and what they are compared with (default: all)")
    parser.add_argument("--small", action="store_true", help="a tiny size where none is given, to see that it runs")
    parser.add_argument("--json", type=Path, help="file for all summaries")
    args = parser.parse_args()
    repeats, documents, max_length = (1, 16, 1024) if args.small else (3, 80, 16384)
    args.repeats = repeats if args.repeats is None else args.repeats
    args.documents = documents if args.documents is None else args.documents
    args.max_length = max_length if args.max_length is None else args.max_length
    corpora = args.corpora.split(",")
    if unknown := set(corpora) - set(CORPORA):
        parser.error(f"--corpora: {', '.join(sorted(unknown))}: known are {', '.join(CORPORA)}")
    if args.max_length < 256:
        parser.error("--max_length must be at least 256")
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    if args.documents % 8 or args.documents < 8:
        parser.error("--documents must be a multiple of 8: two ranks with four micro-batches each")
    profile = args.output / "profile.json"
    console, chosen = Console(), trials(profile)
    if args.runs is not None:
        wanted = {"random", *args.runs.split(",")}
        if unknown := wanted - {trial.name for trial in chosen}:
            parser.error(
                f"--runs: {', '.join(sorted(unknown))}: known are {', '.join(trial.name for trial in chosen)}"
            )
        wanted |= {trial.matches[0] for trial in chosen if trial.name in wanted and trial.matches is not None}
        chosen = [trial for trial in chosen if trial.name in wanted]
    settings, marker = {"documents": args.documents, "max_length": args.max_length}, args.output / "settings.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) != settings:
        parser.error(f"--output {args.output} holds a comparison of other sizes: choose another folder")
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    # Each run is a thread; with a memory arena each, too, what one has freed no other takes: 6 to 7 GB a rank seen.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    model = build_model(args.output / "model")
    if not profile.exists():
        run_profile(model, profile, args.max_length, quick=args.small)
    common = ["--config", str(CONFIG), "--model_name_or_path", str(model)]
    common += ["--max_length", str(args.max_length), "--disable_tqdm", "true"]
    found: dict[str, dict] = {}
    for corpus in corpora:
        here = [trial for trial in chosen if corpus != "equal" or trial.name == "random"]
        rows = run_corpus(corpus, here, common, args, console)
        names = {trial.name for trial in here}
        parts = {
            tuned: split(rows, tuned, f"{tuned}: same work", before)
            for tuned, before in (("dst mean", "random"), ("dst optimal", "random"), ("sab w4 + dst", "sab w4"))
            if {tuned, f"{tuned}: same work", before} <= names
        }
        pairs = [(tuned, f"{tuned}: same work") for tuned in ("dst mean", "dst optimal", "sab w4 + dst")]
        pairs += [("sab w4 + dst", "sab w4"), ("sab w1", "length_partition")]
        pairs += [("sab w4", name) for name in STRATEGIES if name not in ("random", "sparsity_aware")]
        gains = [faster(rows, *pair) for pair in pairs if set(pair) <= names]
        found[corpus] = {"runs": rows, "parts": parts, "gains": gains}
        console.print(table(corpus, rows, here))
        for name, part in parts.items():
            console.print(f"{name}: " + ", ".join(f"{key} {value:.3f}x" for key, value in part.items()))
        for gain in gains:
            console.print(
                f"{gain['run']} over {gain['over']}: {gain['median']:.3f}x ({gain['least']:.3f}-{gain['most']:.3f})"
            )
    if args.json:
        environment = read_run(args.output / corpora[0] / "0" / "random").environment
        document = provenance("torch", "transformers", "accelerate", "numpy")
        document |= {"environment": environment, "corpora": found}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
