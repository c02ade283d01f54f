"""Continue rows token by token, with a cache of the keys and values of all tokens before.

Nothing is padded: the rows of a batch may differ in length, and the beginning that several rows share is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from finetune.engine.attention import attention
from finetune.engine.decoder import Decoder, bare_model
from finetune.engine.layout import PackedPrompts, pack_prompts


class CachedDecoder:
    """Predicts the next token of several rows, then the one after it, and so on.

    Args:
        model: a model for which `unsupported_reason` returns None, in evaluation mode and without gradients.
        rows: token ids, at least one in each row.
        most_tokens: the most tokens that a row will have, those that are appended included.
    """

    def __init__(self, model: Any, rows: Sequence[Sequence[int]], *, most_tokens: int) -> None:
        self._decoder = Decoder(model, _attend, is_constant=True)
        self._head = bare_model(model).get_output_embeddings()
        self._prompts = pack_prompts(rows).to(self._head.weight.device)
        self._cache = _Cache(self._prompts.lengths, most_tokens)

    def start(self) -> torch.Tensor:
        """Compute all rows, and return the logits after the last token of each: (rows, vocabulary)."""
        prompts = self._prompts
        first = _FirstPass(self._cache, prompts)
        hidden = self._decoder.hidden_states(prompts.input_ids, prompts.layout.position_ids, first, prompts.ends)
        return self._logits(hidden).index_select(0, prompts.end_of_row)

    def go_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row, (rows,), and return the logits after it, (rows, vocabulary)."""
        logits = self._append(tokens, self._cache.longest + 1)
        self._cache.longest += 1
        return logits

    def _append(self, tokens: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Compute `go_on` over the first columns of the cache, without waiting for the device."""
        hidden = self._decoder.hidden_states(tokens, self._cache.lengths, _NextPass(self._cache, num_columns))
        self._cache.lengths += 1
        return self._logits(hidden)

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these, given by their indices, int64."""
        self._cache.keep(rows)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden.to(self._head.weight.dtype))
        return logits


class _Cache:
    """Keys and values by layer, each (rows, kv_heads, most_tokens, head_dim).

    Attributes:
        lengths: the tokens of each row so far, (rows,).
        longest: the largest of them.
        most_tokens: the most tokens that a row will have.
        layers: keys and values.
    """

    def __init__(self, lengths: torch.Tensor, most_tokens: int) -> None:
        self.lengths = lengths.clone()
        self.longest = int(lengths.max())
        self.most_tokens = most_tokens
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, rows: torch.Tensor) -> None:
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max())
        for layer, (keys, values) in enumerate(self.layers):  # one by one, so that only one layer is in memory twice
            self.layers[layer] = keys[rows], values[rows]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: _FirstPass | _NextPass,
    *,
    queries: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Attend as `Attention` says; the pass knows its cache."""
    return layout.attend(q, k, v, queries, window)


class _FirstPass:
    """A forward pass of all tokens, which fills the cache layer by layer."""

    def __init__(self, cache: _Cache, prompts: PackedPrompts) -> None:
        self._cache, self._prompts = cache, prompts

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor | None, window: int | None
    ) -> torch.Tensor:
        self._cache.layers.append((self._by_row(k), self._by_row(v)))
        return attention(q, k, v, self._prompts.layout, queries=queries, window=window)

    def _by_row(self, new: torch.Tensor) -> torch.Tensor:
        token_of = self._prompts.token_of
        rows, longest = token_of.shape
        # Zeros, since what attention leaves out is multiplied by 0, and 0 times NaN is NaN.
        padded = new.new_zeros(rows, new.shape[1], self._cache.most_tokens, new.shape[2])
        padded[:, :, :longest] = new[token_of].transpose(1, 2)
        return padded


class _NextPass:
    """A forward pass of one token of each row, which appends to the cache layer by layer."""

    def __init__(self, cache: _Cache, num_columns: int) -> None:
        self._cache = cache
        self._layers = iter(cache.layers)
        self._rows = torch.arange(len(cache.lengths), device=cache.lengths.device)
        self._columns = torch.arange(num_columns, device=cache.lengths.device)
        self._biases: dict[int | None, torch.Tensor] = {}

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor | None, window: int | None
    ) -> torch.Tensor:
        """Attend to the cache; `queries` are None, since every token is the only one of its row."""
        keys, values = next(self._layers)
        keys[self._rows, :, self._cache.lengths] = k
        values[self._rows, :, self._cache.lengths] = v
        rows, kv_heads, _, size = keys.shape
        until = len(self._columns)
        # The query heads of a key head take the place of queries: they see the same keys, which are not repeated.
        attended = functional.scaled_dot_product_attention(
            q.view(rows, kv_heads, -1, size),
            keys[:, :, :until],
            values[:, :, :until],
            attn_mask=self._bias(window, q.dtype),
            scale=size**-0.5,
        )
        return attended.reshape(q.shape)

    def _bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return 0 where a row's token sees a token of the cache and -inf elsewhere, (rows, 1, 1, columns)."""
        if window not in self._biases:
            last = self._cache.lengths[:, None]
            visible = self._columns <= last
            if window is not None:
                visible &= self._columns > last - window
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self._biases[window] = bias[:, None, None]
        return self._biases[window]
