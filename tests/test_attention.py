"""sparsebalance attention inside whole models, against sdpa and against a slow attention written once more here."""

import copy
import functools
import itertools
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)

import hf_sparsebalance
from hf_sparsebalance import StatsCollector
from hf_sparsebalance.attention import SparseAttentionDefaults
from hf_sparsebalance.errors import UserError

BLOCK = 4
VOCAB = 61
LAYERS = 2
LENGTHS = (23, 9, 30, 4, 13)
CONFIGS = {
    "qwen2": Qwen2Config,
    "qwen3": functools.partial(Qwen3Config, head_dim=8),
    "llama": LlamaConfig,
    "mistral": functools.partial(MistralConfig, sliding_window=None),
}


def config_of(family="qwen2", **sparse):
    """A tiny random configuration whose attention matters: with the default initialisation it is nearly uniform."""
    config = CONFIGS[family](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    config.sparse_attention = {"block_size": BLOCK, "top_p": 0.4, **sparse}
    return config


def build(attention, config=None, dtype=torch.float32):
    """The same weights for the same configuration, whatever the attention and dtype."""
    config = config or config_of()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32)
    return model.to(dtype).eval()


@functools.cache
def documents(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths)


def pad(texts, side):
    """input_ids, 2-D attention_mask and the position ids that a padded batch stands for."""
    width = max(len(text) for text in texts) + 2
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        where = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        ids[row, where], mask[row, where] = text, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def pack(texts, by):
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=by == "cu_seq_lens")
    batch = collator([{"input_ids": text.tolist()} for text in texts])
    batch.pop("labels")
    return batch


def batch_of(layout, texts):
    if layout in ("left", "right"):
        return pad(texts, layout)
    return pack(texts, layout)


def split(logits, batch):
    """Logits of the real tokens of each document of a padded or packed batch."""
    if "attention_mask" in batch:
        return [row[mask.bool()] for row, mask in zip(logits, batch["attention_mask"], strict=True)]
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    return [logits[0, first:stop] for first, stop in itertools.pairwise([*starts, logits.shape[1]])]


@torch.no_grad()
def one_by_one(model, texts, **keywords):
    return [model(input_ids=text[None], use_cache=False, **keywords).logits[0] for text in texts]


@functools.cache
def tolerance(family):
    """How far two fp32 runs may differ: each errs by about what sdpa does against its fp64 run; twice that for the
    maximum over other tokens."""
    with torch.no_grad():
        single = one_by_one(build("sdpa", config_of(family)), documents())
        double = one_by_one(build("sdpa", config_of(family), torch.float64), documents())
    error = max(float((a.double() - b).abs().max()) for a, b in zip(single, double, strict=True))
    assert 0.0 < error < 1e-3
    return 4.0 * error


def assert_close(found, expected, family="qwen2"):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= tolerance(family)


def kept_history(query, key, top_p, top_k, scaling):
    """The definition, row by row: blocks of history that the last token of ``key [T, D]`` keeps, of how many."""
    position = key.shape[0] - 1
    blocks = position // BLOCK
    means = [key[b * BLOCK : (b + 1) * BLOCK].float().mean(0) for b in range(blocks)]
    scores = [float(query.float() @ mean) * scaling for mean in means]
    order = sorted(range(blocks), key=lambda b: (-scores[b], -b))
    if top_k is not None:
        return order[: top_k - 1], blocks
    if top_p >= 1.0:
        return order, blocks
    weights = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    kept, total = [], 0.0
    for block in order:
        if total >= top_p:
            break
        kept.append(block)
        total += weights[block]
    return kept, blocks


def slow_attention(module, query, key, value, attention_mask, scaling=None, slow=None, **_):
    """Dense attention under the mask of the definition, for one document; ``slow`` counts kept and visible blocks."""
    heads, length = query.shape[1], query.shape[2]
    group = heads // key.shape[1]
    dense = module.layer_idx in slow.get("dense_layers", ())
    kept_pairs, visible_pairs = 0, 0
    out = torch.zeros_like(query)
    for head in range(heads):
        k, v = key[0, head // group], value[0, head // group]
        for token in range(length):
            top_p, top_k = (1.0, None) if dense else (slow.get("top_p"), slow.get("top_k"))
            kept, visible = kept_history(query[0, head, token], k[: token + 1], top_p, top_k, scaling)
            kept_pairs, visible_pairs = kept_pairs + len(kept), visible_pairs + visible
            own = range(token // BLOCK * BLOCK, token + 1)
            seen = [*(block * BLOCK + i for block in kept for i in range(BLOCK)), *own]
            scores = k[seen] @ query[0, head, token] * scaling
            out[0, head, token] = scores.softmax(0) @ v[seen]
    slow.setdefault("counts", []).append((kept_pairs, visible_pairs))
    return out.transpose(1, 2), None


AttentionInterface.register("slow_oracle", slow_attention)


@torch.no_grad()
def slow(texts, config=None, **budget):
    model = build("slow_oracle", config)
    return [model(input_ids=text[None], use_cache=False, slow=dict(budget)).logits[0] for text in texts]


# Dense budget: equal to sdpa in every layout.


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_dense_budget_of_single_documents_equals_sdpa(family, use_cache):
    """At p = 1 a document without mask has the logits of sdpa, with and without a cache that is filled meanwhile."""
    model = build("sparsebalance", config_of(family))
    with torch.no_grad():
        found = [model(input_ids=t[None], use_cache=use_cache, sparse_top_p=1.0).logits[0] for t in documents()]
    assert_close(found, one_by_one(build("sdpa", config_of(family)), documents()), family)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("layout", ["left", "right", "cu_seq_lens", "position_ids"])
@pytest.mark.parametrize("family", CONFIGS)
def test_dense_budget_of_batches_equals_sdpa(family, layout, use_cache):
    """At p = 1 each document of a padded or packed batch has the logits that sdpa gives it alone."""
    batch = batch_of(layout, documents())
    assert ("cu_seq_lens_q" in batch) == (layout == "cu_seq_lens")
    with torch.no_grad():
        logits = build("sparsebalance", config_of(family))(**batch, use_cache=use_cache, sparse_top_p=1.0).logits
    assert_close(split(logits, batch), one_by_one(build("sdpa", config_of(family)), documents()), family)


@pytest.mark.parametrize("side", ["left", "right"])
def test_dense_budget_of_padded_batches_equals_sdpas_padded_batch(side):
    """Without position_ids a padded batch has sdpa's logits of the same batch at real tokens."""
    batch = pad(documents(), side)
    del batch["position_ids"]
    with torch.no_grad():
        found = build("sparsebalance")(**batch, sparse_top_p=1.0).logits
        expected = build("sdpa")(**batch).logits
    assert_close(split(found, batch), split(expected, batch))


def test_bfloat16_errs_no_more_than_sdpa():
    """In bfloat16 the dense budget stays within twice the error that sdpa makes against fp32."""
    exact = one_by_one(build("sdpa"), documents())
    rounded = one_by_one(build("sdpa", dtype=torch.bfloat16), documents())
    found = one_by_one(build("sparsebalance", dtype=torch.bfloat16), documents(), sparse_top_p=1.0)
    bound = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(exact, found, strict=True)) <= 2 * bound


# Sparse budgets.


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("budget", [{"top_p": 0.3}, {"top_p": 0.7}, {"top_k": 1}, {"top_k": 3}])
def test_sparse_budgets_follow_the_definition(family, budget):
    """A model under a budget has the logits of dense attention under the mask of the definition, not those of sdpa."""
    config = config_of(family)
    keywords = {f"sparse_{name}": value for name, value in budget.items()}
    found = one_by_one(build("sparsebalance", config), documents(), **keywords)
    assert_close(found, slow(documents(), config, **budget), family)
    dense = one_by_one(build("sdpa", config), documents())
    assert float((found[0] - dense[0]).abs().max()) > 100 * tolerance(family)


@pytest.mark.parametrize("budget", [{"sparse_top_p": 0.4}, {"sparse_top_k": 2}])
@pytest.mark.parametrize("layout", ["left", "right", "cu_seq_lens", "position_ids"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_sparse_batches_equal_documents_one_by_one(layout, budget, use_cache):
    """Padding and packing change no document's result under a sparse budget."""
    model = build("sparsebalance")
    batch = batch_of(layout, documents())
    with torch.no_grad():
        logits = model(**batch, use_cache=use_cache, **budget).logits
    assert_close(split(logits, batch), one_by_one(model, documents(), **budget))


def test_a_mask_beside_packing_is_never_contamination():
    """An all-ones attention_mask beside cu_seq_lens_q is refused, or harmless: documents stay apart."""
    model = build("sparsebalance")
    batch = pack(documents(), "cu_seq_lens")
    try:
        with torch.no_grad():
            logits = model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), sparse_top_p=1.0).logits
    except UserError:
        return
    assert_close(split(logits, batch), one_by_one(model, documents(), sparse_top_p=1.0))


def test_kinds_of_budget_agree():
    """A float, a 0-d tensor and one number per document mean the same budget."""
    model = build("sparsebalance")
    batch = pack(documents(), "cu_seq_lens")
    with torch.no_grad():
        expected = model(**batch, sparse_top_p=0.375).logits
        for budget in (torch.tensor(0.375), torch.full((len(LENGTHS),), 0.375)):
            assert torch.equal(model(**batch, sparse_top_p=budget).logits, expected)
        expected = model(**batch, sparse_top_k=2).logits
        for budget in (torch.tensor(2), torch.full((len(LENGTHS),), 2)):
            assert torch.equal(model(**batch, sparse_top_k=budget).logits, expected)


@pytest.mark.parametrize("layout", ["left", "right", "cu_seq_lens", "position_ids"])
def test_budgets_per_document(layout):
    """A tensor with one budget per document gives each document its own."""
    model = build("sparsebalance")
    batch = batch_of(layout, documents())
    budgets = torch.tensor([0.2, 1.0, 0.5, 0.9, 0.05])
    with torch.no_grad():
        logits = model(**batch, sparse_top_p=budgets).logits
        alone = [
            model(input_ids=text[None], sparse_top_p=budget).logits[0]
            for text, budget in zip(documents(), budgets, strict=True)
        ]
    assert_close(split(logits, batch), alone)


@pytest.mark.parametrize("dense_layers", [[0], [1], [0, 1]])
def test_dense_layers_attend_densely(dense_layers):
    """Layers named in dense_layers ignore the budget, the others keep it."""
    config = config_of(dense_layers=dense_layers)
    found = one_by_one(build("sparsebalance", config), documents(), sparse_top_p=0.3)
    assert_close(found, slow(documents(), top_p=0.3, dense_layers=dense_layers))


def test_bounds_of_the_config_reach_the_operator():
    """max_blocks, min_blocks and sink_blocks of config.sparse_attention bound what a budget keeps."""
    two_blocks = one_by_one(build("sparsebalance"), documents(), sparse_top_k=3)
    for bounds in ({"min_blocks": 2, "max_blocks": 2}, {"max_blocks": 2, "top_p": 1.0}):
        assert_close(one_by_one(build("sparsebalance", config_of(**bounds)), documents()), two_blocks)
    for sinks in (0, 1):
        collector = StatsCollector()
        model = build("sparsebalance", config_of(top_p=None, top_k=2, sink_blocks=sinks))
        with torch.no_grad():
            logits = model(input_ids=documents()[2][None], sparse_stats=collector).logits
        if not sinks:
            unpinned = logits
    assert float((logits - unpinned).abs().max()) > 100 * tolerance("qwen2")


# Defaults in the config.


def test_config_defaults_hold_without_the_keyword(tmp_path):
    """config.sparse_attention is used where no keyword is given, and survives save_pretrained in config.json."""
    config = config_of(top_p=0.3, dense_layers=[1])
    model = build("sparsebalance", config)
    expected = one_by_one(model, documents(), sparse_top_p=0.3)
    assert all(map(torch.equal, one_by_one(model, documents()), expected))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sparse_attention"] == config.sparse_attention
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sparsebalance").eval()
    assert loaded.config.sparse_attention == config.sparse_attention
    assert all(map(torch.equal, one_by_one(loaded, documents()), expected))


def test_config_default_top_k():
    """A config with top_k needs no keyword either, and a top_p keyword of one call wins over it."""
    model = build("sparsebalance", config_of(top_p=None, top_k=2))
    assert_close(one_by_one(model, documents()), slow(documents(), top_k=2))
    assert_close(one_by_one(model, documents(), sparse_top_p=0.3), slow(documents(), top_p=0.3))


def test_a_config_without_settings_gets_the_documented_ones():
    """A model that never heard of sparse attention attends with top_p 0.8 in blocks of 128."""
    config = config_of()
    del config.sparse_attention
    defaults = SparseAttentionDefaults.of(config)
    assert (defaults.block_size, defaults.top_p, defaults.top_k) == (128, 0.8, None)
    text = documents(1, (200,))[0]
    config.max_position_embeddings = 512
    given = copy.deepcopy(config)
    given.sparse_attention = {"block_size": 128, "top_p": 0.8}
    without, with_settings = (build("sparsebalance", c) for c in (config, given))
    assert torch.equal(*(one_by_one(model, [text])[0] for model in (without, with_settings)))


# Caches and generation.


def generate(model, texts, static):
    batch = pad(texts, "left")
    del batch["position_ids"]
    keywords = {"cache_implementation": "static", "disable_compile": True} if static else {}
    with torch.no_grad():
        return model.generate(**batch, max_new_tokens=6, do_sample=False, **keywords)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_generation_equals_sdpa(family, static):
    """At p = 1 greedy generation from left-padded prompts gives sdpa's tokens, with a dynamic and a static cache."""
    texts = documents()[:3]
    expected = generate(build("sdpa", config_of(family)), texts, static)
    found = generate(build("sparsebalance", config_of(family, top_p=1.0)), texts, static)
    assert torch.equal(found, expected)


def test_sparse_generation_does_not_depend_on_the_cache_or_padding():
    """Under a sparse budget a static cache, and a prompt alone, give the tokens of the dynamic, padded batch."""
    texts = documents()[:3]
    model = build("sparsebalance")
    expected = generate(model, texts, static=False)
    assert torch.equal(generate(model, texts, static=True), expected)
    for row, text in zip(expected, texts, strict=True):
        with torch.no_grad():
            alone = model.generate(text[None], max_new_tokens=6, do_sample=False)
        assert torch.equal(alone[0, -6:], row[-6:])


@pytest.mark.parametrize("layout", ["alone", "left", "right", "all_rows_padded"])
def test_sparse_prefill_into_a_static_cache_equals_the_dynamic_one(layout):
    """A prefill is sparse in a static cache as in a dynamic one, also where every row ends in padding."""
    model = build("sparsebalance")
    if layout == "alone":
        batch = {"input_ids": documents()[2][None], "attention_mask": torch.ones(1, LENGTHS[2], dtype=torch.long)}
        inputs = [batch, {"input_ids": batch["input_ids"]}]
    else:
        batch = pad(documents(), "left" if layout == "left" else "right")
        if layout == "right":  # at least one row without padding
            batch = {name: tensor[:, :-2] for name, tensor in batch.items()}
        inputs = [batch]
    with torch.no_grad():
        expected = model(**batch, past_key_values=DynamicCache(config=model.config), sparse_top_p=0.3).logits
        for given in inputs:
            cache = StaticCache(config=model.config, max_cache_len=64)
            found = model(**given, past_key_values=cache, sparse_top_p=0.3).logits
            assert_close(split(found, batch), split(expected, batch))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "left padded"])
def test_decoding_is_dense_over_the_cache(masked, static):
    """A token over a cache that a sparse prefill filled attends as sdpa does over it, whatever the budget."""
    sparse, dense = build("sparsebalance"), build("sdpa")
    batch = pad(documents()[:3], "left") if masked else {"input_ids": torch.stack([documents()[2]] * 2)}
    config = sparse.config
    cache = StaticCache(config=config, max_cache_len=64) if static else DynamicCache(config=config)
    token = torch.tensor([[7], [8], [9]])[: len(batch["input_ids"])]
    step = {"input_ids": token}
    if masked:
        step["attention_mask"] = torch.cat([batch["attention_mask"], torch.ones_like(token)], dim=1)
        step["position_ids"] = batch["position_ids"][:, -1:] + 1
    with torch.no_grad():
        sparse(**batch, past_key_values=cache, sparse_top_p=0.2)
        caches = [copy.deepcopy(cache) for _ in range(3)]
        expected = dense(**step, past_key_values=caches[0]).logits
        for other, budget in zip(caches[1:], (0.2, 1.0), strict=True):
            assert_close([sparse(**step, past_key_values=other, sparse_top_p=budget).logits], [expected])


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("layout", ["alone", "left", "right", "all_rows_padded"])
def test_chunked_prefill_equals_one_piece(layout, static):
    """At p = 1 a prompt fed in chunks over a cache has sdpa's logits of the whole prompt, padded or not."""
    batch = pad(documents(), "left" if layout == "left" else "right")
    if layout == "alone":
        text = documents()[2]
        batch = {"input_ids": text[None], "attention_mask": torch.ones(1, len(text), dtype=torch.long)}
        batch["position_ids"] = torch.arange(len(text))[None]
    elif layout == "right":
        batch = {name: tensor[:, :-2] for name, tensor in batch.items()}
    model = build("sparsebalance")
    cache = StaticCache(config=model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
    width = batch["input_ids"].shape[1]
    pieces = []
    with torch.no_grad():
        for first, stop in ((0, 11), (11, 24), (24, width)):
            pieces.append(
                model(
                    input_ids=batch["input_ids"][:, first:stop],
                    position_ids=batch["position_ids"][:, first:stop],
                    attention_mask=None if layout == "alone" else batch["attention_mask"][:, :stop],
                    past_key_values=cache,
                    sparse_top_p=1.0,
                ).logits
            )
        expected = build("sdpa")(**batch, use_cache=False).logits
    assert_close(split(torch.cat(pieces, dim=1), batch), split(expected, batch))


# Gradients and checkpointing.


def two_micro_batches(model, checkpointing=None):
    """Gradients of two micro-batches with different budgets, both forward before either backward."""
    model = copy.deepcopy(model).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    batch = pack(documents(), "cu_seq_lens")
    labels = batch["input_ids"]
    losses = [
        model(**batch, labels=labels, use_cache=False, sparse_top_p=torch.tensor(p), sparse_stats=stats).loss
        for p, stats in ((0.3, StatsCollector()), (0.9, StatsCollector()))
    ]
    for loss in losses:
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_gradient(use_reentrant):
    """A recomputed block sees its own micro-batch's budget: gradients are bit-equal with and without checkpointing."""
    model = build("sparsebalance")
    plain, recomputed = two_micro_batches(model), two_micro_batches(model, use_reentrant)
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


def test_gradients_at_the_dense_budget_equal_sdpa():
    """At p = 1 the gradients of a packed batch are sdpa's gradients of its documents, summed."""

    def gradients(attention, dtype):
        model = build(attention, dtype=dtype)
        if attention == "sdpa":
            loss = sum(model(input_ids=t[None]).logits[0].logsumexp(-1).sum() for t in documents())
        else:
            loss = model(**pack(documents(), "cu_seq_lens"), sparse_top_p=1.0).logits[0].logsumexp(-1).sum()
        loss.backward()
        return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])

    exact, single = gradients("sdpa", torch.float64), gradients("sdpa", torch.float32)
    # Both fp32 runs err; as in `tolerance`.
    bound = 4.0 * float((single - exact).abs().max())
    assert bound < 1e-3 * float(exact.abs().max())
    assert float((gradients("sparsebalance", torch.float32) - single).abs().max()) <= bound


# Statistics.


@pytest.mark.parametrize("checkpointing", [False, True])
def test_statistics_count_each_layer_once(checkpointing):
    """A collector holds each layer once, recomputed or not, and its mean density is what counting rows gives."""
    model = build("sparsebalance").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    collectors = {0.3: StatsCollector(), 0.6: StatsCollector()}
    text = documents()[2]
    losses = [
        model(input_ids=text[None], labels=text[None], use_cache=False, sparse_top_p=p, sparse_stats=stats).loss
        for p, stats in collectors.items()
    ]
    before = {p: stats.mean().density for p, stats in collectors.items()}
    sum(losses).backward()
    for p, stats in collectors.items():
        assert sorted(stats.layers) == list(range(LAYERS))
        assert stats.mean().density == before[p]
        counter = {"top_p": p}
        with torch.no_grad():
            build("slow_oracle")(input_ids=text[None], use_cache=False, slow=counter)
        counted = [kept / visible for kept, visible in counter["counts"]]
        assert [stats.layers[layer].density for layer in range(LAYERS)] == pytest.approx(counted)
        assert stats.mean().density == pytest.approx(sum(counted) / LAYERS)
        assert stats.mean().coverage >= p


def test_statistics_change_no_result():
    """Logits are bit-equal with and without a collector; an unused one has no mean."""
    model = build("sparsebalance")
    batch = pack(documents(), "cu_seq_lens")
    collector = StatsCollector()
    assert collector.mean() is None
    with torch.no_grad():
        found = model(**batch, sparse_top_p=0.4, sparse_stats=collector).logits
        assert torch.equal(found, model(**batch, sparse_top_p=0.4).logits)


def test_statistics_of_top_k_beside_dense_layers():
    """The mean over layers is there under top_k too, also where a dense layer ran beside."""
    for dense_layers in ([], [0]):
        collector = StatsCollector()
        model = build("sparsebalance", config_of(dense_layers=dense_layers))
        with torch.no_grad():
            model(input_ids=documents()[2][None], sparse_top_k=2, sparse_stats=collector)
        assert [layer for layer, stats in collector.layers.items() if stats is None] == dense_layers
        densities = [1.0 if stats is None else stats.density for stats in collector.layers.values()]
        assert collector.mean().density == pytest.approx(sum(densities) / len(densities))


# A k that each layer raises until the tolerance is kept.


def tolerant(wanted, base, tolerance):
    return {"sparse_top_k": wanted, "sparse_base_top_k": base, "sparse_tolerance": tolerance}


def coverages(query, key, starts, scale):
    """Coverage at k = 1, 2, ... over all rows with history: gate, softmax and sums in fp64, row by row."""
    rows = []
    for first, stop in itertools.pairwise(starts.tolist()):
        for token, head in itertools.product(range(first + BLOCK, stop), range(query.shape[1])):
            blocks = key[first : first + (token - first) // BLOCK * BLOCK, head * key.shape[1] // query.shape[1]]
            scores = blocks.double().unflatten(0, (-1, BLOCK)).mean(1) @ query[token, head].double() * scale
            rows.append(torch.softmax(scores, 0).sort(descending=True).values.cumsum(0))
    longest = max(map(len, rows))
    padded = [torch.cat([torch.zeros(1), row, torch.ones(longest - len(row))]) for row in rows]
    return torch.stack(padded).mean(0)


@pytest.fixture
def gates(monkeypatch):
    """What each layer's operator was called with: query, key, starts, k, scale."""
    calls, operator = [], hf_sparsebalance.attention.attention_and_stats

    def record(query, key, value, **options):
        calls.append((query, key, options["cu_seqlens"], options["top_k"], options["scale"]))
        return operator(query, key, value, **options)

    monkeypatch.setattr(hf_sparsebalance.attention, "attention_and_stats", record)
    return calls


def test_each_layer_takes_the_smallest_k_that_keeps_the_tolerance(gates):
    """In each layer k is what trying every k from the anchor's up on the dense gate gives, all documents at once."""
    model, raised = build("sparsebalance"), []
    for wanted, base, tolerance in itertools.product((1, 3), (2, 4, 20), (0.02, 0.1, 0.3)):
        gates.clear()
        collector = StatsCollector()
        with torch.no_grad():
            batch = pack(documents(), "cu_seq_lens")
            model(**batch, **tolerant(wanted, base, tolerance), sparse_stats=collector)
        assert sorted(collector.top_k) == list(range(LAYERS)) and len(gates) == LAYERS
        for layer, (query, key, starts, k, scale) in enumerate(gates):
            coverage = coverages(query, key, starts, scale)
            loss = coverage[min(base, len(coverage)) - 1] - coverage
            assert int((loss - tolerance).abs().min() * 1e6) > 0  # nothing hangs on rounding
            expected = max(wanted, 1 + int((loss <= tolerance).nonzero()[0]))
            assert int(k) == int(collector.top_k[layer]) == expected
            raised.append(expected - wanted)
    assert 0 in raised and len(set(raised)) > 4


def test_a_layer_that_recomputes_keeps_its_k():
    """Checkpointing changes no k, no count of layers and no gradient bit, with and without a collector."""
    text, ends = documents()[2], []
    for checkpointing, collector in ((False, StatsCollector()), (True, StatsCollector()), (True, None)):
        model = build("sparsebalance").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        given = tolerant(torch.tensor(1), torch.tensor(6), torch.tensor(0.1)) | {"sparse_stats": collector}
        model(input_ids=text[None], labels=text[None], use_cache=False, **given).loss.backward()
        chosen = None if collector is None else {layer: int(k) for layer, k in collector.top_k.items()}
        ends.append((chosen, [parameter.grad for parameter in model.parameters()]))
    assert ends[0][0] == ends[1][0] and len(ends[0][0]) == LAYERS and max(ends[0][0].values()) > 1
    for one, two, three in zip(*(gradients for _, gradients in ends), strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_a_dense_layer_has_no_k():
    """Layers in dense_layers stay dense under a tolerance, and report no k."""
    collector = StatsCollector()
    model = build("sparsebalance", config_of(dense_layers=[0]))
    with torch.no_grad():
        model(input_ids=documents()[2][None], **tolerant(1, 4, 0.1), sparse_stats=collector)
    assert list(collector.top_k) == [1] and collector.layers[0] is None


@pytest.mark.parametrize(
    "keywords",
    [
        {"sparse_top_k": 1, "sparse_base_top_k": 2},
        {"sparse_top_k": 1, "sparse_tolerance": 0.1},
        {"sparse_base_top_k": 2, "sparse_tolerance": 0.1},
        {"sparse_top_p": 0.5, "sparse_base_top_k": 2, "sparse_tolerance": 0.1},
        tolerant(torch.tensor([2]), 4, 0.1),
    ],
    ids=str,
)
def test_refuses_half_a_tolerance(keywords):
    """Base and tolerance go together, with one k for all documents."""
    refused("sparse_base_top_k and sparse_tolerance go together", **keywords)


# Refusals: a UserError that names the way out.


def refused(match, config=None, train=False, **inputs):
    model = build("sparsebalance", config).train(train)
    inputs = {"input_ids": documents()[0][None], **inputs}
    with pytest.raises(UserError, match=match):
        model(**inputs)


def test_refuses_a_4d_mask():
    """A 4-D mask is refused with packing and sdpa as the ways out."""
    length = LENGTHS[0]
    refused("(?s)2-D.*packing.*sdpa", attention_mask=torch.ones(1, 1, length, length).tril().bool())


def test_refuses_dropout_in_training_only():
    """attention_dropout is refused while training and harmless in evaluation."""
    config = config_of()
    config.attention_dropout = 0.1
    refused("attention_dropout = 0", config, train=True)
    assert_close(
        one_by_one(build("sparsebalance", config), documents()), one_by_one(build("sparsebalance"), documents())
    )


def test_refuses_a_sliding_window_that_bites():
    """A window shorter than the keys is refused; one that covers them changes nothing."""
    length = LENGTHS[0]
    config = config_of("mistral")
    config.sliding_window = length - 1
    refused("(?s)sliding_window.*sdpa", config)
    config.sliding_window = length
    text = documents()[:1]
    found = one_by_one(build("sparsebalance", config), text, sparse_top_p=1.0)
    assert_close(found, one_by_one(build("sdpa", config_of("mistral")), text), "mistral")


def test_refuses_output_attentions():
    """Weights that are never formed cannot be returned: eager is the way out."""
    refused("eager", output_attentions=True)


def test_refuses_two_budgets():
    """Both budget keywords at once are refused."""
    refused("sparse_top_p and sparse_top_k", sparse_top_p=0.5, sparse_top_k=2)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"blocksize": 4}, "(?s)blocksize.*block_size"),
        ({"block_size": 0}, "block_size"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": None, "top_k": 0}, "top_k"),
        ({"top_k": 2}, "top_p and top_k"),
        ({"min_blocks": -1}, "min_blocks"),
        ({"min_blocks": 1.5}, "min_blocks"),
        ({"top_p": None, "top_k": 8.0}, "top_k"),
        ({"block_size": "128"}, "block_size"),
        ({"sink_blocks": -1}, "sink_blocks"),
        ({"min_blocks": 3, "max_blocks": 2}, "max_blocks"),
    ],
)
def test_refuses_settings_of_the_config(settings, match):
    """A bad entry of config.sparse_attention is refused by its name."""
    refused(match, config_of(**settings))


def test_refuses_bidirectional_attention():
    """A module that is not causal is refused."""
    model = build("sparsebalance")
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UserError, match="causal"):
        model(input_ids=documents()[0][None])


# LoRA.


def test_lora_trains_and_merges():
    """Adapters get gradients through the sparse attention under a budget, and merging them keeps the logits."""
    model = build("sparsebalance")
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    batch = pack(documents(), "cu_seq_lens")
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        loss = adapted(**batch, labels=batch["input_ids"], use_cache=False, sparse_top_p=torch.tensor(0.5)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if "lora_B" in name:
            assert bool(parameter.any()), name
    adapted.eval()
    expected = one_by_one(adapted, documents(), sparse_top_p=0.5)
    merged = adapted.merge_and_unload()
    assert merged.config._attn_implementation == "sparsebalance"
    # Merging rounds W + BA once; both sides are fp32 runs of one function.
    assert_close(one_by_one(merged, documents(), sparse_top_p=0.5), expected)


def test_the_operator_is_public():
    """hf_sparsebalance.block_sparse_attention is the operator itself, with dense attention at p = 1."""
    torch.manual_seed(0)
    q, k, v = torch.randn(10, 2, 8), torch.randn(10, 1, 8), torch.randn(10, 1, 8)
    found = hf_sparsebalance.block_sparse_attention(
        q, k, v, cu_seqlens=torch.tensor([0, 10]), top_p=1.0, block_size=BLOCK
    )
    scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]).double() * 8**-0.5
    weights = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,kd->qhd", weights, v[:, 0].double())
    # 10 products in the output and 8 in a score, each rounded.
    assert float((found - expected).abs().max()) <= 18 * torch.finfo(torch.float32).eps * float(v.abs().max())
