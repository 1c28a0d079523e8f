"""Stages in one process: chained they are the whole model, and each keeps no more than its part."""

import gc
import weakref

import pytest
import tiny_run
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from hf_sparsebalance.attention import ATTENTION_NAME
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.stage_model import make_stages, weight_entries

CUTS = (range(0, 2), range(2, 3), range(3, 5))
SHAPE = {
    "vocab_size": tiny_run.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build_model(config=Qwen2Config, attention=ATTENTION_NAME, **changes):
    """A tiny random model of five layers, the same at each call."""
    torch.manual_seed(0)
    settings = {**SHAPE, "sparse_attention": {"block_size": tiny_run.BLOCK, "top_p": 0.4}, **changes}
    return AutoModelForCausalLM.from_config(config(**settings), attn_implementation=attention)


def micro_batch():
    """Two packed documents."""
    features = [{"input_ids": list(ids)} for ids in tiny_run.documents()[1:3]]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return collate(features) | {"num_items_in_batch": torch.tensor(100)}


def run_stages(models, cuts=CUTS):
    """Loss of the chain of stages, each cut from a model of its own."""
    hidden = None
    for number, model in enumerate(models):
        (stage,) = make_stages(model, cuts, [number])
        hidden = stage(micro_batch(), hidden)
    return hidden


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig])
def test_stages_in_a_row_are_the_whole_model(config, tied):
    """Loss and gradients equal the whole model's to the last bit; a tied weight's are in two parts."""
    changes = {"tie_word_embeddings": tied} | ({"sliding_window": None} if config is MistralConfig else {})
    whole = build_model(config, **changes)
    loss = whole(**micro_batch(), use_cache=False).loss
    loss.backward()
    parts = [build_model(config, **changes) for _ in CUTS]
    chained = run_stages(parts)
    chained.backward()
    assert torch.equal(chained, loss)
    found = {name: parameter.grad for part in parts for name, parameter in part.named_parameters()}
    if tied:
        found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"] + found.pop("lm_head.weight")
    for name, parameter in whole.named_parameters():
        if tied and name == "model.embed_tokens.weight":
            torch.testing.assert_close(found.pop(name), parameter.grad)
        else:
            assert torch.equal(found.pop(name), parameter.grad), name
    assert not found


def test_layers_of_different_types_keep_theirs():
    """Where some layers have a sliding window, the stages give each layer its own mask."""
    changes = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2, "attention": "sdpa"}
    whole = build_model(**changes)
    assert len(set(whole.config.layer_types)) == 2
    loss = whole(**micro_batch(), use_cache=False).loss
    assert torch.equal(run_stages([build_model(**changes) for _ in CUTS]), loss)


def test_a_rank_keeps_only_its_stages():
    """Of a rank with stages 0 and 2 nothing of stage 1 is left; names stay; a tied weight is one parameter."""
    model = build_model(tie_word_embeddings=True)
    names = {name for name in model.state_dict() if ".layers.2." not in name}
    gone = weakref.ref(model.model.layers[2].mlp.up_proj.weight)
    stages = make_stages(model, CUTS, [0, 2])
    gc.collect()
    assert gone() is None
    assert set(model.state_dict()) == names
    assert [stage.tied_weight for stage in stages] == [None, None]
    first, last = ({id(p) for p in stage.parameters()} for stage in stages)
    assert first & last == {id(model.lm_head.weight)}
    assert first | last == {id(p) for p in model.parameters()}


def test_a_middle_stage_has_neither_end():
    """Between the ends there are only layers, in their places."""
    model = build_model()
    (stage,) = make_stages(model, CUTS, [1])
    assert {name.split(".")[2] for name, _ in model.named_parameters()} == {"2"}
    assert [layer.self_attn.layer_idx for layer in stage.model.layers] == [2]


def test_mixed_precision_covers_the_stage():
    """Under autocast a stage computes as the whole model does."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = build_model()(**micro_batch(), use_cache=False).loss
    hidden = None
    for number in range(len(CUTS)):
        (stage,) = make_stages(build_model(), CUTS, [number], autocast=torch.bfloat16)
        hidden = stage(micro_batch(), hidden)
    assert torch.equal(hidden, loss)
    assert not torch.equal(loss, build_model()(**micro_batch(), use_cache=False).loss)


def test_weights_are_counted_by_hand():
    """A layer has matrices for queries and output, keys and values, and three in the MLP; the head has one."""
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert weight_entries(build_model()) == ([layer] * 5, tiny_run.VOCAB * 32)


def test_another_layout_is_refused():
    """A model that is not laid out like Llama is refused by name."""
    config = GPT2Config(vocab_size=8, n_embd=8, n_layer=2, n_head=2)
    with pytest.raises(UserError, match="cannot cut GPT2LMHeadModel"):
        make_stages(AutoModelForCausalLM.from_config(config), (range(0, 1), range(1, 2)), [0])


def test_cuts_of_another_model_are_refused():
    """Cuts that leave layers out are an error."""
    with pytest.raises(ValueError, match="do not fit 5 layers"):
        make_stages(build_model(), (range(0, 2), range(2, 4)), [0])
