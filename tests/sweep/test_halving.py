"""Trials end early as asynchronous successive halving says."""

from __future__ import annotations

import math

from finetune.sweep.running import find_lost_comparison


def weak(values, others, *, after=0, factor=3, sign=-1, last_step=None):
    """The number of the validation that ends a trial; validations are 10 steps apart."""

    def points(of):
        return [(10 * number, value) for number, value in enumerate(of, 1)]

    found = find_lost_comparison(
        points(values), lambda: list(map(points, others)), after=after, factor=factor, sign=sign, last_step=last_step
    )
    return found and found.validation


def test_a_trial_is_compared_after_its_validations_1_3_and_9():
    better = [[1.0] * 9] * 3
    assert weak([2.0], better) == 1
    assert weak([0.5, 2.0], better) is None, "2 is no number of comparison"
    assert weak([0.5, 0.5, 2.0], better) == 3
    assert weak([0.5] * 8, better) is None
    assert weak([0.5] * 8 + [2.0], better) == 9
    assert weak([0.5, 2.0], better, factor=2) == 2


def test_the_best_of_each_three_go_on():
    assert weak([2.0], [[1.0]]) is None, "two trials are not compared"
    assert weak([2.0], [[1.0], [3.0]]) == 1, "the second of three"
    assert weak([1.0], [[1.0], [3.0]]) is None, "as good as the best"
    five = [[1.0], [3.0], [4.0], [5.0], [6.0]]
    assert weak([2.0], five) is None, "the second of six"
    assert weak([3.5], five) == 1
    assert weak([2.0] * 3, [[9.0, 9.0, 1.0], [9.0, 1.0]]) is None, "only one of the others has a third value"


def test_a_higher_metric_is_better_except_the_loss_and_one_that_is_not_finite_is_the_worst():
    assert weak([0.9], [[0.5], [0.6]], sign=1) is None
    assert weak([0.5], [[0.9], [0.6]], sign=1) == 1
    assert weak([math.nan], [[5.0], [6.0]]) == 1
    assert weak([5.0], [[math.nan], [math.nan]]) is None


def test_no_comparison_is_made_twice_and_none_after_the_last_step():
    better = [[1.0] * 3] * 3
    assert weak([2.0, 2.0], better, after=1) is None
    assert weak([2.0, 2.0, 2.0], better, after=1) == 3
    assert weak([2.0, 2.0, 2.0], better, after=1, last_step=30) is None
