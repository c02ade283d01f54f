"""Divide files between training, validation and test, and give rows digests and orders that are the same everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import PurePath

from finetune.data.readers import stem_of

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
"""The splits of a run and their usual names. `data.train`, `data.validation` and `data.test` override them."""


def digest_row(row: object) -> str:
    """Return a digest of a raw row: 16 bytes as hex text. It does not depend on the tokenizer or the objective."""
    return blake2b(json.dumps(row, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


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
    words = {name: _words_in(stem) for name, stem in stems.items()}
    splits = {name: [split for split, usual in SPLIT_NAMES.items() if words[name] & set(usual)] for name in names}
    files_of = {}
    for split, usual in SPLIT_NAMES.items():
        alone = [name for word in usual for name in names if stems[name] == word]
        files_of[split] = alone[:1] or [name for name in names if splits[name] == [split]]
    return {split: files for split, files in files_of.items() if files} or {"train": list(names)}


def names_split(path: str) -> bool:
    """Return whether a file, or a folder in its path, is named after a split."""
    words = _words_in(path.lower())
    return any(words & set(usual) for usual in SPLIT_NAMES.values())


def _words_in(name: str) -> set[str]:
    return set(re.split(r"[\W_\d]+", name))
