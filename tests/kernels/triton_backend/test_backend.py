"""The operator with backend="triton", whole: selection, slabs, attention and gradients on interpreted kernels."""

import math

import harness
import oracle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebalance_kernels import AttentionStats, block_sparse_attention, ops
from sparsebalance_kernels.triton_backend import backend, configs, indexing

LENGTHS = (1, 15, 16, 0, 17, 33, 70)
FP32_ROUNDOFF = torch.finfo(torch.float32).eps / 2
BUDGETS = {
    "p.35": {"top_p": 0.35},
    "p.999": {"top_p": 0.999},
    "p.3-min2": {"top_p": 0.3, "min_blocks": 2},
    "p.7-sink2-max3": {"top_p": 0.7, "sink_blocks": 2, "max_blocks": 3},
    "p-documents": {"top_p": [0.1, 0.2, 0.3, 1.0, 0.4, 0.5, 0.6]},
    "p1": {"top_p": 1.0},
    "k1": {"top_k": 1},
    "k3": {"top_k": 3},
    "k20": {"top_k": 20},
    "k-documents": {"top_k": [1, 2, 3, 1, 2, 2, 4]},
}


def batch_of(lengths=LENGTHS, group=2, dim=32, seed=4):
    return oracle.grid_batch(lengths, block_size=16, kv_heads=2, group=group, dim=dim, seed=seed)


def tensors(options):
    return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in options.items()}


def run(batch, lengths=LENGTHS, **options):
    return harness.run(*(tensor.float() for tensor in batch), lengths, block_size=16, backend="triton", **options)


@pytest.mark.parametrize("name", BUDGETS)
def test_every_budget_equals_masked_dense(name):
    """Under every kind of budget, output and all gradients equal dense attention under the defined mask."""
    batch = batch_of()
    selections = oracle.select(*batch[:2], LENGTHS, 16, **BUDGETS[name])
    expected = harness.run_dense(*batch, selections, LENGTHS, 16)
    bounds = oracle.rounding_bounds(*batch, selections, LENGTHS, 16, FP32_ROUNDOFF, out_unit=FP32_ROUNDOFF)
    harness.assert_within(run(batch, **tensors(BUDGETS[name])), expected, bounds)


@pytest.mark.parametrize("group", [1, 5, 7])
def test_group_sizes_that_are_no_powers_of_two(group):
    """Any number of query heads per key head gives output and gradients of masked dense attention."""
    lengths = (40, 5)
    batch = batch_of(lengths, group=group, dim=64)
    selections = oracle.select(*batch[:2], lengths, 16, top_p=0.5)
    expected = harness.run_dense(*batch, selections, lengths, 16)
    bounds = oracle.rounding_bounds(*batch, selections, lengths, 16, FP32_ROUNDOFF, out_unit=FP32_ROUNDOFF)
    harness.assert_within(run(batch, lengths, top_p=0.5), expected, bounds)


def test_slabs_change_rounding_only(monkeypatch):
    """A workspace of one own block changes no bit of output and dq, and dk and dv by rounding only."""
    batch = batch_of()
    whole = run(batch, top_p=0.6)
    slabs = []
    plan = backend.plan_slabs
    monkeypatch.setattr(backend, "plan_slabs", lambda *given: slabs.append(plan(*given)) or slabs[-1])
    monkeypatch.setattr(configs, "WORKSPACE_BYTES", 1)
    cut = run(batch, top_p=0.6)
    assert all(stop - start == 1 for ranges in slabs for start, stop in ranges) and max(map(len, slabs)) > 3
    assert torch.equal(cut[0], whole[0]) and torch.equal(cut[1], whole[1])
    selections = oracle.select(*batch[:2], LENGTHS, 16, top_p=0.6)
    bounds = oracle.rounding_bounds(*batch, selections, LENGTHS, 16, FP32_ROUNDOFF, out_unit=FP32_ROUNDOFF)
    harness.assert_within(cut, whole, bounds)


def test_slabs_cover_every_block_once():
    """The ranges that the kernels get are consecutive and cover all own blocks, pairs or not."""
    table = backend.block_table(oracle.cumulative(LENGTHS), 16, sum(LENGTHS))
    generator = torch.Generator().manual_seed(0)
    for share in (0.0, 0.3, 1.0):
        kept = torch.rand(table.num_blocks, generator=generator) < share
        pairs = (torch.randint(1, 9, (table.num_blocks,), generator=generator) * kept).tolist()
        ranges = backend._slabs(pairs, 100, table, 4)
        assert [block for start, stop in ranges for block in range(start, stop)] == list(range(table.num_blocks))


class Allocated(TorchDispatchMode):
    """Sums the bytes of uninitialised tensors that calls allocate."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.bytes += out.numel() * out.element_size()
        return out


@pytest.mark.parametrize("blocks", [4, 8])
def test_workspace_of_a_slab_follows_its_formula(blocks):
    """What gather_index and gather_forward allocate for a slab is the bytes that the slabs are planned with."""
    lengths = (16 * blocks,)
    batch = [tensor.float() for tensor in batch_of(lengths)]
    selection = harness.select(*batch[:2], lengths, 16, top_p=0.5)
    table = backend.block_table(selection.cu_seqlens, 16, lengths[0])
    pairs = indexing.pairs_per_block(selection.bits, table).tolist()
    query, key, value, _ = batch
    with Allocated() as allocated:
        index = indexing.gather_index(selection.bits, table, 0, blocks, num_pairs=sum(pairs), group=2)
        rows_per_item = configs.gather_forward_config(query.dtype, 32, 16).rows
        items = indexing.item_table(index.block_offsets, rows_per_item, sum(pairs))
        backend.gather_forward(query, key, value, table, index, items, oracle.SCALE)
    counted = sum(indexing.count_bytes(table, block, 4) for block in range(blocks))
    planned = sum(pairs) * backend._bytes_per_pair(query) + counted
    row_counts = 4 * 4 * blocks * 16  # one int32 per row: no matter of pairs
    assert allocated.bytes <= planned + row_counts


def test_two_runs_and_the_statistics_change_no_bit():
    """A second run, and one that also asks for statistics, give bit for bit the same output and gradients."""
    batch = [tensor.float() for tensor in batch_of()]
    options = {"cu_seqlens": oracle.cumulative(LENGTHS), "top_p": 0.5, "block_size": 16, "scale": oracle.SCALE}
    first = run(batch, top_p=0.5)
    assert all(torch.equal(one, two) for one, two in zip(run(batch, top_p=0.5), first, strict=True))
    leaves = [tensor.clone().requires_grad_() for tensor in batch[:3]]
    out, _ = block_sparse_attention(*leaves, backend="triton", return_stats=True, **options)
    grads = torch.autograd.grad(out, leaves, batch[3])
    assert all(torch.equal(one, two) for one, two in zip((out, *grads), first, strict=True))


@pytest.mark.parametrize("name", ["p.35", "p.7-sink2-max3", "p-documents", "k3", "p1"])
def test_statistics_equal_what_is_counted(name):
    """Density and work are those of the rows' masks, coverage to the rounding of sums, the curve the torch one."""
    query, key, value, _ = (tensor.float() for tensor in batch_of())
    counted = oracle.count(oracle.select(*batch_of()[:2], LENGTHS, 16, **BUDGETS[name]), LENGTHS, 16)
    options = {"cu_seqlens": oracle.cumulative(LENGTHS), "block_size": 16, "scale": oracle.SCALE}
    found, exact = (
        block_sparse_attention(
            query, key, value, backend=name_of, return_stats=True, **options, **tensors(BUDGETS[name])
        )[1]
        for name_of in ("triton", "torch")
    )
    assert found.density == counted.density and found.work == counted.work
    assert abs(found.coverage - counted.coverage) <= counted.mass_error
    assert torch.equal(found.curve, exact.curve)


def test_the_curve_of_a_long_document_is_an_estimate_of_the_exact_one(monkeypatch):
    """From a sample of a document's rows, the curve's mean error is that of a mean of so many rows."""
    monkeypatch.setattr(backend.selector, "CURVE_TOKENS", 8)
    monkeypatch.setattr(backend.selector, "CURVE_RUNS", 4)
    generator = torch.Generator().manual_seed(0)
    length = 600
    query, key = torch.randn(length, 4, 32, generator=generator), torch.randn(length, 2, 32, generator=generator)
    starts = torch.tensor([0, length])
    budget = harness.budget_of([length], 16, top_p=0.5)
    sampled = AttentionStats.from_vector(backend.select(query, key, starts, budget, 0.5, 2, True)[1])
    exact = AttentionStats.from_vector(
        ops.select(query, key, starts, torch.tensor([0.5]), None, 16, 0, None, 0, 0.5, 2, "torch", True)[1]
    )
    rows = 4 * 8 * 4  # independent rows at least: heads, tokens of a run, runs
    assert not torch.equal(sampled.curve, exact.curve)
    # A share of blocks lies in [0, 1]: the standard error of its mean is below 1 / (2 sqrt(rows)).
    assert (sampled.curve - exact.curve).abs().max() < 3 * 0.5 / math.sqrt(rows)
    assert sampled.density == exact.density and sampled.curve[-1] == exact.curve[-1] == 1.0


def test_documents_of_too_many_blocks_go_to_the_torch_selector(monkeypatch):
    """Beyond what one routing program holds the selection is still right."""
    monkeypatch.setattr(backend, "MAX_HISTORY_BLOCKS", 16)
    batch = batch_of()
    selections = oracle.select(*batch[:2], LENGTHS, 16, top_k=3)
    expected = harness.run_dense(*batch, selections, LENGTHS, 16)
    bounds = oracle.rounding_bounds(*batch, selections, LENGTHS, 16, FP32_ROUNDOFF, out_unit=FP32_ROUNDOFF)
    harness.assert_within(run(batch, top_k=3), expected, bounds)


def test_log_sum_exp_is_that_of_the_torch_backend():
    """Both backends return the log-sum-exp of the kept tokens, fp32 [H, T]."""
    query, key, value, _ = (tensor.float() for tensor in batch_of())
    selection = harness.select(query, key, LENGTHS, 16, top_k=3)
    _, lse = harness.attend(query, key, value, selection, backend="triton")
    _, exact = harness.attend(*(t.double() for t in (query, key, value)), selection)
    ones = torch.ones_like(value).double()
    selections = oracle.select(query.double(), key.double(), LENGTHS, 16, top_k=3)
    given = (query.double(), key.double(), ones, query.double(), selections, LENGTHS, 16, FP32_ROUNDOFF)
    assert lse.dtype == torch.float32
    assert (oracle.rounding_bounds(*given)[0][..., 0] >= (lse.double() - exact).abs().T).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}], ids=str)
def test_bad_query_row_stays_alone(options, bad):
    """NaN or infinity in one query row spoils that row and leaves every other bit of the output unchanged."""
    query, key, value, _ = (tensor.float() for tensor in batch_of((70,)))
    given = {"cu_seqlens": torch.tensor([0, 70]), "block_size": 16, "backend": "triton", **options}
    before = block_sparse_attention(query, key, value, **given)
    query[50, 1, 3] = bad
    after = block_sparse_attention(query, key, value, **given)
    assert not after[50, 1].isfinite().all()
    after[50, 1] = before[50, 1]
    assert torch.equal(after, before)


@pytest.mark.parametrize("t", [0, 15, 16, 40])
def test_later_tokens_never_reach_an_output(t):
    """Changing every token after t leaves outputs up to t, and their selection, bit for bit the same."""
    query, key, value, _ = (tensor.float() for tensor in batch_of((70,)))
    given = {"cu_seqlens": torch.tensor([0, 70]), "top_p": 0.5, "block_size": 16, "backend": "triton"}
    before = block_sparse_attention(query, key, value, **given)
    for tensor in (query, key, value):
        tensor[t + 1 :] = torch.randn(tensor[t + 1 :].shape, generator=torch.Generator().manual_seed(t))
    assert torch.equal(block_sparse_attention(query, key, value, **given)[: t + 1], before[: t + 1])


def test_strided_inputs_and_expanded_gradients():
    """Transposed inputs, keys expanded over heads and the gradient of a sum give what contiguous ones give."""
    batch = [tensor.float() for tensor in batch_of()]
    plain = run((*batch[:3], torch.ones_like(batch[3])), top_k=3)
    leaves = [t.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in batch[:3]]
    out = block_sparse_attention(
        *leaves, cu_seqlens=oracle.cumulative(LENGTHS), top_k=3, block_size=16, scale=oracle.SCALE, backend="triton"
    )
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(one, two) for one, two in zip((out, *grads), plain, strict=True))


@pytest.mark.parametrize("boundaries", [[0], [0, 0], [0, 0, 0]])
def test_zero_tokens(boundaries):
    """A batch without tokens has an output without tokens and gradients to match."""
    leaves = [torch.zeros(0, heads, 32, requires_grad=True) for heads in (4, 2, 2)]
    out = block_sparse_attention(
        *leaves, cu_seqlens=torch.tensor(boundaries), top_p=0.5, block_size=16, backend="triton"
    )
    assert out.shape == (0, 4, 32)
    assert [grad.shape for grad in torch.autograd.grad(out.sum(), leaves)] == [leaf.shape for leaf in leaves]


def test_many_one_token_documents():
    """A document of one token attends itself: its output is its value, to the rounding of a quotient."""
    lengths = [1] * 20
    batch = batch_of(tuple(lengths))
    values = batch[2].repeat_interleave(2, dim=1)
    # P * value * (1 / P): three roundings, whatever P is.
    assert ((run(batch, lengths, top_k=2)[0].double() - values).abs() <= 4 * FP32_ROUNDOFF * values.abs()).all()


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("block_size 16, 32, 64", {"block_size": 48}),
        ("head_dim of at most 256", {"dim": 264}),
        ("no float64", {"dtype": torch.float64}),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(named, changes):
    """An explicit backend="triton" that cannot run says why, and the way out."""
    dim, dtype = changes.get("dim", 32), changes.get("dtype", torch.float32)
    tensors = [torch.zeros(20, 2, dim, dtype=dtype) for _ in range(3)]
    with pytest.raises(ValueError, match=f"backend='triton' .*{named}.*use backend='torch'"):
        block_sparse_attention(
            *tensors,
            cu_seqlens=torch.tensor([0, 20]),
            top_p=0.5,
            block_size=changes.get("block_size", 16),
            backend="triton",
        )


def test_ops_keep_their_promises():
    """Schema, fake tensors and autograd registration hold for the kernels' results too."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(50, heads, 16, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    starts = torch.tensor([0, 20, 50])
    options = (torch.tensor([0.3, 0.5], dtype=torch.float64), None, 16, 0, None, 0, 0.25, 1, "triton")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = (leaves[0].detach(), leaves[1].detach(), starts)
    torch.library.opcheck(ops.select, (*inputs, *options, True), test_utils=tests)
    bits, _ = ops.select(*inputs, *options, False)
    torch.library.opcheck(ops.attend, (*leaves, bits, starts, 16, 0.25, "triton"), test_utils=tests)
    out, lse = (tensor.detach() for tensor in ops.attend(*leaves, bits, starts, 16, 0.25, "triton"))
    saved = (out, *(leaf.detach() for leaf in leaves), out, lse, bits, starts, 16, 0.25, "triton")
    torch.library.opcheck(ops.attend_backward, saved, test_utils=tests)
