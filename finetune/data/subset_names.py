"""Name the subsets of a split that are measured beside the whole: the sources of a mixture, or the values of a column.

The names are parts of keys in metrics.jsonl: `loss/NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from finetune.data.readers import stem_of, suffix_of
from finetune.data.readers import SUFFIXES

_LONGEST = 40


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
        name = re.sub(r"[^\w.-]+", "_", "-".join(parts[-depth:]))[:_LONGEST]
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
