"""``sparsebalance report``: a table and a picture of finished runs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from hf_sparsebalance.cli.parsing import Parser
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.report import balance_share, draw_timeline, render_table, summarise
from hf_sparsebalance.runlog import read_run


def run(arguments: Sequence[str]) -> None:
    """Read run folders (run.json, balance.jsonl) and show them side by side."""
    parser = Parser(prog="sparsebalance report", description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders; speedups are over the first, or --baseline")
    parser.add_argument("--baseline", help="run folder that speedups are over")
    parser.add_argument("--picture", help="PNG to write: each rank's micro-batches over time")
    parser.add_argument("--json", action="store_true", help="print the summaries as JSON instead of the table")
    args = parser.parse_args(arguments)
    runs = [read_run(folder) for folder in args.runs]
    baseline = read_run(args.baseline) if args.baseline else runs[0]
    summaries = [summarise(run, baseline) for run in runs]
    if args.picture:
        try:
            draw_timeline(runs, args.picture)
        except OSError as error:
            raise UserError(f"--picture {args.picture} cannot be written ({error.strerror})") from error
    if args.json:
        print(json.dumps(summaries, indent=2))
    else:
        Console().print(render_table(summaries, [balance_share(run) for run in runs]))
