"""Decide which trials end early: asynchronous successive halving (ASHA; Li et al. 2020, arXiv:1810.05934).

With a factor of 3, trials are compared after their validations 1, 3, 9 and so on. There, a trial goes on if its metric
is among the best third of the trials that have got there so far. Nobody waits for slower trials. Fewer than three
trials are not compared, and the last validation of a run ends no trial, because it is over anyway.

Weak trials are stopped, not paused. The decision depends only on the values at each validation and
on the order of the trials, so with one trial at a time a sweep always ends the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from finetune.runs.recorded_run import Points


class Weak(NamedTuple):
    """The comparison that ends a trial."""

    validation: int
    """The number of the validation, counted from 1."""
    step: int
    value: float
    better: int
    """Trials that had a better metric there."""
    compared: int
    """Trials that have got there, this one included."""

    def __str__(self) -> str:
        return f"{self.value:.4g} at step {self.step}, rank {self.better + 1} of {self.compared} there"


def find_weak(
    points: Points,
    read_others: Callable[[], Sequence[Points]],
    *,
    after: int,
    factor: int,
    sign: int,
    last_step: int | None,
) -> Weak | None:
    """Return the first comparison that a trial has lost; None if it goes on.

    Args:
        points: step and metric of its validations so far.
        read_others: returns the same of all other trials.
        after: the number of validations after which it was compared before.
        factor: one of so many trials goes on.
        sign: 1 if a higher metric is better, else -1.
        last_step: the last step of the trial's run, if it is known.
    """
    numbers = [number for number in _compared_after(factor, len(points)) if number > after]
    others = read_others() if numbers else []
    for number in numbers:
        step, value = points[number - 1]
        if step == last_step:
            return None
        there = [_merit(other[number - 1][1], sign) for other in others if len(other) >= number]
        better = sum(merit > _merit(value, sign) for merit in there)
        compared = len(there) + 1
        if compared >= factor and better >= compared // factor:
            return Weak(number, step, value, better, compared)
    return None


def _compared_after(factor: int, validations: int) -> Iterator[int]:
    number = 1
    while number <= validations:
        yield number
        number *= factor


def _merit(value: float, sign: int) -> float:
    return sign * value if math.isfinite(value) else -math.inf
