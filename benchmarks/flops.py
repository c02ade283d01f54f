"""The matrix products that LoRA fine-tuning cannot do without, counted by hand. No torch is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.job import LORA_RANK, RowShape, Size

_FORWARD_PRODUCTS = 2  # scores, and the values they weigh
_BACKWARD_PRODUCTS = 4  # gradients of values, weights, queries and keys


def necessary_flops(
    size: Size,
    rows: Iterable[RowShape],
    *,
    rank: int = LORA_RANK,
    trains_all: bool = False,
    recomputes_scores: bool = True,
    is_causal: bool = True,
) -> int:
    """Floating-point operations of one forward and one backward pass over rows, without padding.

    A frozen linear layer costs 2 P a token forward and 2 P for the gradient of its input, P being its weights; a LoRA
    pair twice its own forward besides; the head is run at target positions only. Nothing below the first layer's
    queries, keys and values trains, so these need no gradient of their input, nor does the parallel MLP of phi. If all
    weights train, every layer and the head cost 6 P, and there is no LoRA.

    Args:
        size: the model.
        rows: their tokens and targets.
        rank: of the LoRA pairs.
        trains_all: whether all weights train (`training.method=full`).
        recomputes_scores: count the scores of attention once more in the backward pass, as every attention that does
            not keep them must (Dao, 2023, arXiv:2307.08691).
        is_causal: count only the pairs of positions that a causal model looks at.
    """
    shapes = size.linear_shapes
    weights = sum(width_in * width_out for width_in, width_out in shapes)
    widths = sum(width_in + width_out for width_in, width_out in shapes)
    if trains_all:
        per_token, per_target = 6 * size.layers * weights, 6 * size.hidden * size.vocabulary
    else:
        first = sum(2 * width_in * (width_out + rank) for width_in, width_out in size.shapes_at_input)
        per_token = size.layers * (4 * weights + 6 * rank * widths) - first
        per_target = 4 * size.hidden * size.vocabulary
    products = _FORWARD_PRODUCTS + _BACKWARD_PRODUCTS + recomputes_scores
    per_pair = 2 * products * size.layers * size.heads * size.head_dim
    return sum(
        row.num_tokens * per_token + row.num_targets * per_target + _pairs(row.num_tokens, is_causal) * per_pair
        for row in rows
    )


def _pairs(num_tokens: int, is_causal: bool) -> int:
    return num_tokens * (num_tokens + 1) // 2 if is_causal else num_tokens**2
