import functools
import itertools
import math

import harness
import oracle
import pytest
import torch
import torch.nn.functional as F

from sparsebalance_kernels import block_sparse_attention, index, selector, torch_backend

HALF_UNIT = {
    dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
# kv heads, group, head dim, block size
SHAPES = [
    (2, 1, 64, 16),
    (2, 2, 32, 16),
    (1, 5, 80, 16),
    (1, 6, 64, 64),
    (1, 7, 32, 64),
    (1, 8, 64, 16),
    (1, 2, 80, 64),
]
LENGTHS = [1, 15, 16, 0, 17, 32, 33, 56, 101]
BUDGETS = {
    "p.05": {"top_p": 0.05},
    "p.35": {"top_p": 0.35},
    "p.8": {"top_p": 0.8},
    "p.999": {"top_p": 0.999},
    "p1": {"top_p": 1.0},
    "p1-max2": {"top_p": 1.0, "max_blocks": 2},
    "p.3-min2": {"top_p": 0.3, "min_blocks": 2},
    "p.9-max2": {"top_p": 0.9, "max_blocks": 2},
    "p.7-sink2-max3": {"top_p": 0.7, "sink_blocks": 2, "max_blocks": 3},
    "p-documents": {"top_p": [0.1, 0.2, 0.3, 0.5, 1.0, 0.4, 1.0, 0.6, 0.55]},
    "k1": {"top_k": 1},
    "k3": {"top_k": 3},
    "k20": {"top_k": 20},
    "k6-max2": {"top_k": 6, "max_blocks": 2},
    "k1-sink2": {"top_k": 1, "sink_blocks": 2},
    "k-documents": {"top_k": [1, 2, 3, 1, 2, 2, 4, 3, 4]},
}


def ragged(block_size):
    size = block_size
    return [1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size + size // 2, 6 * size + 5]


@functools.cache
def shape_case(kv_heads, group, dim, block_size):
    """fp64 inputs, their selection at p = .6 and the oracle's four results."""
    lengths = ragged(block_size)
    batch = oracle.grid_batch(lengths, block_size=block_size, kv_heads=kv_heads, group=group, dim=dim, seed=3)
    selections = oracle.select(*batch[:2], lengths, block_size, top_p=0.6)
    return lengths, batch, selections, harness.run_dense(*batch, selections, lengths, block_size)


@functools.cache
def batch_of(lengths=tuple(LENGTHS), block_size=16, kv_heads=2, group=2, dim=32, seed=4):
    return oracle.grid_batch(lengths, block_size=block_size, kv_heads=kv_heads, group=group, dim=dim, seed=seed)


def as_tensors(options):
    """Lists, one number per document, as the tensors that the operator takes."""
    return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in options.items()}


def assert_equals_oracle(found, batch, lengths, block_size, options, lost=0.0):
    selections = oracle.select(*batch[:2], lengths, block_size, **options)
    expected = harness.run_dense(*batch, selections, lengths, block_size)
    bounds = oracle.rounding_bounds(*batch, selections, lengths, block_size, HALF_UNIT[torch.float64])
    harness.assert_within(found, expected, [bound + lost for bound in bounds])


@functools.cache
def budget_case(name):
    """Of the default batch under a named budget: the oracle's selection and four results."""
    selections = oracle.select(*batch_of()[:2], LENGTHS, 16, **BUDGETS[name])
    return selections, harness.run_dense(*batch_of(), selections, LENGTHS, 16)


def assert_equals_budget_case(found, name, dtype=torch.float64):
    selections, expected = budget_case(name)
    bounds = oracle.rounding_bounds(*batch_of(), selections, LENGTHS, 16, HALF_UNIT[dtype])
    harness.assert_within(found, expected, bounds)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "Hkv{}-G{}-D{}-B{}".format(*shape))
def test_fp64_equals_masked_dense(shape):
    """In fp64, output and all gradients equal dense attention under the defined mask to the bound of rounding."""
    lengths, batch, selections, expected = shape_case(*shape)
    found = harness.run(*batch, lengths, top_p=0.6, block_size=shape[3])
    bounds = oracle.rounding_bounds(*batch, selections, lengths, shape[3], HALF_UNIT[torch.float64])
    harness.assert_within(found, expected, bounds)


def rms(tensor):
    return tensor.square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "Hkv{}-G{}-D{}-B{}".format(*shape))
def test_low_precision_is_as_good_as_dense(shape, dtype):
    """In lower precision the error stays within 2 (gradients 3) times that of dense attention in the same dtype.

    Errors are root mean squares, with one rounding of the result on top: a largest error over 10^5 is a matter of
    luck.  Each element stays within the bound of computing in fp32 and one rounding to the dtype, but for bf16, whose
    probabilities may be rounded for the matrix unit.
    """
    lengths, batch, selections, exact = shape_case(*shape)
    inputs = [tensor.to(dtype) for tensor in batch]
    found = harness.run(*inputs, lengths, top_p=0.6, block_size=shape[3])
    rival = harness.run_dense(*inputs, selections, lengths, shape[3])
    half = HALF_UNIT[dtype]
    bounds = oracle.rounding_bounds(*batch, selections, lengths, shape[3], HALF_UNIT[torch.float32], out_unit=half)
    # Rounding to the dtype errs by half a unit of the rounded number, or half a step of the subnormal numbers.
    step = torch.finfo(dtype).tiny * HALF_UNIT[dtype]
    bounds = [
        bound + HALF_UNIT[dtype] * (right.abs() + bound) + step for bound, right in zip(bounds, exact, strict=True)
    ]
    if dtype != torch.bfloat16:
        harness.assert_within(found, exact, bounds)
    for name, one, other, right in zip(("out", "dq", "dk", "dv"), found, rival, exact, strict=True):
        assert one.dtype == dtype
        allowed = (2 if name == "out" else 3) * rms(other.double() - right) + HALF_UNIT[dtype] * rms(right)
        assert rms(one.double() - right) <= allowed, name


@pytest.mark.parametrize("name", BUDGETS)
def test_every_budget_equals_masked_dense(name):
    """Under every kind of budget, output and all gradients equal dense attention under the defined mask."""
    found = harness.run(*batch_of(), LENGTHS, block_size=16, backend="torch", **as_tensors(BUDGETS[name]))
    assert_equals_budget_case(found, name)


@pytest.mark.parametrize("name", ["p.35", "p1-max2", "p-documents", "k3", "k1-sink2"])
def test_reference_equals_masked_dense(name):
    """The reference backend gives output and gradients of dense attention under the defined mask."""
    found = harness.run(*batch_of(), LENGTHS, block_size=16, backend="reference", **as_tensors(BUDGETS[name]))
    assert_equals_budget_case(found, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["p.35", "p1", "k3", "p-documents"])
def test_packing_changes_nothing(name, dtype):
    """A packed batch gives each document the output and gradients it has alone, to the bound of rounding."""
    batch = [tensor.to(dtype) for tensor in batch_of()]
    options = BUDGETS[name]
    packed = harness.run(*batch, LENGTHS, block_size=16, **as_tensors(options))
    alone = []
    for number, parts in enumerate(zip(*(oracle.split(tensor, LENGTHS) for tensor in batch), strict=True)):
        own = {key: value[number] if isinstance(value, list) else value for key, value in options.items()}
        alone.append(harness.run(*parts, [LENGTHS[number]], block_size=16, **own))
    alone = [torch.cat(pieces) for pieces in zip(*alone, strict=True)]
    bounds = oracle.rounding_bounds(*batch_of(), budget_case(name)[0], LENGTHS, 16, HALF_UNIT[dtype])
    harness.assert_within(packed, alone, bounds)


def test_other_documents_values_never_reach_a_document():
    """Changing one document leaves the others' outputs and gradients bit for bit the same."""
    batch = batch_of()
    other = batch_of(seed=5)
    starts = oracle.cumulative(LENGTHS).tolist()
    inside = slice(starts[6], starts[7])
    changed = [tensor.clone() for tensor in batch]
    for tensor, source in zip(changed, other, strict=True):
        tensor[inside] = source[inside]
    outside = torch.ones(starts[-1], dtype=torch.bool)
    outside[inside] = False
    for options in ({"top_p": 0.5}, {"top_k": 2}):
        before = harness.run(*batch, LENGTHS, block_size=16, **options)
        after = harness.run(*changed, LENGTHS, block_size=16, **options)
        for one, two in zip(before, after, strict=True):
            assert torch.equal(one[outside], two[outside])
            assert not torch.equal(one[inside], two[inside])


def test_more_than_64_blocks(monkeypatch):
    """Documents of 150 blocks, more own blocks than one batch of them holds, equal masked dense attention."""
    lengths = (600, 3)
    batch = batch_of(lengths, 4, 1, 1, 16)
    for module in (index, torch_backend):
        monkeypatch.setattr(module, "SCORES_AT_ONCE", 64 * 16)
    found = harness.run(*batch, lengths, top_k=70, block_size=4)
    assert_equals_oracle(found, batch, lengths, 4, {"top_k": 70})


@pytest.mark.parametrize(("tile", "slab", "scores"), [(1, 1, 1), (24, 7, 999), (33, 100, 2**14), (4096, 512, 512)])
@pytest.mark.parametrize("name", ["p.35", "k3", "p.7-sink2-max3"])
def test_tile_sizes_change_rounding_only(monkeypatch, name, tile, slab, scores):
    """How tokens are cut into tiles and own blocks into batches changes no result beyond rounding."""
    monkeypatch.setattr(index, "TILE_TOKENS", tile)
    monkeypatch.setattr(index, "SCORES_AT_ONCE", scores)
    monkeypatch.setattr(selector, "SELECT_TOKENS", slab)
    monkeypatch.setattr(torch_backend, "SCORES_AT_ONCE", scores)
    found = harness.run(*batch_of(), LENGTHS, block_size=16, **BUDGETS[name])
    assert_equals_budget_case(found, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("t", [0, 15, 16, 47, 48, 77, 143])
def test_later_tokens_never_reach_an_output(t, dtype):
    """Changing queries, keys and values after position t leaves the outputs up to t bit for bit the same."""
    batch = [tensor.to(dtype) for tensor in batch_of((145,))[:3]]
    other = [tensor.to(dtype) for tensor in batch_of((145,), seed=6)[:3]]
    for options in ({"top_p": 0.5}, {"top_k": 3}, {"top_p": 1.0}, {"top_p": 0.9, "sink_blocks": 1, "max_blocks": 3}):
        options = {"cu_seqlens": oracle.cumulative([145]), "block_size": 16, "scale": oracle.SCALE} | options
        before = block_sparse_attention(*batch, **options)
        for changed in ((0,), (1,), (2,), (0, 1, 2)):
            inputs = [tensor.clone() for tensor in batch]
            for number in changed:
                inputs[number][t + 1 :] = other[number][t + 1 :]
            after = block_sparse_attention(*inputs, **options)
            assert torch.equal(after[: t + 1], before[: t + 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("early", [1, 3, 5])
def test_later_rows_that_join_a_block_change_no_earlier_row(early, dim, dtype):
    """A block kept by few rows gives them the same bits when later rows keep it too."""
    size, t = 16, 32 + early - 1
    generator = torch.Generator().manual_seed(early)
    query, key, value = (torch.randn(48, 1, dim, generator=generator).to(dtype) for _ in range(3))
    # Of the last block's queries those up to t keep block 1; the later ones keep block 0 or, changed, block 1 as well.
    query[..., 0], key[..., 0] = -8.0, 0.0
    key[:16, :, 0], key[16:32, :, 0] = -8.0, 8.0
    query[32 : t + 1, :, 0] = 8.0
    joined = query.clone()
    joined[t + 1 :, :, 0] = 8.0
    outputs = []
    for q, keeping in ((query, early), (joined, 16)):
        (mask,) = harness.decode(harness.select(q, key, [48], size, top_k=2), [48])
        assert int(mask[32:, 0, 1].sum()) == keeping
        options = {"cu_seqlens": oracle.cumulative([48]), "block_size": size, "scale": oracle.SCALE}
        outputs.append(block_sparse_attention(q, key, value, top_k=2, **options))
    assert torch.equal(outputs[0][: t + 1], outputs[1][: t + 1])


def test_gradients_of_later_tokens_are_exactly_zero():
    """A loss of the outputs up to t has gradient zero, not merely small, for every later query, key and value."""
    query, key, value, grad = batch_of((145,))
    for t in (0, 15, 16, 40, 143):
        early = grad.clone()
        early[t + 1 :] = 0.0
        for options in ({"top_p": 0.5}, {"top_k": 3}):
            _, *grads = harness.run(query, key, value, early, [145], block_size=16, **options)
            assert not any(tensor[t + 1 :].any() for tensor in grads)


def test_p_one_is_scaled_dot_product_attention():
    """p = 1 without max_blocks is causal scaled_dot_product_attention of each document, at the default scale."""
    batch = batch_of()
    parts = [oracle.split(tensor, LENGTHS) for tensor in batch[:3]]
    dense = []
    for q, k, v in zip(*parts, strict=True):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        dense.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    for options in ({"top_p": 1.0}, {"top_p": 1}, {"top_k": 7}, {"top_p": torch.tensor(1.0)}):
        out = block_sparse_attention(*batch[:3], cu_seqlens=oracle.cumulative(LENGTHS), block_size=16, **options)
        selections = oracle.select(*batch[:2], LENGTHS, 16, top_p=1.0)
        bounds = oracle.rounding_bounds(*batch, selections, LENGTHS, 16, HALF_UNIT[torch.float64], scale=32**-0.5)
        assert ((out - torch.cat(dense)).abs() <= bounds[0]).all()


def test_sparse_path_at_full_selection_equals_dense():
    """The sparse path itself, given every block, equals dense attention: the shortcut hides nothing."""
    batch = batch_of()
    found = harness.run(*batch, LENGTHS, block_size=16, top_p=1e-6, min_blocks=6)
    assert_equals_oracle(found, batch, LENGTHS, 16, {"top_p": 1.0})


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1.0, "max_blocks": 0}], ids=["k1", "max0"])
def test_k_one_is_the_own_block_only(options):
    """k = 1, or no history block at all, is causal attention inside each block and nothing else."""
    batch = batch_of()
    pieces = [length for _, length in index.document_blocks(oracle.cumulative(LENGTHS).tolist(), 16)]
    found = harness.run(*batch, LENGTHS, block_size=16, **options)
    assert_equals_oracle(found, batch, pieces, 16, {"top_p": 1.0})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_bad_query_row_stays_alone(dtype, options, bad):
    """NaN or infinity in one query row spoils that row and leaves every other bit of the output unchanged."""
    query, key, value = (tensor.to(dtype) for tensor in batch_of((145,))[:3])
    options = {"cu_seqlens": oracle.cumulative([145]), "block_size": 16, "scale": oracle.SCALE} | options
    before = block_sparse_attention(query, key, value, **options)
    for token, head in ((5, 0), (47, 1), (48, 3), (100, 2)):
        damaged = query.clone()
        damaged[token, head] = bad
        after = block_sparse_attention(damaged, key, value, **options)
        assert after[token, head].isnan().all()
        after[token, head] = before[token, head]
        assert torch.equal(after, before)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.9, "max_blocks": 2}], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_query_row_leaves_the_statistics_numbers(options, bad):
    """NaN or infinity in one query row moves density, coverage and curve by no more than that row's share."""
    query, key, value = batch_of((145,))[:3]
    options = {"cu_seqlens": oracle.cumulative([145]), "block_size": 16, "return_stats": True} | options
    _, before = block_sparse_attention(query, key, value, **options)
    damaged = query.clone()
    damaged[100, 2] = bad
    _, after = block_sparse_attention(damaged, key, value, **options)
    share = 6 / sum(t // 16 for t in range(145)) / query.shape[1]  # of the visible pairs; of the rows it is less
    assert abs(after.density - before.density) <= share
    assert abs(after.coverage - before.coverage) <= 1 / (129 * query.shape[1])
    assert float((after.curve - before.curve).abs().max()) <= 2 * share


def test_a_block_size_beyond_the_documents_costs_nothing():
    """Masks are made for blocks that exist: 2**30 tokens a block are dense attention of a short document."""
    query, key, value = batch_of((40,))[:3]
    found = block_sparse_attention(query, key, value, cu_seqlens=torch.tensor([0, 40]), top_p=0.5, block_size=2**30)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(found, dense)


def test_many_one_token_documents():
    """A document of one token attends itself: its output is its value, whatever stands around it."""
    lengths = [1] * (torch_backend.SHORT_BLOCKS_AT_ONCE + 10)
    batch = batch_of(tuple(lengths))
    selections = oracle.select(*batch[:2], lengths, 16, top_k=1)
    expected = harness.run_dense(*batch, selections, lengths, 16)
    bounds = oracle.rounding_bounds(*batch, selections, lengths, 16, HALF_UNIT[torch.float64])
    for options in ({"top_p": 0.5}, {"top_k": 1}, {"top_p": 1.0}):
        found = harness.run(*batch, lengths, block_size=16, **options)
        assert torch.equal(found[0], batch[2].repeat_interleave(2, dim=1))
        harness.assert_within(found, expected, bounds)


@pytest.mark.parametrize("boundaries", [[0], [0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_zero_tokens(boundaries, backend):
    """An empty batch gives an empty output, empty gradients and the statistics of nothing."""
    leaves = [torch.zeros(0, heads, 32, requires_grad=True) for heads in (4, 2, 2)]
    for options in ({"top_p": 0.5}, {"top_p": 1.0}, {"top_k": 2}):
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
        out, stats = block_sparse_attention(
            *leaves, cu_seqlens=cu_seqlens, backend=backend, return_stats=True, **options
        )
        assert out.shape == (0, 4, 32)
        assert all(
            g.shape == leaf.shape for g, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True)
        )
        assert (stats.density, stats.work, stats.coverage) == (1.0, 1.0, 1.0)
        assert (stats.curve == 1.0).all()


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 1}, {"top_p": 1.0}], ids=repr)
def test_empty_documents_inside_a_batch(options):
    """Empty documents change nothing, wherever they stand."""
    batch = batch_of((5, 41, 4))
    with_empty = harness.run(*batch, [0, 5, 0, 0, 41, 4, 0], block_size=16, **options)
    without = harness.run(*batch, [5, 41, 4], block_size=16, **options)
    assert all(torch.equal(one, two) for one, two in zip(with_empty, without, strict=True))


def heads_first(tensor):
    """The layout in which transformers hands over projections: heads before tokens, transposed back as a view."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def every_other(tensor):
    """A view with gaps inside the head dimension."""
    return torch.stack([tensor, torch.full_like(tensor, math.nan)], dim=-1)[..., 0]


def run_strided(layout, batch, **options):
    leaves = [layout(tensor).detach().requires_grad_() for tensor in batch[:3]]
    assert not any(leaf.is_contiguous() for leaf in leaves)
    cu_seqlens = oracle.cumulative(LENGTHS)
    out = block_sparse_attention(*leaves, cu_seqlens=cu_seqlens, block_size=16, scale=oracle.SCALE, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, layout(batch[3]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}, {"top_p": 1.0, "max_blocks": 3}], ids=repr)
def test_transposed_inputs_equal_contiguous_ones(options, dtype):
    """Views as transformers passes them give bit for bit the output and gradients of contiguous inputs."""
    batch = [tensor.to(dtype) for tensor in batch_of()]
    found = run_strided(heads_first, batch, **options)
    plain = harness.run(*batch, LENGTHS, block_size=16, **options)
    assert all(torch.equal(one, two) for one, two in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", ["p.35", "k3", "p-documents"])
def test_inputs_may_have_gaps(name):
    """Views whose last stride is not 1 equal masked dense attention; what stands in the gaps is never read."""
    assert_equals_budget_case(run_strided(every_other, batch_of(), **as_tensors(BUDGETS[name])), name)


def test_expanded_gradient_and_inputs():
    """Tensors of stride zero (the gradient of a sum, one key for all kv heads) work like their copies."""
    query, key, value, grad = batch_of()
    one_key = key[:, :1]
    plain = harness.run(
        query, one_key.repeat(1, 2, 1), value, torch.ones_like(grad), LENGTHS, top_p=0.5, block_size=16
    )
    leaves = [query.clone().requires_grad_(), one_key.clone().requires_grad_(), value.clone().requires_grad_()]
    out = block_sparse_attention(
        leaves[0], leaves[1].expand(-1, 2, -1), leaves[2], cu_seqlens=oracle.cumulative(LENGTHS), top_p=0.5,
        block_size=16, scale=oracle.SCALE,
    )  # fmt: skip
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert torch.equal(out, plain[0]) and torch.equal(dq, plain[1]) and torch.equal(dv, plain[3])
    assert torch.equal(dk, plain[2].sum(1, keepdim=True))


@pytest.mark.parametrize("options", [{"top_p": 0.6}, {"top_k": 1}, {"top_k": 2}], ids=repr)
def test_gradients_are_those_of_finite_differences(options):
    """With the selection frozen, the gradients are the derivatives of the output."""
    lengths = [1, 4, 0, 11]
    batch = batch_of(tuple(lengths), 4, 1, 2, 4)
    frozen = harness.select(*batch[:2], lengths, 4, **options)
    leaves = [tensor.clone().requires_grad_() for tensor in batch[:3]]
    assert torch.autograd.gradcheck(lambda q, k, v: harness.attend(q, k, v, frozen)[0], leaves, fast_mode=False)


def test_selection_handed_to_attend_is_obeyed():
    """attend uses the selection it is given, not one of its own: the frozen one of other inputs."""
    query, key, value, grad = batch_of()
    other_query, other_key, _, _ = batch_of(seed=7)
    frozen = harness.select(other_query, other_key, LENGTHS, 16, top_k=3)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out, _ = harness.attend(*leaves, frozen)
    found = out.detach(), *torch.autograd.grad(out, leaves, grad)
    selections = oracle.select(other_query, other_key, LENGTHS, 16, top_k=3)
    expected = harness.run_dense(query, key, value, grad, selections, LENGTHS, 16)
    bounds = oracle.rounding_bounds(query, key, value, grad, selections, LENGTHS, 16, HALF_UNIT[torch.float64])
    harness.assert_within(found, expected, bounds)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_log_sum_exp_of_the_kept_tokens(dtype):
    """attend's second result is each row's log-sum-exp over the kept tokens, in the compute dtype, no gradient."""
    query, key, value, grad = batch_of()
    inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (query, key, value)]
    out, lse = harness.attend(*inputs, harness.select(query, key, LENGTHS, 16, top_k=3))
    lse = lse.T
    assert out.requires_grad and not lse.requires_grad
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    selections = oracle.select(query, key, LENGTHS, 16, top_k=3)
    # With values of one, the bound on the output is the relative error of a probability, which holds that of its lse.
    ones = torch.ones_like(value)
    bound = oracle.rounding_bounds(query, key, ones, grad, selections, LENGTHS, 16, HALF_UNIT[lse.dtype])[0][..., 0]
    expected = []
    for q, k, one in zip(oracle.split(query, LENGTHS), oracle.split(key, LENGTHS), selections, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) * oracle.SCALE
        hidden = ~oracle.token_mask(one.kept, 16)
        expected.append(torch.logsumexp(scores.masked_fill(hidden, -math.inf), dim=-1).T)
    assert ((lse.double() - torch.cat(expected)).abs() <= bound).all()


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)), ids=str)
def test_inputs_need_not_require_gradients(needed):
    """Any of query, key and value may do without a gradient; the others' gradients stay bit for bit the same."""
    batch = batch_of()
    _, *everything = harness.run(*batch, LENGTHS, top_p=0.5, block_size=16)
    leaves = [tensor.clone().requires_grad_(wanted) for tensor, wanted in zip(batch[:3], needed, strict=True)]
    cu_seqlens = oracle.cumulative(LENGTHS)
    out = block_sparse_attention(*leaves, cu_seqlens=cu_seqlens, top_p=0.5, block_size=16, scale=oracle.SCALE)
    assert out.requires_grad == any(needed)
    if any(needed):
        out.backward(batch[3])
    for leaf, wanted, right in zip(leaves, needed, everything, strict=True):
        assert torch.equal(leaf.grad, right) if wanted else leaf.grad is None


def test_hidden_scores_may_be_huge():
    """A later key whose hidden score would overflow exp leaves earlier rows and every gradient finite and right."""
    query, key, value, grad = (tensor.clone() for tensor in batch_of((60,), 16, 1, 2, 32))
    query[..., 0] = 1.0
    key[30, :, 0], key[59, :, 0] = 16000.0, 16000.0
    found = harness.run(query, key, value, grad, [60], top_k=2, block_size=16)
    assert all(tensor.isfinite().all() for tensor in found)
    # Probabilities below e^-87 count as e^-87: 60 keys, in products of numbers up to 16000, 8, 8 and 60 rows.
    lost = 60 * 60 * math.exp(torch_backend.LEAST_EXPONENT) * 16000 * 8 * 8
    assert_equals_oracle(found, (query, key, value, grad), [60], 16, {"top_k": 2}, lost)
    low = harness.run(*(tensor.float() for tensor in (query, key, value, grad)), [60], top_k=2, block_size=16)
    assert all(tensor.isfinite().all() for tensor in low)


@pytest.fixture
def poisoned_buffers():
    """torch.empty hands out NaN: what is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("name", ["p.35", "p-documents", "k1", "k3"])
def test_nothing_is_read_before_it_is_written(poisoned_buffers, name):
    """With every fresh buffer full of NaN, output and gradients are still those of the definition."""
    assert torch.empty(3).isnan().all()
    found = harness.run(*batch_of(), LENGTHS, block_size=16, **as_tensors(BUDGETS[name]))
    assert_equals_budget_case(found, name)


def test_two_runs_give_the_same_bits():
    """Running twice, with the statistics or under a checkpoint gives bit for bit the same output and gradients."""
    batch = [tensor.float() for tensor in batch_of()]
    options = {"cu_seqlens": oracle.cumulative(LENGTHS), "top_p": 0.5, "block_size": 16, "scale": oracle.SCALE}
    first = harness.run(*batch, LENGTHS, top_p=0.5, block_size=16)
    second = harness.run(*batch, LENGTHS, top_p=0.5, block_size=16)

    def attention(*leaves, stats=False):
        out = block_sparse_attention(*leaves, return_stats=stats, **options)
        return out[0] if stats else out

    results = [second]
    for call in (
        functools.partial(attention, stats=True),
        functools.partial(torch.utils.checkpoint.checkpoint, attention, use_reentrant=False),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in batch[:3]]
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, batch[3])))
    for result in results:
        assert all(torch.equal(one, two) for one, two in zip(result, first, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}, {"top_p": 1.0}], ids=str)
def test_autocast_changes_no_bit(dtype, options):
    """Under autocast the operator computes as without it: scores in fp32, inputs in their own dtype."""
    query, key, value, grad = (tensor.to(dtype) for tensor in batch_of())
    lengths = list(LENGTHS)
    expected = harness.run(query, key, value, grad, lengths, block_size=16, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = harness.run(query, key, value, grad, lengths, block_size=16, **options)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("length", [6, 40])
def test_second_derivatives_are_refused(length):
    """A second derivative through the operator raises, whatever the length, and never comes out wrong."""
    query, key, value, _ = batch_of((length,), block_size=8)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    out = block_sparse_attention(*leaves, cu_seqlens=torch.tensor([0, length]), top_p=0.5, block_size=8)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        sum(gradient.square().sum() for gradient in first).backward()


def test_changing_the_output_in_place_is_refused():
    """The backward pass reads the output: changing it in place raises, as with torch's own attention."""
    query, key, value, _ = batch_of()
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    out = block_sparse_attention(*leaves, cu_seqlens=oracle.cumulative(LENGTHS), top_p=0.5, block_size=16)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.mul_(2).sum().backward()
