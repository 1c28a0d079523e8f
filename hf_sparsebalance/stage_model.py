"""Stages of a transformers decoder: each runs transformers' own forward pass over its part of the layers.

A rank keeps one model, from which what other ranks hold is gone, with the names of the whole model in its state dict;
the optimizer, PEFT and activation checkpointing work on that.  Its stages are views of it that share its modules.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hf_sparsebalance.errors import UserError


class StageModule(nn.Module):
    """One stage as a module: hidden states of a micro-batch in, hidden states out; the last one returns the loss.

    Attributes:
        stage, num_stages: which of how many.
        layers: numbers of its layers in the whole model.
        hidden_size, dtype: of the hidden states between stages.
    """

    def __init__(
        self, model: nn.Module, cuts: Sequence[range], stage: int, autocast: torch.dtype | None, tied: bool
    ) -> None:
        super().__init__()
        self.stage, self.num_stages, self.layers = stage, len(cuts), cuts[stage]
        self.hidden_size, self.dtype = model.config.hidden_size, model.dtype
        self._autocast, self._tied = autocast, tied
        decoder = _view(model.model)
        decoder.layers = nn.ModuleList(decoder.layers[layer] for layer in self.layers)
        # transformers reads from the configuration how many layers there are, and of which type.
        decoder.config = copy.copy(decoder.config)
        decoder.config.num_hidden_layers = len(self.layers)
        if types := getattr(decoder.config, "layer_types", None):
            decoder.config.layer_types = [types[layer] for layer in self.layers]
        if not self.is_first:
            decoder.embed_tokens = nn.Identity()
        if not self.is_last:
            decoder.norm = nn.Identity()
        self.model = _view(model) if self.is_last else decoder
        if self.is_last:
            self.model.model = decoder

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.stage == self.num_stages - 1

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Of the first and the last stage, a weight of which another rank holds a copy: head tied to embedding."""
        if not (self._tied and (self.is_first or self.is_last)):
            return None
        return self.model.embed_tokens.weight if self.is_first else self.model.lm_head.weight

    def forward(self, micro_batch: Mapping[str, Any], hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the stage.

        Args:
            micro_batch: keyword arguments of the whole model: input_ids ``[batch, tokens]``, labels, position_ids,
                cu_seq_lens_q, sparse_top_p, sparse_stats and so on, and ``num_items_in_batch``, which makes the loss a
                sum over this micro-batch's target tokens divided by those of the global batch.
            hidden: ``[batch, tokens, hidden_size]`` from the stage before; None on the first.

        Returns:
            Hidden states for the next stage, or the loss, 0-d.
        """
        inputs = {**micro_batch, "use_cache": False}
        input_ids, labels = inputs.pop("input_ids"), inputs.pop("labels", None)
        inputs |= {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden}
        # Without a dtype of its own it leaves precision to the caller.
        precision = nullcontext() if self._autocast is None else torch.autocast(input_ids.device.type, self._autocast)
        with precision:
            if self.is_last:
                return self.model(labels=labels, **inputs).loss
            return self.model(**inputs).last_hidden_state


def make_stages(
    model: nn.Module, cuts: Sequence[range], stages: Sequence[int], autocast: torch.dtype | None = None
) -> list[StageModule]:
    """Reduce a causal language model to what one rank holds, in place, and return the rank's stages.

    What other ranks hold is replaced by empty modules, so that its memory is freed and the names of what is left stay
    those of the whole model.  Where the vocabulary head is tied to the embedding, the last rank keeps it under its own
    name: the two copies stay equal as long as their gradients are summed before the optimizer's step.

    Args:
        model: of the Llama family in transformers' layout (``model.embed_tokens``, ``layers``, ``norm``,
            ``rotary_emb``; ``lm_head``), or a PEFT model around one; whole, in its final dtype, attention
            implementation and adapters.
        cuts: layers of each stage, as from ``cut_layers``.
        stages: numbers of the rank's stages, rising.
        autocast: dtype of mixed precision, or None.

    Raises:
        UserError: the model has another layout.
        ValueError: the cuts do not fit the model.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = getattr(base, "model", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    if not (hasattr(base, "lm_head") and all(hasattr(decoder, name) for name in parts)):
        raise UserError(
            f"--pipeline_parallel_size cannot cut {type(base).__name__}: it is not laid out as Llama, Qwen2, Qwen3 or "
            "Mistral in transformers; use data parallelism"
        )
    if [layer for cut in cuts for layer in cut] != list(range(len(decoder.layers))):
        raise ValueError(f"stages {list(cuts)} do not fit {len(decoder.layers)} layers")
    first, last = 0 in stages, len(cuts) - 1 in stages
    # One rank with both ends has one weight for both.
    tied = base.lm_head.weight is decoder.embed_tokens.weight and not (first and last)
    own = {layer for stage in stages for layer in cuts[stage]}
    for layer in range(len(decoder.layers)):
        if layer not in own:
            decoder.layers[layer] = nn.Identity()
    if not first:
        decoder.embed_tokens = nn.Identity()
    if not last:
        decoder.norm, base.lm_head = nn.Identity(), nn.Identity()
    return [StageModule(base, cuts, stage, autocast, tied) for stage in stages]


def weight_entries(model: nn.Module) -> tuple[list[int], int]:
    """(entries of each layer's weight matrices, entries of the head's): what `predict_times` shares time out by."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    matrices = [sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in base.model.layers]
    return matrices, base.lm_head.weight.numel()


def _view(module: nn.Module) -> nn.Module:
    """A module with the same sub-modules, whose list of them may be changed without changing the first one's."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view
