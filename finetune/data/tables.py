"""Read tables: CSV and Parquet files. `readers.py` imports this module only for them."""

from __future__ import annotations

import contextlib
import csv
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from finetune.data.compressed import MOST_RATIO, most_unpacked
from finetune.data.values import CONVERT
from finetune.errors import DataError
from finetune.logs import hear_libraries
from finetune.units import format_bytes

_ROWS_AT_ONCE = 16
"""Rows of a Parquet file. Each of them may be large."""
_BLANKS = " \t\n\r\xa0\u200b\u200c\u200d\u2060\ufeff"
"""White space and invisible characters. At the ends of the name of a column, they are no part of it."""
_CONVERTED_MARK = "\xef\xbb\xbf"
"""What a byte order mark of UTF-8 becomes if the file is converted from Windows-1252."""


def csv_rows(
    lines: Callable[[], Iterator[str]], label: str, suffix: str, separator: str | None, *, most: int
) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """Yield each row of a table of text, or None and the problem that prevented reading it.

    `lines` yields the lines of the file that are still to be read, and `most` is the length of the longest cell.
    """
    csv.field_size_limit(most)  # by default, long texts are refused
    delimiter = "\t" if separator == "tab" or (separator is None and suffix == ".tsv") else separator or ","
    unmarked = (line if number else line.removeprefix(_CONVERTED_MARK) for number, line in enumerate(lines()))
    cells = csv.reader(unmarked, delimiter=delimiter, strict=True)
    try:
        header = next(cells, [])
        if header and header[0].lower().startswith("sep="):  # Excel names its separator on a first line
            named = {"tab": "\t", "\\t": "\t"}.get(header[0][4:].lower(), header[0][4:])
            if len(set(named)) > 1:  # a program may have filled the line up with separators: sep=;;;
                raise DataError(f"{label} begins with {header[0]!r}; expected one sign, such as sep=; in this line.")
            separator = named[:1] or delimiter
            cells = csv.reader(lines(), delimiter=separator, strict=True)
            header = next(cells, [])
        name = header[0] if separator is None and len(header) == 1 else ""
        other_separator = next((character for character in ";\t|," if character in name), None)
        if other_separator is not None:
            shown = "tab" if other_separator == "\t" else f"'{other_separator}'"
            raise DataError(f"{label} has one column, {header[0]!r}. If it is several, set data.separator={shown}.")
        names = (name.strip(_BLANKS) for name in header)
        columns = [name or f"(unnamed column {number})" for number, name in enumerate(names, start=1)]
        twice = [name for name, count in Counter(columns).items() if count > 1]
        if twice:
            raise DataError(f"{label} has the column {twice[0]} twice. Rename or remove one of the two.")
        for row in filter(None, cells):
            if any(row[len(columns) :]):
                yield None, f"{len(row)} cells, but the header has {len(columns)} columns"
            else:
                yield dict(zip_longest(columns, row[: len(columns)])), None
    except (UnicodeDecodeError, csv.Error) as error:
        line, problem, advice = cells.line_num, str(error), "Correct the file."
        if isinstance(error, UnicodeDecodeError):  # in the bytes after the lines that were read, several lines at once
            line += 1 + error.object.count(b"\n", 0, error.start)
            problem = f"the byte 0x{error.object[error.start]:02x} is not UTF-8 text"
            advice = f"Save it as UTF-8, which Excel calls CSV UTF-8. {CONVERT}"
        raise DataError(f"{label} cannot be read as {suffix[1:]} (line {line}): {problem}. {advice}") from None


def parquet_rows(path: Path, label: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file. A dictionary may repeat a value, so the unpacked rows are counted."""
    from datasets import Features
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile
    from pyarrow.types import is_dictionary

    most = most_unpacked(path)
    too_much = f"it unpacks to more than {format_bytes(most)}, over {MOST_RATIO} times its size"
    unpacked = 0
    try:
        with ParquetFile(path) as file:
            schema, parts = file.schema_arrow, file.metadata
            if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
                raise ValueError(f"it has the column {twice[0]} twice")
            if sum(parts.row_group(n).total_byte_size for n in range(parts.num_row_groups)) > most:
                raise ValueError(too_much)
            # A file that `datasets` wrote says which of its columns hold encoded values.
            is_from_datasets = b"huggingface" in (schema.metadata or {})
            decode = Features.from_arrow_schema(schema).decode_example if is_from_datasets else dict
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                columns = [each.dictionary_decode() if is_dictionary(each.type) else each for each in batch.columns]
                plain = RecordBatch.from_arrays(columns, schema.names)
                unpacked += plain.nbytes
                if unpacked > most:
                    raise ValueError(too_much)
                yield from map(decode, plain.to_pylist())
    except Exception as error:  # pyarrow and datasets raise many types
        cause = error.__cause__ or error
        raise DataError(f"{label} cannot be read as parquet: {type(cause).__name__}: {cause}") from error


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """Turn off the progress bars of `datasets`, and those of huggingface_hub for good: they disturb our output."""
    import datasets
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    hear_libraries()
    was_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()
