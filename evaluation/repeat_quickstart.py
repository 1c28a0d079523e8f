"""Run the quickstart several times and print each run's median over the repeats: the table in README.

    .venv/bin/python evaluation/repeat_quickstart.py --repeats 3 --json evaluation/results/quickstart_cpu.json

Each quickstart runs its four trainings one after another, as a user would, and speedups are taken inside it: a slow
hour of the machine cancels, a slow minute does not (`compare_balance.py` alternates by the step).
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("total_s", "speedup", "perfect_balance_speedup", "imbalance_rank", "work", "heldout_loss_after")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "repeats", help="folder for the runs")
    parser.add_argument("--json", type=Path, help="file for all summaries")
    args, options = parser.parse_known_args()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    summaries = []
    for repeat in range(args.repeats):
        folder = args.output / str(repeat)
        command = [sys.executable, str(ROOT / "recipes" / "quickstart.py"), "--output", str(folder), *options]
        subprocess.run(command, check=True, cwd=ROOT)
        summaries.append(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    if args.json:
        args.json.write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    print(table(summaries))
    return 0


def table(summaries: list[dict]) -> str:
    """Markdown: a row per run, the median of each column over the repeats, and the range of the speedup."""
    lines = [f"| run | {' | '.join(SHOWN)} | speedup, range |", "|---" * (len(SHOWN) + 2) + "|"]
    for rows in zip(*(summary["runs"] for summary in summaries), strict=True):
        cells = [rows[0]["name"]]
        for key in SHOWN:
            values = [row[key] for row in rows]
            cells.append("-" if None in values else f"{statistics.median(values):.3f}")
        speedups = [row["speedup"] for row in rows]
        cells.append(f"{min(speedups):.2f}-{max(speedups):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
