"""The process's precision of fp32 products, lent to the operator."""

import threading

import pytest
import torch

from sparsebalance_kernels import block_sparse_attention, select_blocks
from sparsebalance_kernels.precision import cpu_matmul_precision

MATMUL = torch.backends.mkldnn.matmul
STARTS = torch.tensor([0, 200])


@pytest.fixture(autouse=True)
def untouched():
    """Each test starts from, and leaves, settings that nobody has made."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.fp32_precision = "none"
    MATMUL.fp32_precision = "none"


def tensors(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(200, heads, 32, generator=generator).to(dtype) for heads in (4, 2, 2))


def attend(dtype=torch.bfloat16):
    return block_sparse_attention(*tensors(dtype), cu_seqlens=STARTS, top_p=0.5, block_size=16)


def test_products_in_bf16_end_with_the_call():
    """The matrix unit is asked for during bf16 calls only, and not after one that failed."""
    before = MATMUL.fp32_precision
    attend()
    assert MATMUL.fp32_precision == before
    with pytest.raises(ValueError, match="rows"), cpu_matmul_precision("bf16"):
        assert MATMUL.fp32_precision == "bf16"
        raise ValueError("rows")
    assert MATMUL.fp32_precision == before
    with cpu_matmul_precision(None):
        assert MATMUL.fp32_precision == before


def test_threads_leave_the_setting_as_it_was():
    """Calls of several threads at once, each lending and giving back, end with the setting that they found."""
    before = MATMUL.fp32_precision
    threads = [threading.Thread(target=lambda: [attend() for _ in range(10)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert MATMUL.fp32_precision == before


def test_a_setting_that_is_inherited_stays_so():
    """After a call the products still follow the general setting, whatever it becomes."""
    torch.backends.fp32_precision = "ieee"
    attend()
    torch.backends.fp32_precision = "bf16"
    assert MATMUL.fp32_precision == "bf16"


def test_a_setting_of_the_callers_own_is_given_back():
    """What the caller set for these products holds after the call."""
    torch.backends.fp32_precision = "ieee"
    MATMUL.fp32_precision = "bf16"
    attend()
    assert MATMUL.fp32_precision == "bf16"


def test_the_gate_is_fp32_whatever_the_process_allows():
    """With products allowed to round to bf16 the selection is bit for bit the one of fp32 products."""
    query, key, _ = tensors(torch.float32)
    expected = select_blocks(query, key, cu_seqlens=STARTS, top_p=0.5, block_size=16).bits
    torch.set_float32_matmul_precision("medium")
    found = select_blocks(query, key, cu_seqlens=STARTS, top_p=0.5, block_size=16).bits
    assert torch.equal(found, expected)
