"""Compare the logits of a served model with those of the trained model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MOST_DIFFERENCE = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1.25e-1}
"""The largest relative difference for each type of the stored weights. For 16-bit types it is 16 steps of the type at 1
(2^-10 and 2^-7); for wider types it is what the order of additions can make of many layers."""
_SMALLEST_NORM = 1e-30


@dataclass(frozen=True, kw_only=True)
class LogitDifference:
    """How far the logits of a served model are from the logits of the model as trained.

    The mean of each position is taken off first, because a shift of all logits of a position changes no probability.
    """

    max_abs: float
    """The largest difference of a logit, with the means left on."""
    relative: float
    """The norm of all differences over the norm of all logits."""
    most_relative: float
    """The largest relative difference of one position; infinite without positions or for not a number."""
    same_greedy: float
    """The fraction of positions with the same most likely token."""
    num_positions: int
    lost: float | None = None
    """The norm of the differences over the norm of what the adapter changed; None without an adapter or an effect."""

    def __str__(self) -> str:
        lost_effect = "" if self.lost is None else f", {self.lost:.2%} of the adapter's effect lost"
        return (
            f"largest difference of a logit {self.max_abs:.3g}, relative {self.relative:.3g}, "
            f"same greedy token {self.same_greedy:.1%} of {self.num_positions} positions{lost_effect}"
        )


def compare_logits(served: torch.Tensor, expected: torch.Tensor, base: torch.Tensor | None = None) -> LogitDifference:
    """Compare a served model's logits with the trained model's, (positions, vocabulary).

    The logits of the base without its adapter show how much of the adapter's effect is lost.
    """
    if not len(expected):
        infinite = dict.fromkeys(("max_abs", "relative", "most_relative"), math.inf)
        return LogitDifference(**infinite, same_greedy=0.0, num_positions=0)
    trained = centred(expected)
    error = (centred(served) - trained).norm()
    effect = 0.0 if base is None else float((trained - centred(base)).norm())
    return LogitDifference(
        max_abs=float((served - expected).abs().max()),
        relative=float(error / trained.norm().clamp_min(_SMALLEST_NORM)),
        most_relative=float(relative_by_position(served, expected).max()),
        same_greedy=float((served.argmax(dim=-1) == expected.argmax(dim=-1)).double().mean()),
        num_positions=len(expected),
        lost=float(error) / effect if effect else None,
    )


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Take the mean off the logits of each position, in float64: a shift of all of them changes no probability."""
    wide = logits.double()
    return wide - wide.mean(dim=-1, keepdim=True)


def relative_by_position(served: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the relative difference of logits (positions, vocabulary) at each position; infinite for not a number."""
    trained = centred(expected)
    relative = (centred(served) - trained).norm(dim=-1) / trained.norm(dim=-1).clamp_min(_SMALLEST_NORM)
    return torch.nan_to_num(relative, nan=torch.inf)
