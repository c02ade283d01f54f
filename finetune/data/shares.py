"""Shares of the training rows for validation and test. Their rows are a function of (seed, number of rows)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from finetune.errors import DataError

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?")
_TAKEN_IN_THIS_ORDER = ("test", "validation", "train")  # a share for validation never changes the test rows


@dataclass(frozen=True)
class Share:
    """A number of rows, or a fraction of them."""

    text: str
    """As the user wrote it: `0.05`, `5%` or `200`."""
    rows: int = 0
    fraction: float = 0.0

    def of(self, num_rows: int) -> int:
        """Return the share as a number of rows, rounded to the nearest and at least one."""
        return self.rows or max(1, int(self.fraction * num_rows + 0.5))


def rows_of_split(num_rows: int, *, split: str, shares: Mapping[str, Share], seed: int, label: str) -> list[int]:
    """Return the rows of one split in ascending order.

    Args:
        num_rows: all rows of the source.
        split: train, validation or test; train has the remaining rows.
        shares: the share of each other split.
        seed: data.split_seed.
        label: names the rows in messages.

    Raises:
        DataError: no row is left to train on.
    """
    counts = {name: share.of(num_rows) for name, share in shares.items()}
    counts["train"] = num_rows - sum(counts.values())
    if counts["train"] <= 0:
        asked = " and ".join(f"data.{name}={share.text}" for name, share in sorted(shares.items()))
        leave = "leaves" if len(shares) == 1 else "leave"
        raise DataError(f"{label} has {num_rows:,} rows, and {asked} {leave} none to train on. Put fewer aside.")
    before = _TAKEN_IN_THIS_ORDER[: _TAKEN_IN_THIS_ORDER.index(split)]
    start = sum(counts.get(name, 0) for name in before)
    return sorted(shuffled(num_rows, seed)[start : start + counts[split]])


def read_share(text: str, split: str) -> Share | None:
    """Read `0.05`, `5%` or `200`; None if the text is not a number.

    Raises:
        DataError: the number is not a valid share.
    """
    number = text.strip().removesuffix("%")
    if not _NUMBER.fullmatch(number):
        return None
    if number.isdigit() and number == text.strip() and int(number) > 0:
        return Share(text, rows=int(number))
    fraction = float(number) / 100 if text.strip().endswith("%") else float(number)
    if not 0 < fraction < 1:
        raise DataError(
            f"data.{split} is {text}: expected a share of the training rows above 0 and below 1 (0.05 or 5%), a "
            "number of rows (200), the name of a split, or a file."
        )
    return Share(text, fraction=fraction)


def shuffled(num_rows: int, seed: int) -> list[int]:
    """Return the rows from 0 in an order that depends only on the seed, on every machine and in every version."""
    key = seed.to_bytes(8, "little")
    return sorted(range(num_rows), key=lambda row: blake2b(row.to_bytes(8, "little"), key=key, digest_size=16).digest())
