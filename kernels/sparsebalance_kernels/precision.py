"""How the CPU rounds fp32 matrix products while the operator runs: a setting of the process, given back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

# Two threads that saved and restored in turn would leave the setting of one behind for good.
_LOCK = Lock()


@contextmanager
def cpu_matmul_precision(precision: str | None) -> Iterator[None]:
    """fp32 products on the CPU in ``precision`` ("ieee", "bf16"); None leaves them as the process has them set.

    One thread at a time.  Products that other threads compute outside the operator meanwhile take the setting too.
    """
    if precision is None:
        yield
        return
    mkldnn = torch.backends.mkldnn
    with _LOCK:
        before = mkldnn.matmul.fp32_precision
        # "none" follows the more general settings, as where nobody has set this one.
        given_back = "none" if before == mkldnn.fp32_precision else before
        mkldnn.matmul.fp32_precision = precision
        try:
            yield
        finally:
            mkldnn.matmul.fp32_precision = given_back
