"""Say which files a list or a glob names, in which order, and which split of a run a file belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from glob import glob
from pathlib import Path, PurePath

from finetune.data.compressed import stem_of, suffix_of
from finetune.data.readers import SUFFIXES

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
"""The splits of a run and their usual names. `data.train`, `data.validation` and `data.test` override them."""


def is_pattern(path: str) -> bool:
    """Whether a path is a glob. The `?` of an address begins its query."""
    return "*" in path or ("://" not in path and re.search(r"\?|\[.+\]", path) is not None)


def matching(pattern: str) -> list[str]:
    """Return the files of rows that a glob matches on this machine, in the order of `in_order`."""
    found = glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 (Path.glob needs a folder)
    return in_order(name for name in found if suffix_of(name) in SUFFIXES and Path(name).is_file())


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names so that numbers in them compare as numbers: part-9 comes before part-10."""

    def key(name: str) -> tuple[list[str | int], str]:
        return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", name)], name

    return sorted(names, key=key)


def split_of(name: str) -> str | None:
    """Return the split that a file is named after: validation for `chats-dev.jsonl`. None if it names none or two."""
    parts = re.split(r"[\W_\d]+", stem_of(PurePath(name)).lower())
    splits = [split for split, words in SPLIT_NAMES.items() if not set(words).isdisjoint(parts)]
    return splits[0] if len(splits) == 1 else None


def files_of_splits(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split, given the files of a folder in order.

    A file whose whole name is a split's name (`train.jsonl`) is that split alone. Otherwise all files that are named
    after the split are its parts (`train-1.jsonl`, `train-2.jsonl`). If no file is named after a split, all of them are
    parts of the training rows.
    """
    found = {}
    for split, words in SPLIT_NAMES.items():
        alone = [name for word in words for name in names if stem_of(PurePath(name)).lower() == word]
        found[split] = alone[:1] or [name for name in names if split_of(name) == split]
    return {split: files for split, files in found.items() if files} or {"train": list(names)}
