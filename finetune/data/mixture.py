"""The sources of `data.mixture`: their names, their data sections, and their rows one after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from finetune.config.schema import AUTO_VALIDATION, DataSection
from finetune.data.formats import Example
from finetune.data.readers import SUFFIXES, stem_of, suffix_of
from finetune.data.rows import Examples, SequenceOfRows
from finetune.data.splits import SPLIT_NAMES

_LONGEST_NAME = 40


def section_of_source(section: DataSection, source: Mapping[str, Any]) -> DataSection:
    """Return the data section of one source of a mixture."""
    keys = {
        key: str(value) if key in SPLIT_NAMES and isinstance(value, (int, float)) else value
        for key, value in source.items()
        if key != "weight"
    }
    validation = None if section.validation == AUTO_VALIDATION else section.validation
    return section.model_copy(update={"validation": validation, **keys, "mixture": []})


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


class JoinedExamples(SequenceOfRows):
    """The rows of a split that has several sources, one source after the other, each row once whatever its weight."""

    def __init__(self, parts: Sequence[Examples]) -> None:
        self.parts = tuple(parts)

    @property
    def label(self) -> str:
        """The sources as the user would name them."""
        return " + ".join(part.label for part in self.parts)

    @cached_property
    def rows(self) -> list[Example]:
        """All rows, see `Examples.rows`."""
        return [row for part in self.parts for row in part.rows]
