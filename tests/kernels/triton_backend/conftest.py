"""Kernels on CPU tensors: this folder runs in a process of its own, with TRITON_INTERPRET=1 (see the Makefile).

Triton reads the variable when a kernel is decorated, so no process can both interpret and compile.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    """Skip what lies in this folder unless kernels are interpreted."""
    if INTERPRETED:
        return
    skip = pytest.mark.skip(
        reason="interprets Triton kernels: run `TRITON_INTERPRET=1 pytest tests/kernels/triton_backend`"
    )
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def poisoned_buffers():
    """torch.empty hands out NaN, or the largest integer: what is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
