import functools
import itertools
import os
import subprocess
import sys

import harness
import oracle
import pytest
import torch

from sparsebalance_kernels import (
    CURVE_TOP_K,
    CURVE_TOP_P,
    BlockSelection,
    attend,
    block_sparse_attention,
    ops,
    select_blocks,
)

LENGTHS = [1, 15, 16, 17, 32, 33, 0, 87]
BUDGETS = {
    "p.35": {"top_p": 0.35},
    "p.8": {"top_p": 0.8},
    "p1": {"top_p": 1.0},
    "p.9-max2": {"top_p": 0.9, "max_blocks": 2},
    "p.5-sink1-min2": {"top_p": 0.5, "sink_blocks": 1, "min_blocks": 2},
    "p-documents": {"top_p": [0.1, 0.2, 0.3, 1.0, 0.4, 1.0, 0.6, 0.45]},
    "k1": {"top_k": 1},
    "k3": {"top_k": 3},
    "k20": {"top_k": 20},
    "k3-sink1": {"top_k": 3, "sink_blocks": 1},
    "k4-max2": {"top_k": 4, "max_blocks": 2},
    "k-documents": {"top_k": [1, 2, 3, 9, 2, 9, 4, 3]},
}


def grid_batch(lengths=LENGTHS, seed=8):
    return oracle.grid_batch(lengths, block_size=16, kv_heads=2, group=2, dim=32, seed=seed)


def call(batch, lengths=LENGTHS, **options):
    options = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in options.items()}
    options = {"cu_seqlens": oracle.cumulative(lengths), "block_size": 16, "scale": oracle.SCALE} | options
    return block_sparse_attention(*batch[:3], **options)


@functools.cache
def counted_at(**options):
    """Density, work and coverage of the default batch, counted; cached as a curve asks for twenty of them."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return oracle.count(oracle.select(*grid_batch()[:2], LENGTHS, 16, **options), LENGTHS, 16)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("options", BUDGETS.values(), ids=BUDGETS.keys())
def test_stats_equal_what_is_counted(options, backend):
    """Density, work, coverage and curve are those counted row by row, dense and short documents included."""
    batch = grid_batch()
    _, stats = call(batch, return_stats=True, backend=backend, **options)
    counted = counted_at(**{name: tuple(v) if isinstance(v, list) else v for name, v in options.items()})
    assert stats.density == counted.density
    assert stats.work == counted.work
    assert abs(stats.coverage - counted.coverage) <= counted.mass_error

    bounds = {name: value for name, value in options.items() if name not in ("top_p", "top_k")}
    assert stats.curve.dtype == torch.float64 and stats.curve.device.type == "cpu"
    if "top_p" in options:
        assert stats.curve.tolist() == [counted_at(top_p=p, **bounds).density for p in CURVE_TOP_P]
    else:
        coverage = [counted_at(top_k=k, **bounds).coverage for k in CURVE_TOP_K]
        expected = torch.tensor(coverage, dtype=torch.float64)
        assert ((stats.curve - expected).abs() <= counted.mass_error).all()


@pytest.mark.parametrize("p", CURVE_TOP_P)
def test_curve_passes_through_the_density_used(p):
    """At the p in use the density curve is the density itself, bit for bit."""
    _, stats = call([tensor.float() for tensor in grid_batch()], return_stats=True, top_p=p)
    assert stats.curve[CURVE_TOP_P.index(p)] == stats.density


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_curve_passes_through_the_coverage_used(k):
    """At the k in use the coverage curve is the coverage itself, to the rounding of two orders of summation."""
    _, stats = call(grid_batch(), return_stats=True, top_k=k)
    rows = 4 * sum(max(0, length - 16) for length in LENGTHS)
    assert abs(float(stats.curve[CURVE_TOP_K.index(k)]) - stats.coverage) <= 2 * rows * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("options", BUDGETS.values(), ids=BUDGETS.keys())
def test_curve_never_falls(options):
    """Density does not fall with p nor coverage with k, and without max_blocks both end at 1."""
    _, stats = call(grid_batch(), return_stats=True, **options)
    assert (stats.curve.diff() >= 0).all()
    if "max_blocks" not in options:
        assert stats.curve[-1] == 1.0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_p_is_a_lower_bound_of_coverage(p):
    """Mean coverage is at least p, to the rounding of the masses."""
    _, stats = call(grid_batch(), return_stats=True, top_p=p)
    assert stats.coverage >= p - oracle.mass_error(5)


@pytest.mark.parametrize("options", [{"top_p": 0.3}, {"top_k": 1}, {"top_p": 1.0}], ids=repr)
def test_stats_where_nothing_has_history(options):
    """Documents no longer than a block have density, coverage and curve 1 and do all causal work."""
    lengths = [1, 16, 7]
    _, stats = call(grid_batch(lengths), lengths, return_stats=True, **options)
    assert (stats.density, stats.work, stats.coverage) == (1.0, 1.0, 1.0)
    assert (stats.curve == 1.0).all()


def test_stats_of_a_batch_weigh_documents_by_what_they_count():
    """The batch's density is the documents' densities weighted by visible triples, not their mean."""
    lengths = [33, 101]
    batch = grid_batch(lengths)
    _, stats = call(batch, lengths, return_stats=True, top_p=0.4)
    parts = zip(*(oracle.split(tensor, lengths) for tensor in batch), strict=True)
    alone = [
        call(part, [length], return_stats=True, top_p=0.4)[1] for part, length in zip(parts, lengths, strict=True)
    ]
    visible = [sum(position // 16 for position in range(length)) for length in lengths]
    kept = sum(round(one.density * 4 * seen) for one, seen in zip(alone, visible, strict=True))
    assert stats.density == kept / (4 * sum(visible))


@pytest.mark.parametrize("lengths", [LENGTHS, [87]])
def test_forms_of_a_budget_are_one(lengths):
    """A number, a 0-d tensor and one equal number per document give the same bits."""
    batch = [tensor.float() for tensor in grid_batch(lengths)]
    n = len(lengths)
    for name, value in (("top_p", 0.45), ("top_p", 1.0), ("top_k", 3)):
        plain = call(batch, lengths, **{name: value})
        forms = [torch.tensor(value), torch.full((n,), value), torch.tensor(value, dtype=torch.float64)]
        assert all(torch.equal(call(batch, lengths, **{name: form}), plain) for form in forms)


def test_budgets_are_no_hidden_state():
    """A call's result depends on its own budget only, whatever budgets were used before."""
    batch = grid_batch()
    first = call(batch, top_p=0.3)
    others = [call(batch, top_p=0.9), call(batch, top_k=2), call(batch, top_p=1.0)]
    assert torch.equal(call(batch, top_p=0.3), first)
    assert not any(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_dtypes(dtype):
    """cu_seqlens may be int32 or int64."""
    batch = grid_batch()
    assert torch.equal(call(batch, top_p=0.5, cu_seqlens=oracle.cumulative(LENGTHS).to(dtype)), call(batch, top_p=0.5))


def test_default_scale_and_block_size():
    """Without being told, the scale is D ** -0.5 and a block has 128 tokens."""
    batch = oracle.grid_batch([300], block_size=128, dim=64, seed=9)
    cu_seqlens = oracle.cumulative([300])
    plain = block_sparse_attention(*batch[:3], cu_seqlens=cu_seqlens, top_k=2)
    spelled = block_sparse_attention(*batch[:3], cu_seqlens=cu_seqlens, top_k=2, block_size=128, scale=0.125)
    assert torch.equal(plain, spelled)


def test_auto_is_the_torch_backend_on_cpu():
    """backend="auto" on CPU tensors gives the bits of backend="torch"."""
    batch = grid_batch()
    assert torch.equal(call(batch, top_p=0.5), call(batch, top_p=0.5, backend="torch"))


def test_inputs_are_left_as_they_were():
    """Neither forward nor backward writes to an input."""
    batch = grid_batch()
    copies = [tensor.clone() for tensor in batch]
    leaves = [tensor.requires_grad_() for tensor in batch[:3]]
    for options in ({"top_p": 0.5}, {"top_p": [0.1, 0.2, 0.3, 1.0, 0.4, 1.0, 0.6, 0.45]}, {"top_k": 1}):
        call(leaves, **options).backward(batch[3])
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(batch, copies, strict=True))


def test_scale_shapes_the_selection():
    """A larger scale sharpens the gate, so top_p keeps less."""
    batch = grid_batch()
    densities = [call(batch, top_p=0.5, scale=scale, return_stats=True)[1].density for scale in (0.01, 0.125, 2.0)]
    assert densities == sorted(densities, reverse=True) and len(set(densities)) == 3


def tensors(tokens=8, heads=4, kv_heads=2, dim=16, dtype=torch.float32, device="cpu"):
    return {
        "query": torch.zeros(tokens, heads, dim, dtype=dtype, device=device),
        "key": torch.zeros(tokens, kv_heads, dim, dtype=dtype, device=device),
        "value": torch.zeros(tokens, kv_heads, dim, dtype=dtype, device=device),
        "cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32),
    }


WRONG = {
    "query-2d": ("query", {"query": torch.zeros(8, 64)}),
    "query-4d": ("query", {"query": torch.zeros(1, 4, 8, 16)}),
    "key-4d": ("key", {"key": torch.zeros(1, 2, 8, 16)}),
    "value-2d": ("value", {"value": torch.zeros(8, 32)}),
    "query-integers": ("query", {"query": torch.zeros(8, 4, 16, dtype=torch.int64)}),
    "query-complex": ("query", {"query": torch.zeros(8, 4, 16, dtype=torch.complex64)}),
    "key-dtype": ("key", {"key": torch.zeros(8, 2, 16, dtype=torch.bfloat16)}),
    "value-dtype": ("value", {"value": torch.zeros(8, 2, 16, dtype=torch.float64)}),
    "key-device": ("key", {"key": torch.zeros(8, 2, 16, device="meta")}),
    "value-device": ("value", {"value": torch.zeros(8, 2, 16, device="meta")}),
    "key-tokens": ("key", {"key": torch.zeros(7, 2, 16), "value": torch.zeros(7, 2, 16)}),
    "key-dim": ("key", {"key": torch.zeros(8, 2, 8), "value": torch.zeros(8, 2, 8)}),
    "value-dim": ("value", {"value": torch.zeros(8, 2, 8)}),
    "value-heads": ("value", {"value": torch.zeros(8, 1, 16)}),
    "heads-no-multiple": ("key", {"key": torch.zeros(8, 3, 16), "value": torch.zeros(8, 3, 16)}),
    "kv-heads-more": ("key", {"key": torch.zeros(8, 8, 16), "value": torch.zeros(8, 8, 16)}),
    "kv-heads-none": ("key", {"key": torch.zeros(8, 0, 16), "value": torch.zeros(8, 0, 16)}),
    "cu_seqlens-float": ("cu_seqlens", {"cu_seqlens": torch.tensor([0.0, 8.0])}),
    "cu_seqlens-2d": ("cu_seqlens", {"cu_seqlens": torch.tensor([[0, 8]])}),
    "cu_seqlens-empty": ("cu_seqlens", {"cu_seqlens": torch.zeros(0, dtype=torch.int32)}),
    "cu_seqlens-first": ("cu_seqlens", {"cu_seqlens": torch.tensor([1, 8])}),
    "cu_seqlens-last": ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 7])}),
    "cu_seqlens-beyond": ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 9])}),
    "cu_seqlens-falling": ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 6, 4, 8])}),
    "p-and-k": ("top_p and top_k", {"top_k": 2}),
    "neither": ("top_p and top_k", {"top_p": None}),
    "p-zero": ("top_p", {"top_p": 0.0}),
    "p-negative": ("top_p", {"top_p": -0.1}),
    "p-above-one": ("top_p", {"top_p": 1.01}),
    "p-nan": ("top_p", {"top_p": float("nan")}),
    "p-one-document-bad": ("top_p", {"top_p": torch.tensor([0.5, 0.0])}),
    "p-too-many": ("top_p", {"top_p": torch.tensor([0.5, 0.5, 0.5])}),
    "p-1d-of-one": ("top_p", {"top_p": torch.tensor([0.5])}),
    "p-2d": ("top_p", {"top_p": torch.tensor([[0.5, 0.5]])}),
    "k-zero": ("top_k", {"top_p": None, "top_k": 0}),
    "k-negative": ("top_k", {"top_p": None, "top_k": torch.tensor([2, -1])}),
    "k-too-many": ("top_k", {"top_p": None, "top_k": torch.tensor([2, 2, 2])}),
    "k-fraction": ("top_k", {"top_p": None, "top_k": 2.5}),
    "k-nan": ("top_k", {"top_p": None, "top_k": float("nan")}),
    "block_size-zero": ("block_size", {"block_size": 0}),
    "block_size-fraction": ("block_size", {"block_size": 2.5}),
    "scale-nan": ("scale", {"scale": float("nan")}),
    "min_blocks-negative": ("min_blocks", {"min_blocks": -1}),
    "sink_blocks-negative": ("sink_blocks", {"sink_blocks": -1}),
    "max_blocks-negative": ("max_blocks", {"max_blocks": -1}),
    "max-below-min": ("max_blocks", {"min_blocks": 3, "max_blocks": 2}),
    "max-below-sink": ("max_blocks", {"sink_blocks": 3, "max_blocks": 2}),
    "backend": ("backend", {"backend": "cuda"}),
    "query-no-heads": ("query", {"query": torch.zeros(8, 0, 16)}),
    "no-head_dim": ("query", {name: torch.zeros(8, 2, 0) for name in ("query", "key", "value")}),
    "cu_seqlens-list": ("cu_seqlens", {"cu_seqlens": [0, 8]}),
    "cu_seqlens-none": ("cu_seqlens", {"cu_seqlens": None}),
    "p-list": ("top_p", {"top_p": [0.5, 0.5]}),
    "p-text": ("top_p", {"top_p": "a"}),
    "k-text": ("top_k", {"top_p": None, "top_k": "3"}),
    "min_blocks-fraction": ("min_blocks", {"min_blocks": 1.5}),
    "sink_blocks-none": ("sink_blocks", {"sink_blocks": None}),
    "max_blocks-fraction": ("max_blocks", {"max_blocks": 2.5}),
    "max_blocks-infinite": ("max_blocks", {"max_blocks": float("inf")}),
    "min_blocks-huge": ("min_blocks", {"min_blocks": 2**70}),
}


@pytest.mark.parametrize(("named", "changes"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_wrong_arguments_are_named(named, changes, backend):
    """A shape, dtype, device or budget that does not fit raises a ValueError that names the argument."""
    arguments = tensors() | {"top_p": 0.5, "backend": backend} | changes
    with pytest.raises(ValueError, match=named):
        block_sparse_attention(**arguments)


def test_right_arguments_are_accepted():
    """The arguments from which the wrong ones are made are right."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        out = block_sparse_attention(**tensors(dtype=dtype), top_p=torch.tensor([0.5, 1.0]), block_size=2)
        assert out.shape == (8, 4, 16) and out.dtype == dtype


def test_reference_and_torch_agree_in_fp64():
    """Both backends give one result and one set of gradients, to the bound of rounding."""
    batch = grid_batch()
    selections = oracle.select(*batch[:2], LENGTHS, 16, top_p=0.45)
    bounds = oracle.rounding_bounds(*batch, selections, LENGTHS, 16, torch.finfo(torch.float64).eps / 2)
    one, two = (harness.run(*batch, LENGTHS, top_p=0.45, block_size=16, backend=b) for b in ("torch", "reference"))
    harness.assert_within(one, two, bounds)


def test_import_is_light():
    """Importing the package imports neither transformers nor triton."""
    code = "import sys, sparsebalance_kernels; print(sorted({'transformers', 'triton'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("options", [{"top_p": 0.4}, {"top_k": 2, "sink_blocks": 1}], ids=str)
def test_the_two_halves_are_the_operator(options):
    """select_blocks and attend give the operator's output and gradients bit for bit, and the density of its stats."""
    lengths = [1, 16, 60, 0, 87]  # none that top_k keeps whole: such a document is attended densely
    query, key, value, grad = (tensor.float() for tensor in grid_batch(lengths))
    cu_seqlens = oracle.cumulative(lengths)
    results = []
    for whole in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        if whole:
            given = {"cu_seqlens": cu_seqlens, "block_size": 16, **options}
            out, stats = block_sparse_attention(*leaves, return_stats=True, **given)
        else:
            selection = select_blocks(query, key, cu_seqlens=cu_seqlens, block_size=16, **options)
            out, lse = attend(*leaves, selection)
            assert lse.shape == (query.shape[1], query.shape[0]) and selection.density() == stats.density
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_any_selector_may_feed_the_attention():
    """Bits set by hand (each row's previous block) give masked dense attention over own and previous block."""
    length, size = 70, 16
    query, key, value, grad = oracle.grid_batch([length], block_size=size, kv_heads=1, group=2)
    kept = torch.zeros(length, 2, length // size, dtype=torch.bool)
    for position in range(size, length):
        kept[position, :, position // size - 1] = True
    bits = (kept.int() << torch.arange(length // size)).sum(-1, dtype=torch.int32).T[:, None].contiguous()
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    selection = BlockSelection(bits, torch.tensor([0, length]), size)
    out, _ = attend(*leaves, selection, scale=oracle.SCALE)
    found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    selections = [oracle.Selection(kept, torch.zeros(0))]
    expected = harness.run_dense(query, key, value, grad, selections, [length], size)
    bounds = oracle.rounding_bounds(query, key, value, grad, selections, [length], size, 2.0**-53)
    harness.assert_within(found, expected, bounds)


@pytest.mark.parametrize(
    ("named", "bits"),
    [
        ("selection.bits must be int32", torch.zeros(2, 1, 40)),
        ("at least 2 words", torch.zeros(2, 1, 600, dtype=torch.int32)),
        ("2 heads", torch.zeros(1, 2, 600, dtype=torch.int32)),
    ],
)
def test_a_selection_that_does_not_fit_is_named(named, bits):
    """attend refuses bits of another dtype, too few words or other heads, and says what it wants."""
    tokens = bits.shape[2]
    query, key = torch.zeros(tokens, 2, 8), torch.zeros(tokens, 1, 8)
    selection = BlockSelection(bits, torch.tensor([0, tokens]), 16)
    with pytest.raises(ValueError, match=named):
        attend(query, key, key, selection)
    with pytest.raises(ValueError, match="use block_sparse_attention"):
        select_blocks(query, key, cu_seqlens=torch.tensor([0, tokens]), top_p=0.5, backend="reference")


def feasible(query, key, lengths, wanted, base, tolerance, min_blocks=0, max_blocks=None, sink_blocks=0):
    numbers = (torch.tensor(number) for number in (wanted, base, tolerance))
    starts = oracle.cumulative(lengths)
    return int(ops.feasible_top_k(query, key, starts, *numbers, 16, min_blocks, max_blocks, sink_blocks, oracle.SCALE))


@pytest.mark.parametrize("bounds", [{}, {"sink_blocks": 1}, {"min_blocks": 2}, {"max_blocks": 3}], ids=str)
@pytest.mark.parametrize("base", [1, 2, 4, 9])
def test_feasible_top_k_is_the_smallest_that_keeps_the_tolerance(base, bounds):
    """The k chosen loses no more coverage than allowed, counted row by row; one less would, or is not wanted."""
    query, key = grid_batch()[:2]
    at_base = counted_at(top_k=base, **bounds)
    loss = {k: at_base.coverage - counted_at(top_k=k, **bounds).coverage for k in range(1, base + 1)}
    for wanted, tolerance in itertools.product(range(1, 8), [0.0, 0.03, 0.1, 0.25, 1.0]):
        k = feasible(query, key, LENGTHS, wanted, base, tolerance, **bounds)
        assert k == wanted or (wanted < k <= base and loss[k - 1] > tolerance - 2 * at_base.mass_error)
        assert k >= base or loss[k] <= tolerance + 2 * at_base.mass_error


def test_feasible_top_k_of_a_long_document_is_sampled():
    """Where rows are sampled the loss over all rows misses the tolerance by less than .01."""
    lengths, tolerance = [6000], 0.1
    query, key = oracle.grid_batch(lengths, block_size=16, kv_heads=1, group=1, dim=32, seed=3)[:2]
    k = feasible(query, key, lengths, 1, 200, tolerance)
    coverage = [
        block_sparse_attention(
            query, key, key, cu_seqlens=oracle.cumulative(lengths), top_k=top_k, block_size=16, scale=oracle.SCALE,
            return_stats=True,
        )[1].coverage
        for top_k in (200, k, k - 1)
    ]  # fmt: skip
    assert coverage[0] - coverage[1] <= tolerance + 0.01 and coverage[0] - coverage[2] >= tolerance - 0.01


@pytest.mark.parametrize(("wanted", "base", "tolerance"), [(0, 2, 0.1), (1, 0, 0.1), (1, 2, -0.1), (1, 2, 1.5)])
def test_feasible_top_k_refuses_numbers_out_of_range(wanted, base, tolerance):
    """k counts from the own block, a tolerance is a share."""
    with pytest.raises(ValueError, match="base_top_k must be at least 1 and tolerance in"):
        feasible(*grid_batch()[:2], LENGTHS, wanted, base, tolerance)
