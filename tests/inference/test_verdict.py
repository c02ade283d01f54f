"""The verdict is right where the effect is large, and wrong no more often than its level where there is none."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from finetune.inference.verdict import LEVEL, judge_distinct_rows, judge_rows

NUM_SEEDS = 100
MOST_WRONG = 12
"""Of 100 seeds at a level of 5 %, more are wrong with a probability of 0.1 %."""


def shares(rng, effect, n=40):
    """Right or wrong answers; `effect` of the rows change, a few at random."""
    other = (rng.random(n) < 0.5).astype(float)
    judged = np.where(rng.random(n) < 0.2, (rng.random(n) < 0.5).astype(float), other)
    is_changed = rng.random(n) < abs(effect)
    return np.where(is_changed, float(effect > 0), judged), np.where(is_changed, float(effect < 0), other), ()


def scores(rng, effect, n=24):
    """Half of the rows are answered equally, as with a token F1."""
    other = rng.beta(2, 2, n)
    return np.where(rng.random(n) < 0.5, other, other + rng.normal(effect, 0.2, n)), other, ()


def losses(rng, effect, n=24):
    """Nats of rows with very different numbers of targets."""
    sizes = rng.integers(2, 300, n).astype(float)
    other = rng.gamma(4, 0.4, n)
    return (other - effect + rng.standard_t(4, n) * 0.2) * sizes, other * sizes, sizes


PLANTED = {"exact_match": (shares, 0.5), "token_f1": (scores, 0.4), "loss": (losses, 0.4)}


@pytest.mark.slow
@pytest.mark.parametrize("metric", PLANTED)
@pytest.mark.parametrize("planted", ["better", "worse", "no difference"])
def test_a_planted_difference_is_found_and_none_is_invented(metric, planted):
    make, size = PLANTED[metric]
    effect = {"better": size, "worse": -size, "no difference": 0.0}[planted]
    found = []
    for seed in range(NUM_SEEDS):
        judged, other, weights = make(np.random.default_rng(seed), effect)
        verdict = judge_rows(metric, judged, other, weights)
        found.append(verdict.result)
        is_outside = verdict.low is not None and not verdict.low <= 0 <= verdict.high
        assert is_outside == (verdict.p_value <= LEVEL), "interval and test agree"
        assert verdict.is_worse_than(0) == (verdict.result == "worse")
    wrong = NUM_SEEDS - found.count(planted)
    assert wrong <= (MOST_WRONG if planted == "no difference" else 0.05 * NUM_SEEDS)


def compare_shares(num_better, num_worse, num_rows):
    other = [0.0] * num_better + [1.0] * (num_rows - num_better)
    judged = [1.0] * num_better + [0.0] * num_worse + [1.0] * (num_rows - num_better - num_worse)
    return judge_rows("exact_match", judged, other)


@pytest.mark.parametrize(("num_better", "num_worse", "p_value"), [(6, 0, 2 / 64), (5, 0, 2 / 32), (7, 1, 18 / 256)])
def test_shares_have_the_exact_sign_test_and_an_interval_that_agrees(num_better, num_worse, p_value):
    verdict = compare_shares(num_better, num_worse, 40)
    assert verdict.p_value == pytest.approx(p_value)
    assert (verdict.low > 0) == (p_value <= LEVEL)
    assert verdict.low <= verdict.difference == (num_better - num_worse) / 40 <= verdict.high
    assert (verdict.num_better, verdict.num_worse) == (num_better, num_worse)
    assert verdict.num_equal == 40 - num_better - num_worse


def test_rows_needed_are_those_of_connor():
    # (1.96 * sqrt(0.4) + 0.8416 * sqrt(0.36))^2 / 0.04 = 76.1; the variance is estimated with n - 1.
    assert compare_shares(300, 100, 1000).rows_needed == 77
    verdict = compare_shares(6, 2, 20)
    assert "no difference that 20 rows could show (about 78 rows would show one of this size)" in str(verdict)


def test_equal_rows_show_nothing_and_bound_the_difference():
    verdict = compare_shares(0, 0, 40)
    assert (verdict.p_value, verdict.rows_needed, verdict.num_equal) == (1.0, None, 40)
    assert verdict.high == -verdict.low == pytest.approx(1 - 0.025 ** (1 / 40))
    same = judge_rows("token_f1", [0.3, 0.7], [0.3, 0.7])
    assert (same.low, same.high, same.result) == (0.0, 0.0, "no difference")


def test_two_rows_decide_nothing():
    verdict = judge_rows("token_f1", [0.9, 0.8], [0.1, 0.2])
    assert verdict.result == "no difference"
    assert (verdict.low, verdict.high, verdict.rows_needed) == (None, None, None)
    assert not verdict.is_worse_than(0)
    assert str(verdict).startswith("no difference that 2 rows could show: +0.7000, 95 % interval unknown, p = ")


@pytest.mark.parametrize("unit", [100.0, 5.0, 0.1])
@pytest.mark.parametrize(("num_better", "num_worse"), [(40, 0), (0, 40), (6, 1), (30, 5)])
def test_the_unit_of_equal_changes_does_not_matter(unit, num_better, num_worse):
    base = compare_shares(num_better, num_worse, 40)
    signs = [1] * num_better + [-1] * num_worse + [0] * (40 - num_better - num_worse)
    other = [unit * (1 + row % 3) for row in range(40)]  # 0.1 + 0.2 is not 0.3
    verdict = judge_rows("points", [value + sign * unit for value, sign in zip(other, signs, strict=True)], other)
    assert (verdict.result, verdict.p_value, verdict.num_equal) == (base.result, base.p_value, base.num_equal)
    assert [verdict.difference, verdict.low, verdict.high] == pytest.approx(
        [unit * value for value in (base.difference, base.low, base.high)]
    )
    assert verdict.is_worse_than(0.5 * unit) == base.is_worse_than(0.5)


@pytest.mark.parametrize("unit", [1.0, 0.1])
@pytest.mark.parametrize("num_odd", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [40, 200])
def test_many_rows_that_change_almost_alike_show_a_difference(num_rows, num_odd, unit):
    other = [unit * (1 + row % 3) for row in range(num_rows)]
    changes = [unit] * (num_rows - num_odd) + [unit / 2] * num_odd
    lower, higher = ([value + sign * by for value, by in zip(other, changes, strict=True)] for sign in (-1, 1))
    worse, better = judge_rows("token_f1", lower, other), judge_rows("token_f1", higher, other)
    assert (worse.result, better.result) == ("worse", "better")
    assert worse.is_worse_than(0.5 * unit)
    assert not worse.is_worse_than(unit)
    assert not better.is_worse_than(0)
    assert worse.low < worse.difference < worse.high < 0


def test_many_rows_are_resampled_in_parts(monkeypatch):
    verdicts = []
    for drawn_at_once in (10**9, 1000):
        monkeypatch.setattr("finetune.inference.verdict._DRAWN_AT_ONCE", drawn_at_once)
        verdicts.append(judge_rows("token_f1", *scores(np.random.default_rng(1), 0.3, 50)[:2]))
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].p_value == 1 / 5000, "no resample is as far away, so the estimate counts alone"


def test_few_rows_that_differ_show_nothing():
    other = [0.5] * 40
    verdict = judge_rows("token_f1", [0.9, 0.8, *other[2:]], other)
    assert (verdict.result, verdict.low, verdict.num_better) == ("no difference", None, 2)
    verdict = judge_rows("token_f1", [0.9, *other[1:]], other)
    assert (verdict.result, verdict.low, verdict.num_better) == ("no difference", None, 1)
    verdict = judge_rows("points", [5.0, 7.0, *other], [3.0, 5.0, *other])
    assert (verdict.result, verdict.p_value, verdict.difference) == ("no difference", 0.5, 4 / 42)
    assert verdict.low < 0 < verdict.high, "two rows that change alike have the interval of the sign test"


def test_fewer_rows_than_the_sign_test_needs_are_never_named_as_enough():
    for num_rows in (2, 3, 5):
        sentence = f"no difference that {num_rows} rows could show (about 6 rows would show one of this size): +1.0000"
        assert str(compare_shares(num_rows, 0, num_rows)).startswith(sentence)
    assert compare_shares(6, 0, 6).result == "better"


def test_losses_that_change_by_the_same_rate_show_a_difference():
    sizes = [float(n) for n in range(10, 50)]
    verdict = judge_rows("loss", [2.5 * n for n in sizes], [2.0 * n for n in sizes], sizes)
    assert (verdict.result, verdict.difference) == ("worse", pytest.approx(0.5))
    assert verdict.is_worse_than(0.4)
    same = judge_rows("loss", sizes, sizes, sizes)
    assert (same.low, same.high, same.p_value, same.rows_needed) == (0.0, 0.0, 1.0, None)
    assert "+0.0000, 95 % interval +0.0000 to +0.0000" in str(same)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("is_of_base", [False, True])
def test_a_value_that_is_not_finite_cannot_be_compared_and_does_not_pass(value, is_of_base):
    both = [value, *[1.0] * 39], [value if is_of_base else 1.0, *[1.5] * 39]
    verdict = judge_rows("loss", *both, [1.0] * 40)
    assert (verdict.result, verdict.p_value, verdict.low, verdict.rows_needed) == ("not comparable", 1.0, None, None)
    assert verdict.is_worse_than(10)
    assert str(verdict) == "not comparable: 39 rows better, 0 worse, 0 equal, 1 with a value that is not finite"
    json.dumps({**verdict.as_record(), "difference": None}, allow_nan=False)


def test_copies_of_a_row_are_no_evidence():
    judged, other, sizes = losses(np.random.default_rng(0), 0.4)
    once = judge_rows("loss", judged, other, sizes)
    copied = [np.tile(values, 5) for values in (judged, other, sizes)]
    often = judge_distinct_rows("loss", copied[0], copied[1], [*range(24)] * 5, copied[2])
    assert often == replace(once, num_copies=96)
    assert str(often) == f"{once}; copies of these rows, which do not count again: 96"
    assert judge_distinct_rows("loss", [1.0] * 12, [2.0] * 12, ["one row"] * 12, [1.0] * 12) is None
    assert judge_distinct_rows("loss", [], [], []) is None


def test_a_lower_loss_is_better_and_a_margin_shields_a_small_one():
    sizes = [float(n) for n in range(10, 50)]
    other = [2.0 * n for n in sizes]
    change = [0.1 * n * (0.9 + 0.01 * (n % 20)) for n in sizes]
    lower, higher = ([value + sign * by for value, by in zip(other, change, strict=True)] for sign in (-1, 1))
    better, worse = judge_rows("loss", lower, other, sizes), judge_rows("loss", higher, other, sizes)
    assert (better.result, better.num_better) == ("better", 40)
    assert (worse.result, worse.num_worse) == ("worse", 40)
    assert worse.is_worse_than(0.05)
    assert not worse.is_worse_than(0.1)
    assert not better.is_worse_than(0)
    assert worse.as_record()["sentence"].startswith("loss: worse: +0.")
