"""Decide which trials end early: asynchronous successive halving (ASHA; Li et al. 2020, arXiv:1810.05934).

With a factor of 3, trials are compared after their validations 1, 3, 9 and so on. There, a trial goes on if its metric
is among the best third of the trials that have got there so far. Nobody waits for slower trials. Fewer than three
trials are not compared, and the last validation of a run ends no trial, because it is over anyway.

Weak trials are stopped, not paused. The decision depends only on the values at each validation and
on the order of the trials, so with one trial at a time a sweep always ends the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from finetune.runs.recorded_run import Points


class LostComparison(NamedTuple):
    """The comparison that ends a trial."""

    validation: int
    """The number of the validation, counted from 1."""
    step: int
    value: float
    better: int
    """The number of trials with a better metric there."""
    compared: int
    """The number of trials that have got there, this one included."""


def find_lost_comparison(
    points: Points,
    read_others: Callable[[], Sequence[Points]],
    *,
    after: int,
    factor: int,
    sign: int,
    last_step: int | None,
) -> LostComparison | None:
    """Return the first comparison that a trial has lost; None if it goes on.

    Args:
        points: step and metric of its validations so far.
        read_others: returns the points of every other trial.
        after: the number of validations after which the trial was compared before.
        factor: one of this many trials goes on.
        sign: 1 if a higher metric is better, else -1.
        last_step: the last step of the trial's run, if it is known.
    """

    def merit(value: float) -> float:
        return sign * value if math.isfinite(value) else -math.inf

    others: Sequence[Points] | None = None
    number = 1
    while number <= len(points):
        step, value = points[number - 1]
        if number > after and step != last_step:
            others = read_others() if others is None else others
            merits = [merit(other[number - 1][1]) for other in others if len(other) >= number]
            better = sum(other > merit(value) for other in merits)
            compared = len(merits) + 1
            if compared >= factor and better >= compared // factor:
                return LostComparison(number, step, value, better, compared)
        number *= factor
    return None
