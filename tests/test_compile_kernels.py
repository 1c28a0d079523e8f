"""evaluation/compile_kernels.py: what it records, reads and holds against the limits, and one small run."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.language")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels: not in a process that interprets them", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "evaluation" / "compile_kernels.py"

CUOBJDUMP = """
Resource usage:
 Common:
  GLOBAL:0
 Function _tile_dq_kernel:
  REG:168 STACK:24 SHARED:0 LOCAL:8 CONSTANT[0]:508 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
AMDGCN = """
\t.set _route.num_vgpr, 111
\t.amdhsa_private_segment_fixed_size 32
    .name:           _route
    .private_segment_fixed_size: 32
    .sgpr_count:     106
    .sgpr_spill_count: 67
    .symbol:         _route.kd
    .vgpr_count:     128
    .vgpr_spill_count: 8
    .wavefront_size: 64
"""


@pytest.fixture(scope="module")
def program():
    """The program as a module."""
    return importlib.import_module("compile_kernels")


@pytest.fixture
def triton_driver(program, monkeypatch):
    """Recording makes a driver of its own active; here it ends with the test."""
    monkeypatch.setattr(program.driver, "_active", program.driver._active)


def row(program, *cases, **measured):
    """A row of sm_80."""
    return program.Row("sm_80", "tile_dq", [program.Case(*case) for case in cases], {}, {}, **measured)


def test_cuobjdump_gives_registers_and_local_memory(program):
    """Stack and local memory are both memory that a thread goes to for want of registers."""
    assert program.read_cuobjdump(CUOBJDUMP) == (168, 24 + 8)


def test_amdgcn_gives_registers_scratch_memory_and_scalar_spills(program):
    """Numbers come from the kernel's metadata; scalar registers that went to vector registers are no memory."""
    assert program.read_amdgcn(AMDGCN) == (128, 32, 67)


@pytest.mark.parametrize(
    ("assembly", "found"),
    [
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}", "wgmma.mma_async"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }", "mma.sync"),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 ], %rd2;", "tcgen05.mma"),
        ("wgmma.mma_async.sync.aligned\nmma.sync.aligned.m16n8k8", "wgmma.mma_async+mma.sync"),
        ("\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1]", "v_mfma"),
        ("fma.rn.f32 %r1, %r2; wgmma.fence.sync.aligned; tcgen05.commit", "none"),
        ("\tv_fma_f32 v1, v2", "none"),
    ],
)
def test_matrix_instructions_are_told_apart(program, assembly, found):
    """The instruction that multiplies counts, not its fences, and not a product of single numbers."""
    assert program.matrix_instructions(assembly) == found


@pytest.mark.parametrize(
    ("cases", "measured", "complaints"),
    [
        ([("bf16", 128, 64)], {"shared": 1000, "tensor_memory": 512}, []),
        ([("bf16", 128, 64)], {"shared": 1001}, ["1001 bytes of shared memory"]),
        ([("fp32", 256, 64)], {"shared": 1001}, ["1001 bytes of shared memory"]),
        ([("bf16", 128, 64)], {"tensor_memory": 513}, ["513 columns of tensor memory"]),
        ([("bf16", 128, 64)], {"spills": 4}, ["spills 4 bytes"]),
        ([("fp16", 32, 64)], {"spills": 4, "shared": 1001}, ["1001 bytes", "spills 4 bytes"]),
        ([("bf16", 256, 64)], {"spills": 4}, []),
        ([("fp32", 128, 64)], {"spills": 4}, []),
        ([("fp32", 128, 64), ("bf16", 128, 64)], {"spills": 4}, ["spills 4 bytes"]),
        ([("bf16", 128, 64)], {"scalar_spills": 67}, []),
        ([("fp32", 256, 64)], {"error": "CompilationError: no"}, ["does not compile: CompilationError: no"]),
    ],
)
def test_limits(program, cases, measured, complaints):
    """Too much memory is wrong anywhere, spills in half precision up to head dim 128; each gets a line of its own."""
    problems = program.problems_of(row(program, *cases, **measured), 1000)
    assert len(problems) == len(complaints)
    for problem, complaint in zip(problems, complaints, strict=True):
        assert problem.startswith("tile_dq sm_80 ")
        assert complaint in problem


def test_launched_kernels_are_those_that_no_kernel_calls(program):
    """Of all decorated functions exactly those count as launched that are not part of another one."""
    everything, called = {}, set()
    for module in program.backend_modules().values():
        for value in vars(module).values():
            if isinstance(value, program.JITFunction):
                everything[value.fn.__module__, value.fn.__name__] = value
    for kernel in everything.values():
        called |= {name for _, name in everything if f"{name}(" in kernel.src.partition(":\n")[2]}
    assert program.launched_kernels() == {key for key in everything if key[1] not in called}


@pytest.mark.parametrize("target", ["sm_86", "sm_90", "gfx942"])
def test_recorded_launches_are_those_of_the_target(program, target, triton_driver):
    """All kernels are reached, in each variant, with the types, alignment, constants and options of the target."""
    case = program.Case("bf16", 80, 64)
    launches, missed = program.record_launches(target, [case], (1, 4))
    assert missed == []
    found = {}
    for launch in launches:
        assert (launch.target, launch.cases) == (target, [case])
        kernel = getattr(program.importlib.import_module(launch.module), launch.function)
        recorded = json.loads(launch.specialization)
        constants = dict(zip((path[0] for path in recorded["constant_keys"]), recorded["constant_vals"], strict=True))
        named = {kernel.arg_names[number]: value for number, value in constants.items()}
        found.setdefault(program.short_name(launch.function), []).append((recorded, named))
    precision = "ieee" if target == "gfx942" else "tf32x3"
    for name in ("route", "gather_forward", "tile_forward", "gather_dq", "tile_dq", "dkdv"):
        assert {named["PRECISION"] for _, named in found[name]} == {precision}, name
    for name in ("tile_forward", "tile_dq"):
        assert {named["HAS_PARTIALS"] for _, named in found[name]} == {False, True}
    assert {named["OWN"] for _, named in found["fill_pairs"]} == {False, True}
    assert {named["NB"] for _, named in found["route"]} == {32, 128}
    configs = program.backend_modules()["configs"]
    bf16 = program.DTYPES["bf16"]
    (recorded, named) = found["gather_forward"][0]
    tile = configs.gather_forward_config(bf16, 80, 64, hopper=target == "sm_90")
    assert (named["ROWS"], named["KEYS"], named["GROUP"]) == (tile.rows, tile.keys, 7)
    options = recorded["options"]
    assert (options["num_warps"], options["num_stages"]) == (tile.num_warps, tile.num_stages)
    assert options.get("maxnreg") == (None if target == "gfx942" else tile.max_registers)
    assert recorded["signature"]["query"] == "*bf16"
    assert ["tt.divisibility", 16] in recorded["attrs_vals"][0]


def test_a_kernel_that_is_not_reached_is_named(program, monkeypatch, triton_driver):
    """Nothing that the backend launches can be left out in silence."""
    monkeypatch.setattr(program, "launch_all", lambda case, words: None)
    launches, missed = program.record_launches("sm_80", [program.Case("bf16", 64, 64)], (1,))
    assert launches == []
    assert {line.split()[0] for line in missed} == {
        program.short_name(function) for _, function in program.launched_kernels()
    }


def test_equal_launches_are_compiled_once(program, triton_driver):
    """Kernels of the index know neither dtype nor head dim: one launch, with all cases that lead to it."""
    cases = [program.Case("bf16", 32, 64), program.Case("fp16", 64, 64)]
    launches, _ = program.record_launches("sm_80", cases, (1,))
    by_name = {}
    for launch in launches:
        by_name.setdefault(program.short_name(launch.function), []).append(launch.cases)
    assert by_name["count_pairs"] == [cases, cases]  # with and without the own blocks
    assert by_name["dkdv"] == [[case] for case in cases]


def test_interpreter_is_refused(program, monkeypatch, capsys):
    """One line says why nothing is compiled."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert program.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_run_reports_rows_and_violations(program, tmp_path):
    """A run compiles, writes what each launch takes, and fails where a limit is broken, with one line each."""
    path = tmp_path / "rows.json"
    options = ["--targets=sm_80,gfx942", "--kernels=pool,add_parts", "--dtypes=bf16", "--head-dims=64"]
    options += ["--block-sizes=16", "--shared-limit=0", "--jobs=1", f"--json={path}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [sys.executable, str(PROGRAM), *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    document = json.loads(path.read_text(encoding="utf-8"))
    assert set(document) == {
        "command", "date", "machine", "versions", "seconds", "shared_limits", "violations", "rows",
    }  # fmt: skip
    assert {"python", "torch", "triton", "ptxas", "ptxas-blackwell"} == set(document["versions"])
    rows = {(row["kernel"], row["target"]): row for row in document["rows"]}
    assert set(rows) == {(kernel, target) for kernel in ("pool", "add_parts") for target in ("sm_80", "gfx942")}
    fields = {field.name for field in dataclasses.fields(program.Row)}
    for (kernel, target), measured in rows.items():
        assert set(measured) == fields
        assert measured["error"] is None
        assert measured["cases"] == [["bf16", 64, 16]]
        assert 16 <= measured["registers"] <= 255
        assert measured["instruction"] == "-"
        # Sums over the keys of a block cross warps; parts are added by each thread alone.
        assert (measured["shared"] > 0) == (kernel == "pool")
        complained = [line for line in document["violations"] if line.startswith(f"{kernel} {target} ")]
        assert len(complained) == (kernel == "pool")
    assert [line.removeprefix("violation: ") for line in done.stdout.splitlines() if line.startswith("violation")] == (
        document["violations"]
    )
    assert "4 of 4 launches compiled" in done.stdout.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == [path]
