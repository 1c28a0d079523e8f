"""Loss on held-out documents, token by token, whatever the number of ranks.

Trainer's own evaluation averages over batches, and a round of batches over ranks; with documents of uneven length its
figure depends on how they fall together.  Here each rank takes every n-th document whole, and sums are added up once.
All ranks run equally many: sharded ones gather each other's parameters in every forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hf_sparsebalance.attention import ATTENTION_NAME, StatsCollector
from hf_sparsebalance.distributed import gather_rows
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.topology import topology_of

_COLUMNS = ("nats", "targets", "tokens", "pairs", "density", "work", "coverage")


@torch.no_grad()
def heldout_loss(
    model: torch.nn.Module, documents: Sequence[Sequence[int]], top_p: float | None = None
) -> dict[str, float | None]:
    """Mean loss per predicted token of a causal language model; collective.

    Args:
        model: on its device; with sparsebalance attention the budget is ``top_p``, else the model's own.
        documents: token ids of each document, the same on every rank.

    Returns:
        loss (nats per token), perplexity, documents, tokens; density and work of the sparse attention, weighted by the
        (query, key) pairs that they are shares of, and coverage, weighted by tokens (None for another attention).

    Raises:
        UserError: no document has a second token.
    """
    topology = topology_of(model)
    sparse = model.config._attn_implementation == ATTENTION_NAME
    training = model.training
    model.eval()
    sums = torch.zeros(len(_COLUMNS), dtype=torch.float64)
    for first in range(0, len(documents), topology.num_ranks):
        number = first + topology.rank
        is_counted = number < len(documents)
        ids = torch.tensor([list(documents[number if is_counted else 0])], device=model.device)
        length = ids.shape[1]
        collector = StatsCollector()
        keywords = {"sparse_stats": collector, "sparse_top_p": top_p} if sparse else {}
        loss = model(input_ids=ids, labels=ids, use_cache=False, **keywords).loss
        stats = collector.mean()
        density, work, coverage = (1.0,) * 3 if stats is None else (stats.density, stats.work, stats.coverage)
        pairs = length * (length + 1) // 2
        nats = float(loss) * (length - 1) if length > 1 else 0.0
        row = [nats, length - 1, length, pairs, density * pairs, work * pairs, coverage * length]
        if is_counted:
            sums += torch.tensor(row, dtype=torch.float64)
    model.train(training)
    # The processes of a tensor-parallel rank ran the same documents, each with its own heads' statistics.
    total = dict(zip(_COLUMNS, (gather_rows(sums).sum(0) / topology.tensor_size).tolist(), strict=True))
    if not total["targets"]:
        raise UserError("the held-out documents have one token each: there is nothing to predict")
    loss_per_token = total["nats"] / total["targets"]
    return {
        "loss": loss_per_token,
        "perplexity": math.exp(min(loss_per_token, 700.0)),
        "documents": float(len(documents)),
        "tokens": total["tokens"],
        "density": total["density"] / total["pairs"] if sparse else None,
        "work": total["work"] / total["pairs"] if sparse else None,
        "coverage": total["coverage"] / total["tokens"] if sparse else None,
    }
