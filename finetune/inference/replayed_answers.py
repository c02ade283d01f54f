"""Generate answers in steps that a CUDA graph replays, if `training.graphs` asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.products import unchanged_weights
from finetune.engine.replayed import STEPS_OF_BLOCK, BlockOfTokens, SteppedDecoder, has_rounded_weights
from finetune.engine.supported import called_layers, unsupported_reason
from finetune.model.base import longrope_boundary
from finetune.units import ceil_bucket

if TYPE_CHECKING:
    from finetune.inference.sampling import Draw


def why_not_replayed(model: Any) -> str | None:
    """Return the reason why `SteppedDecoder` cannot continue rows of a model; None if it can."""
    if has_rounded_weights(model):
        return "the base is in 4 bits or in fp8"
    reason = unsupported_reason(model)
    if reason is not None:
        return reason
    if called := called_layers(model):
        return f"the engine calls some linear layers: they are {' or '.join(called)}"
    rope = getattr(model.config, "rope_parameters", None) or {}
    ropes = [rope, *(of_type for of_type in rope.values() if isinstance(of_type, dict))]
    is_dynamic = any(each.get("rope_type") == "dynamic" for each in ropes)
    return "its rotation follows the longest row (rope_type dynamic)" if is_dynamic else None


def continue_in_steps(
    model: Any,
    batch: Sequence[Sequence[int]],
    room: int,
    stop_ids: Sequence[int],
    draw: Draw | None,
    on_token: Callable[[int], object] | None,
) -> list[list[int]]:
    """Answer a batch with a `SteppedDecoder`, and look at the tokens after each block of steps.

    A row stays as padding when its answer has ended. Rows leave together, once the rest fits a smaller number of rows.
    """
    boundary = longrope_boundary(model)
    answers: list[list[int]] = [[] for _ in batch]
    alive, ended, stops = list(range(len(batch))), set[int](), frozenset(stop_ids)
    most_tokens = max(map(len, batch)) + room

    def levels(num_steps: int) -> torch.Tensor | None:
        return None if draw is None else draw.levels(num_steps)

    def begin() -> tuple[SteppedDecoder, BlockOfTokens]:
        rows = [[*batch[row], *answers[row]] for row in alive]
        # With the short factors of LongRoPE there are no later positions.
        is_short = boundary is not None and max(map(len, rows)) <= boundary
        most = min(most_tokens, boundary) if is_short and boundary is not None else most_tokens
        decoder = SteppedDecoder(model, rows, most_tokens=most, choose=most_likely if draw is None else draw.choose)
        return decoder, decoder.begin(levels(1))

    with unchanged_weights():
        decoder, block = begin()
        while True:
            for row, tokens in zip(alive, block.tokens.tolist(), strict=True):
                answers[row] += tokens
                if not stops.isdisjoint(tokens):
                    ended.add(row)
            if draw is not None and block.nats is not None:
                draw.note(block.nats)
            if on_token is not None:
                _pass_on(answers[0][-block.tokens.shape[1] :], stops, on_token)
            going = [place for place, row in enumerate(alive) if row not in ended]
            left = room - len(answers[alive[0]])
            if not going or not left:
                return answers
            num_rows = ceil_bucket(len(going))
            if num_rows < len(alive):
                padding = [place for place, row in enumerate(alive) if row in ended][: num_rows - len(going)]
                kept = sorted([*going, *padding])
                decoder.keep(torch.tensor(kept, device=block.tokens.device))
                alive = [alive[place] for place in kept]
                if draw is not None:
                    draw.keep(kept)
            cached = len(batch[alive[0]]) + len(answers[alive[0]]) - 1
            if cached == boundary:
                # The next token is the first with the long factors, and the cache is computed with the short ones.
                del decoder
                decoder, block = begin()
            else:
                most_steps = boundary - cached if boundary is not None and cached < boundary else left
                num_steps = min(STEPS_OF_BLOCK, left, most_steps)
                block = decoder.advance(num_steps, levels(num_steps))


def _pass_on(tokens: Sequence[int], stops: frozenset[int], on_token: Callable[[int], object]) -> None:
    """Call `on_token` with each token of a block, up to the first stop token."""
    for token in tokens:
        on_token(token)
        if token in stops:
            return


def most_likely(logits: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Choose the most likely token of each row, as a `SteppedDecoder` calls it."""
    del levels
    return logits.argmax(-1), None
