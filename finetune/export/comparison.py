"""How far a merged model is from base and adapter, and how far it may be."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.errors import RunFailedError
from finetune.export.plain_reload import prompt_ids

PROBE_TEXTS = ("What is the capital of Portugal?", "Write one short sentence about three crates of oranges.")
"""What a user might say; the rest of the prompts are random tokens."""
_RANDOM_PROMPTS = 4
_RANDOM_LENGTH = 24
MOST_DIFFERENCE = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1.25e-1}
"""The largest relative difference by the type the weights are stored in: 16 of its steps at 1 (2^-10 and 2^-7 for the
16-bit types), and for the wider types what the order of additions alone may make of many layers."""
MOST_LOST = 0.5
"""The largest part of the adapter's own effect that rounding may take away."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Logits of the merged model, reloaded, against those of base and adapter; all computed in fp32.

    Attributes:
        max_abs: the largest difference of a logit.
        relative: norm of the differences over the norm of the logits, each position's mean taken off: a shift of all
            logits of a position changes no probability.
        same_greedy: share of positions whose most likely token is the same.
        lost: norm of the differences over the norm of what the adapter changed; None without an adapter or an effect.
        num_positions: how many positions were compared.
    """

    max_abs: float
    relative: float
    same_greedy: float
    lost: float | None
    num_positions: int

    def __str__(self) -> str:
        lost = "" if self.lost is None else f", {self.lost:.2%} of the adapter's effect lost"
        return (
            f"largest difference of a logit {self.max_abs:.3g}, relative {self.relative:.3g}, "
            f"same greedy token {self.same_greedy:.1%} of {self.num_positions} positions{lost}"
        )

    def as_record(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What was written, and how close it is.

    Attributes:
        folder: the model's.
        num_bytes: of its weights.
        dtype: the type they are stored in.
        is_tied: input embeddings and output head are one tensor.
        stop_ids: at which generation ends.
        difference: from base and adapter.
    """

    folder: Path
    num_bytes: int
    dtype: str
    is_tied: bool
    stop_ids: list[int]
    difference: Difference


def probe_prompts(tokenizer: Any, num_rows: int, seed: int = 0) -> list[list[int]]:
    """The prompts to compare on: a few a user might type, through the chat template, and seeded random tokens.

    Args:
        tokenizer: the run's.
        num_rows: of the embedding; no token is above.
        seed: of the random tokens.
    """
    rng = random.Random(seed)
    ceiling = min(num_rows, len(tokenizer))
    noise = [[rng.randrange(ceiling) for _ in range(_RANDOM_LENGTH)] for _ in range(_RANDOM_PROMPTS)]
    return [*(prompt_ids(tokenizer, text) for text in PROBE_TEXTS), *noise]


def compare_logits(merged: torch.Tensor, tuned: torch.Tensor, base: torch.Tensor | None) -> Difference:
    """Compare (positions, vocabulary) logits on the same prompts.

    Args:
        merged: of the merged model.
        tuned: of base and adapter.
        base: of the base alone; None where there is none.
    """
    error = _centred(merged) - _centred(tuned)
    effect = 0.0 if base is None else float((_centred(tuned) - _centred(base)).norm())
    return Difference(
        max_abs=float((merged - tuned).abs().max()),
        relative=float(error.norm() / _centred(tuned).norm().clamp_min(1e-30)),
        same_greedy=float((merged.argmax(dim=-1) == tuned.argmax(dim=-1)).float().mean()),
        lost=float(error.norm()) / effect if effect else None,
        num_positions=len(tuned),
    )


def refuse_far(difference: Difference, dtypes: Sequence[str], most: float | None = None) -> None:
    """Say why a merged model is not the tuned one, where it is not.

    Args:
        difference: of the two.
        dtypes: the types that the weights are stored in; the coarsest counts.
        most: the largest relative difference; None: what fits the type.

    Raises:
        RunFailedError: it is too far off, or rounding took away most of what was trained.
    """
    bound = max(MOST_DIFFERENCE.get(dtype, 0.0) for dtype in dtypes) if most is None else most
    stored = ", ".join(dtypes)
    if not math.isfinite(difference.relative) or difference.relative > bound:
        raise RunFailedError(
            f"the merged model does not answer like base and adapter: {difference}; expected a relative difference of "
            f"at most {bound:.3g} for weights stored as {stored}. Merge with --dtype float32, or use the adapter as "
            "it is; --max-difference sets another bound."
        )
    if difference.lost is not None and difference.lost > MOST_LOST:
        raise RunFailedError(
            f"rounding to {stored} takes away most of what was trained: {difference}; expected to lose at most "
            f"{MOST_LOST:.0%} of the adapter's effect. Merge with --dtype float32, or use the adapter as it is."
        )


def _centred(logits: torch.Tensor) -> torch.Tensor:
    wide = logits.double()
    return wide - wide.mean(dim=-1, keepdim=True)
