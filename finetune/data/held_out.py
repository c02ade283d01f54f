"""Hold rows out of the training rows, for validation and test.

Each row is ranked by a hash of its content with `data.split_seed`, and the first rows are held out. So a row keeps its
split when other rows are added, removed or moved. Equal rows have equal ranks, so they are in one split, unless the
size of a split ends between them. `data.validation=auto` has no exact size, so it takes such rows too, up to 200 rows.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from finetune.config.schema import AUTO_VALIDATION
from finetune.data.splits import shuffled
from finetune.errors import DataError
from finetune.units import counted

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?")
_HELD_OUT_IN_THIS_ORDER = ("test", "validation", "train")  # the validation size never changes the test rows
AUTO_NEEDS_ROWS = 40
"""`data.validation=auto` holds no row out of fewer rows."""
_AUTO_MOST_ROWS = 200
_ranked: dict[bytes, Sequence[int]] = {}
"""Rows that `_rank` has ranked: all splits of a source, and both sides of a pair, are parts of the same rows."""
_MOST_RANKED = 16


@dataclass(frozen=True)
class SplitSize:
    """The size of a split that is held out of the training rows: a number of rows, or a fraction of them."""

    text: str
    """As the user wrote it: `0.05`, `5%` or `200`; or `auto`."""
    rows: int = 0
    fraction: float = 0.0

    def of(self, num_rows: int) -> int:
        """Return the size as a number of rows. A fraction is rounded to the nearest number, and is at least one row."""
        if self.text == AUTO_VALIDATION:
            return min(max(8, int(0.05 * num_rows + 0.5)), _AUTO_MOST_ROWS) if num_rows >= AUTO_NEEDS_ROWS else 0
        return self.rows or max(1, int(self.fraction * num_rows + 0.5))


def rows_of_split(
    digests: Sequence[str], *, split: str, sizes: Mapping[str, SplitSize], rule: str, seed: int, label: str
) -> list[int]:
    """Return the rows of one split in ascending order. The split train has the rows that the others leave.

    `digests` has the `digest_row` of each row, and `sizes` the size of each other split. `rule` is `data.split_rule`,
    and `label` names the rows in messages.

    Raises:
        DataError: no row is left to train on.
    """
    num_rows, ranked = len(digests), _rank(digests, rule, seed)
    counts = {name: size.of(num_rows) for name, size in sizes.items()}
    if counts.get("validation") and sizes["validation"].text == AUTO_VALIDATION:
        start = end = sum(counts.values())
        most = min(num_rows, end + _AUTO_MOST_ROWS - counts["validation"])
        while end < most and digests[ranked[end - 1]] == digests[ranked[end]]:
            end += 1
        if end < num_rows:  # else equal rows are all that is left to train on, and they are parted
            counts["validation"] += end - start
    counts["train"] = num_rows - sum(counts.values())
    if counts["train"] <= 0:
        settings = " and ".join(f"data.{name}={size.text}" for name, size in sorted(sizes.items()))
        leave = "leaves" if len(sizes) == 1 else "leave"
        raise DataError(
            f"{label} has {counted(num_rows, 'row')}, and {settings} {leave} none to train on. Hold fewer out."
        )
    before = _HELD_OUT_IN_THIS_ORDER[: _HELD_OUT_IN_THIS_ORDER.index(split)]
    start = sum(counts.get(name, 0) for name in before)
    return sorted(ranked[start : start + counts[split]])


def _rank(digests: Sequence[str], rule: str, seed: int) -> Sequence[int]:
    """Return the rows in the order in which they are held out. The same rows are ranked once."""
    asked = blake2b("".join([rule, f"{seed},", *digests]).encode(), digest_size=16).digest()
    ranked = _ranked.get(asked)
    if ranked is None:
        if rule == "position":
            order = shuffled(len(digests), seed)
        else:  # equal rows keep their order
            key = seed.to_bytes(8, "little")
            ranks = [blake2b(bytes.fromhex(digest), key=key, digest_size=16).digest() for digest in digests]
            order = sorted(range(len(digests)), key=ranks.__getitem__)
        if len(_ranked) >= _MOST_RANKED:
            _ranked.clear()
        ranked = array("I", order)
        _ranked[asked] = ranked
    return ranked


def parse_split_size(text: str, split: str) -> SplitSize | None:
    """Parse `0.05`, `5%` or `200`; None if the text is not a number.

    Raises:
        DataError: the number is not a valid size.
    """
    number = text.strip().removesuffix("%")
    if not _NUMBER.fullmatch(number):
        return None
    if number.isdigit() and number == text.strip() and int(number) > 0:
        return SplitSize(text, rows=int(number))
    fraction = float(number) / 100 if text.strip().endswith("%") else float(number)
    if not 0 < fraction < 1:
        raise DataError(
            f"data.{split} is {text}: expected a fraction of the training rows above 0 and below 1 (0.05 or 5%), a "
            "number of rows (200), the name of a split, a file, or none."
        )
    return SplitSize(text, fraction=fraction)
