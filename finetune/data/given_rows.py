"""Write rows that a script holds in memory into the cache, where a run reads them like any file.

The name of each file is a digest of its rows. So a run, its resumed start and later commands on its folder read the
same rows, and a changed list is another file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.data.splits import SPLIT_NAMES
from finetune.errors import DataError
from finetune.runs.durable import describe_os_error, replacing
from finetune.runs.file_lock import file_lock


def write_given_rows(data: object, cache_dir: str) -> dict[str, str]:
    """Write rows to files. Every process may call this at the same time.

    Args:
        data: dicts, for example a list or a `datasets.Dataset`; or a mapping of such rows by the name of their split,
            for example a `datasets.DatasetDict`.
        cache_dir: `data.cache_dir`.

    Returns:
        The keys of the configuration that name the files: `data.path` for one split, otherwise `data.train` and so on.

    Raises:
        DataError: a row is no dict or holds values that JSON does not have, or a file cannot be written.
    """
    folder = Path(cache_dir).expanduser() / "given"
    if not isinstance(data, Mapping):
        return {"data.path": _write("data", data, folder)}
    names = {name: split for split, usual in SPLIT_NAMES.items() for name in usual}
    unknown = [name for name in data if name not in names]
    if unknown or not data:
        known = ", ".join(SPLIT_NAMES)
        raise DataError(
            f"data is a mapping with the keys {list(data)}; expected the names of splits ({known}) with rows. "
            "For columns, give datasets.Dataset.from_dict(columns)."
        )
    return {f"data.{names[name]}": _write(f'data["{name}"]', rows, folder) for name, rows in data.items()}


def _write(name: str, rows: object, folder: Path) -> str:
    """Write the rows of a split, unless they are there already, and return the path."""
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes)):
        raise DataError(f"{name} is {type(rows).__name__}; expected a path, rows as dicts, or a datasets.Dataset.")
    repeatable = rows if hasattr(rows, "__len__") else list(rows)
    digest, count = hashlib.sha256(), 0
    for line in _lines(name, repeatable):
        digest.update(line)
        count += 1
    if not count:
        raise DataError(f"{name} has no rows.")
    file = folder / f"{digest.hexdigest()[:32]}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(file.with_suffix(".lock"), waiting_for=f"the rows of {name}"):
            if not file.exists():
                with replacing(file) as stream:
                    for line in _lines(name, repeatable):
                        stream.write(line)
    except OSError as error:
        raise DataError(
            f"the rows of {name} cannot be written to {folder}: {describe_os_error(error)}. Set data.cache_dir to "
            "another folder, or make room."
        ) from error
    return str(file)


def _lines(name: str, rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield each row as a line of JSON."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} of {name} is {type(row).__name__}; expected a dict with the row's columns.")
        try:
            yield (json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
        except (TypeError, ValueError, RecursionError) as error:
            bad = next((column for column, value in row.items() if not _is_json(value)), "")
            raise DataError(
                f"row {number} of {name} holds a value that JSON does not have, in the column {bad!r}: {error}. "
                "Convert the value to text, a number, a list or a dict, or remove the column."
            ) from error


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True
