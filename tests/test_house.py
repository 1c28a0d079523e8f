"""The house rules, read from the source: who may import whom, and what no module may contain."""

import ast
import importlib
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "hf_sparsebalance": ROOT / "hf_sparsebalance",
    "sparsebalance_kernels": ROOT / "kernels/sparsebalance_kernels",
}
PURE = set(re.findall(r'"hf_sparsebalance/(\w+)\.py"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
# pipeline drives the schedules of torch.distributed.pipelining; torch_schedules only reads their tables.
DISTRIBUTED = {f"hf_sparsebalance.{name}" for name in ("distributed", "pipeline", "torch_schedules")}
# Names that are public beside what the packages' __init__ export.
PUBLIC_MODULES = {
    "arguments": {"SparseBalanceArguments"},
    "trainer": {"SparseBalanceTrainer", "SparseBalanceMixin"},
    "callback": {"SparseBalanceCallback"},
    "latency": {"LatencyPredictor"},
    "latency_profile": {"LatencyProfile"},
    "density": {"DensityCurve"},
    "tuning": {"tune_sparsity", "MicroBatch"},
    "batching": {"plan_batches", "STRATEGIES"},
    "schedule": {"simulate_step"},
    "errors": {"UserError"},
    "planner": {"Planner"},
    "cli.train": {"plan", "run"},
}


def module_name(path):
    """Dotted name of a source file of the packages."""
    package = next(name for name, folder in PACKAGES.items() if folder in path.parents)
    parts = [package, *path.relative_to(PACKAGES[package]).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imports_of(tree):
    """(module, name or None) of each import, inside functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [(node.module, alias.name) for alias in node.names]
    return found


def modules_of(name):
    """Dotted names of all modules that a module imports, each `from x import y` of a submodule resolved to it."""
    modules = set()
    for module, imported in imports_of(TREES[name]):
        submodule = f"{module}.{imported}"
        modules.add(submodule if submodule in SOURCES else module)
    return modules


def within(module, package):
    return module == package or module.startswith(package + ".")


def test_planning_is_pure():
    """The modules that plan are among those held to be pure."""
    assert {"batching", "density", "latency", "planner", "schedule", "tuning"} <= PURE


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_import_only_pure_modules(name):
    """A pure module takes plain data in and out: no torch, no transformers, nothing above itself."""
    for module in modules_of(f"hf_sparsebalance.{name}"):
        assert not any(within(module, heavy) for heavy in ("torch", "transformers", "accelerate", "datasets")), module
        assert not within(module, "sparsebalance_kernels"), module
        if within(module, "hf_sparsebalance"):
            assert module.removeprefix("hf_sparsebalance.") in PURE, module


def test_few_modules_talk_between_ranks():
    """Only distributed.py (and those that deal with torch's pipelines) imports torch.distributed or spells it."""
    for name, tree in TREES.items():
        if name in DISTRIBUTED:
            continue
        for module in modules_of(name):
            assert not within(module, "torch.distributed"), name
        for module, imported in imports_of(tree):
            assert (module, imported) != ("torch", "distributed"), name
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "distributed":
                assert not (isinstance(node.value, ast.Name) and node.value.id == "torch"), name


def test_kernels_stand_alone():
    """sparsebalance_kernels imports neither transformers nor hf_sparsebalance."""
    for name in SOURCES:
        if within(name, "sparsebalance_kernels"):
            for module in modules_of(name):
                assert not any(within(module, other) for other in ("transformers", "hf_sparsebalance")), (name, module)


def test_imports_go_one_way():
    """The import graph of both packages has no circle."""
    graph = {name: {module for module in modules_of(name) if module in SOURCES} for name in SOURCES}
    assert graph["hf_sparsebalance.trainer"] >= {"hf_sparsebalance.balance", "hf_sparsebalance.errors"}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert order.index("hf_sparsebalance.latency") < order.index("hf_sparsebalance.trainer")


def test_the_library_is_below_its_command_line():
    """Nothing outside cli imports cli, except the module that is `python -m hf_sparsebalance`."""
    for name in SOURCES:
        if not within(name, "hf_sparsebalance.cli") and name != "hf_sparsebalance.__main__":
            assert not any(within(module, "hf_sparsebalance.cli") for module in modules_of(name)), name


@pytest.mark.parametrize("folder", ["recipes", "evaluation"])
def test_programs_use_the_public_surface(folder):
    """Recipes and evaluation import what the packages make public, never an underscore or an inner module."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for module, imported in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            if within(module, "sparsebalance_kernels"):
                assert module == "sparsebalance_kernels", path
            if not within(module, "hf_sparsebalance") or module == "hf_sparsebalance" or imported is None:
                continue
            inner = module.removeprefix("hf_sparsebalance.")
            public = PUBLIC_MODULES.get(inner, set()) | exported(module)
            assert imported in public, f"{path}: {module}.{imported}"


def exported(name):
    """The __all__ of a module."""
    for node in TREES[name].body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def test_all_names_exist():
    """Each name in an __all__ is there."""
    for name in SOURCES:
        if names := exported(name):
            module = importlib.import_module(name)
            assert not [each for each in names if not hasattr(module, each)], name


def test_kernels_is_no_package():
    """kernels/ is a source root: as a package it would shadow the distribution that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import transformers.integrations.hub_kernels"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_package_import_needs_no_triton():
    """Importing the operator loads neither triton nor transformers."""
    code = "import sys, sparsebalance_kernels; print(*[m for m in ('triton', 'transformers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "kernels", capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_public_things_have_docstrings(name):
    """Every module, and every public function and class at its top level, says what it does."""
    tree = TREES[name]
    assert ast.get_docstring(tree), name
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
            assert overload or ast.get_docstring(node), f"{name}.{node.name}"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_forbidden_constructs(name):
    """No blanket except, no global state, no block pointers, no evaluated text."""
    for node in ast.walk(TREES[name]):
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{name}:{node.lineno}"
            for caught in ast.walk(node.type):
                blanket = isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException")
                assert not blanket, f"{name}:{node.lineno}"
        if isinstance(node, ast.Name):
            assert node.id not in ("eval", "exec"), f"{name}:{node.lineno}"
        assert getattr(node, "attr", getattr(node, "id", None)) != "make_block_ptr", f"{name}:{node.lineno}"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_only_the_command_line_prints(name):
    """The library logs; only cli writes to stdout."""
    if not within(name, "hf_sparsebalance.cli"):
        for node in ast.walk(TREES[name]):
            assert not (isinstance(node, ast.Name) and node.id == "print"), f"{name}:{node.lineno}"
