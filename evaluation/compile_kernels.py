"""Compile every Triton kernel for every target, without a GPU, and hold what it takes against the limits.

    .venv/bin/python evaluation/compile_kernels.py --sample                    # minutes: what CI runs
    .venv/bin/python evaluation/compile_kernels.py --cache DIR --json FILE     # all: hours; started again, it goes on

What is compiled is what gets launched: the backend's own entry points run on empty CPU tensors that say they are on
the target's GPU, and Triton's hook before compilation records each launch (types, alignment, constants, options)
instead of compiling it.  Nothing is run, so tensors hold nothing; the counts that decide between kernels are made up.
Equal launches are compiled once.  A kernel that some module launches and that no call reached is a violation.

Violations: a kernel that does not compile; more shared memory or tensor memory than allowed; spills to memory in bf16
and fp16 up to head dim 128.  Other spills are listed.  Exit status: 0 none, 1 violations, 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from provenance import provenance
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparsebalance_kernels import BlockSelection, Budget, triton_backend

KIB = 1024
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes that a program may have.  sm_80, sm_90 and sm_100 have more, but two programs are to share one of their SMs.
SHARED_LIMITS = {name: (99 if gpu.backend == "cuda" else 64) * KIB for name, gpu in TARGETS.items()}
TENSOR_MEMORY_LIMIT = 512  # columns, Blackwell
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
HEADS, KV_HEADS = 28, 4  # Qwen2.5-7B
SPILL_FREE_DTYPES, SPILL_FREE_HEAD_DIM = ("bf16", "fp16"), 128
# Constants that the case, or the heads above, imply: not shown beside it.
IMPLIED = {"GROUP", "KV_HEADS", "NUM_KV_HEADS", "HEAD_DIM", "DIM", "BLOCK_SIZE", "BLOCK_D", "PRECISION"}
INSTRUCTIONS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "v_smfmac", "v_mfma")


class Case(NamedTuple):
    """What the caller of the operator brings along."""

    dtype: str
    head_dim: int
    block_size: int


SAMPLE = {
    "sm_80": Case("bf16", 128, 128),
    "sm_86": Case("fp16", 80, 64),
    "sm_90": Case("bf16", 128, 64),
    "sm_100": Case("bf16", 64, 128),
    "gfx942": Case("fp32", 64, 32),
}
SAMPLE_WORDS = (4,)


@dataclass
class Launch:
    """One distinct launch: ``specialization`` is Triton's own JSON of it; all of ``cases`` lead to it."""

    target: str
    module: str
    function: str
    specialization: str
    cases: list[Case] = field(default_factory=list)


@dataclass
class Row:
    """What one launch takes.

    Attributes:
        cases: all that lead to this launch.
        constants, options: of the launch; see IMPLIED for those not shown.
        seconds: compile time.
        error: why it does not compile, or None.
        registers: per thread; on HIP vector registers.
        spills: bytes of memory per thread for what did not fit in registers.
        scalar_spills: scalar registers kept in vector registers (HIP): no memory is involved.
        shared: bytes per program.
        tensor_memory: columns per program.
        instruction: of matrix products: "-" in a kernel without any, "none" if no matrix unit multiplies.
    """

    target: str
    kernel: str
    cases: list[Case]
    constants: dict[str, object]
    options: dict[str, int]
    seconds: float = 0.0
    error: str | None = None
    registers: int = 0
    spills: int = 0
    scalar_spills: int = 0
    shared: int = 0
    tensor_memory: int = 0
    instruction: str = "-"

    @property
    def must_not_spill(self) -> bool:
        """Whether any of the cases is in half precision with a head dim up to 128."""
        return any(c.dtype in SPILL_FREE_DTYPES and c.head_dim <= SPILL_FREE_HEAD_DIM for c in self.cases)

    def case(self) -> str:
        """All cases in short."""
        parts = ("/".join(map(str, dict.fromkeys(values))) for values in zip(*self.cases, strict=True))
        return "{} D={} B={}".format(*parts)

    def describe(self) -> str:
        """Kernel, target, cases, and the constants and options that these do not imply."""
        shown = {name: value for name, value in self.constants.items() if name not in IMPLIED} | self.options
        return " ".join([self.kernel, self.target, self.case(), *(f"{name}={value}" for name, value in shown.items())])


def short_name(function: str) -> str:
    """_tile_dq_kernel -> tile_dq."""
    return function.removeprefix("_").removesuffix("_kernel")


class TargetDriver:
    """As much of a Triton driver as recording and compiling ask for."""

    def __init__(self, name: str):
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> str:
        """A device of its own for each target: by this number a kernel keeps what belongs to one target."""
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0


class PretendGpu(TorchFunctionMode):
    """CPU tensors say that they are on a GPU, and what is to be made there is made on the CPU."""

    says = {torch.Tensor.device.__get__: torch.device("cuda", 0), torch.Tensor.is_cuda.__get__: True}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.says:
            return self.says[func]
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def pretend(target: str, record: Callable[[JITFunction, str], None]) -> Iterator[None]:
    """Answer for ``target`` whatever launchers ask about the device; launches go to ``record`` and no further."""

    def before_compiling(*, key, repr, fn, compile, is_manual_warmup, already_compiled) -> bool:
        record(fn.jit_function, compile["specialization_data"])
        return True  # neither compile nor run

    gpu = TARGETS[target]
    capability = divmod(gpu.arch, 10) if gpu.backend == "cuda" else (9, 4)
    driver.set_active(TargetDriver(target))
    with (
        patch.object(knobs.runtime, "jit_cache_hook", before_compiling),
        patch.object(torch.version, "hip", None if gpu.backend == "cuda" else "7.0"),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        PretendGpu(),
    ):
        yield


@functools.cache
def backend_modules() -> dict[str, ModuleType]:
    """All modules of the Triton backend by their short names."""
    names = [info.name for info in pkgutil.iter_modules(triton_backend.__path__)]
    return {name: importlib.import_module(f"{triton_backend.__name__}.{name}") for name in names}


def launched_kernels() -> set[tuple[str, str]]:
    """(module, function) of every kernel that the backend launches: ``name[grid](...)`` in the source of a module."""
    found = set()
    for module in backend_modules().values():
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = getattr(module, getattr(node.func.value, "id", ""), None)
                if isinstance(kernel, JITFunction):
                    found.add((kernel.fn.__module__, kernel.fn.__name__))
    return found


def launch_all(case: Case, words: tuple[int, ...]) -> None:
    """Select, attend and differentiate, so that each kernel is launched in each of its variants.

    There are four own blocks: the tiles of two are in tile mode, those of the others in gather mode.  That makes more
    pairs than one item of dK and dV takes.

    Args:
        case: dtype, head dim, block size.
        words: 32-bit words of selection bits per row; each number is another variant of the routing kernel.
    """
    backend, indexing = backend_modules()["backend"], backend_modules()["indexing"]
    size = case.block_size
    num_tokens = 3 * size + 1
    cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32)
    many, few = (num_tokens, HEADS, case.head_dim), (num_tokens, KV_HEADS, case.head_dim)
    query, key, value, grad_out = (torch.empty(shape, dtype=DTYPES[case.dtype]) for shape in (many, few, few, many))
    count_tiles = indexing._tile_counts

    def made_up(bits: torch.Tensor, table: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        unions, pairs = count_tiles(bits, table, rows)
        half = unions.shape[1] // 2
        unions.fill_(1)
        pairs[:, :half], pairs[:, half:] = rows, 1
        return unions, pairs

    # Between them these take both sides of every branch; the first is the one that needs most registers.
    budgets = Budget(size, top_p=(0.5,), min_blocks=1, max_blocks=8, sink_blocks=1), Budget(size, top_k=(4,))
    for budget, count in itertools.product(budgets, words):
        backend.select(query, key, cu_seqlens, budget, 0.125, count, False)
    selection = BlockSelection(torch.zeros(HEADS, 1, num_tokens, dtype=torch.int32), cu_seqlens, size)
    with patch.object(indexing, "_tile_counts", made_up):
        out, lse = backend.attend_forward(query, key, value, selection, 0.125)
        backend.attend_backward(grad_out, query, key, value, out, lse, selection, 0.125)


def record_launches(target: str, cases: list[Case], words: tuple[int, ...] | None) -> tuple[list[Launch], list[str]]:
    """The distinct launches of the cases, and a line for each kernel that they do not reach; ``words`` None: all."""
    if words is None:
        words = tuple(2**i for i in range((backend_modules()["routing"].MAX_HISTORY_BLOCKS // 32).bit_length()))
    launches: dict[tuple[str, str, str], Launch] = {}

    def note(case: Case, kernel: JITFunction, specialization: str) -> None:
        key = kernel.fn.__module__, kernel.fn.__name__, specialization
        launch = launches.setdefault(key, Launch(target, *key))
        if case not in launch.cases:
            launch.cases.append(case)

    for case in cases:
        with pretend(target, functools.partial(note, case)):
            launch_all(case, words)
    missed = launched_kernels() - {(launch.module, launch.function) for launch in launches.values()}
    return list(launches.values()), [
        f"{short_name(function)} {target}: {module} has it, but launch_all does not reach it"
        for module, function in sorted(missed)
    ]


def compile_launch(launch: Launch, cache: str | None) -> Row:
    """Compile one launch in this process; ``cache``: folder for what is compiled, None: it is not kept."""
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    driver.set_active(TargetDriver(launch.target))
    kernel: JITFunction = getattr(importlib.import_module(launch.module), launch.function)
    recorded = json.loads(launch.specialization)
    names = [kernel.arg_names[path[0]] for path in recorded["constant_keys"]]
    constants = {n: value for n, value in zip(names, recorded["constant_vals"], strict=True) if n.isupper()}
    options = {name: recorded["options"].get(name) for name in ("num_warps", "num_stages", "maxnreg")}
    options = {name: value for name, value in options.items() if value is not None}
    row = Row(launch.target, short_name(launch.function), launch.cases, constants, options)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = cache or scratch
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # where Triton prints the program if ptxas fails
                compiled = kernel.preload(launch.specialization)
        except (TritonError, RuntimeError) as error:
            row.error = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
        else:
            row.shared = compiled.metadata.shared
            row.tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
            read_assembly(row, compiled.asm, Path(scratch))
    kernel.device_caches.clear()  # or thousands of binaries stay in memory
    row.seconds = round(time.perf_counter() - begin, 2)
    return row


def read_assembly(row: Row, asm: dict[str, Any], scratch: Path) -> None:
    """Set registers, spills and instruction from what was compiled."""
    if "cubin" in asm:
        binary = scratch / "kernel.cubin"
        binary.write_bytes(asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row.registers, row.spills = read_cuobjdump(usage)
    else:
        row.registers, row.spills, row.scalar_spills = read_amdgcn(asm["amdgcn"])
    if "tt.dot" in asm["ttir"]:
        row.instruction = matrix_instructions(asm["ptx"] if "ptx" in asm else asm["amdgcn"])


def read_cuobjdump(usage: str) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) of a thread, from ``cuobjdump -res-usage`` of one kernel."""
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def read_amdgcn(assembly: str) -> tuple[int, int, int]:
    """(vector registers, bytes of scratch memory, spilled scalar registers), from the metadata of one kernel."""
    names = ("vgpr_count", "private_segment_fixed_size", "sgpr_spill_count")
    found = dict(re.findall(rf"^\s+\.({'|'.join(names)}):\s+(\d+)$", assembly, flags=re.MULTILINE))
    registers, spills, scalar_spills = (int(found[name]) for name in names)
    return registers, spills, scalar_spills


def matrix_instructions(assembly: str) -> str:
    """Which matrix instructions PTX or AMDGCN assembly has, "none" without any."""
    return "+".join(name for name in INSTRUCTIONS if re.search(rf"\b{re.escape(name)}", assembly)) or "none"


def problems_of(row: Row, shared_limit: int) -> list[str]:
    """A line for each limit that a row breaks."""
    if row.error is not None:
        return [f"{row.describe()}: does not compile: {row.error}"]
    broken = []
    if row.shared > shared_limit:
        broken.append(f"{row.shared} bytes of shared memory, the limit is {shared_limit}")
    if row.tensor_memory > TENSOR_MEMORY_LIMIT:
        broken.append(f"{row.tensor_memory} columns of tensor memory, the limit is {TENSOR_MEMORY_LIMIT}")
    if row.spills and row.must_not_spill:
        broken.append(f"spills {row.spills} bytes")
    return [f"{row.describe()}: {problem}" for problem in broken]


def compile_all(launches: list[Launch], jobs: int, cache: str | None) -> tuple[list[Row], list[str]]:
    """Rows in the order of ``launches``, and a line if the compiler took its process down."""
    rows: dict[int, Row] = {}
    # Spawned: a worker is not to inherit what recording has set.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compile_launch, launch, cache): i for i, launch in enumerate(launches)}
        console = Console(stderr=True)
        done = track(
            as_completed(futures), "compiling", len(futures), console=console, disable=not console.is_terminal
        )
        try:
            for future in done:
                rows[futures[future]] = future.result()
        except BrokenProcessPool:
            pass
    lost = len(launches) - len(rows)
    died = f"a compiler process died: no result for {lost} of {len(launches)} launches; --jobs 1 --cache DIR narrow it"
    return [rows[i] for i in sorted(rows)], [died] if lost else []


def show(rows: list[Row], verbose: bool, console: Console) -> None:
    """Every row if ``verbose``, the worst of each kernel and target, and the spills that are allowed."""
    write = functools.partial(console.print, soft_wrap=True, markup=False, highlight=False)
    for row in rows if verbose else ():
        taken = f"{row.registers} registers, {row.spills} bytes spilled, {row.scalar_spills} scalars in vectors"
        write(f"{row.describe()}: {row.error or f'{taken}, {row.shared} bytes shared, {row.instruction}'}")
    table = Table(title="worst of each kernel and target; bytes of spills per thread, of shared memory per program")
    for name in ("kernel", "target", "launches", "registers", "spills", "shared", "most shared by", "instruction"):
        table.add_column(name, justify="right" if name in ("launches", "registers", "spills", "shared") else "left")
    for kernel in sorted({row.kernel for row in rows}):
        for target in TARGETS:
            group = [row for row in rows if (row.kernel, row.target, row.error) == (kernel, target, None)]
            if not group:
                continue
            most = max(group, key=lambda row: row.shared)
            worst = [max(row.registers for row in group), max(row.spills for row in group), most.shared]
            found = ", ".join(sorted({row.instruction for row in group}))
            table.add_row(
                kernel, target, str(len(group)), *map(str, worst), most.case() if most.shared else "-", found
            )
        table.add_section()
    console.print(table)
    allowed = [row for row in rows if row.spills and not row.must_not_spill]
    if allowed:
        write(f"{len(allowed)} launches spill where that is allowed (fp32, or head dim above {SPILL_FREE_HEAD_DIM}):")
    for row in allowed:
        write(f"  {row.describe()}: {row.spills} bytes")


def parse() -> argparse.Namespace:
    """The command line; lists are separated by commas."""

    def several(allowed: Sequence[Any]) -> Callable[[str], list]:
        def convert(text: str) -> list:
            named = {str(value): value for value in allowed}
            if unknown := [part for part in text.split(",") if part not in named]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(named)}")
            return [named[part] for part in text.split(",")]

        return convert

    kernels = sorted(short_name(function) for _, function in launched_kernels())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=several(list(TARGETS)), default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--kernels", type=several(kernels), default=kernels, help=", ".join(kernels))
    axes = {"dtypes": list(DTYPES), "head_dims": HEAD_DIMS, "block_sizes": BLOCK_SIZES}
    for name, values in axes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=several(values), help=", ".join(map(str, values)))
    parser.add_argument("--sample", action="store_true", help="every kernel, one case per target")
    parser.add_argument("--shared-limit", type=int, help="bytes, for all targets; default: each target's own")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--cache", type=Path, help="folder that keeps what was compiled; default: nothing is kept")
    parser.add_argument("--verbose", action="store_true", help="print every launch")
    parser.add_argument("--json", type=Path, help="file for every launch, with versions and date")
    args = parser.parse_args()
    if args.sample and any(getattr(args, name) for name in axes):
        parser.error("--sample has dtypes, head dims and block sizes of its own")
    for name, everything in axes.items():
        setattr(args, name, getattr(args, name) or everything)
    return args


def main() -> int:
    if knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: a process interprets kernels or compiles them; unset it", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    args = parse()
    begin = time.perf_counter()
    every_case = [Case(*values) for values in itertools.product(args.dtypes, args.head_dims, args.block_sizes)]
    launches: list[Launch] = []
    violations: list[str] = []
    for target in args.targets:
        cases, words = ([SAMPLE[target]], SAMPLE_WORDS) if args.sample else (every_case, None)
        recorded, missed = record_launches(target, cases, words)
        launches += [launch for launch in recorded if short_name(launch.function) in args.kernels]
        violations += missed
    print(f"{len(launches)} distinct launches, {args.jobs} processes", file=sys.stderr)
    rows, died = compile_all(launches, args.jobs, str(args.cache.absolute()) if args.cache else None)
    violations += died
    limits = {target: SHARED_LIMITS[target] if args.shared_limit is None else args.shared_limit for target in TARGETS}
    for row in rows:
        violations += problems_of(row, limits[row.target])
    seconds = round(time.perf_counter() - begin, 1)
    if args.json:
        assemblers = {"ptxas": knobs.nvidia.ptxas.version, "ptxas-blackwell": knobs.nvidia.ptxas_blackwell.version}
        document = provenance("torch", "triton")
        document["versions"] |= assemblers
        document |= {
            "seconds": seconds,
            "shared_limits": limits,
            "violations": violations,
            "rows": [asdict(row) for row in rows],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    show(rows, args.verbose, Console(width=None if sys.stdout.isatty() else 119))
    for line in violations:
        print(f"violation: {line}")
    print(f"{len(rows)} of {len(launches)} launches compiled in {seconds:.0f} s, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
