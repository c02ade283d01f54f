"""Divide rows and files between training, validation and test, and name the parts that are measured separately.

Held-out rows: each row is ranked by a hash of its content with `data.split_seed`, and the first rows are held out. So a
row keeps its split when other rows are added, removed or moved. Equal rows have equal ranks, so they are in one split,
unless the size of a split ends between them. `data.validation=auto` has no exact size, so it takes such rows too, up to
200 rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import PurePath, PurePosixPath
from typing import Any

from finetune.config.schema import AUTO_VALIDATION
from finetune.data.readers import SUFFIXES, stem_of, suffix_of
from finetune.errors import DataError
from finetune.units import counted

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?")
_HELD_OUT_IN_THIS_ORDER = ("test", "validation", "train")  # the validation size never changes the test rows
AUTO_NEEDS_ROWS = 40
"""`data.validation=auto` holds no row out of fewer rows."""
_AUTO_MOST_ROWS = 200
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
"""The splits of a run and their usual names. `data.train`, `data.validation` and `data.test` override them."""
_LONGEST_NAME = 40


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


def digest_row(row: object) -> str:
    """Return a digest of a raw row: 16 bytes as hex text. It does not depend on the tokenizer or the objective."""
    return blake2b(json.dumps(row, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def rows_of_split(
    digests: Sequence[str], *, split: str, sizes: Mapping[str, SplitSize], rule: str, seed: int, label: str
) -> list[int]:
    """Return the rows of one split in ascending order. The split train has the rows that the others leave.

    `digests` has the `digest_row` of each row, and `sizes` the size of each other split. `rule` is `data.split_rule`,
    and `label` names the rows in messages.

    Raises:
        DataError: no row is left to train on.
    """
    num_rows = len(digests)
    if rule == "position":
        ranked = shuffled(num_rows, seed)
    else:  # equal rows keep their order
        key = seed.to_bytes(8, "little")
        ranks = [blake2b(bytes.fromhex(digest), key=key, digest_size=16).digest() for digest in digests]
        ranked = sorted(range(num_rows), key=ranks.__getitem__)
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
            "number of rows (200), the name of a split, or a file."
        )
    return SplitSize(text, fraction=fraction)


def shuffled(num_rows: int, seed: int) -> list[int]:
    """Return the rows from 0 in an order that depends only on the seed, on every machine and in every version."""
    key = seed.to_bytes(8, "little")
    return sorted(range(num_rows), key=lambda row: blake2b(row.to_bytes(8, "little"), key=key, digest_size=16).digest())


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names so that numbers in them compare as numbers: part-9 comes before part-10."""
    return sorted(names, key=lambda name: (re.sub("[0-9]+", lambda number: number[0].zfill(20), name), name))


def files_of_splits(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split: the file with its name (`dev.jsonl`), or all files with its name as a word.

    `train-1.jsonl` and `train-2.jsonl` are parts of one split. If no file is named after a split, all are for training.
    """
    stems = {name: stem_of(PurePath(name)).lower() for name in names}
    words = {name: set(re.split(r"[\W_\d]+", stem)) for name, stem in stems.items()}
    splits = {name: [split for split, usual in SPLIT_NAMES.items() if words[name] & set(usual)] for name in names}
    files_of = {}
    for split, usual in SPLIT_NAMES.items():
        alone = [name for word in usual for name in names if stems[name] == word]
        files_of[split] = alone[:1] or [name for name in names if splits[name] == [split]]
    return {split: files for split, files in files_of.items() if files} or {"train": list(names)}


def names_of_sources(mixture: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each source of `data.mixture`, in their order.

    The name is the file or folder at the end of the path. If several sources end alike, their names begin with as many
    folders above it as tell them apart.
    """
    return unique_names([_parts_of(source) for source in mixture])


def unique_names(labels: Sequence[Sequence[str]]) -> list[str]:
    """Return a different name for each label, of the last of its parts, or of as many as tell it from the others."""
    names: list[str] = []
    for parts in labels:
        depth = 1
        while depth < len(parts) and sum(other[-depth:] == parts[-depth:] for other in labels) > 1:
            depth += 1
        name = re.sub(r"[^\w.-]+", "_", "-".join(parts[-depth:]))[:_LONGEST_NAME]
        number = 2
        unique = name
        while unique in names:
            unique, number = f"{name}-{number}", number + 1
        names.append(unique)
    return names


def _parts_of(source: Mapping[str, Any]) -> list[str]:
    """Return the folders and the name of a source: `support`, `chats` for `data/support/chats.jsonl.gz`."""
    first = source["path"][0] if isinstance(source["path"], list) else source["path"]
    path = PurePosixPath(re.sub(r"^\w+:(//)?|/[^/]*\*.*", "", str(first)))  # of a glob, the folder
    last = stem_of(path) if suffix_of(path) in SUFFIXES else path.name or "source"
    folders = [part for part in path.parent.parts if part not in ("/", "..")]
    config = [str(source["name"])] if source.get("name") else []
    return [*folders, "-".join([last, *config])]
