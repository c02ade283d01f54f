"""Durations and sizes as messages show them."""

from __future__ import annotations

from finetune.units import ceil_share, counted, format_bytes, format_duration


def test_a_duration_has_its_two_largest_units():
    seconds = (-1, 0, 0.42, 9.94, 9.96, 61, 3599.6, 7300, 200_000)
    assert [format_duration(each) for each in seconds] == [
        *("0 s", "0 s", "0.42 s", "9.9 s", "10 s", "1 min 1 s", "1 h 0 min", "2 h 1 min", "55 h 33 min")
    ]


def test_a_size_has_three_digits_and_never_an_exponent():
    sizes = (0, 999, 1000, 1234, 999_499, 999_600, 82_600_000, 16e9, 1.5e12)
    assert [format_bytes(size) for size in sizes] == [
        *("0 B", "999 B", "1 kB", "1.23 kB", "999 kB", "1 MB", "82.6 MB", "16 GB", "1.5 TB")
    ]


def test_a_count_agrees_with_its_noun():
    assert [counted(n, "step") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
    assert counted(2, "process") == "2 processes"


def test_a_share_is_rounded_up_by_its_decimal_digits():
    assert [ceil_share(share, 100) for share in (0.07, 0.071, 1.5, 1e-9)] == [7, 8, 150, 1]
