"""Sample the tokens of answers by temperature, top-k and top-p, instead of taking the most likely one each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from finetune.data.batches import derived_seed
from finetune.engine.products import in_float64
from finetune.errors import RunFailedError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for sampling tokens instead of taking the most likely one each time.

    The random numbers of an answer are a function of the seed, the index of its prompt and the position. They do not
    depend on the other prompts of the batch or on the device.
    """

    temperature: float = 1.0
    """Logits are divided by it; above 0."""
    top_k: int | None = None
    """Sample only from this many of the most likely tokens."""
    top_p: float | None = None
    """Sample only from the most likely tokens that together have this probability; above 0, at most 1."""
    seed: int = 0


class Draw:
    """A logits processor that samples a token for each row with the row's own generator, and masks all other tokens."""

    def __init__(self, sampling: Sampling, rows: Sequence[int]) -> None:
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        self._num_rows = len(rows)
        self._alive = list(range(len(rows)))
        self._nats: list[tuple[list[int], torch.Tensor]] = []
        self._generators = [
            torch.Generator().manual_seed(derived_seed(sampling.seed, "answer", int(row))) for row in rows
        ]
        self._filters: list[Any] = [TemperatureLogitsWarper(float(sampling.temperature))]
        if sampling.top_k is not None:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None:
            self._filters.append(TopPLogitsWarper(float(sampling.top_p)))

    def keep(self, places: Sequence[int]) -> None:
        """Sample from here on for these rows only."""
        self._alive = [self._alive[place] for place in places]
        self._generators = [self._generators[place] for place in places]

    def nats(self) -> list[list[float]]:
        """Return -log p of each token that was drawn, row after row, before temperature and filters.

        Raises:
            RunFailedError: the model's probabilities were not finite, so the tokens have no meaning.
        """
        nats: list[list[float]] = [[] for _ in range(self._num_rows)]
        for rows, values in self._nats:
            for row, more in zip(rows, values.tolist(), strict=True):
                nats[row] += more
        if not all(map(math.isfinite, chain.from_iterable(nats))):
            raise RunFailedError(
                "no token can be drawn, because the model's probabilities are not finite: its weights have diverged, "
                "or the temperature is too close to 0. Take an earlier checkpoint, with a lower optim.learning_rate if "
                "you train, or raise the temperature."
            )
        return nats

    def note(self, nats: torch.Tensor) -> None:
        """Keep -log p of tokens that `choose` has chosen, (rows, tokens)."""
        self._nats.append((self._alive, nats))

    def levels(self, num_tokens: int) -> torch.Tensor:
        """Return the next random numbers of each row, (rows, num_tokens), float64, on the CPU."""
        drawn = [torch.rand((num_tokens,), generator=g, dtype=torch.float64) for g in self._generators]
        return torch.stack(drawn)

    def choose(self, scores: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token of each row that a random number of [0, 1), (rows, 1), chooses, and its -log p.

        -log p is nan where the probabilities are not finite.
        """
        filtered = scores.float()
        if torch.are_deterministic_algorithms_enabled():  # CUDA has no running sum with a fixed order
            filtered = filtered.cpu()
        for apply_filter in self._filters:
            filtered = apply_filter(None, filtered)
        # In float64, so that the sample is the same on every device.
        below = in_float64(filtered).softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(below, levels.to(below.device) * below[:, -1:], right=True).to(scores.device)
        drawn = drawn.clamp(max=scores.shape[-1] - 1)  # there is no such token if nothing is finite
        logits, is_finite = scores.float(), below[:, -1].isfinite().to(scores.device)
        nats = logits.logsumexp(-1) - logits.gather(1, drawn)[:, 0]
        return drawn[:, 0], torch.where(is_finite, nats, torch.nan)

    def __call__(self, input_ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (rows, vocabulary): 0 for the sampled token, minus infinity for all others."""
        del input_ids
        tokens, nats = self.choose(scores, self.levels(1))
        self.note(nats[:, None])
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)
