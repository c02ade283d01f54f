"""Continue rows token by token, with a cache of the keys and values of all tokens before.

Nothing is padded: the rows of a batch may differ in length, and the beginning that several rows share is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy
import torch
from torch.nn import functional

from finetune.engine.attention import attention
from finetune.engine.decoder import Angles, AnyLinear, Decoder, are_read, bare_model, family_of, read_groups
from finetune.engine.layout import Layout, flat_tokens_of_rows, lay_out
from finetune.engine.linear import Linear, joined_biases, linear, merge_adapters
from finetune.engine.prefixes import build_prefix_tree
from finetune.engine.products import LINEAR, ONEDNN, PROCESSOR

_ROWS_OF_PACKED = 64
"""The rows of the input for which a weight is packed. On a Zen 4 core, it is then the fastest for 2 to 600 rows."""
_MOST_COPIED_BYTES = 1 << 30
"""Weights of a model whose linear layers are copied for many short calls. The copies take as much memory again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPrompts:
    """Rows that are going to be continued, packed for one forward pass.

    Attributes:
        input_ids: flat tokens, int64, shape (tokens,).
        layout: of the tokens.
        token_of: the flat token of each row and position, 0 after the end of a row, int64, shape (rows, longest row).
        lengths: the number of tokens of each row, int64, shape (rows,).
        ends: the flat tokens at which a row ends, ascending, each once, int64, shape (ends,).
        end_of_row: the index in `ends` of each row, int64, shape (rows,).
    """

    input_ids: torch.Tensor
    layout: Layout
    token_of: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor
    end_of_row: torch.Tensor

    def to(self, device: torch.device) -> PackedPrompts:
        """A copy on another device."""
        names = ("input_ids", "token_of", "lengths", "ends", "end_of_row")
        tensors = {name: getattr(self, name).to(device) for name in names}
        return replace(self, layout=self.layout.map(lambda tensor: tensor.to(device)), **tensors)


def pack_prompts(rows: Sequence[Sequence[int]]) -> PackedPrompts:
    """Pack rows of token ids, none empty, with each shared prefix only once."""
    tokens = [numpy.array(row, dtype=numpy.int64) for row in rows]
    lengths = [len(row) for row in tokens]
    tree = build_prefix_tree(tokens)
    layout, input_ids = lay_out(tree, tokens)
    token_of = numpy.zeros((len(rows), max(lengths)), dtype=numpy.int64)
    for row, flat in enumerate(flat_tokens_of_rows(layout, tree.last_node, lengths)):
        token_of[row, : len(flat)] = flat
    last = token_of[numpy.arange(len(rows)), numpy.array(lengths) - 1]
    ends, end_of_row = numpy.unique(last, return_inverse=True)
    return PackedPrompts(
        input_ids=input_ids,
        layout=layout,
        token_of=torch.from_numpy(token_of),
        lengths=torch.tensor(lengths),
        ends=torch.from_numpy(ends),
        end_of_row=torch.from_numpy(end_of_row),
    )


class CachedDecoder:
    """Predicts the next token of several rows, then the one after it, and so on.

    Args:
        model: a model for which `unsupported_reason` returns None, in evaluation mode and without gradients.
        rows: token ids, at least one in each row.
        most_tokens: the most tokens that a row will have, those that are appended included.
    """

    def __init__(self, model: Any, rows: Sequence[Sequence[int]], *, most_tokens: int) -> None:
        self._prepare = partial(_prepared, num_rows=len(rows)) if is_small(model) else _as_they_are
        self._decoder = Decoder(
            model,
            lambda q, k, v, layout, **how: layout.attend(q, k, v, **how),  # the pass itself, which knows its cache
            prepare=self._prepare,
        )
        head = bare_model(model).get_output_embeddings()
        self._weights_of_head = Linear(head.weight, head.bias)
        self._prompts = pack_prompts(rows).to(head.weight.device)
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

    def _append(self, tokens: torch.Tensor, num_columns: int, angles: Angles | None = None) -> torch.Tensor:
        """Compute `go_on` over the first columns of the cache. With `angles`, the host does not wait for the device."""
        next_pass = _NextPass(self._cache, num_columns)
        hidden = self._decoder.hidden_states(tokens, self._cache.lengths, next_pass, angles=angles)
        self._cache.lengths += 1
        return self._logits(hidden)

    def copy_nothing(self) -> None:
        """Compute with the model's own weights, which takes less memory. To be called before `start`."""
        self._decoder.prepare = self._prepare = _as_they_are

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these, given by their indices, int64."""
        self._cache.keep(rows)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.to(self._weights_of_head.weight.dtype), self._head)

    @cached_property
    def _head(self) -> Linear:
        (head,) = self._prepare([self._weights_of_head], self._weights_of_head.weight.dtype)
        return head


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


class _FirstPass:
    """A forward pass of all tokens, which fills the cache layer by layer."""

    def __init__(self, cache: _Cache, prompts: PackedPrompts) -> None:
        self._cache, self._prompts = cache, prompts

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: torch.Tensor | None,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        self._cache.layers.append((self._by_row(k), self._by_row(v)))
        return attention(q, k, v, self._prompts.layout, queries=queries, window=window, scale=scale)

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
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: torch.Tensor | None,
        window: int | None,
        scale: float,
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
            scale=scale,
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


def _as_they_are(layers: Sequence[Linear], dtype: torch.dtype) -> Sequence[Linear]:
    del dtype
    return layers


def _prepared(layers: Sequence[Linear], dtype: torch.dtype, num_rows: int) -> Sequence[Linear]:
    packs = layers[0].weight.device.type == "cpu" and can_pack(dtype, num_rows)
    copies = copied(layers, dtype, packs=packs)
    return packed_layers(copies, dtype) if packs else copies


def is_small(model: Any) -> bool:
    """Return whether linear layers are copied for many calls."""
    size: int = sum(weight.nbytes for weight in bare_model(model).parameters())
    return size <= _MOST_COPIED_BYTES


def can_pack(dtype: torch.dtype, num_rows: int) -> bool:
    """Return whether packed weights make products with so many rows faster on this CPU. In fp32, one row gains none."""
    if dtype == torch.float32:
        return ONEDNN is not None and num_rows > 1
    return dtype == torch.bfloat16 and LINEAR is not None and PROCESSOR.bf16_products is not None


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a weight, (out_features, in_features), that lies in memory as oneDNN's kernels read it.

    A product with a few rows is 1.5 times as fast with it. Only `product` takes it, without `low_rank`.
    """
    copy: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_OF_PACKED)
    return copy


@torch.no_grad()
def copied(layers: Sequence[Linear], dtype: torch.dtype, *, packs: bool) -> list[Linear]:
    """Return copies of layers with one input, in the form that is fastest for many inputs of this dtype with few rows.

    Adapters are merged where that is exact. In 16 bits it is not; there, `[x, x Aᵀ]` times `[W, scale · B]ᵀ` is one
    product too, which rounds once. `packs` says whether `packed_layers` follows. If not, only merging makes copies.
    """
    merged = merge_adapters(layers, dtype)
    if not packs or not all(layer.is_packable(dtype) for layer in layers):
        return merged
    return merged if len(merged) == 1 and merged[0].lora_a is None else [_with_adapters_beside(layers, dtype)]


def packed_layers(layers: Sequence[Linear], dtype: torch.dtype) -> list[Linear]:
    """Pack the weights of layers that `copied` returned, where `can_pack` holds. Only forward passes may use them."""
    if len(layers) != 1 or not layers[0].is_packable(dtype):
        return list(layers)
    return [layers[0]._replace(weight=packed(layers[0].weight))]


def _with_adapters_beside(layers: Sequence[Linear], dtype: torch.dtype) -> Linear:
    """Return layers as one whose weight is `[W, scale · B]`, where each layer has columns of its own for its B."""
    ranks = [0 if layer.lora_a is None else len(layer.lora_a) for layer in layers]
    features = layers[0].weight.shape[1]
    weight = layers[0].weight.new_zeros(sum(layer.width for layer in layers), features + sum(ranks))
    rows, columns = 0, features
    for layer, rank in zip(layers, ranks, strict=True):
        own = weight[rows : rows + layer.width]
        own[:, :features] = layer.weight
        if layer.lora_b is not None:
            own[:, columns : columns + rank] = layer.lora_b * layer.scale
        rows, columns = rows + layer.width, columns + rank
    lora_a = [layer.lora_a.to(dtype) for layer in layers if layer.lora_a is not None]
    return Linear(weight, joined_biases(layers, weight), torch.cat(lora_a) if lora_a else None)


def bytes_of_copies(model: Any, num_rows: int, *, on_cpu: bool) -> int:
    """Return the bytes of the weights that a `CachedDecoder` of so many rows copies."""
    if not is_small(model):
        return 0
    bare = bare_model(model)
    like, head = bare.get_input_embeddings().weight, bare.get_output_embeddings()
    packs = on_cpu and can_pack(like.dtype, num_rows)
    groups, total = family_of(bare.config.model_type).groups, 0
    read: list[list[AnyLinear]] = [[Linear(head.weight, head.bias)]]
    for modules in bare.get_decoder().layers:
        read += read_groups(modules, groups, like)
    for layers in filter(are_read, read):
        copies = copied(layers, like.dtype, packs=packs)
        if copies[0] is not layers[0] or (packs and copies[0].is_packable(like.dtype)):
            total += sum(copy.weight.nbytes for copy in copies)
    return total
