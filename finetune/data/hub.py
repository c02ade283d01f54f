"""Read data sets with `datasets`: from the hub, from a local folder that has the layout of a data set on the hub, or
from a folder that `datasets` saved.

With `data.max_rows`, only the first rows of a hub data set are downloaded. They are kept in `data.cache_dir`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from finetune.config.config_files import local_path
from finetune.config.hub import HubFault, Repository, cache_only, explain_hub_fault, fault_of, find_fault
from finetune.config.schema import DataSection
from finetune.data.readers import FileRows, RawRow
from finetune.data.remote import in_cache
from finetune.data.tables import quiet_datasets
from finetune.errors import DataError
from finetune.limits import is_own_file
from finetune.runs.durable import replace_file

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a `datasets.Dataset`."""

    dataset: Any
    label: str

    def place(self, number: int) -> str:
        """Name one row in messages."""
        return f"{self.label} row {number}"

    def check(self) -> None:
        """Do nothing: a data set that was loaded can be read."""

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
        return (RawRow(number, row) for number, row in enumerate(self.dataset.with_format(None), start=1))


def is_reader(path: str) -> bool:
    """Return whether `datasets` takes a name for one of its readers, such as json and text.

    A reader without files reads those of the current folder.
    """
    if "/" in path:
        return False
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    return path in _PACKAGED_DATASETS_MODULES


def _location(path: str) -> str:
    """Return a hub id, or a folder so that `datasets` does not take its name for a reader."""
    return f"./{path}" if is_reader(path) else path


def saved_splits(folder: Path, label: str) -> dict[str, DatasetRows]:
    """Return the splits in a folder that `datasets` saved, by name. A data set without splits is the split train.

    Raises:
        DataError: the folder cannot be read.
    """
    import datasets

    try:
        with quiet_datasets():
            loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # pyarrow and datasets raise many types for a damaged folder
        raise DataError(f"{label} cannot be read as a datasets directory: {type(error).__name__}: {error}") from error
    splits: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    return {name: DatasetRows(rows, f"{label.rstrip('/')}/{name}") for name, rows in splits.items()}


def split_names(section: DataSection, path: str) -> list[str]:
    """Return the splits at a hub id or in a local folder. Without the hub, these are the splits that were read before.

    Raises:
        DataError: the hub does not answer, does not have it, or the data set cannot be read.
    """
    import datasets

    fault = _hub_fault(section, path)
    if fault is not None and (cached_files := _kept_rows(section, path)):
        _log.warning("%s: %s; the rows that were read before are used", path, fault.text)
        splits = (file.stem.split("-", 2)[2].rpartition("-")[0] for file in cached_files)  # of hub-DIGEST-SPLIT-COMMIT
        return list(dict.fromkeys(splits))
    name, revision = section.name, section.revision
    with quiet_datasets():
        return _ask(
            section, path, lambda: list(datasets.get_dataset_split_names(_location(path), name, revision=revision))
        )


def local_files(section: DataSection, folder: str) -> list[Path]:
    """Return the files that `datasets` reads of a local folder.

    Raises:
        DataError: the data set cannot be read.
    """
    import datasets

    with quiet_datasets():
        files = _ask(
            section, folder, lambda: datasets.load_dataset_builder(_location(folder), section.name).config.data_files
        )
    return [Path(file) for of_split in (files or {}).values() for file in of_split]


def open_split(section: DataSection, path: str, split: str) -> FileRows | DatasetRows:
    """Return the rows of a split. The first `data.max_rows` of a hub data set are read without downloading the others.

    `split` may also be a slice in the notation of `datasets`: `train[:10%]`.

    Raises:
        DataError: see `split_names`; or the first rows cannot be kept.
    """
    import datasets

    if section.max_rows is not None and "[" not in split and not Path(path).exists():
        return FileRows(_first_rows(section, path, split), _label(section, path, split), is_copy=True)
    name, revision = section.name, section.revision
    with quiet_datasets():
        rows = _ask(section, path, lambda: datasets.load_dataset(_location(path), name, revision=revision, split=split))
    return DatasetRows(rows, _label(section, path, split))


def _label(section: DataSection, path: str, split: str) -> str:
    """Name a split in messages. Subsets and revisions have other names, because a mixture may have several of them."""
    revision = f"@{section.revision}" if section.revision else ""
    return " ".join(filter(None, (f"{path.rstrip('/')}{revision}", section.name, split)))


def _first_rows(section: DataSection, hub_id: str, split: str) -> Path:
    """Return the file that holds the first rows of a split. Download them if the hub has a newer commit.

    Without the hub, return the newest file.
    """
    from huggingface_hub import HfApi, constants

    def newest() -> str:
        return str(HfApi(endpoint=constants.ENDPOINT).dataset_info(hub_id, revision=section.revision).sha)

    folder = local_path(section.cache_dir)
    is_reachable = _hub_fault(section, hub_id) is None
    commit = _ask(section, hub_id, newest) if is_reachable else "offline"
    prefix = f"hub-{_digest(section, hub_id)}-{split}"
    with in_cache(folder / f"{prefix}.lock", f"the first rows of {hub_id} {split}"):
        cached_files = _kept_rows(section, hub_id, split, commit if is_reachable else "*")
        if cached_files:
            _log.info("%s %s: the first rows were read before, to %s", hub_id, split, cached_files[-1])
            return cached_files[-1]
        file = folder / f"{prefix}-{commit}.jsonl"
        replace_file(file, _read_first_rows(section, hub_id, split, commit if is_reachable else section.revision))
        return file


def _read_first_rows(section: DataSection, hub_id: str, split: str, revision: str | None) -> bytes:
    import datasets

    def read() -> bytes:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            hub_id, section.name, revision=revision, split=split, streaming=True
        )
        return b"".join(_as_line(row) for row in islice(rows, section.max_rows))

    with quiet_datasets():
        lines = _ask(section, hub_id, read)
    _log.info("%s %s: the first %d rows read from the hub", hub_id, split, lines.count(b"\n"))
    return lines


def _as_line(row: Mapping[str, Any]) -> bytes:
    """Write a row as JSON. A value that JSON cannot express (a date, an image, NaN) becomes null."""
    return json.dumps(_finite(row), default=lambda _: None, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    """Return a value in which numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _digest(section: DataSection, hub_id: str) -> str:
    # The number tells these files from earlier ones, which may have NaN in a list.
    parts = [hub_id, section.name, section.revision, section.max_rows, 2]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _kept_rows(section: DataSection, hub_id: str, split: str = "*", commit: str = "*") -> list[Path]:
    """Return the files of first rows that were written before, the newest last."""
    folder = local_path(section.cache_dir)
    files = folder.glob(f"hub-{_digest(section, hub_id)}-{split}-{commit}.jsonl")
    own = (file for file in files if is_own_file(file, "its rows are not used"))
    return sorted(own, key=lambda file: file.stat().st_mtime)


def _hub_fault(section: DataSection, path: str) -> HubFault | None:
    """Ask the hub for a data set. Returns why it does not give it; None for a local folder."""
    return None if Path(path).exists() else find_fault(Repository(path, section.revision, "dataset"))


def _ask(section: DataSection, path: str, question: Callable[[], _Answer]) -> _Answer:
    """Call `datasets`, and turn its errors into one sentence of a DataError.

    If the hub does not answer, the client only uses its cache, which has the data sets that were prepared here.
    """
    fault = _hub_fault(section, path)
    try:
        with cache_only() if fault is not None else nullcontext():
            return question()
    except Exception as error:  # the client's own errors differ from version to version
        if Path(path).exists():
            raise DataError(
                f"data.path is {path}, which cannot be read as a data set ({type(error).__name__}: {error})."
            ) from error
        if fault is None:
            fault = fault_of(error)
        elif isinstance(error, ValueError):  # it was prepared here before, but not as this run wants it
            fault = None
        if fault is not None:
            state = "is not a file or folder here and was not prepared here before"
            repository = Repository(path, section.revision, "dataset")
            raise DataError(explain_hub_fault(fault, repository, "data.path", state)) from error
        raise DataError(
            f"data.path is {path}: there is no such file or folder here, and the hub's data set cannot be read "
            f"({type(error).__name__}: {error}). See the data set's page."
        ) from error
