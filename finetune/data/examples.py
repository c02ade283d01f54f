"""Find the splits of a run: in one file, a folder of split files, a `datasets` directory, or a hub data set."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import escape, glob
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from finetune.config.config_files import is_address, is_list_or_glob, local_path, resolve_shipped
from finetune.config.schema import AUTO_VALIDATION, NO_ROWS, DataSection, as_list, name_files
from finetune.data.formats import Example, Reads
from finetune.data.readers import SUFFIXES, FileRows, JoinedRows, RowSource, stem_of, suffix_of
from finetune.data.rows import Examples
from finetune.data.splits import SPLIT_NAMES, files_of_splits, in_order
from finetune.errors import ConfigError, DataError
from finetune.logs import waiting, warnings_only
from finetune.runs.durable import describe_os_error
from finetune.terminal import without_passwords
from finetune.units import name_first

if TYPE_CHECKING:
    from finetune.data.held_out import SplitSize
    from finetune.data.mixture import JoinedExamples

_log = logging.getLogger(__name__)

_ONE_FILE = "one file"
_FILES = "a list of files"
_PARTS = "a folder of parts"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SEARCH_SECONDS = 120  # for the files that a pattern matches
_ROWS_LOOKED_AT = 100
_MAX_FILES = 20
"""The most files that a warning names."""
_SHARE_WITH_TOOLS = 0.1
"""Tools are offered if at least this share of the rows has some."""
_MARKS = {"run.json", "config.json", "adapter_config.json"}
"""Files of rows have other names. These are in the folders of runs and of models."""
_SHARD = re.compile(r"-[0-9]+-of-[0-9]+\.")
"""In the names of the files of a downloaded data set: `train-00000-of-00002.parquet`."""


class Opening(NamedTuple):
    """The system turn and the tools, as JSON text, that a conversation opens with."""

    system: str | None = None
    tools: str = ""
    num_with_system: int = 0
    num_with_tools: int = 0
    num_rows: int = 0
    """Of the training rows that were looked at, the number with this system turn, with any tools, and of all."""


@dataclass(frozen=True)
class ExampleSplits:
    """The rows of a run, before they are encoded."""

    train: Examples | JoinedExamples
    validation: Examples | JoinedExamples | None = None
    test: Examples | JoinedExamples | None = None

    def wholes(self) -> list[Examples]:
        """Return all rows of each source. A source that several splits have rows of comes once."""
        parts = (part for split in vars(self).values() if split is not None for part in split.parts)
        return list(dict.fromkeys(part.whole for part in parts))


@dataclass(frozen=True)
class _Splits:
    """The splits at `data.path`: their names, and a function that opens one."""

    form: str
    label: str
    names: Sequence[str]
    open_split: Callable[[str], RowSource]
    has_slices: bool = False
    not_read: Sequence[str] = ()
    """The files of a folder that belong to no split of the run."""
    refusal: str = ""
    """Says which files of a folder are missing from the rows. Only a run that was started before goes on without."""

    def has(self, name: str) -> bool:
        return (name.partition("[")[0] if self.has_slices else name) in self.names


@waiting("looking for the data")
def load_examples(section: DataSection, reads: Reads = "answers") -> ExampleSplits:
    """Find the splits of a run. Local files are read later, on first use: cached data needs no parsing.

    `reads` is what the objective needs of a row: `answers`, `chosen`, `rejected`, `labelled` or `prompts`.

    Raises:
        ConfigError: neither `data.path`, `data.mixture` nor `data.train` is set, or two of them name the training rows.
        DataError: there is nothing readable at `data.path`, no training split, no split of a name that was asked
            for, or the hub does not answer.
    """
    why_off: dict[str, str] = {}
    if section.mixture:
        splits = _load_mixture(section, reads, why_off)
    else:
        splits = ExampleSplits(**_load_source(section, reads, why_off))
    for split, reason in why_off.items():
        if getattr(splits, split) is None and reads != "rejected":  # the chosen side has said it
            _log.info("%s is off: %s", split, reason)
    return splits


def read_opening(section: DataSection, reads: Reads = "answers") -> Opening:
    """Read the most frequent tools and system turn of the first training rows: like them, prompts work best.

    Raises:
        DataError: the rows cannot be read.
    """
    # Splits of so few rows could leave none for training.
    few_rows = {"max_rows": min(section.max_rows or _ROWS_LOOKED_AT, _ROWS_LOOKED_AT), "validation": None, "test": None}
    mixture = [{key: value for key, value in source.items() if key not in few_rows} for source in section.mixture]
    with warnings_only("finetune.data"):  # training has said all about these rows
        rows = load_examples(section.model_copy(update={**few_rows, "mixture": mixture}), reads).train
        openings = [(_system_of(row), row.tools) for row in islice(rows, _ROWS_LOOKED_AT)]
    offers = Counter(tools for _, tools in openings if tools)
    is_offered = offers and offers.total() >= _SHARE_WITH_TOOLS * len(openings)
    tools = offers.most_common(1)[0][0] if is_offered else ""
    [(system, _)] = Counter(system for system, offered in openings if offered == tools).most_common(1)
    num_with_system = sum(system == other for other, _ in openings)
    return Opening(system, tools, num_with_system, offers.total(), len(openings))


def _system_of(row: Example) -> str | None:
    has_one = bool(row.messages) and row.messages[0]["role"] in ("system", "developer")
    return row.messages[0]["content"] or None if has_one else None


def holds_out_by_default(section: DataSection) -> bool:
    """Return whether `data.validation=auto` holds out training rows, if there are enough. The hub is not asked."""
    if section.validation != AUTO_VALIDATION or section.mixture:
        return False
    if section.path is None:
        return section.train is not None
    return not any(map(is_hub_id, as_list(section.path))) and _is_one_source(_find_splits(section))


def is_all_here(section: DataSection) -> bool:
    """Return whether all training rows are on this machine, so that reading them copies nothing."""
    return all(_is_here(name) for source in _sources_of(section) for name in as_list(source.path or source.train))


def missing_here(section: DataSection) -> list[str]:
    """Describe each file and folder that the data section names on this machine and that is not there."""
    missing = []
    for source in _sources_of(section):
        for key in ("path", *SPLIT_NAMES):
            for name in as_list(getattr(source, key)):
                may_be_other = is_hub_id(name) if key == "path" else suffix_of(name) not in SUFFIXES
                if not (may_be_other or is_address(name) or _is_here(name)):
                    missing.append(_not_there(key, name))
    return list(dict.fromkeys(missing))


def check_local_rows(section: DataSection, reads: Reads | None = None, *, is_new: bool = True) -> None:
    """Refuse files that are not there or cannot be read, before anything is downloaded. The hub is not asked.

    With `reads`, the first row of a JSON or CSV file must also have the columns of a format that this objective reads.
    A new run also refuses a folder of which it would read only a part. Other runs were trained on that part.

    Raises:
        ConfigError: see `load_examples`.
        DataError: a file or a folder is not there, cannot be read, or has rows of no known format.
    """
    for source in _sources_of(section):
        if any(map(is_hub_id, as_list(source.path))):
            continue
        at_path, _, sources = _find_sources(source)
        if is_new and at_path is not None and at_path.refusal:
            raise DataError(at_path.refusal)
        for rows in (each for each in sources.values() if each is not None):
            rows.check()
            first = rows.parts[0] if isinstance(rows, JoinedRows) else rows
            if reads is not None and isinstance(first, FileRows) and suffix_of(first.path) != ".parquet":
                examples = _as_examples(rows, source, reads)
                examples.name = source.label if section.mixture else ""
                examples.check_format()


def _sources_of(section: DataSection) -> list[DataSection]:
    if not section.mixture:
        return [section]
    from finetune.data.mixture import section_of_source

    return [section_of_source(section, keys) for keys in section.mixture]


def _is_here(path: str) -> bool:
    try:
        return bool(local_path(resolve_shipped(path)).stat())
    except (FileNotFoundError, NotADirectoryError):
        return bool(_matching(path))
    except OSError:
        return True  # it may not be read; reading it raises an error that says so


def _is_file(path: str) -> bool:
    return os.path.isfile(local_path(path))  # noqa: PTH113 (also answers for what may not be looked at)


def _matching(pattern: str) -> list[str]:
    """Return the files of rows that a glob matches, in order."""
    if not is_list_or_glob(pattern):
        return []
    from finetune.deadlines import DeadlineExceededError, call_within

    try:
        search = partial(glob, str(local_path(pattern)), recursive=True)
        matches = call_within(SEARCH_SECONDS, search, name="search for files")
    except DeadlineExceededError:
        raise DataError(
            f"{pattern} matches files in so many folders that {SEARCH_SECONDS} s are not enough to look into them. "
            "Begin the pattern with the folder that holds the rows."
        ) from None
    return in_order(name for name in matches if suffix_of(name) in SUFFIXES and _is_file(name))


def _not_there(key: str, path: str) -> str:
    if is_list_or_glob(path):
        return f"data.{key} is {path}, but no file that ends in {', '.join(SUFFIXES)} matches it. Correct the path."
    return f"data.{key} is {path}, but there is no such file{' or folder' if key == 'path' else ''}. Correct the path."


def is_hub_id(path: str) -> bool:
    """Whether `data.path` names a data set at the hub, and not a file, a folder or a reader of `datasets`."""
    if _is_here(path) or suffix_of(path) in SUFFIXES or _HUB_ID.fullmatch(path) is None:
        return False
    from finetune.data.hub import is_reader

    return not is_reader(path)


def _load_mixture(section: DataSection, reads: Reads, why_off: dict[str, str]) -> ExampleSplits:
    """Load each source. A file in `data.validation` or `data.test` belongs to all of them and is read once.

    `why_off` receives the reason for each split that a source does not have.
    """
    if section.path is not None:
        raise ConfigError(f"data.path is {section.path} and data.mixture is set: both name the data. Keep one of them.")
    from finetune.data.mixture import JoinedExamples, names_of_sources, section_of_source

    parts: dict[str, list[Examples]] = {split: [] for split in SPLIT_NAMES}
    for split in ("validation", "test"):
        files = getattr(section, split)
        if isinstance(files, list) or (files is not None and suffix_of(files) in SUFFIXES):
            parts[split] = [_as_examples(_rows_at(split, files, section), section, reads)]
    named_for_all = {split for split, examples in parts.items() if examples}
    for name, source_keys in zip(names_of_sources(section.mixture), section.mixture, strict=True):
        of_source = _load_source(section_of_source(section, source_keys), reads, why_off, without=named_for_all)
        of_source["train"].weight = float(source_keys.get("weight", 1.0))
        for split, examples in of_source.items():
            examples.name = examples.whole.name = name
            parts[split].append(examples)
    return ExampleSplits(**{split: JoinedExamples(of_split) for split, of_split in parts.items() if of_split})


def _load_source(
    section: DataSection, reads: Reads, why_off: dict[str, str], without: Collection[str] = ()
) -> dict[str, Examples]:
    """Load the splits of one source, except those in `without`. `why_off` receives the reasons for missing splits."""
    at_path, sizes, sources = _find_sources(section, without)
    for split, source in sources.items():
        if source is None:
            why_off[split] = _why_off(split, at_path, getattr(section, split))
        if isinstance(source, JoinedRows):
            _log.info("%s: the files in this order: %s", split, ", ".join(part.label for part in source.parts))
    if at_path is not None and at_path.not_read:
        names = name_first(at_path.not_read, _MAX_FILES)
        _log.warning("%s: in no split, and not read unless a key of data names them: %s", at_path.label, names)
    if at_path is not None and at_path.refusal:
        _log.warning("%s", at_path.refusal)
    splits = {split: _as_examples(source, section, reads) for split, source in sources.items() if source is not None}
    if not sizes:
        return splits
    from finetune.data.held_out import rows_of_split

    train = splits["train"]
    choose = partial(rows_of_split, sizes=sizes, rule=section.split_rule, seed=section.split_seed, label=train.label)
    return splits | {split: train.with_choice(partial(choose, split=split)) for split in ("train", *sizes)}


class _Sources(NamedTuple):
    """Where the splits of a source come from. A split that is off has the source None."""

    at_path: _Splits | None
    sizes: dict[str, SplitSize]
    sources: dict[str, RowSource | None]


def _find_sources(section: DataSection, without: Collection[str] = ()) -> _Sources:
    try:
        at_path = _find_splits(section)
    except OSError as error:
        raise DataError(f"data.path is {section.path}, which cannot be read: {describe_os_error(error)}.") from error
    if at_path is not None and at_path.form in (_ONE_FILE, _FILES) and section.train not in (None, "train"):
        raise ConfigError(
            f"data.path is {name_files(section.path)} and data.train is {name_files(section.train)}: both name the "
            "training data. Remove one of the two."
        )
    settings = {split: getattr(section, split) for split in SPLIT_NAMES if split not in without}
    sizes = {split: size for split, text in settings.items() if (size := _size_of(split, text, at_path)) is not None}
    if settings.get("validation") == AUTO_VALIDATION:
        settings["validation"] = None  # the split of that name, unless rows are held out
    sources = {
        split: _find_source(split, text, at_path, section) for split, text in settings.items() if split not in sizes
    }
    return _Sources(at_path, sizes, sources)


def _as_examples(source: RowSource, section: DataSection, reads: Reads) -> Examples:
    drops = section.on_bad_row == "drop"
    return Examples(source, section.format, section.columns, section.max_rows, reads=reads, drops=drops)


def _size_of(split: str, text: str | list[str] | None, at_path: _Splits | None) -> SplitSize | None:
    """Return the size of a split that is held out of the training rows; None if `text` names a split or a file."""
    if split == "train" or not isinstance(text, str):
        return None
    is_auto = split == "validation" and text == AUTO_VALIDATION
    if is_auto and not _is_one_source(at_path):
        return None
    if not is_auto and ((at_path is not None and at_path.has(text)) or _is_file(text)):
        return None
    from finetune.data.held_out import SplitSize, parse_split_size

    return SplitSize(AUTO_VALIDATION) if is_auto else parse_split_size(text, split)


def _is_one_source(at_path: _Splits | None) -> bool:
    """Return whether the data is training rows alone. A folder with a file that is named train has splits."""
    is_folder_of_rows = at_path is not None and at_path.form == _PARTS and list(at_path.names) != ["train"]
    return at_path is None or at_path.form in (_ONE_FILE, _FILES) or is_folder_of_rows


def _why_off(split: str, at_path: _Splits | None, setting: str | list[str] | None) -> str:
    if setting == NO_ROWS:
        return f"data.{split} is {NO_ROWS}"
    if at_path is None or at_path.form in (_ONE_FILE, _FILES):
        form = _ONE_FILE if at_path is None else at_path.form
        return f"the data is {form} without {split} rows; data.{split} can name another file or a fraction (0.05)"
    return f"{at_path.label} has no split named {' or '.join(SPLIT_NAMES[split])}; data.{split} can name one"


def _find_source(
    split: str, setting: str | list[str] | None, at_path: _Splits | None, section: DataSection
) -> RowSource | None:
    if setting is None:
        return _default_split(split, at_path)
    if setting == NO_ROWS and split != "train":
        return None
    if isinstance(setting, str) and at_path is not None and at_path.has(setting):
        return at_path.open_split(setting)
    if isinstance(setting, list) or suffix_of(setting) in SUFFIXES or is_list_or_glob(setting) or _is_file(setting):
        return _rows_at(split, setting, section)
    if is_address(setting):
        return _rows_at(split, setting, section)
    if at_path is None:
        raise DataError(_not_there(split, setting))
    raise DataError(
        f"data.{split} is {setting}, which is neither a file nor a split of {at_path.label} ({at_path.form} with "
        f"{', '.join(at_path.names)}). Name one of these, a file ({', '.join(SUFFIXES)}), or {NO_ROWS}."
    )


def _default_split(split: str, at_path: _Splits | None) -> RowSource | None:
    split_name = next((name for name in SPLIT_NAMES[split] if at_path and at_path.has(name)), None)
    if at_path is not None and split_name is not None:
        return at_path.open_split(split_name)
    if split != "train":
        return None
    if at_path is None:
        raise ConfigError("data.path is not set: name a file, a folder, a hub id or shipped:orders.")
    raise DataError(
        f"data.path is {at_path.label}: {at_path.form} with {', '.join(at_path.names)}, but no train. Name the split "
        "to train on with data.train."
    )


def _find_splits(section: DataSection) -> _Splits | None:
    if section.path is None:
        return None
    if isinstance(section.path, list) or (is_list_or_glob(section.path) and not _is_file(section.path)):
        joined = _rows_at("path", section.path, section)
        return _Splits(_FILES, joined.label, ["train"], lambda _: joined)
    if is_address(section.path):
        return _at_address(section.path, section)
    path = local_path(resolve_shipped(section.path))
    is_saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if path.is_file():
        source = _rows_at("path", section.path, section)
        return _Splits(_ONE_FILE, section.path, ["train"], lambda _: source)
    if is_saved:
        from finetune.data.hub import saved_splits

        saved = saved_splits(path, section.path)
        return _Splits("a datasets directory", section.path, list(saved), saved.__getitem__)
    if _is_here(section.path):
        return _local_folder(section, path, section.path)
    if not is_hub_id(section.path):
        raise DataError(_not_there("path", section.path))
    _log.info("data.path %s is not a file or folder here; asking the hub for it", section.path)
    return _dataset("a hub data set", section, section.path)


def _rows_at(key: str, files: str | list[str], section: DataSection) -> RowSource:
    """Return the rows of a file, of the files of a list, or of those that a glob matches, or raise a DataError."""
    names = [name for path in as_list(files) for name in ([path] if _is_file(path) else _matching(path) or [path])]
    sources: list[RowSource] = []
    for name in names:
        path = local_path(resolve_shipped(name))
        if is_address(name):
            section.refuse_untrusted(name)
            from finetune.data.remote import RemoteRows

            sources.append(RemoteRows(f"data.{key}", name, section.cache_dir, section.separator))
        elif not _is_here(name):
            raise DataError(_not_there(key, name))
        elif suffix_of(path) not in SUFFIXES:
            from finetune.data.column_advice import describe_suffix

            raise DataError(describe_suffix(path, name))
        else:
            sources.append(FileRows(path, name, separator=section.separator))
    if names == [files]:
        return sources[0]
    if key == "path" and (splits := files_of_splits(names)).keys() != {"train"}:
        raise DataError(
            f"data.path is {name_files(files)}, which has {', '.join(splits)} files. Give their folder, or name the "
            "files of each split: data.train=[…] data.validation=[…]."
        )
    return JoinedRows(sources, name_files(files))


def _at_address(address: str, section: DataSection) -> _Splits:
    from finetune.data.remote import RemoteRows, name_of, names_at

    if suffix_of(name_of(address)) in SUFFIXES:
        source = _rows_at("path", address, section)
        return _Splits(_ONE_FILE, source.label, ["train"], lambda _: source)
    section.refuse_untrusted(address)
    addresses = names_at("data.path", address)
    return _split_folder(
        without_passwords(address),
        list(addresses),
        lambda name: RemoteRows("data.path", addresses[name], section.cache_dir, section.separator),
    )


def _local_folder(section: DataSection, folder: Path, label: str) -> _Splits:
    names = sorted(
        path.name for path in folder.iterdir() if suffix_of(path) in SUFFIXES and path.is_file() and path.name[0] != "."
    )
    below = [Path(name).relative_to(folder).as_posix() for name in _matching(f"{escape(str(folder))}/**/*")]
    if not below or not _MARKS.isdisjoint(names):
        from finetune.data.folders import refuse_no_rows

        refuse_no_rows(folder, label, names)
    is_data_set = any(map(_SHARD.search, names)) or bool(below and not names)
    if is_data_set:
        from finetune.data.hub import local_files

        splits = _dataset("a data set", section, str(folder))
        read = local_files(section, str(folder))
    else:
        splits = _split_folder(
            label,
            names,
            lambda name: FileRows(folder / name, f"{label.rstrip('/')}/{name}", separator=section.separator),
        )
        read = [folder / name for name in names]
    are_read = {path.resolve() for path in read}
    unread = [name for name in below if (folder / name).resolve() not in are_read]
    if not unread or section.train is not None:
        return splits
    from finetune.data.folders import explain_unread

    not_named, refusal = explain_unread(folder, label, below, unread, is_data_set=is_data_set)
    return replace(splits, not_read=[*splits.not_read, *not_named], refusal=refusal)


def _split_folder(label: str, names: Sequence[str], open_file: Callable[[str], RowSource]) -> _Splits:
    files: dict[str, str] = {}
    for name in in_order(names):
        split = stem_of(PurePath(name))
        if split in files:
            raise DataError(f"{label} has both {files[split]} and {name}. Remove one of them.")
        files[split] = name
    if not files:
        expected = " or ".join(f"train{suffix}" for suffix in SUFFIXES)
        raise DataError(f"data.path is {label}, a folder without data files. Expected {expected} in it.")
    of_splits = files_of_splits(list(files.values()))

    def open_split(split: str) -> RowSource:
        sources = [open_file(name) for name in ([files[split]] if split in files else of_splits[split])]
        return sources[0] if len(sources) == 1 else JoinedRows(sources, label)

    has_no_splits = of_splits == {"train": list(files.values())}
    not_read = set(files.values()).difference(*of_splits.values())
    splits = list(dict.fromkeys([*files, *of_splits]))
    return _Splits(_PARTS if has_no_splits else "a folder", label, splits, open_split, not_read=in_order(not_read))


def _dataset(form: str, section: DataSection, path: str) -> _Splits:
    from finetune.data.hub import open_split, split_names

    names = split_names(section, path)
    return _Splits(form, path, names, partial(open_split, section, path), has_slices=True)
