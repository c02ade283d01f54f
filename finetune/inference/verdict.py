"""Decide from the same rows whether one model is better than another: difference, interval, p-value, rows needed.

Two tests, each with an interval that leaves out 0 exactly where p <= 0.05:

- Values of 0 and 1, or at least two rows that differ, all by the same amount: the exact sign test (exact McNemar test)
  on the rows that differ. The interval is this amount times the product of two Clopper-Pearson intervals: for the
  share of rows that differ, and for the share of better rows among them.
- All other values: the symmetric bootstrap-t over rows (Hall, "On symmetric bootstrap confidence intervals", J. R.
  Stat. Soc. B 50, 1988). The usual percentile bootstrap covers too little with few rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.units import counted

LEVEL = 0.05
LOWER_IS_BETTER = frozenset({"loss"})
_RESAMPLES = 4_999
_DRAWN_AT_ONCE = 2_000_000
_ROUNDING = 1e-9
"""Changes of rows that differ by less, as a share of their size, count as equal."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PairedVerdict:
    """The paired comparison of two models by one metric."""

    metric: str
    difference: float
    """The judged model minus the other one, in the metric's unit; nan if a value is not finite."""
    low: float | None
    """The 95 % interval of the difference; None where too few rows differ to bound it."""
    high: float | None
    p_value: float
    num_better: int
    num_worse: int
    num_equal: int
    rows_needed: int | None
    """How many rows would show a difference of this size in 80 of 100 cases; None without a difference or interval."""
    num_not_finite: int = 0
    """Rows that cannot be compared, because a value is not finite."""
    num_copies: int = 0
    """Rows that are copies of an earlier row. All other fields leave them out."""

    @property
    def result(self) -> Literal["better", "worse", "no difference", "not comparable"]:
        """What these rows show at the 5 % level."""
        if self.num_not_finite:
            return "not comparable"
        if self.p_value > LEVEL:
            return "no difference"
        return "worse" if (self.difference > 0) == (self.metric in LOWER_IS_BETTER) else "better"

    def is_worse_than(self, margin: float) -> bool:
        """Return whether the whole interval lies beyond the margin on the bad side, or a value is not finite."""
        if self.low is None or self.high is None:
            return self.num_not_finite > 0
        return self.low > margin if self.metric in LOWER_IS_BETTER else self.high < -margin

    def __str__(self) -> str:
        """Return a sentence without the metric's name."""
        text: str = self.result
        counts = f"{counted(self.num_better, 'row')} better, {self.num_worse:,} worse, {self.num_equal:,} equal"
        copies = f"; copies of these rows, which do not count again: {self.num_copies:,}" if self.num_copies else ""
        if self.num_not_finite:
            return f"{text}: {counts}, {self.num_not_finite:,} with a value that is not finite{copies}"
        if self.p_value > LEVEL:
            num_rows = self.num_better + self.num_worse + self.num_equal
            text += f" that {counted(num_rows, 'row')} could show"
            if self.rows_needed is not None and self.rows_needed > num_rows:
                text += f" (about {self.rows_needed:,} rows would show one of this size)"
        interval = "unknown" if self.low is None else f"{self.low:+.4f} to {self.high:+.4f}"
        return f"{text}: {self.difference:+.4f}, 95 % interval {interval}, p = {self.p_value:.2g}; {counts}{copies}"

    def as_record(self) -> dict[str, Any]:
        """Return plain values, with the result and the sentence."""
        return {**asdict(self), "result": self.result, "sentence": f"{self.metric}: {self}"}


def judge_rows(
    metric: str, judged: Sequence[float], other: Sequence[float], weights: Sequence[float] = ()
) -> PairedVerdict:
    """Compare two models on the same rows.

    Args:
        metric: its name. The loss is better if it is lower, every other metric if it is higher.
        judged: the values of the judged model, one for each row; at least two rows.
        other: the values of the model that it is compared with.
        weights: the size of each row, for a ratio of sums: `sum(values) / sum(weights)`. Empty: a mean over rows.
    """
    first, second = np.asarray(judged, np.float64), np.asarray(other, np.float64)
    sizes = np.asarray(weights, np.float64) if len(weights) else np.ones(len(first))
    delta = np.where(np.isfinite(first) & np.isfinite(second), first, math.nan) - second
    difference, error = (float(value[0]) for value in _ratio(delta[None], sizes[None]))
    num_more, num_less = int((delta > 0).sum()), int((delta < 0).sum())
    changes = np.abs(delta[delta != 0])
    # All rows that differ may change by the same amount. Shares would change by 1, even if no row differs.
    are_shares = bool(np.isin([first, second], (0.0, 1.0)).all())
    change = float(changes.max(initial=float(are_shares)))
    is_unit = not len(weights) and (are_shares or len(changes) > 1)  # one row does not tell how far others may change
    low, high, p_value = _sign_test(num_more, num_less, len(delta))
    if math.isnan(difference):
        low, high, p_value = math.nan, math.nan, 1.0
    elif not len(changes) or (is_unit and float(changes.min()) >= change * (1 - _ROUNDING)):
        low, high = change * low + 0.0, change * high + 0.0  # 0.0 instead of -0.0
    else:
        low, high, p_value = _bootstrap_t(delta, sizes, difference, error, is_clear=p_value <= LEVEL)
    num_better, num_worse = (num_less, num_more) if metric in LOWER_IS_BETTER else (num_more, num_less)
    is_bounded = math.isfinite(low)
    return PairedVerdict(
        metric=metric,
        difference=difference,
        low=low if is_bounded else None,
        high=high if is_bounded else None,
        p_value=p_value,
        num_better=num_better,
        num_worse=num_worse,
        num_equal=int((delta == 0).sum()),
        rows_needed=_rows_needed(delta, sizes, difference, error) if is_bounded and difference else None,
        num_not_finite=int(np.isnan(delta).sum()),
    )


def judge_distinct_rows(
    metric: str,
    judged: Sequence[float],
    other: Sequence[float],
    contents: Sequence[Hashable],
    weights: Sequence[float] = (),
) -> PairedVerdict | None:
    """Compare two models on the rows with different contents. Return None if there are fewer than two.

    Losses and greedy answers depend on the content of a row alone, so its copies say nothing more about chance. The
    first of equal rows stands for all of them. For the other arguments, see `judge_rows`.
    """
    first_of: dict[Hashable, int] = {}
    for row, content in enumerate(contents):
        first_of.setdefault(content, row)
    rows = [*first_of.values()]
    if len(rows) < 2:
        return None
    first, second = ([values[row] for row in rows] for values in (judged, other))
    verdict = judge_rows(metric, first, second, [weights[row] for row in rows] if len(weights) else ())
    return replace(verdict, num_copies=len(contents) - len(rows))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of these values; 0 below two, nan if one is not finite."""
    each = np.asarray([values], np.float64)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return float(_ratio(each, np.ones_like(each))[1][0]) if len(values) > 1 else 0.0


def _sign_test(num_more: int, num_less: int, num_rows: int) -> tuple[float, float, float]:
    """Return the interval of the difference of two shares, and the p-value of the exact two-sided sign test.

    The difference is d * (2 q - 1), where d is the share of rows that differ and q the share of them with more. Its
    sign is that of q - 1/2, so the interval of q decides whether 0 is inside.
    """
    differing = num_more + num_less
    tail = _tails(differing, 0.5)[max(num_more, num_less)]
    low, high = 2 * _lower_limit(num_more, differing) - 1, 1 - 2 * _lower_limit(num_less, differing)
    few, many = _lower_limit(differing, num_rows), 1 - _lower_limit(num_rows - differing, num_rows)
    return low * (few if low > 0 else many), high * (few if high < 0 else many), min(1.0, 2 * float(tail))


def _lower_limit(count: int, num_rows: int) -> float:
    """Return the lower end of the exact interval of a share (Clopper and Pearson, Biometrika 26, 1934)."""
    low, high = 0.0, count / max(num_rows, 1)
    for _ in range(50 if count else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if _tails(num_rows, middle)[count] > LEVEL / 2 else (middle, high)
    return low


def _tails(n: int, share: float) -> Floats:
    """Return P(X >= k) for k from 0 to n, where X is binomial."""
    k = np.arange(n + 1)
    choose = np.concatenate([[0.0], np.cumsum(np.log((n - k[1:] + 1) / k[1:]))])
    weights: Floats = np.exp(choose + k * math.log(share) + (n - k) * math.log1p(-share))
    tails: Floats = np.cumsum(weights[::-1])[::-1]
    return tails


def _bootstrap_t(
    delta: Floats, sizes: Floats, estimate: float, error: float, *, is_clear: bool
) -> tuple[float, float, float]:
    """Return the symmetric bootstrap-t interval and p-value of sum(delta) / sum(sizes), with a fixed seed.

    A resample without spread counts as far away, so too few differing rows show nothing. If the sign test is clear, a
    resample may have no spread because nearly all rows change equally. It then gets the standard error of all rows.
    """
    error = max(error, _ROUNDING * abs(estimate))
    random, n = np.random.default_rng(0), len(delta)
    at_random = np.empty(0)
    while (num_left := _RESAMPLES - len(at_random)) > 0:
        rows = random.integers(n, size=(min(num_left, max(1, _DRAWN_AT_ONCE // n)), n))
        mean, spread = _ratio(delta[rows], sizes[rows])
        spread[(mean != 0) & (spread <= _ROUNDING * np.abs(mean))] = error if is_clear else 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            at_random = np.append(at_random, np.abs(mean - estimate) / spread)
    at_random[np.isnan(at_random)] = np.inf
    p_value = (1 + int((at_random >= abs(estimate) / error).sum())) / (_RESAMPLES + 1)
    reach = error * float(np.sort(at_random)[-int(LEVEL * (_RESAMPLES + 1))])
    return estimate - reach, estimate + reach, p_value


def _ratio(delta: Floats, sizes: Floats) -> tuple[Floats, Floats]:
    """Return sum(delta) / sum(sizes) of each sample, (samples, rows), and its standard error by linearisation."""
    total, n = sizes.sum(1), delta.shape[1]
    ratio = delta.sum(1) / total
    return ratio, np.sqrt(((delta - ratio[:, None] * sizes) ** 2).sum(1) * n / (n - 1)) / total


def _rows_needed(delta: Floats, sizes: Floats, estimate: float, error: float) -> int:
    """Return how many rows show a difference of this size in 80 of 100 cases, by a two-sided test at 5 %.

    n = (z(0.975) * sqrt(m) + z(0.8) * sqrt(v))^2 / difference^2, where m is the mean square of the differences of rows
    and v their variance (Connor, "Sample size for testing differences in proportions for the paired-sample design",
    Biometrics 43, 1987, which has it for shares).
    """
    square, variance = float((delta**2).mean() / sizes.mean() ** 2), len(delta) * error**2
    z = NormalDist().inv_cdf
    root = z(1 - LEVEL / 2) * math.sqrt(square) + z(0.8) * math.sqrt(variance)
    return max(6, math.ceil((root / estimate) ** 2))  # with 5, the sign test shows nothing: p = 0.06 at best
