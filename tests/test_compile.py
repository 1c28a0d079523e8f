"""torch.compile and selective checkpointing of models with sparsebalance attention.

The compiler backend is ``aot_eager``: the graph is traced, differentiated and run without a C++ compiler.
"""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, Qwen2Config

from hf_sparsebalance import StatsCollector
from sparsebalance_kernels import block_sparse_attention, ops

STARTS = torch.tensor([0, 30, 200], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(30), torch.arange(170)])[None]
PADDING = torch.ones(2, 100, dtype=torch.long)
PADDING[0, :20] = 0
PADDING[1, 90:] = 0
TOLERANT = {
    "sparse_top_k": torch.tensor(1),
    "sparse_base_top_k": torch.tensor(4),
    "sparse_tolerance": torch.tensor(0.2),
}


def model_of(**sparse):
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    config.sparse_attention = {"block_size": 16, "top_p": 0.5, **sparse}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sparsebalance")


def step(call, model, shape, **inputs):
    """Loss and all gradients of one training step."""
    ids = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = call(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("shape", "inputs"),
    [
        ((2, 100), {}),
        ((2, 100), {"attention_mask": PADDING}),
        ((1, 200), {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 170, "max_length_k": 170}),
        ((1, 200), {"position_ids": POSITIONS}),
        ((2, 100), {"sparse_top_k": torch.tensor(3)}),
        ((2, 100), TOLERANT),
    ],
    ids=["plain", "padded", "cu_seq_lens", "position_ids", "top_k", "tolerance"],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_has_one_graph_and_the_same_results(shape, inputs, checkpointing):
    """The whole model compiles without a graph break and gives the eager model's loss and gradients bit for bit."""
    model = model_of()
    if checkpointing:
        model.gradient_checkpointing_enable()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, two in zip(step(compiled, model, shape, **inputs), step(model, model, shape, **inputs), strict=True):
        assert torch.equal(one, two)


def test_another_budget_compiles_nothing():
    """p is a run-time number: a new one runs the compiled graph, and changes the result."""
    model = model_of()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = [step(compiled, model, (2, 100), sparse_top_p=torch.tensor(0.5))[0]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses += [step(compiled, model, (2, 100), sparse_top_p=torch.tensor(p))[0] for p in (0.05, 0.9)]
    assert len({loss.item() for loss in losses}) == 3


def test_a_k_that_layers_raise_compiles_nothing_anew():
    """The anchor's k, the base and the tolerance are run-time numbers; each layer's k leaves the graph as in eager."""
    model = model_of()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    step(compiled, model, (2, 100), **TOLERANT, sparse_stats=StatsCollector())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for wanted, base, tolerance in ((1, 6, 0.05), (3, 2, 0.2)):
            given = {
                "sparse_top_k": torch.tensor(wanted),
                "sparse_base_top_k": torch.tensor(base),
                "sparse_tolerance": torch.tensor(tolerance),
            }
            collectors = StatsCollector(), StatsCollector()
            for call, collector in zip((compiled, model), collectors, strict=True):
                step(call, model, (2, 100), **given, sparse_stats=collector)
            chosen = [{layer: int(k) for layer, k in collector.top_k.items()} for collector in collectors]
            assert chosen[0] == chosen[1] and len(chosen[0]) == 2
            assert (min(chosen[0].values()) > wanted) == (wanted < base)


def test_sizes_and_scales_may_be_symbols():
    """With dynamic=True one graph serves other lengths, budgets and scales, with the results of the eager operator."""

    def attend(query, key, value, starts, top_p, scale):
        return block_sparse_attention(query, key, value, cu_seqlens=starts, top_p=top_p, block_size=16, scale=scale)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for length, top_p, scale in ((200, 0.5, 0.2), (150, 0.3, 0.3), (170, 0.8, 0.25)):
        query, key, value = (torch.randn(length, heads, 32, generator=generator) for heads in (4, 2, 2))
        given = query, key, value, torch.tensor([0, 30, length]), torch.tensor(top_p), scale
        assert torch.equal(compiled(*given), attend(*given))


def test_statistics_leave_a_compiled_graph():
    """A collector passed to a compiled model holds what the eager model's holds."""
    model = model_of()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for call in (compiled, model):
        stats = StatsCollector()
        step(call, model, (2, 100), sparse_stats=stats)
        found.append(stats)
    for one, two in zip(found[0].vectors.values(), found[1].vectors.values(), strict=True):
        assert torch.equal(one, two)
    assert found[0].mean().density == found[1].mean().density < 1


def test_ops_keep_their_promises():
    """Schema, fake tensors, autograd and ahead-of-time dispatch of the ops pass torch's own checks."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(50, heads, 16, generator=generator) for heads in (4, 2, 2))
    starts = torch.tensor([0, 20, 50])
    options = (torch.tensor([0.3, 0.5], dtype=torch.float64), None, 16, 0, None, 0, 0.25, 1, "torch")
    for with_stats in (False, True):
        torch.library.opcheck(ops.select, (query, key, starts, *options, with_stats))
    tolerant = (*TOLERANT.values(), 16, 0, None, 0, 0.25)
    torch.library.opcheck(ops.feasible_top_k, (query, key, starts, *tolerant))
    bits, _ = ops.select(query, key, starts, *options, False)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    torch.library.opcheck(ops.attend, (*leaves, bits, starts, 16, 0.25, "torch"))
    out, lse = (tensor.detach() for tensor in ops.attend(*leaves, bits, starts, 16, 0.25, "torch"))
    saved = (out, *(leaf.detach() for leaf in leaves), out, lse, bits, starts, 16, 0.25, "torch")
    torch.library.opcheck(ops.attend_backward, saved)


def test_selective_checkpointing_can_save_the_selection():
    """Under a policy that saves ``sparsebalance::select`` the recomputed pass does not select again."""
    select = torch.ops.sparsebalance.select.default

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += func is select
            return func(*args, **(kwargs or {}))

    def save(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is select else CheckpointPolicy.PREFER_RECOMPUTE

    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(80, heads, 16, generator=generator, requires_grad=True) for heads in (4, 2, 2)]

    def attention(*tensors):
        return block_sparse_attention(*tensors, cu_seqlens=torch.tensor([0, 80]), top_p=0.4, block_size=16)

    plain = torch.autograd.grad(attention(*leaves).square().sum(), leaves)
    counts = []
    for contexts in ({}, {"context_fn": functools.partial(create_selective_checkpoint_contexts, save)}):
        with Count():
            Count.calls = 0
            out = checkpoint(attention, *leaves, use_reentrant=False, **contexts)
            grads = torch.autograd.grad(out.square().sum(), leaves)
        counts.append(Count.calls)
        assert all(torch.equal(one, two) for one, two in zip(grads, plain, strict=True))
    assert counts == [2, 1]
