"""Compare a served model's logits with the trained model's, and refuse a merge that is too far off."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from finetune.errors import LOST_IN_ROUNDING, RunFailedError

MOST_DIFFERENCE = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1.25e-1}
"""The largest relative difference for each type of the stored weights. For 16-bit types it is 16 steps of the type at 1
(2^-10 and 2^-7); for wider types it is what the order of additions can make of many layers."""
MOST_LOST = 0.5
"""The largest part of the adapter's own effect that rounding may take away."""
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
        lost = "" if self.lost is None else f", {self.lost:.2%} of the adapter's effect lost"
        return (
            f"largest difference of a logit {self.max_abs:.3g}, relative {self.relative:.3g}, "
            f"same greedy token {self.same_greedy:.1%} of {self.num_positions} positions{lost}"
        )


def compare_logits(found: torch.Tensor, expected: torch.Tensor, base: torch.Tensor | None = None) -> LogitDifference:
    """Compare a served model's logits with the trained model's, (positions, vocabulary).

    The logits of the base without its adapter show how much of the adapter's effect is lost.
    """
    if not len(expected):
        infinite = dict.fromkeys(("max_abs", "relative", "most_relative"), math.inf)
        return LogitDifference(**infinite, same_greedy=0.0, num_positions=0)
    wanted = centred(expected)
    error = (centred(found) - wanted).norm()
    effect = 0.0 if base is None else float((wanted - centred(base)).norm())
    return LogitDifference(
        max_abs=float((found - expected).abs().max()),
        relative=float(error / wanted.norm().clamp_min(_SMALLEST_NORM)),
        most_relative=float(relative_by_position(found, expected).max()),
        same_greedy=float((found.argmax(dim=-1) == expected.argmax(dim=-1)).double().mean()),
        num_positions=len(expected),
        lost=float(error) / effect if effect else None,
    )


def refuse_far(difference: LogitDifference, dtype: str, most: float | None = None) -> None:
    """Refuse a merged model that is not the tuned one.

    The bound is `most`, a relative difference, or by default the bound of the type in which weights are stored.

    Raises:
        RunFailedError: the difference is above the bound, or rounding took away most of the adapter's effect.
    """
    bound = MOST_DIFFERENCE.get(dtype, 0.0) if most is None else most
    if not math.isfinite(difference.relative) or difference.relative > bound:
        raise RunFailedError(
            f"the merged model does not answer like base and adapter: {difference}; expected a relative difference of "
            f"at most {bound:.3g} for weights stored as {dtype}. Merge with --dtype float32, use the adapter as it is, "
            "or set another bound with --max-difference."
        )
    if difference.lost is not None and difference.lost > MOST_LOST:
        raise RunFailedError(
            f"rounding to {dtype} {LOST_IN_ROUNDING}: {difference}; expected to lose at most "
            f"{MOST_LOST:.0%} of its effect. Merge with --dtype float32, or use the adapter as it is."
        )


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Take the mean off the logits of each position, in float64: a shift of all of them changes no probability."""
    wide = logits.double()
    return wide - wide.mean(dim=-1, keepdim=True)


def relative_by_position(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the relative difference of logits (positions, vocabulary) at each position; infinite for not a number."""
    wanted = centred(expected)
    apart = (centred(found) - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(_SMALLEST_NORM)
    return torch.nan_to_num(apart, nan=torch.inf)
