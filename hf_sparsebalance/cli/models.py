"""Loading what ``--model_name_or_path`` names; whatever is wrong with it becomes one line."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_sparsebalance.errors import UserError


def load_config(name: str) -> PreTrainedConfig:
    """The model's configuration; UserError where there is none."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _unusable(name, "no usable model configuration", error) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer; UserError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _unusable(name, "no usable tokenizer", error) from error


def load_model(name: str, attn_implementation: str, dtype: str) -> PreTrainedModel:
    """The model with its attention; UserError where there is none, or its attention cannot be replaced."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, attn_implementation=attn_implementation, dtype=dtype)
    except KeyError as error:
        raise UserError(
            f"--attn_implementation {attn_implementation}: the attention of {name} cannot be replaced; choose another "
            "model, or --attn_implementation eager with --tolerance 0"
        ) from error
    except (OSError, ValueError) as error:
        raise _unusable(name, "cannot be loaded", error) from error


def _unusable(name: str, what: str, error: Exception) -> UserError:
    first_line = str(error).strip().splitlines()[0]
    return UserError(f"--model_name_or_path {name}: {what} ({first_line})")
