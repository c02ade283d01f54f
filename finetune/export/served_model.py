"""The interface of a model in the runtime that serves it. `finetune verify` asks each runtime through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

Turns = Sequence[Mapping[str, str]]
"""A conversation: each turn has a role and a content."""


class Rendered(NamedTuple):
    """A conversation as a runtime gives it to its model, with the header of the next answer."""

    text: str
    token_ids: list[int]


class ServedModel(Protocol):
    """A model that one runtime has loaded. No method may use another runtime's tokenizer, template or weights."""

    runtime: str
    """The name and the version of the runtime, for example `transformers 5.23.0`."""
    stop_ids: list[int]
    """The tokens at which the runtime ends an answer."""
    most_tokens: int | None
    """The runtime gives logits of so many of the most likely tokens only, and the others are -inf; None: of all."""

    def render(self, turns: Turns) -> Rendered:
        """Render a conversation with the runtime's chat template, and encode the text with its tokenizer."""
        ...

    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Compute logits at some positions of a prompt, fp32, shape (positions, vocabulary).

        The logits of a position may be off by one constant: the comparison takes off their mean.
        """
        ...

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Answer a prompt greedily. Returns the new tokens, including the stop token if there was one."""
        ...
