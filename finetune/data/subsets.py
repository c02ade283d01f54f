"""Divide the rows of a split by the values of a column (`validation.by`), to measure the rows of each value.

The cache of encoded rows does not hold this column, so the rows are read again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.mixture import unique_names
from finetune.data.values import quote
from finetune.errors import DataError
from finetune.logs import waiting

if TYPE_CHECKING:
    from finetune.config.schema import DataSection

MOST_VALUES = 32
"""The most different values of a column: more cannot be read in a live view, and are rarely categories."""


@waiting("reading the column of validation.by")
def by_column(section: DataSection, column: str, splits: Mapping[str, EncodedExamples]) -> dict[str, EncodedExamples]:
    """Return the splits, by name, with a subset for each value that a column has in their files.

    Raises:
        DataError: a row has no text, number or truth value there, or the values are too many.
    """
    places = {name: list(map(rows.source, range(len(rows)))) for name, rows in splits.items()}
    values = _read_values(section, column, {place for of_split in places.values() for place in of_split})
    with_subsets = {}
    for name, of_split in places.items():
        lacking = [place for place in of_split if place not in values]
        if lacking:
            raise DataError(
                f"validation.by is {column}, but {len(set(lacking)):,} of {len(set(of_split)):,} {name} rows have no "
                f"value in such a column; the first is {lacking[0]}. Name a column that every row has, or add it."
            )
        different = sorted({values[place] for place in of_split})
        if len(different) > MOST_VALUES:
            raise DataError(
                f"validation.by is {column}, which has {len(different):,} different values in the {name} rows "
                f"({', '.join(map(quote, different[:3]))}, ...). At most {MOST_VALUES} can be reported. Name a column "
                "with fewer values, for example a language or a source."
            )
        index = {value: place for place, value in enumerate(different)}
        subset = torch.tensor([index[values[place]] for place in of_split], dtype=torch.int16)
        with_subsets[name] = replace(
            splits[name], subset=subset, subset_names=tuple(unique_names([[value] for value in different]))
        )
    return with_subsets


def _read_values(section: DataSection, column: str, places: Collection[str]) -> dict[str, str]:
    """Return the value of the column in each of the rows at these places that has one."""
    values: dict[str, str] = {}
    for examples in load_examples(section).wholes():
        for row in islice(examples.source.rows(), examples.max_rows):
            place = examples.source.place(row.number)
            value = row.value.get(column) if place in places and isinstance(row.value, Mapping) else None
            if value is None or (isinstance(value, str) and not value.strip()):
                continue
            if not isinstance(value, (str, int, float)):
                raise DataError(
                    f"validation.by is {column}, but {place} has {quote(value)} there; expected text, a number, or "
                    "true or false."
                )
            values[place] = str(value).lower() if isinstance(value, bool) else str(value).strip()
    return values
