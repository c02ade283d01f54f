"""Continue rows token by token, with a cache of the keys and values of all tokens before.

Nothing is padded: the rows of a batch may differ in length, and the beginning that several rows share is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from finetune.engine.attention import attention
from finetune.engine.decoder import Angles, Decoder, bare_model
from finetune.engine.layout import PackedPrompts, pack_prompts
from finetune.units import ceil_div

Choose: TypeAlias = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Chooses tokens on the device, without waiting for it. Takes logits (rows, vocabulary) and a random number of [0, 1)
for each row, (rows, 1), float64. Returns the tokens, (rows,), and -log p of each in fp32, or None."""
STEPS_OF_BLOCK = 16
"""The most steps of a `SteppedDecoder` before the host looks at their tokens."""
COLUMNS_OF_STEP = 256
"""Attention of a `SteppedDecoder` looks at a multiple of this number of columns, so that a graph serves many steps."""


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

    def _append(self, tokens: torch.Tensor, num_columns: int, angles: Angles | None = None) -> torch.Tensor:
        """Compute `go_on` over the first columns of the cache. With `angles`, the host does not wait for the device."""
        next_pass = _NextPass(self._cache, num_columns)
        hidden = self._decoder.hidden_states(tokens, self._cache.lengths, next_pass, angles=angles)
        self._cache.lengths += 1
        return self._logits(hidden)

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these, given by their indices, int64."""
        self._cache.keep(rows)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden.to(self._head.weight.dtype))
        return logits


class BlockOfTokens(NamedTuple):
    """What the steps of a block chose, (rows, steps)."""

    tokens: torch.Tensor
    """The next block overwrites them."""
    nats: torch.Tensor | None
    """-log p of each token."""


class SteppedDecoder(CachedDecoder):
    """A `CachedDecoder` that also chooses the tokens, in steps that a CUDA graph replays.

    A step takes nothing from the host and gives it nothing: it reads and writes tensors that keep their places until
    rows leave. A graph launches its hundreds of kernels at once. It is captured for each number of columns of the cache
    that attention looks at, and captured again after rows have left. Graphs are freed with the decoder. Without CUDA
    there are no graphs, and each step is computed.

    Args:
        model: see `CachedDecoder`. Its rotation must depend on the position alone, up to `most_tokens`.
        rows: see `CachedDecoder`.
        most_tokens: see `CachedDecoder`.
        choose: chooses the tokens.
    """

    def __init__(self, model: Any, rows: Sequence[Sequence[int]], *, most_tokens: int, choose: Choose) -> None:
        super().__init__(model, rows, most_tokens=most_tokens)
        self._choose = choose
        zeros = partial(self._cache.lengths.new_zeros, (len(rows), STEPS_OF_BLOCK))
        self._levels, self._tokens, self._nats = zeros(dtype=torch.float64), zeros(), zeros(dtype=torch.float32)
        self._last = self._tokens[:, 0].clone()
        self._place = self._last.new_zeros(1)
        self._has_nats = False
        self._angles: Angles | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def start(self) -> torch.Tensor:
        """Compute all rows as `CachedDecoder` does, and the rotation at all positions that they will have."""
        logits = super().start()
        like = self._cache.layers[0][0]
        self._angles = self._decoder.angles(torch.arange(self._cache.most_tokens, device=like.device), like)
        return logits

    def begin(self, levels: torch.Tensor | None) -> BlockOfTokens:
        """Compute all rows, and choose the first token after each. `levels`: see `advance`."""
        logits = self.start()
        self._begin_block(levels)
        self.choose(logits)
        return self._block(1)

    def advance(self, num_steps: int, levels: torch.Tensor | None) -> BlockOfTokens:
        """Append the token that was chosen last to each row and choose the next one, several times.

        Args:
            num_steps: at most `STEPS_OF_BLOCK`.
            levels: random numbers, (rows, num_steps), float64; None if `choose` does not need them.
        """
        self._begin_block(levels)
        self._cache.longest += num_steps
        num_columns = COLUMNS_OF_STEP * ceil_div(self._cache.longest, COLUMNS_OF_STEP)
        num_columns = min(num_columns, self._cache.most_tokens)
        step: Callable[[], object] = partial(self.step, num_columns)
        if self._last.is_cuda:
            if num_columns not in self._graphs:
                self._graphs[num_columns] = self._capture(step)
            step = self._graphs[num_columns].replay
        for _ in range(num_steps):
            step()
        return self._block(num_steps)

    def step(self, num_columns: int) -> None:
        """Append the tokens that were chosen last, and choose the next ones, without waiting for the device."""
        self.choose(self.append(num_columns))

    def append(self, num_columns: int) -> torch.Tensor:
        """Append the tokens that were chosen last, and return the logits after them."""
        assert self._angles is not None
        places = self._cache.lengths
        angles = {
            of: (cos.index_select(0, places), sin.index_select(0, places)) for of, (cos, sin) in self._angles.items()
        }
        return self._append(self._last, num_columns, angles)

    def choose(self, logits: torch.Tensor) -> None:
        """Choose the next tokens."""
        tokens, nats = self._choose(logits, self._levels.index_select(1, self._place))
        self._last.copy_(tokens)
        self._tokens.index_copy_(1, self._place, tokens.unsqueeze(1))
        self._has_nats = nats is not None
        if nats is not None:
            self._nats.index_copy_(1, self._place, nats.unsqueeze(1))
        self._place += 1

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these, given by their indices, int64. They need new graphs."""
        self._graphs.clear()
        self._pool = None
        super().keep(rows)
        self._last, self._levels, self._tokens, self._nats = (
            tensor[rows] for tensor in (self._last, self._levels, self._tokens, self._nats)
        )

    def _begin_block(self, levels: torch.Tensor | None) -> None:
        self._place.zero_()
        if levels is not None:
            self._levels[:, : levels.shape[1]].copy_(levels, non_blocking=True)

    def _block(self, num_steps: int) -> BlockOfTokens:
        return BlockOfTokens(self._tokens[:, :num_steps], self._nats[:, :num_steps].clone() if self._has_nats else None)

    def _capture(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Capture a step without computing it."""
        # In the first pass, libraries allocate memory and kernels are compiled, which must not be captured.
        stream = _side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._try(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile, such as NCCL's watchdog and the thread that pins batches.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            step()
        self._pool = graph.pool()  # graphs are replayed one after the other, so they share their memory
        return graph

    def _try(self, step: Callable[[], object]) -> None:
        """Compute a step and undo it. Its keys, values and tokens stay, and the next step overwrites them."""
        state = self._cache.lengths, self._last, self._place
        before = [tensor.clone() for tensor in state]
        step()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)


@cache
def _side_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: libraries keep memory for every stream that they have seen."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


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
    scale: float,
) -> torch.Tensor:
    """Attend as `Attention` says; the pass knows its cache."""
    return layout.attend(q, k, v, queries, window, scale)


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
