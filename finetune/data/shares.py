"""A share of the training rows, put aside to measure on: which ones is a function of (seed, number of rows)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from finetune.errors import DataError

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?")
_TAKEN_IN_THIS_ORDER = ("test", "validation")  # so that a share to validate on never moves the rows to test on


@dataclass(frozen=True)
class Share:
    """So many rows, or so much of them."""

    text: str
    """As the user wrote it: `0.05`, `5%` or `200`."""
    rows: int = 0
    fraction: float = 0.0

    def of(self, num_rows: int) -> int:
        """How many rows that is, rounded to the nearest and at least one."""
        return self.rows or max(1, int(self.fraction * num_rows + 0.5))


@dataclass(frozen=True)
class ShareChoice:
    """The rows of one split where shares of the training rows are put aside. A `RowChoice`.

    Attributes:
        split: train, validation or test.
        shares: what is put aside, by split.
        seed: data.split_seed.
        label: names the rows in messages.
    """

    split: str
    shares: Mapping[str, Share]
    seed: int
    label: str

    def indices(self, num_rows: int) -> list[int]:
        """See `RowChoice.indices`.

        Raises:
            DataError: nothing is left to train on.
        """
        order = shuffled(num_rows, self.seed)
        start = 0
        for split in _TAKEN_IN_THIS_ORDER:
            if split in self.shares:
                stop = start + self.shares[split].of(num_rows)
                if split == self.split:
                    self._refuse_if_none_left(num_rows)
                    return sorted(order[start:stop])
                start = stop
        self._refuse_if_none_left(num_rows)
        return sorted(order[start:])

    def _refuse_if_none_left(self, num_rows: int) -> None:
        if sum(share.of(num_rows) for share in self.shares.values()) >= num_rows:
            asked = " and ".join(f"data.{split}={share.text}" for split, share in sorted(self.shares.items()))
            raise DataError(
                f"{self.label} has {num_rows:,} rows, of which {asked} leaves none to train on. Put fewer aside."
            )


def read_share(text: str, split: str) -> Share | None:
    """What `0.05`, `5%` or `200` asks for; None where the text is no number.

    Raises:
        DataError: it is a number, but no share.
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
    """The rows from 0 in an order that depends on the seed alone, on every machine and in every version."""
    key = seed.to_bytes(8, "little")
    return sorted(range(num_rows), key=lambda row: blake2b(row.to_bytes(8, "little"), key=key, digest_size=16).digest())
