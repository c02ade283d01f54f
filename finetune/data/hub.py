"""Read data sets on the hub: download them, or stream their first rows and keep these."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from finetune.config.hub import Repository, cache_only, explain, fault_of, find_fault
from finetune.config.schema import DataSection
from finetune.data.readers import DatasetRows, FileRows, RowSource, quiet_datasets
from finetune.errors import DataError
from finetune.runs.durable import describe_os_error, replace_file
from finetune.runs.file_lock import file_lock

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


def hub_splits(section: DataSection, hub_id: str) -> list[str]:
    """Return the names of a data set's splits.

    Raises:
        DataError: the hub does not answer, does not have it, or has it in a form that cannot be read.
    """
    import datasets

    with quiet_datasets():
        return ask_hub(
            section,
            hub_id,
            lambda: list(datasets.get_dataset_split_names(hub_id, section.name, revision=section.revision)),
        )


def open_whole(section: DataSection, hub_id: str, split: str) -> RowSource:
    """Download a split of a data set. Raises the errors of `hub_splits`."""
    import datasets

    name, revision = section.name, section.revision
    with quiet_datasets():
        rows = ask_hub(section, hub_id, lambda: datasets.load_dataset(hub_id, name, revision=revision, split=split))
    return DatasetRows(rows, f"{hub_id} {split}")


def open_stream(section: DataSection, path: str, split: str) -> RowSource:
    """Stream the first `data.max_rows` rows of a split once, and keep them in `data.cache_dir`.

    The kept rows are used again for the same data set, revision, split and number of rows. A local folder whose files
    have changed counts as another data set. A hub data set without `data.revision` may change unnoticed.

    Args:
        section: the configuration, the revision and the number of rows.
        path: a hub id, or a local folder that `datasets` can read.
        split: one of its splits.

    Raises:
        DataError: as `hub_splits`, or the rows cannot be kept.
    """
    folder = Path(section.cache_dir).expanduser()
    file = folder / f"streamed-{_key(section, path, split)}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(file.with_suffix(".lock"), waiting_for=f"the stream of {path} {split}"):
            if file.exists():
                again = "" if section.revision or Path(path).exists() else "; remove it to read the hub again"
                _log.info("%s %s: read as a stream before, kept in %s%s", path, split, file, again)
            else:
                replace_file(file, _read_stream(section, path, split))
    except OSError as error:
        raise DataError(
            f"data.cache_dir is {section.cache_dir}, where the rows of a stream are kept, and it cannot be written: "
            f"{describe_os_error(error)}. Give another folder, or do not use data.stream."
        ) from error
    return FileRows(file, f"{path} {split}", is_copy=True)


def ask_hub(section: DataSection, hub_id: str, question: Callable[[], _Answer]) -> _Answer:
    """Call the hub's client, and turn its errors into one sentence.

    If the hub does not answer, the client is left with its cache, which has the data sets that were prepared here.

    Args:
        section: the data, for its revision.
        hub_id: a data set, or a local folder that is read as a stream.
        question: the call.

    Raises:
        DataError: the hub does not answer, does not have it, or has it in a form that cannot be read.
    """
    repository = None if Path(hub_id).exists() else Repository(hub_id, section.revision, "dataset")
    fault = None if repository is None else find_fault(repository)
    try:
        with cache_only() if fault is not None else nullcontext():
            return question()
    except Exception as error:  # the client's own errors differ from version to version
        if fault is None:
            fault = fault_of(error)
        elif isinstance(error, ValueError):  # it was prepared here before, but not as this run wants it
            fault = None
        if repository is not None and fault is not None:
            state = "is not a file or folder here and was not prepared here before"
            raise DataError(explain(fault, repository, "data.path", state)) from error
        raise DataError(_in_one_sentence(hub_id, error)) from error


def _in_one_sentence(hub_id: str, error: Exception) -> str:
    from datasets.exceptions import DatasetNotFoundError

    if Path(hub_id).exists():  # a local folder that is read as a stream
        return f"data.path is {hub_id}, which cannot be read as a stream: {type(error).__name__}: {error}"
    what, advice = "the hub's data set cannot be read", "See the data set's page."
    if isinstance(error, DatasetNotFoundError):
        what = "the hub has no data set of that name that you may read"
        advice = "Correct the path; for a private or gated data set run `hf auth login`."
    name = "" if isinstance(error, DatasetNotFoundError) else f"{type(error).__name__}: "
    return f"data.path is {hub_id}: there is no such file or folder here, and {what} ({name}{error}). {advice}"


def _read_stream(section: DataSection, path: str, split: str) -> bytes:
    import datasets

    def read() -> bytes:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            path, section.name, revision=section.revision, split=split, streaming=True
        )
        return b"".join(_as_line(row) for row in islice(rows, section.max_rows))

    with quiet_datasets():
        lines = ask_hub(section, path, read)
    _log.info("%s %s: %d rows read as a stream", path, split, lines.count(b"\n"))
    return lines


def _as_line(row: Mapping[str, Any]) -> bytes:
    """A row as JSON. A value that JSON cannot express (a date, an image) becomes null, which columns of text refuse."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(finite, default=lambda _: None).encode() + b"\n"


def _key(section: DataSection, path: str, split: str) -> str:
    files = sorted(Path(path).rglob("*")) if Path(path).is_dir() else []
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    parts = [path, section.name, section.revision, split, section.max_rows, state]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
