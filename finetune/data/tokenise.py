"""Rows through the template and the tokenizer, a batch in one call each. Without torch: worker processes start fast."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from finetune.data.rows import BadRowError, Example
from finetune.data.templates import (
    AnswerTokens,
    RenderedRow,
    TokenisedRow,
    TrainOn,
    mark_targets,
    render_examples,
    tokenize,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_batch(batch: list[Example], tokens: AnswerTokens, train_on: TrainOn) -> list[TokenisedRow | BadRowError]:
    """Each row as tokens with its targets, or why that cannot be. All rows must be of one kind.

    Raises:
        DataError: the tokenizer lacks what this kind of row needs.
    """
    rendered = render_examples(tokens.tokenizer, batch, train_on)
    if batch[0].kind != "text":  # plain text may hold special tokens: it is what a model reads, as it stands
        rendered = [tokens.special_text_in(example) or row for example, row in zip(batch, rendered, strict=True)]
    good = [row for row in rendered if isinstance(row, RenderedRow)]
    encodings = iter(tokenize(tokens.tokenizer, [row.text for row in good]) if good else [])
    return [mark_targets(row, next(encodings), tokens) if isinstance(row, RenderedRow) else row for row in rendered]


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """A SHA-256 over the vocabulary, the merges, the special tokens and the chat template."""
    backend: str = tokenizer.backend_tokenizer.to_str()
    # Truncation and padding come first in it. Any call may have changed them, and none of ours uses them.
    backend = backend[max(0, backend.find('"added_tokens"')) :]
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest_json([backend, special_tokens, tokenizer.chat_template])


def digest_json(value: object) -> str:
    """A SHA-256 over plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
