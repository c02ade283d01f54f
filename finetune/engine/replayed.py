"""Continue rows token by token in steps that a CUDA graph replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch

from finetune.engine.decoder import Angles
from finetune.engine.kv_cache import CachedDecoder
from finetune.engine.products import FP8, is_in_4_bits
from finetune.units import ceil_div

Choose: TypeAlias = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Chooses tokens on the device, without waiting for it. Takes logits (rows, vocabulary) and a random number of [0, 1)
for each row, (rows, 1), float64. Returns the tokens, (rows,), and -log p of each in fp32, or None."""
STEPS_OF_BLOCK = 16
"""The most steps of a `SteppedDecoder` before the host looks at their tokens."""
COLUMNS_OF_STEP = 256
"""Attention of a `SteppedDecoder` looks at a multiple of this number of columns, so that a graph serves many steps."""


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
        graph = capture(step, self._pool)
        self._pool = graph.pool()  # graphs are replayed one after the other, so they share their memory
        return graph

    def _try(self, step: Callable[[], object]) -> None:
        """Compute a step and undo it. Its keys, values and tokens stay, and the next step overwrites them."""
        state = self._cache.lengths, self._last, self._place
        before = [tensor.clone() for tensor in state]
        step()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)


def has_rounded_weights(model: torch.nn.Module) -> bool:
    """Return whether weights of a model are in 4 bits or in fp8. No graph computes them."""
    return any(is_in_4_bits(weight) or weight.dtype == FP8 for weight in model.parameters())


def capture(step: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """Capture a step without computing it, in the memory pool of other graphs. None: in a new pool."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may call CUDA meanwhile, such as NCCL's watchdog and the thread that pins batches.
    with torch.cuda.graph(graph, pool=pool, stream=_side_stream(), capture_error_mode="thread_local"):
        step()
    return graph


@cache
def _side_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: libraries keep memory for every stream that they have seen."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
