"""Read raw rows from a file or a `datasets` object, each with its line or row number."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from finetune.data.compressed import is_compressed, opened, suffix_of, suffixes_of
from finetune.errors import DataError
from finetune.logs import hear_libraries
from finetune.runs.durable import describe_os_error

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""The suffixes of files that can be read."""

_LIST_START = re.compile(r'\s*(\{\s*"data"\s*:\s*)?\[')
_JSON_EXPECTED = 'Expected a list of rows, an object {"data": [rows]}, or one row per line. Correct the file.'
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it was read: its value, or the problem that prevented reading it."""

    number: int
    """Line of the file, or place in the list or table, from 1. Unique and ascending within a source: `RowTable.of`
    takes encoded rows of one number for the answers of one example."""
    value: Any
    problem: str | None = None


@dataclass(frozen=True)
class FileRows:
    """The rows of one file, read by its suffix, when `digest` or `rows` is called."""

    path: Path
    label: str
    """The file as the user would name it."""
    is_copy: bool = False
    """Whether the file is our own copy of the rows. Its line numbers are then left out of messages."""

    def place(self, number: int) -> str:
        """Name one row: `orders/train.jsonl:17`, or `orders/train.csv row 17`."""
        has_lines = suffix_of(self.path) == ".jsonl" and not self.is_copy
        return f"{self.label}:{number}" if has_lines else f"{self.label} row {number}"

    def check(self) -> None:
        """Refuse a file that cannot be opened. Raises the error of `digest`."""
        with self._open():
            pass

    def digest(self) -> str:
        """Compute a SHA-256 over the suffixes and the bytes of the file.

        Raises:
            DataError: the file cannot be read.
        """
        with self._open() as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(suffixes_of(self.path).encode())
        return digest.hexdigest()

    def rows(self) -> Iterator[RawRow]:
        """Yield every row, also rows that cannot be read.

        Raises:
            DataError: the file as a whole does not have the format of its suffix, or cannot be decompressed.
        """
        read = {".jsonl": _read_json_lines, ".json": _read_json}.get(suffix_of(self.path), _read_table)
        return read(self.path, self.label)

    @contextlib.contextmanager
    def _open(self) -> Iterator[BufferedReader]:
        try:
            with self.path.open("rb") as file:
                yield file
        except OSError as error:
            name = self.path if self.is_copy else self.label
            raise DataError(f"{name} cannot be read: {describe_os_error(error)}.") from error


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a `datasets.Dataset`."""

    dataset: Any
    label: str

    def place(self, number: int) -> str:
        """See `FileRows.place`."""
        return f"{self.label} row {number}"

    def digest(self) -> str:
        """Compute a SHA-256 over the rows in Arrow form; the library's fingerprint does not cover content."""
        digest = hashlib.sha256()
        for table in self.dataset.with_format("arrow").iter(batch_size=1000):
            digest.update(str(table.schema.remove_metadata()).encode())
            for batch in table.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return digest.hexdigest()

    def rows(self) -> Iterator[RawRow]:
        """Yield every row."""
        return (RawRow(number, row) for number, row in enumerate(self.dataset, start=1))


def _read_json_lines(path: Path, label: str) -> Iterator[RawRow]:
    """Read one row per line; blank lines are skipped but counted."""
    with opened(path, label) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield parse_line(number, line)


def parse_line(number: int, line: bytes) -> RawRow:
    """Read a line of JSON as one row."""
    try:
        return RawRow(number, _parse_json(line.rstrip().decode("utf-8")))
    except UnicodeDecodeError as error:
        problem = f"the line is not UTF-8 text (byte {error.start + 1}); expected UTF-8"
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at column {error.colno}; expected one JSON object per line"
    except (ValueError, RecursionError) as error:
        problem = f"not JSON: {error}; expected one JSON object per line"
    return RawRow(number, None, problem)


def _parse_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON value")


def _read_json(path: Path, label: str) -> Iterator[RawRow]:
    """Read a list of rows, an object `{"data": [rows]}`, or JSON lines with this suffix (common on the hub)."""
    try:
        with opened(path, label) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{label}: byte {error.start + 1} is not UTF-8. Save the file as UTF-8.") from None
    if not _LIST_START.match(text):
        return (replace(row, number=number) for number, row in enumerate(_read_json_lines(path, label), start=1))
    try:
        rows = _parse_json(text)
    except (ValueError, RecursionError) as error:  # a JSONDecodeError names line and column
        raise DataError(f"{label} is not JSON ({error}). {_JSON_EXPECTED}") from None
    if isinstance(rows, dict):
        if list(rows) != ["data"]:
            raise DataError(f"{label} has the keys {', '.join(rows)}. {_JSON_EXPECTED}")
        rows = rows["data"]
    return (RawRow(number, row) for number, row in enumerate(rows, start=1))


def _read_table(path: Path, label: str) -> Iterator[RawRow]:
    """Read a CSV or Parquet file with `datasets`, without leaving anything in its cache."""
    with tempfile.TemporaryDirectory(prefix="finetune-table-") as folder, quiet_datasets():
        if is_compressed(path):
            plain = Path(folder) / path.stem
            _decompress(path, label, plain)
            path = plain
        dataset = _load_table(path, label, folder)
        for number, row in enumerate(dataset, start=1):
            yield RawRow(number, row)


def _decompress(path: Path, label: str, plain: Path) -> None:
    plain.touch()
    with opened(path, label) as file:
        for piece in iter(partial(file.read, _PIECE_BYTES), b""):
            try:  # only around writing: `opened` handles errors of reading
                with plain.open("ab") as copy:
                    copy.write(piece)
            except OSError as error:
                raise DataError(
                    f"{label} is decompressed into {plain.parent}, which cannot be written: "
                    f"{describe_os_error(error)}. Make room there, or set TMPDIR to another folder."
                ) from error


def _load_table(path: Path, label: str, cache_dir: str) -> Iterable[dict[str, Any]]:
    from datasets import Dataset, Features, Value

    loaded: Iterable[dict[str, Any]]
    try:
        if path.suffix == ".parquet":
            loaded = Dataset.from_parquet(str(path), cache_dir=cache_dir, keep_in_memory=False)
            return loaded
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), [])
        # Every cell is text: otherwise `007` becomes 7 and a cell with `null` becomes nothing.
        columns = Features({name: Value("string") for name in header})
        loaded = Dataset.from_csv(
            str(path), features=columns, cache_dir=cache_dir, keep_in_memory=False, keep_default_na=False
        )
        return loaded
    except Exception as error:  # pandas, pyarrow and datasets raise many types
        cause = error.__cause__ or error
        suffix = path.suffix.removeprefix(".")
        raise DataError(f"{label} cannot be read as {suffix}: {type(cause).__name__}: {cause}") from error


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
