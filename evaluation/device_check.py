"""Check the Triton backend on a GPU in at most five minutes: correctness, repeatability, speed, memory, training.

    python evaluation/device_check.py --out DIR                              # on the GPU machine
    python evaluation/device_check.py --out DIR --device cpu --tiny          # dry run on interpreted kernels

It needs this checkout, torch, triton and transformers.  Each part is a process of its own with its own time limit, so
that one failure hides nothing; the most important come first, and what no time was left for is named.  Parts that time
nothing run at once: they also compile the kernels for those that do.

DIR gets lines.jsonl (each measurement as soon as it exists, also of a part that died later), device_check.json (all of
it, and the verdict; written after each part) and log.txt (what the parts printed).  Exit status: 0 if every part ran
to its end and every check holds, 1 otherwise, 2 for a mistake in the command; missed targets of speed do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 3.0  # no part gets anything done in less
KINDS = ("machine", "check", "timing", "training")
MODEL = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
METHOD = {
    "accuracy": "largest error against fp64 masked dense attention under the operator's own selection; at most 2 "
    "(out) or 3 (gradients) times that of dense attention in PyTorch in the same dtype",
    "selection": "a block is surely kept if the fp64 mass (top_k: number) of all blocks whose score may reach its own "
    "stays below the target, surely dropped if the mass of those whose score must exceed its own reaches it; scores "
    "may be off by (D + B + 16) 2^-23 scale |q|.mean|k|, masses by (2 blocks + 6) 2^-24 + 4 times that; every sure "
    "block must be right, and only rows with unsure blocks may differ from the torch selector's",
    "spot": "the accuracy rule on a few tokens of a long document, as queries (out, dq) and as keys (dk, dv)",
    "time": "seconds per call, CUDA events, median of repeats that run all contenders in turn, every second one "
    "backwards; ratios are taken inside a repeat",
    "total": "attention and routing: k rows time the operator whole, density rows attend random bits, and the time of "
    "selecting as many by top_k is added (none at density 1)",
    "density": "each bit is set at random with that probability: neighbouring rows agree in nothing, the hardest case",
    "p=1": "the operator, whose dense shortcut is SDPA; density=1 is the kernels themselves with every bit set",
    "flash": "scaled_dot_product_attention, FLASH_ATTENTION only, causal; cudnn: CUDNN_ATTENTION only, key and value "
    "heads repeated inside the call",
    "flex": "compiled flex_attention, the same bits as block mask and mask function, made before the clock starts",
    "flop": "kept pairs x 2 (forward) or 7 (forward+backward) products x 2 x head_dim; its rate is over the total",
    "memory": "torch.cuda.max_memory_allocated minus memory_allocated before the call; random bits are an input",
    "training": "forward, backward, fused AdamW; gradient checkpointing; loss in checkpointed chunks of tokens; both "
    "models resident, the peak is beyond that",
}


@dataclass(frozen=True)
class Case:
    """One correctness case: heads, head_dim, block size, document lengths, and the budget."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    lengths: tuple[int, ...]
    top_p: float | None = None
    top_k: int | None = None

    @property
    def name(self) -> str:
        return f"correct-d{self.head_dim}-g{self.heads // self.kv_heads}-b{self.block_size}"


@dataclass(frozen=True)
class Sizes:
    """What is run; ``shapes`` are (heads, kv_heads, head_dim)."""

    shapes: dict[str, tuple[int, int, int]]
    block_size: int
    top_k: int
    densities: tuple[float, ...]
    lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]  # those of the targets at k blocks, and of the tests at full length
    density_lengths: tuple[int, ...]  # those of the targets at density densities[0]
    flex_lengths: tuple[int, ...]
    cases: tuple[Case, ...]
    check_dtypes: tuple[str, ...]
    dtype: str
    matmul_side: int
    model: tuple[int, ...]  # Qwen2Config's MODEL
    train_length: int
    loss_chunk: int
    compile_length: int

    @property
    def model_settings(self) -> dict[str, int]:
        return dict(zip(MODEL, self.model, strict=True))


FULL = Sizes(
    shapes={"0.5B": (14, 2, 64), "3B": (16, 2, 128), "7B": (28, 4, 128)},
    block_size=128,
    top_k=8,
    densities=(0.1, 0.25, 0.05, 1.0),
    lengths=(4096, 8192, 16384, 32768, 65536, 131072),
    k_lengths=(8192, 32768, 131072),
    density_lengths=(32768, 131072),
    flex_lengths=(32768, 8192, 16384, 4096),
    cases=(
        Case(14, 2, 64, 128, (2085,), top_k=8),
        Case(16, 2, 128, 128, (1, 127, 128, 129, 700, 1000), top_p=0.5),
        Case(28, 4, 128, 128, (1500,), top_p=0.9),
        Case(4, 4, 80, 64, (900, 70, 300), top_p=0.3),
        Case(10, 2, 96, 256, (2000,), top_k=3),
        Case(8, 1, 256, 16, (600, 300), top_k=5),
        Case(7, 1, 64, 512, (2600,), top_p=0.5),
        Case(4, 2, 32, 32, (1100,), top_k=9),
    ),
    check_dtypes=("bfloat16", "float16"),
    dtype="bfloat16",
    matmul_side=8192,
    model=(24, 896, 4864, 151936, 14, 2, 32768),
    train_length=32768,
    loss_chunk=2048,
    compile_length=2048,
)
TINY = Sizes(
    shapes={"tiny": (2, 1, 16)},
    block_size=16,
    top_k=2,
    densities=(0.25, 1.0),
    lengths=(32, 48),
    k_lengths=(48,),
    density_lengths=(48,),
    flex_lengths=(48,),
    cases=(Case(3, 1, 24, 16, (37, 1, 18), top_k=2), Case(2, 2, 16, 32, (100,), top_p=0.6)),
    check_dtypes=("float32", "float16"),
    dtype="float16",
    matmul_side=64,
    model=(2, 32, 48, 64, 4, 2, 256),
    train_length=96,
    loss_chunk=40,
    compile_length=64,
)


@dataclass(frozen=True)
class Target:
    """At least so many times as fast as flash, forward+backward, at this selection and length."""

    selection: str
    length: int
    speedup: float
    why: str


TARGETS = (
    Target("k=8", 8192, 1.1, "FlashMoBA's on an H100"),
    Target("k=8", 32768, 3.5, "FlashMoBA's on an H100"),
    Target("k=8", 131072, 9.0, "FlashMoBA's on an H100"),
    Target("density=0.1", 32768, 4.0, "10 at equal efficiency"),
    Target("density=0.1", 131072, 6.0, "10 at equal efficiency"),
    *(Target(dense, n, 1 / 1.3, "1.3 times flash's time") for n in (32768, 131072) for dense in ("p=1", "density=1")),
)


@dataclass(frozen=True)
class Part:
    """A process: at most ``share`` of the budget; ``timed`` ones run alone."""

    name: str
    share: float
    timed: bool = True


def plan(sizes: Sizes, device: str) -> list[Part]:
    """The parts, most important first."""
    parts = [Part(case.name, 0.4, timed=False) for case in sizes.cases]
    parts[3:3] = [Part(f"twice-{shape}", 0.4, timed=False) for shape in sizes.shapes]  # compiles most: early
    parts += [Part("compile", 0.4, timed=False), Part("top_k", 0.3), Part("density", 0.3), Part("train", 0.2)]
    parts += [Part(f"grid-{shape}", 0.3) for shape in sizes.shapes]
    if device == "cuda":
        parts.append(Part("cudnn", 0.15))
    return [*parts, Part("flex", 1.0)]


@dataclass(frozen=True)
class Running:
    """A part under way; ``log`` is the path of what it prints."""

    part: Part
    process: subprocess.Popen
    log: Path
    started: float
    timeout_s: float


def environment(args: argparse.Namespace) -> dict[str, str]:
    """What the parts see: this checkout first, and kernels interpreted on the CPU only."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(ROOT), str(ROOT / "kernels"), variables.get("PYTHONPATH"))
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    variables["PYTHONUNBUFFERED"] = "1"
    return variables | ({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if args.device == "cpu" else {})


def start(part: Part, timeout_s: float, folder: Path, args: argparse.Namespace) -> Running:
    command = [sys.executable, str(Path(__file__).resolve()), f"--part={part.name}", f"--out={args.out}"]
    command += [f"--device={args.device}", *(["--tiny"] if args.tiny else [])]
    command += ["--fail", part.name] if args.fail == part.name else []
    log = folder / part.name
    with log.open("wb") as stream:
        # A session of its own, so that the compiler's workers end with it.
        files = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": stream}
        process = subprocess.Popen(command, env=environment(args), start_new_session=True, **files)
    return Running(part, process, log, time.monotonic(), timeout_s)


def kill(running: Running) -> None:
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()


def outcome_of(running: Running) -> dict[str, Any] | None:
    """How a part ended; None while it runs within its time."""
    status, seconds = running.process.poll(), time.monotonic() - running.started
    timed_out = status is None and seconds > running.timeout_s
    if status is None and not timed_out:
        return None
    kill(running)
    printed = [line for line in running.log.read_text("utf-8", "replace").splitlines() if line.strip()]
    reason = printed[-1].strip()[:300] if printed else "it printed nothing"
    if timed_out:
        reason = f"killed after {seconds:.0f} s; last line: {reason}"
    elif status < 0:
        reason = f"killed by signal {-status}; last line: {reason}"
    result = "timed out" if timed_out else "failed" if status else "passed"
    row = {"name": running.part.name, "result": result, "exit_status": None if timed_out else status}
    row |= {"seconds": round(seconds, 2), "timeout_s": round(running.timeout_s, 2)}
    return row | {"reason": None if result == "passed" else reason}


def not_run(part: Part, reason: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("exit_status", "seconds", "timeout_s"))
    return {"name": part.name, "result": "not run", **nothing, "reason": reason}


def run_parts(parts: Iterable[Part], args: argparse.Namespace, end: Callable[[dict, str], None]) -> None:
    """Run all parts inside the budget; ``end`` gets each part's outcome and what it printed."""
    deadline = args.begun + args.budget_s - 1.0  # a second for killing and writing
    jobs = max(2, (os.cpu_count() or 1) - 4)
    waiting, running = list(parts), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and may_start(waiting[0], running, jobs, args.tiny):
                    part, left = waiting.pop(0), deadline - time.monotonic()
                    if left < LEAST_SECONDS:
                        end(not_run(part, f"no time left of the {args.budget_s:g} s (--budget-s)"), "")
                    else:
                        timeout_s = min(left, part.share * args.budget_s)
                        running.append(start(part, timeout_s, Path(folder), args))
                for one in list(running):
                    if outcome := outcome_of(one):
                        running.remove(one)
                        end(outcome, one.log.read_text("utf-8", "replace"))
                time.sleep(0.05)
        finally:
            for one in running:
                kill(one)


def may_start(part: Part, running: list[Running], jobs: int, tiny: bool) -> bool:
    """Timed parts run alone, but for tiny ones, whose times mean nothing."""
    together = tiny or not (part.timed or any(one.part.timed for one in running))
    return not running or (together and len(running) < jobs)


def read_lines(path: Path) -> dict[str, list[dict]]:
    """The parts' rows by kind; a line that was cut off when its part was killed is left out."""
    rows: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row.pop("kind")].append(row)
    return rows


def verdict(timings: list[dict], sizes: Sizes) -> list[dict]:
    """Each target for each head shape: what is needed, what was measured, and whether that is enough."""
    found: dict[tuple, float] = {}
    for row in timings:
        if row["mode"] == "forward+backward" and row["contender"] == "ours":
            found.setdefault((row["selection"], row["length"], row["shape"]), row["speedup_over_flash"])
    rows = []
    for target in TARGETS if sizes is FULL else ():
        for shape in sizes.shapes:
            measured = found.get((target.selection, target.length, shape))
            row = {"selection": target.selection, "length": target.length, "shape": shape, "why": target.why}
            row |= {"needed": target.speedup, "measured": measured}
            rows.append(row | {"met": None if measured is None else measured >= target.speedup})
    return rows


def document_of(outcomes: list[dict], args: argparse.Namespace) -> dict[str, Any]:
    sizes, rows = TINY if args.tiny else FULL, read_lines(args.out / "lines.jsonl")
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "dry_run": args.tiny,
        "device": args.device,
        "budget_s": args.budget_s,
        "elapsed_s": round(time.monotonic() - args.begun, 2),
        "machine": rows["machine"][0] if rows["machine"] else None,
        "method": METHOD,
        "parts": outcomes,
        "checks": rows["check"],
        "timings": rows["timing"],
        "training": rows["training"],
        "verdict": verdict(rows["timing"], sizes),
    }


def number(value: float | None, factor: float = 1.0, digits: int = 1) -> str:
    return "-" if value is None else f"{value * factor:,.{digits}f}"


def table(*header: str, rows: list[tuple]) -> None:
    if not rows:
        return
    lines = [header, *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def show(document: dict[str, Any]) -> None:
    machine = document["machine"] or {}
    versions = ", ".join(f"{name} {machine.get(name)}" for name in ("python", "torch", "triton", "transformers"))
    print(f"{machine.get('gpu') or machine.get('cpu')}, {versions}, {document['date']}")
    if document["dry_run"]:
        print("DRY RUN at tiny sizes: no time below means anything, none is compared with a target")
    columns = ("mode", "contender", "ms", "routing ms", "/ flash", "kept TFLOP/s", "of matmul", "peak MiB")
    rows = []
    for row in document["timings"]:
        figures = (number(row["median_s"], 1e3, 2), number(row["routing_s"], 1e3, 2))
        figures += (number(row["speedup_over_flash"], digits=2) + "x", number(row["flop_per_s"], 1e-12))
        figures += (number(row["share_of_matmul"], 100) + "%", number(row["peak_bytes"], 2**-20, 0))
        names = (row[name] for name in ("shape", "length", "selection", "mode", "contender"))
        rows.append((*names, *figures))
    table("shape", "tokens", "selection", *columns, rows=rows)
    rows = []
    for row in document["training"]:
        figures = (number(row["median_s"], 1e3), number(row["peak_bytes"], 2**-20, 0))
        rows.append((row["attention"], row["length"], *figures))
    table("attention", "tokens", "ms/step", "peak MiB", rows=rows)
    checks = document["checks"]
    broken = [check for check in checks if not check["holds"]]
    print(f"\nchecks: {len(checks) - len(broken)} of {len(checks)} hold")
    for check in broken:
        print(f"  does not hold: {json.dumps(check)}")
    rows = []
    for row in document["verdict"]:
        said = {None: "not measured", True: "met", False: "NOT met"}[row["met"]]
        figures = (f"{row['needed']:.2f}x", number(row["measured"], digits=2) + "x", said, row["why"])
        rows.append((f"{row['selection']} at {row['length']}", row["shape"], *figures))
    table("target, against flash", "shape", "needed", "measured", "verdict", "why", rows=rows)
    rows = [(one["name"], one["result"], number(one["seconds"]), one["reason"] or "") for one in document["parts"]]
    table("part", "result", "s", "", rows=rows)
    print(f"{document['elapsed_s']:.0f} s of {document['budget_s']:g}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")  # one line, without the usage
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the results; made if absent")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="a dry run of every part at tiny sizes")
    add("--budget-s", type=float, default=290.0, help="seconds for everything (%(default)g)")
    add("--only", metavar="NAMES", help="these parts, with commas, in their own order")
    add("--part", metavar="NAME", help="run this part here, without a limit, and add its rows to lines.jsonl")
    add("--fail", metavar="NAME", help="this part fails after its first row (a test of the program)")
    args = parser.parse_args()
    args.begun = time.monotonic()
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu interprets the kernels, which only a dry run can wait for: add --tiny")
    if not 0 < args.budget_s < float("inf"):
        parser.error(f"--budget-s must be a positive number of seconds, got {args.budget_s:g}")
    known = [part.name for part in plan(TINY if args.tiny else FULL, args.device)]
    args.only = [name.strip() for name in args.only.split(",")] if args.only else known
    for option, names in (("only", args.only), ("part", [args.part]), ("fail", [args.fail])):
        for name in names:
            if name is not None and name not in known:
                parser.error(f"--{option} {name}: choose among {', '.join(known)}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "lines.jsonl").open("a").close()
    except OSError as error:
        parser.error(f"--out {args.out} must be a folder that can be written: {error.strerror}")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no GPU here: use --device cpu --tiny")
    return args


def main() -> int:
    args = parse()
    sizes = TINY if args.tiny else FULL
    if args.part:
        sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
        import device_parts

        return device_parts.run(args.part, sizes, args.device, args.out / "lines.jsonl", args.fail == args.part)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("device_check.py: ended from outside"))
    for name in ("lines.jsonl", "log.txt"):
        (args.out / name).write_text("", encoding="utf-8")
    outcomes: list[dict] = []

    def end(outcome: dict, printed: str) -> None:
        outcomes.append(outcome)
        with (args.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"== {outcome['name']}: {outcome['result']}\n{printed}\n")
        text = json.dumps(document_of(outcomes, args), indent=1) + "\n"
        (args.out / "device_check.json").write_text(text, encoding="utf-8")
        print(f"{outcome['name']}: {outcome['result']} {outcome['reason'] or ''}", file=sys.stderr)

    run_parts([part for part in plan(sizes, args.device) if part.name in args.only], args, end)
    document = document_of(outcomes, args)
    show(document)
    fine = all(one["result"] == "passed" for one in outcomes) and all(one["holds"] for one in document["checks"])
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
