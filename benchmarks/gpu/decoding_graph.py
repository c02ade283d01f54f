"""The engine's pass of one token as a CUDA graph. No run uses it: it has to be measured on a GPU first.

A pass over few tokens is bound by the host, which launches some thirty kernels a layer. A graph launches them all at
once. Its tensors keep their places, so a graph is captured for each number of columns of the cache that attention looks
at, in steps of `COLUMNS`, and anew when rows have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.timing import captured
from finetune.engine.kv_cache import CachedDecoder
from finetune.units import ceil_div

COLUMNS = 256
_Replay = Callable[[], torch.Tensor]
"""Computes the pass on the tokens that were copied in, and returns its logits, which the next call overwrites."""


class GraphedDecoder(CachedDecoder):
    """A `CachedDecoder` whose passes of one token are replayed. Without CUDA, they are computed anew each time."""

    def __init__(self, model: Any, rows: Sequence[Sequence[int]], *, most_tokens: int) -> None:
        super().__init__(model, rows, most_tokens=most_tokens)
        self._tokens = self._cache.lengths.new_empty(len(rows))
        self._replays: dict[int, _Replay] = {}

    def go_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row, (rows,), and return the logits after it, (rows, vocabulary)."""
        cache = self._cache
        num_columns = min(COLUMNS * ceil_div(cache.longest + 1, COLUMNS), cache.most_tokens)
        self._tokens.copy_(tokens)
        if num_columns not in self._replays:
            self._replays[num_columns] = self._capture(num_columns)
        logits = self._replays[num_columns]()
        cache.longest += 1
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these, given by their indices, int64."""
        super().keep(rows)
        self._tokens = self._tokens[rows]
        self._replays.clear()

    def _capture(self, num_columns: int) -> _Replay:
        def append() -> torch.Tensor:
            return self._append(self._tokens, num_columns)

        if not self._tokens.is_cuda:
            return append
        lengths = self._cache.lengths.clone()
        replay = captured(append)
        # The pass before the capture has counted a token. The keys that it wrote are written again.
        self._cache.lengths.copy_(lengths)
        return replay
