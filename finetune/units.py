"""Format durations, sizes in bytes, and lists of names and ranks for messages, logs and pages; divide and round up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

_MOST_RANKS = 8


def ceil_div(number: int, divisor: int) -> int:
    """Return a quotient of integers, rounded up."""
    return -(-number // divisor)


def ceil_bucket(number: int) -> int:
    """Return a positive number, rounded up to a power of two or to three quarters of one: 1, 2, 3, 4, 6, 8, 12, 16."""
    power = 1 << (number - 1).bit_length()
    return next(bucket for bucket in (power * 3 // 4, power) if bucket >= number)


def ceil_share(share: float, number: int) -> int:
    """Return a share of a number, rounded up. The decimal digits of the share count: 0.07 of 100 is 7, not 8."""
    return math.ceil(Fraction(repr(share)) * number)


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: `1 step`, `1,200 steps`, `2 processes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def name_first(names: Sequence[str], most: int, *, separator: str = ", ") -> str:
    """Join the first names of a list, and say how many more there are: `a, b and 3 more`."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units: `2 h 1 min`, `1 min 1 s`, `45 s`, `0.4 s`."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_bytes(num_bytes: float) -> str:
    """Format a size with three digits in decimal units: `1.23 MB`."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    size, unit = num_bytes / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if size < 999.5:  # three digits would show it as 1000
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks for a message: `rank 1`, `ranks 0, 2` or `none`. At most eight are named by number."""
    numbers = sorted(ranks)
    if not numbers:
        return "none"
    more = f" and {len(numbers) - _MOST_RANKS} others" if len(numbers) > _MOST_RANKS else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_MOST_RANKS]))}{more}"
