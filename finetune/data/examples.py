"""Where a run's splits are: one file, a folder of split files, a `datasets` directory, or a hub id."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from finetune.config.schema import DataSection
from finetune.data.readers import SUFFIXES, DatasetRows, FileRows, RowSource, quiet_datasets
from finetune.data.rows import Example as Example
from finetune.data.rows import Examples
from finetune.durable import describe_os_error
from finetune.errors import ConfigError, DataError
from finetune.shipped_files import resolve_shipped

_log = logging.getLogger(__name__)

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
"""The splits of a run, and what they may be called where `data.train` and the like do not say."""

_Answer = TypeVar("_Answer")

_ONE_FILE = "one file"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class ExampleSplits:
    """The rows of a run, before they are encoded."""

    train: Examples
    validation: Examples | None = None
    test: Examples | None = None


@dataclass(frozen=True)
class _Place:
    """What is at `data.path`: the names of its splits, and how to open one."""

    what: str
    label: str
    names: tuple[str, ...]
    open_split: Callable[[str], RowSource]
    has_slices: bool = False

    def has(self, name: str) -> bool:
        return (name.partition("[")[0] if self.has_slices else name) in self.names


def load_examples(section: DataSection) -> ExampleSplits:
    """Find the splits of a run. Local files are read later, on first use: cached data needs no parsing.

    Raises:
        ConfigError: neither `data.path` nor `data.train` is set, or both name a file to train on.
        DataError: there is nothing readable at `data.path`, no training split, no split of a name that was asked
            for, or the hub does not answer.
    """
    try:
        place = _resolve_place(section)
    except OSError as error:
        raise DataError(f"data.path is {section.path}, which cannot be read: {describe_os_error(error)}.") from error
    if place is not None and place.what == _ONE_FILE and section.train is not None:
        raise ConfigError(
            f"data.path is the file {section.path} and data.train is {section.train}: both name the training "
            "data. Remove one of the two."
        )
    sources = {split: _find_split(split, getattr(section, split), place) for split in SPLIT_NAMES}
    for split in ("validation", "test"):
        if sources[split] is None:
            _log.info("%s is off: %s", split, _why_off(split, place))
    examples = {
        split: Examples(source, section.format, section.max_rows)
        for split, source in sources.items()
        if source is not None
    }
    return ExampleSplits(**examples)


def _why_off(split: str, place: _Place | None) -> str:
    if place is None or place.what == _ONE_FILE:
        return f"one file was given and all of it is training data; data.{split} can name another file"
    return f"{place.label} has no split named {' or '.join(SPLIT_NAMES[split])}; data.{split} can name one"


def _find_split(split: str, wanted: str | None, place: _Place | None) -> RowSource | None:
    if wanted is None:
        return _default_split(split, place)
    if place is not None and place.has(wanted):
        return place.open_split(wanted)
    path = Path(wanted).expanduser()
    if path.is_file():
        return _file_rows(path, wanted)
    if path.suffix in SUFFIXES or place is None:
        raise DataError(f"data.{split} is {wanted}, but there is no such file. Correct the path.")
    raise DataError(
        f"data.{split} is {wanted}, which is no file and no split of {place.label} ({place.what} with "
        f"{', '.join(place.names)}). Name one of these, or a file ({', '.join(SUFFIXES)})."
    )


def _default_split(split: str, place: _Place | None) -> RowSource | None:
    found = next((name for name in SPLIT_NAMES[split] if place and place.has(name)), None)
    if place is not None and found is not None:
        return place.open_split(found)
    if split != "train":
        return None
    if place is None:
        raise ConfigError("data.path is not set: name a file, a folder, a hub id or shipped:orders.")
    raise DataError(
        f"data.path is {place.label}: {place.what} with {', '.join(place.names)}, but no train. Name the split "
        "to train on with data.train."
    )


def _resolve_place(section: DataSection) -> _Place | None:
    if section.path is None:
        return None
    path = Path(resolve_shipped(section.path)).expanduser()
    if path.is_file():
        source = _file_rows(path, section.path)
        return _Place(_ONE_FILE, section.path, ("train",), lambda _: source)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved_datasets(path, section.path)
    if path.is_dir():
        return _split_folder(path, section.path)
    if path.suffix in SUFFIXES or not _HUB_ID.fullmatch(section.path):
        raise DataError(f"data.path is {section.path}, but there is no such file or folder. Correct the path.")
    return _hub_dataset(section.path, section.name, section.revision)


def _file_rows(path: Path, label: str) -> FileRows:
    if path.suffix not in SUFFIXES:
        raise DataError(f"{label} ends in {path.suffix or 'nothing'}; expected one of {', '.join(SUFFIXES)}.")
    return FileRows(path, label)


def _split_folder(folder: Path, label: str) -> _Place:
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        if path.stem in files:
            raise DataError(f"{label} has both {files[path.stem].name} and {path.name}: which is meant? Remove one.")
        files[path.stem] = path
    if not files:
        expected = " or ".join(f"train{suffix}" for suffix in SUFFIXES)
        raise DataError(f"data.path is {label}, a folder without data files. Expected {expected} in it.")
    return _Place(
        "a folder",
        label,
        tuple(files),
        lambda name: FileRows(files[name], f"{label.rstrip('/')}/{files[name].name}"),
    )


def _saved_datasets(folder: Path, label: str) -> _Place:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # pyarrow and datasets have many names for a damaged folder
        raise DataError(f"{label} cannot be read as a datasets directory: {type(error).__name__}: {error}") from error
    splits: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    return _Place(
        "a datasets directory",
        label,
        tuple(splits),
        lambda name: DatasetRows(splits[name], f"{label.rstrip('/')}/{name}"),
    )


def _hub_dataset(hub_id: str, name: str | None, revision: str | None) -> _Place:
    import datasets

    _log.info("data.path %s is no file or folder here; asking the hub for it", hub_id)

    def open_split(split: str) -> RowSource:
        with quiet_datasets():
            rows = _ask_hub(hub_id, lambda: datasets.load_dataset(hub_id, name, revision=revision, split=split))
        return DatasetRows(rows, f"{hub_id} {split}")

    names: list[str] = _ask_hub(hub_id, lambda: datasets.get_dataset_split_names(hub_id, name, revision=revision))
    return _Place("a hub data set", hub_id, tuple(names), open_split, has_slices=True)


def _ask_hub(hub_id: str, question: Callable[[], _Answer]) -> _Answer:
    """Call the hub's client and say in one sentence what went wrong.

    Raises:
        DataError: the hub does not answer, does not have it, or has it in a form that cannot be read.
    """
    from datasets.exceptions import DatasetNotFoundError

    try:
        return question()
    except DatasetNotFoundError as error:
        what = f"the hub has none of that name that you may read ({error})"
        advice = "Correct the path; for a private or gated data set run `hf auth login`."
        cause: Exception = error
    except Exception as error:  # the client's own errors differ from version to version
        unreachable = _is_connection_error(error)
        what = "the hub cannot be reached" if unreachable else "the hub's data set cannot be read"
        what += f" ({type(error).__name__}: {error})"
        advice = "Give a local path, or see to the network." if unreachable else "See the data set's page."
        cause = error
    raise DataError(f"data.path is {hub_id}: there is no such file or folder here, and {what}. {advice}") from cause


def _is_connection_error(error: BaseException | None) -> bool:
    while error is not None:
        words = f"{type(error).__module__}.{type(error).__name__}"
        if isinstance(error, (ConnectionError, TimeoutError)) or re.search("connect|offline|LocalEntry", words, re.I):
            return True
        error = error.__cause__ or error.__context__
    return False
