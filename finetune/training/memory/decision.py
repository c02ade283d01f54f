"""Decide by forecasts on gradient checkpointing and the size of micro-batches, where memory may not suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.errors import first_line
from finetune.training.memory.forecast import CANNOT_TRACE, Size, predict_sizes
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.training.forward import Computation

ENOUGH_TOKENS = 4096
"""From this many tokens in a micro-batch on, more tokens would save less time than checkpointing costs (estimated)."""


class Need(NamedTuple):
    """The memory of the smallest and of the largest micro-batch that a run may have.

    Between the two, memory grows almost linearly. Only the chunks of the head and of the MLP cause deviations.
    """

    smallest: Size
    largest: Size

    def tokens_that_fit(self, room: int) -> int:
        """Return the most tokens for which a step needs at most `room` bytes; 0 if the smallest does not fit."""
        (few, least), (many, most) = self
        if most <= room:
            return many
        # `num_bytes` solved for the tokens.
        return few + (many - few) * (room - least) // (most - least) if least <= room else 0

    def num_bytes(self, tokens: int) -> int:
        """Return the bytes that a step needs with this many tokens in a micro-batch, by linear interpolation."""
        (few, least), (many, most) = self
        return most if tokens >= many else least + (most - least) * (tokens - few) // (many - few)


class Decision(NamedTuple):
    """The result of `decide`."""

    is_checkpointing: bool
    tokens: int
    """The most tokens of a micro-batch; at least as many as the smallest one has."""
    num_bytes: int
    """Bytes that a step needs in addition to the weights."""


def decide(need: Callable[[bool], Need], room: int, *, wish: bool | None) -> Decision:
    """Return whether to checkpoint gradients, and the largest micro-batch that then fits.

    Without a wish, checkpointing is turned on if a micro-batch of useful size does not fit without it.

    Args:
        need: returns the memory of a step, given whether gradients are checkpointed.
        room: bytes that a step may use in addition to the weights.
        wish: whether the user wants checkpointing, or None if this function is to decide.
    """
    is_on = bool(wish)
    sizes = need(is_on)
    enough = min(max(sizes.smallest.tokens, ENOUGH_TOKENS), sizes.largest.tokens)
    if wish is None and sizes.tokens_that_fit(room) < enough:
        is_on, sizes = True, need(True)
    tokens = max(sizes.tokens_that_fit(room), sizes.smallest.tokens)
    return Decision(is_on, tokens, sizes.num_bytes(tokens))


def _decide_twice(
    size: Callable[[int, bool], Size], fewest: int, most: int, row_tokens: int, usable: int, *, wish: bool | None
) -> Decision:
    decision = decide(lambda is_on: Need(size(fewest, is_on), size(most, is_on)), usable, wish=wish)
    if not row_tokens < decision.tokens < most * row_tokens:
        return decision
    fitting = decision.tokens // row_tokens  # memory is not quite a straight line
    return decide(lambda on: Need(size(fewest, on), size(fitting, on)), usable, wish=decision.is_checkpointing)


def decide_by_forecast(
    config: Config,
    model: Any,
    how: Computation,
    *,
    examples: tuple[int, int],
    row_tokens: int,
    most_tokens: int | None,
    usable: int,
    free: str,
    **shape: Any,
) -> dict[str, Any]:
    """Return what differs from the configured choice, by the attributes of `MemoryChoice`.

    Args:
        config: the whole run.
        model: see `finetune.training.memory.choice.choose`, also for `how` and `shape`.
        how: how the run computes a step.
        examples: the fewest and the most examples that a micro-batch may have.
        row_tokens: tokens of the longest example.
        most_tokens: the highest limit of tokens to choose; None: the limit stays as it is configured.
        usable: bytes that a step may use in addition to the weights.
        free: describes the free memory.
        shape: the other arguments of `predict_sizes`.
    """
    wish = config.training.gradient_checkpointing
    fewest, most = examples
    try:
        size = predict_sizes(config, model, how, **shape)
        decision = _decide_twice(size, fewest, most, row_tokens, usable, wish=None if wish == "auto" else wish)
    except CANNOT_TRACE as error:
        why = f"the memory of a step cannot be predicted without data ({type(error).__name__}: {first_line(error)})"
        return {"max_rows": config.training.batch_size, "why": why}
    why = f"a step needs at most {format_bytes(decision.num_bytes)} beside the weights, of {free}"
    if decision.num_bytes > usable:
        why += ", so memory may run out: see `finetune plan`"
    found = {"gradient_checkpointing": decision.is_checkpointing, "why": why}
    if most_tokens is None:
        return found
    fits_most = decision.tokens >= most * row_tokens
    return {**found, "max_tokens": max(row_tokens, most_tokens if fits_most else decision.tokens)}
