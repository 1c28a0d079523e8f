"""Where a decoder is cut into pipeline stages: by predicted time, not by the number of layers.

A pipeline runs at the pace of its slowest stage (1F1B with m equal micro-batches on S stages takes the sum of the
stages' times and m - 1 times the largest), so the cut with the least largest stage is sought, exactly.  The vocabulary
head often weighs several layers, and layers that always attend densely weigh more than sparse ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import LatencyPredictor

__all__ = ["ModelTimes", "cut_layers", "predict_times"]


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Milliseconds, forward and backward, of a model's parts for the same tokens.

    Attributes:
        layer_ms: of each layer, in order.
        embedding_ms: what comes before the first layer.
        head_ms: what comes after the last one: final norm, vocabulary head, loss.
    """

    layer_ms: tuple[float, ...]
    embedding_ms: float = 0.0
    head_ms: float = 0.0


def predict_times(
    predictor: LatencyPredictor,
    lengths: Sequence[int],
    densities: Sequence[float],
    layer_weights: Sequence[int],
    head_weights: int,
    dense_layers: Collection[int] = (),
) -> ModelTimes:
    """Times of a model's parts for a packed micro-batch that stands for the training data.

    A profile tells the layers' attention; everything else it measured only for the whole model.  That is shared out by
    multiplications: a linear map of w weights takes w of them per token, a look-up in the embedding none.

    Args:
        predictor: of the model.
        lengths, densities: tokens and density of each document of the micro-batch, as for `predictor.predict`.
        layer_weights: entries of each layer's weight matrices.
        head_weights: entries of the vocabulary head's matrix.
        dense_layers: layers that always attend densely.

    Raises:
        ValueError: the profile has another number of layers, or of dense ones.
    """
    context, num_layers = predictor.profile.context, len(layer_weights)
    if (context.num_layers, context.num_dense_layers) != (num_layers, len(dense_layers)):
        raise ValueError(
            f"the profile has {context.num_layers} layers, {context.num_dense_layers} of them dense, the model "
            f"{num_layers} and {len(dense_layers)}"
        )
    dense_ms = float(predictor.attention_ms(lengths, densities, dense=True).sum()) / num_layers
    sparse_ms = dense_ms
    if num_sparse := num_layers - len(dense_layers):
        attention_ms = float(predictor.attention_ms(lengths, densities).sum())
        sparse_ms = (attention_ms - len(dense_layers) * dense_ms) / num_sparse
    per_weight_ms = predictor.linear(sum(lengths)).total_ms / (sum(layer_weights) + head_weights)
    return ModelTimes(
        layer_ms=tuple(
            weights * per_weight_ms + (dense_ms if layer in dense_layers else sparse_ms)
            for layer, weights in enumerate(layer_weights)
        ),
        head_ms=head_weights * per_weight_ms,
    )


def cut_layers(times: ModelTimes, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage: contiguous, none empty, the largest stage's time the least possible.

    Among equals the earlier stages get as few layers as can be: they hold the activations of more micro-batches.

    Args:
        times: of the model's parts; the first stage has the embedding, the last one the head.
        num_stages: virtual stages, over all ranks of the pipeline.

    Raises:
        UserError: there are fewer layers than stages.

    Cost: O(stages * layers^2).
    """
    num_layers = len(times.layer_ms)
    if not 1 <= num_stages <= num_layers:
        raise UserError(
            f"--pipeline_parallel_size: {num_stages} stages (interleaved and zero-bubble schedules have two per rank) "
            f"but the model has {num_layers} layers: use fewer ranks, or --pipeline_schedule 1f1b"
        )
    cost = list(times.layer_ms)
    cost[0] += times.embedding_ms
    cost[-1] += times.head_ms
    before = list(accumulate(cost, initial=0.0))
    # least[k][end]: the least largest stage when the first `end` layers make k stages.
    least = [[0.0] + [float("inf")] * num_layers]
    for k in range(1, num_stages + 1):
        least.append(
            [
                min((max(least[k - 1][i], before[end] - before[i]) for i in range(k - 1, end)), default=float("inf"))
                for end in range(num_layers + 1)
            ]
        )
    bound, end, cuts = least[num_stages][num_layers], num_layers, []
    for k in range(num_stages, 0, -1):
        start = next(i for i in range(k - 1, end) if max(least[k - 1][i], before[end] - before[i]) <= bound)
        cuts.append(range(start, end))
        end = start
    return tuple(reversed(cuts))
