"""Read raw rows from a file, which may be compressed, each with its line or row number."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BufferedReader, TextIOWrapper
from pathlib import Path, PurePath
from typing import IO, Any, AnyStr, Protocol

from finetune.data.values import CONVERT, DuplicateKeyError, refuse_constant, with_unique_keys
from finetune.errors import DataError
from finetune.runs.durable import describe_os_error

_MODULES = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "backports.zstd"}
"""The module that opens each. The package zstandard is no choice for the last: it takes a file that was cut short for a
whole one. fsspec's own decompression falls back to it."""
_FIRST_BYTES = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zX": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
JSON_LINES = (".jsonl", ".ndjson")
SUFFIXES = (*JSON_LINES, ".json", ".csv", ".tsv", ".parquet")
"""The suffixes of files that can be read."""
MOST_OF_A_LINE = 128 << 20
"""The longest line of a file, in bytes, and the longest cell of a table, in characters."""
_LIST_START = re.compile(r'\s*(\{\s*"data"\s*:\s*)?\[')
_JSON_EXPECTED = 'Expected a list of rows, an object {"data": [rows]}, or one row per line. Correct the file.'
_LINES_EXPECTED = (
    "Write each row on one line, as json.dumps and `jq -c .` do, without commas between rows. A file that is one list "
    "of rows must end in .json."
)
_USUAL_CAUSES = ("the text ends before the value does", "a comma that nothing follows", "the text of a Python object")
"""Mistakes that the messages of Python's reader do not name. If the first line has one, so have the others."""
_BETWEEN_ROWS = re.compile(r"[\s,]*")
_STRAY_COMMA = re.compile(r",\s*([}\]]|$)")
_DECODER = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=with_unique_keys)


@lru_cache  # a row is named by the suffix of its file
def suffix_of(path: PurePath | str) -> str:
    """Return the suffix that says what a file holds, in lower case: `.jsonl` for `rows.jsonl` and `rows.JSONL.gz`."""
    path = PurePath(path)
    return (PurePath(path.stem) if is_compressed(path) else path).suffix.lower()


def suffixes_of(path: PurePath | str) -> str:
    """Return the suffixes that say how to read a file: `.jsonl.gz` for `rows.jsonl.gz`."""
    path = PurePath(path)
    return suffix_of(path) + (path.suffix.lower() if is_compressed(path) else "")


def stem_of(path: PurePath) -> str:
    """Return the name of a file without its suffixes."""
    return PurePath(path.stem).stem if is_compressed(path) else path.stem


def is_compressed(path: PurePath) -> bool:
    """Whether the suffix of a file says that it is compressed."""
    return path.suffix.lower() in _MODULES


@contextlib.contextmanager
def opened(path: Path, label: str) -> Iterator[IO[bytes]]:
    """Open a file of UTF-8 text, through its compression if it has one. Memory does not grow with its size.

    Raises:
        DataError: also inside the block: the file cannot be read, is cut short or damaged, unpacks to far more than
            text does, or a package is missing. Or its first bytes are those of compressed data or of UTF-16.
    """
    try:
        if is_compressed(path):
            from finetune.data.compressed import decompressed

            with decompressed(path, _MODULES[path.suffix.lower()], label, check=_refuse_other_bytes) as unpacked:
                yield unpacked
        else:
            with path.open("rb") as file:
                _refuse_other_bytes(file, label)
                yield file
    except OSError as error:
        raise DataError(f"{label} cannot be read: {describe_os_error(error)}.") from error


def _refuse_other_bytes(file: IO[bytes], label: str) -> None:
    start = file.read(4)
    file.seek(0)
    suffix = next((suffix for first_bytes, suffix in _FIRST_BYTES.items() if start.startswith(first_bytes)), None)
    if suffix is not None:
        raise DataError(f"{label} holds data that is compressed as {suffix}. Rename it to {label}{suffix}.")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start:
        raise DataError(f"{label} is text in UTF-16; expected UTF-8. Convert it: `iconv -f UTF-16 -t UTF-8 OLD > NEW`.")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it was read: its value, or the problem that prevented reading it."""

    number: int
    """Line of the file, or place in the list or table, from 1. Unique and ascending within a source: encoded rows of
    one number are the answers of one example."""
    value: Any
    problem: str | None = None
    is_table: bool = False
    """Whether it is a row of a table without types (CSV): every cell is text."""


@dataclass(frozen=True)
class FileRows:
    """The rows of one file, read by its suffix when `digest` or `rows` is called."""

    path: Path
    label: str
    """The file as the user would name it."""
    is_copy: bool = False
    """Whether the file is our own copy of the rows. Its line numbers are then left out of messages."""
    separator: str | None = None
    """The character between the cells of a CSV file, or `tab`. None: a comma, or a tab in a .tsv file."""

    def place(self, number: int) -> str:
        """Name one row: `orders/train.jsonl:17`, or `orders/train.csv row 17`."""
        has_lines = suffix_of(self.path) in JSON_LINES and not self.is_copy
        return f"{self.label}:{number}" if has_lines else f"{self.label} row {number}"

    def check(self) -> None:
        """Refuse a file that cannot be opened. Raises the error of `digest`."""
        with self._open():
            pass

    def digest(self) -> str:
        """Compute a SHA-256 over the bytes of the file, its suffixes, and the separator if one is given.

        Raises:
            DataError: the file cannot be read.
        """
        with self._open() as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update((suffixes_of(self.path) + (self.separator or "")).encode())
        return digest.hexdigest()

    def rows(self) -> Iterator[RawRow]:
        """Yield every row, also rows that cannot be read.

        Raises:
            DataError: the file as a whole does not have the format of its suffix, or cannot be decompressed.
        """
        suffix = suffix_of(self.path)
        if suffix in (".csv", ".tsv"):
            return _read_csv(self.path, self.label, self.separator)
        read = {".json": _read_json, ".parquet": _read_parquet}.get(suffix, _read_json_lines)
        return read(self.path, self.label)

    @contextlib.contextmanager
    def _open(self) -> Iterator[BufferedReader]:
        try:
            with self.path.open("rb") as file:
                yield file
        except OSError as error:
            name = self.path if self.is_copy else self.label
            raise DataError(f"{name} cannot be read: {describe_os_error(error)}.") from error


class RowSource(Protocol):
    """The rows of one split, wherever they are: in a file here, at an address, in several files, or in a data set."""

    @property
    def label(self) -> str:
        """The file as the user would name it."""

    def place(self, number: int) -> str:
        """Name one row in messages."""

    def check(self) -> None:
        """Refuse a file that cannot be opened."""

    def digest(self) -> str:
        """Compute a SHA-256 over the bytes of the file and what decides how they are read."""

    def rows(self) -> Iterator[RawRow]:
        """Yield every row, also rows that cannot be read."""


_BITS_OF_A_NUMBER = 40
"""A row of `JoinedRows` has the number of its part above these bits, and its own number in them."""


@dataclass(frozen=True)
class JoinedRows:
    """The rows of several files, one file after the other, as one source."""

    parts: Sequence[RowSource]
    label: str

    def place(self, number: int) -> str:
        """Name one row by its own file; see `FileRows.place`."""
        return self.parts[number >> _BITS_OF_A_NUMBER].place(number & ((1 << _BITS_OF_A_NUMBER) - 1))

    def check(self) -> None:
        """Refuse a file that cannot be opened. Raises the error of `digest`."""
        for part in self.parts:
            part.check()

    def digest(self) -> str:
        """Compute a SHA-256 over the digests of the files, in their order. Raises their errors."""
        return hashlib.sha256("".join(part.digest() for part in self.parts).encode()).hexdigest()

    def rows(self) -> Iterator[RawRow]:
        """Yield every row of every file. Raises the errors of `FileRows.rows`."""
        for index, part in enumerate(self.parts):
            for row in part.rows():
                yield replace(row, number=(index << _BITS_OF_A_NUMBER) + row.number)


def _read_json_lines(path: Path, label: str) -> Iterator[RawRow]:
    """Read one row per line; blank lines are skipped but counted."""
    with opened(path, label) as file:
        is_first = True
        for number, line in enumerate(_lines(file, label), start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                row = parse_line(number, line)
                problem = "a list; expected an object" if isinstance(row.value, list) else row.problem or ""
                if is_first and any(cause in problem for cause in ("a list; ", *_USUAL_CAUSES)):
                    raise DataError(f"{label}:{number}: {problem}. {_LINES_EXPECTED}")
                if is_first:
                    _refuse_columns(row.value, label)
                is_first = False
                yield row


def _lines(file: IO[AnyStr], label: str) -> Iterator[AnyStr]:
    """Yield the lines of a file. Raises DataError for a line that would fill the memory."""
    number = 0
    while line := file.readline(MOST_OF_A_LINE + 1):
        number += 1
        if len(line) > MOST_OF_A_LINE:
            raise DataError(
                f"{label}:{number}: the line has more than {MOST_OF_A_LINE:,} characters, the most that are read. "
                "Write each row on a line of its own, and cut longer texts."
            )
        yield line


def parse_line(number: int, line: bytes) -> RawRow:
    """Read a line of JSON as one row."""
    try:
        return RawRow(number, _DECODER.decode(line.rstrip().decode("utf-8")))
    except UnicodeDecodeError as error:
        problem = f"the line is not UTF-8 text (byte {error.start + 1}); expected UTF-8. {CONVERT}"
    except json.JSONDecodeError as error:
        cause = _usual_cause(error) or error.msg
        problem = f"not JSON: {cause} at column {error.colno}; expected one JSON object per line"
    except DuplicateKeyError as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem = f"not JSON: {error}; expected one JSON object per line"
    return RawRow(number, None, problem)


def _usual_cause(error: json.JSONDecodeError) -> str:
    """Return the one of `_USUAL_CAUSES` that explains an error; empty if none does."""
    text, position = error.doc, error.pos
    too_short, comma, is_python = _USUAL_CAUSES
    if not text[position:].strip():
        return too_short
    if _STRAY_COMMA.match(text, max(0, text.rfind(",", 0, position + 1))):
        return comma
    return is_python if text.startswith(("'", "None", "True", "False"), position) else ""


def _read_json(path: Path, label: str) -> Iterator[RawRow]:
    """Read a list of rows, an object `{"data": [rows]}`, or JSON lines with this suffix (common on the hub)."""
    try:
        with opened(path, label) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{label}: byte {error.start + 1} is not UTF-8. {CONVERT}") from None
    start = _LIST_START.match(text)
    if not start:
        with contextlib.suppress(ValueError, RecursionError):  # several objects are rows
            _refuse_columns(_DECODER.decode(text), label)
        return (replace(row, number=number) for number, row in enumerate(_read_json_lines(path, label), start=1))
    try:
        rows = _DECODER.decode(text)
    except DuplicateKeyError as error:
        raise DataError(f"{label}:{_line_of_bad_row(text, start.end())}: in this row, {error}.") from None
    except (ValueError, RecursionError) as error:  # a JSONDecodeError names line and column
        cause = isinstance(error, json.JSONDecodeError) and _usual_cause(error)
        raise DataError(f"{label} is not JSON ({f'{cause}: ' if cause else ''}{error}). {_JSON_EXPECTED}") from None
    if isinstance(rows, dict):
        if list(rows) != ["data"]:
            raise DataError(f"{label} has the keys {', '.join(rows)}. {_JSON_EXPECTED}")
        rows = rows["data"]
    return (RawRow(number, row) for number, row in enumerate(rows, start=1))


def _refuse_columns(first: object, label: str) -> None:
    """Refuse a file if its first object holds the columns of a table, as pandas and `datasets` write them."""
    values = list(first.values()) if isinstance(first, dict) else []
    lists = [value for value in values if isinstance(value, list) and value]
    kinds = {type(item) for value in lists for item in value}
    are_lists = len(lists) == len(values) and (kinds == {list} or (kinds <= {list, str} and len(values) > 1))
    if values and (are_lists or all(isinstance(value, dict) and "0" in value for value in values)):
        raise DataError(
            f"{label} is written by columns: each of {', '.join(map(str, first))} holds the values of all rows. Write "  # type: ignore[call-overload]
            "rows: with pandas, df.to_json(path, orient='records', lines=True) into a .jsonl file."
        )


def _line_of_bad_row(text: str, position: int) -> int:
    """Return the line on which the first row begins that cannot be read. `position` is behind the list's `[`."""
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            position = _BETWEEN_ROWS.match(text, position).end()  # type: ignore[union-attr]  # it matches nothing too
            _, position = _DECODER.raw_decode(text, position)
    return text.count("\n", 0, position) + 1


def _read_csv(path: Path, label: str, separator: str | None) -> Iterator[RawRow]:
    """Read a table of text. Every cell stays the text it is: `007` and `null` too."""
    from finetune.data.tables import csv_rows  # few runs read a table

    with opened(path, label) as file, TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        rows = csv_rows(partial(_lines, text, label), label, suffix_of(path), separator, most=MOST_OF_A_LINE)
        for number, (row, problem) in enumerate(rows, start=1):
            yield RawRow(number, row, problem, is_table=problem is None)


def _read_parquet(path: Path, label: str) -> Iterator[RawRow]:
    """Read a Parquet file a few rows at a time."""
    from finetune.data.tables import parquet_rows

    if is_compressed(path):
        raise DataError(f"{label} is compressed, but a Parquet file is compressed inside. Decompress it.")
    yield from (RawRow(number, row) for number, row in enumerate(parquet_rows(path, label), start=1))
