"""Find the files of rows in a folder that a run would not read, and say how to read them."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from glob import escape
from pathlib import Path, PurePath

from finetune.config.config_files import SAVED_CONFIG
from finetune.data.column_advice import describe_suffix
from finetune.data.readers import suffix_of
from finetune.data.splits import names_split
from finetune.errors import DataError
from finetune.units import counted, name_first

_NO_ROWS = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
"""Files that describe a data set or a model. `datasets` takes none of them for rows."""
_OF_MODELS = ("config.json", "adapter_config.json")
_DECLARED = re.compile(r"^[\s-]*data_files\s*:", re.MULTILINE)
_DECLARATIONS = ("README.md", ".huggingface.yaml")
_MAX_NAMED = 3


def refuse_no_rows(folder: Path, label: str, names: Sequence[str]) -> None:
    """Refuse the folder of a run or of a model, and a folder of texts. `names` are its files that may hold rows.

    Raises:
        DataError: it is one of these, and no file is named after a split.
    """
    if any(map(names_split, names)):
        return
    if (folder / SAVED_CONFIG).is_file() and "run.json" in names:
        raise DataError(
            f"data.path is {label}, the folder of a run. Name the rows: those of this run are data.* in "
            f"{label.rstrip('/')}/{SAVED_CONFIG}."
        )
    if any((folder / name).is_file() for name in _OF_MODELS) and any(folder.glob("*.safetensors")):
        raise DataError(
            f"data.path is {label}, the folder of a model. Name the rows here, and the model in model.path."
        )
    if not names and (texts := sorted(folder.glob("*.txt"))):
        raise DataError(f"data.path is {label}, a folder of texts: {describe_suffix(texts[0], texts[0].name)}")


def explain_unread(
    folder: Path, label: str, below: Sequence[str], unread: Sequence[str], *, is_data_set: bool
) -> tuple[Sequence[str], str]:
    """Explain which files of rows in a folder are not read although the folder is `data.path`.

    A data set that declares its files in its README leaves out the others on purpose. A subfolder may be a run or a
    model.

    Args:
        folder: the folder.
        label: the folder as the user would name it.
        below: the files of rows in the folder and in its subfolders, relative to the folder.
        unread: those of them that are not read.
        is_data_set: whether `datasets` reads the folder. Otherwise the files of the folder itself are read.

    Returns:
        The files beside those of the splits, and a refusal: it says which files are missing from the rows, and how to
        read them. The refusal is empty if none are missing.
    """
    if is_data_set and any(_DECLARED.search(_text_of(folder / name)) for name in _DECLARATIONS):
        return [], ""
    not_read = set(unread)
    read = [name for name in below if name not in not_read]
    unread = [name for name in unread if PurePath(name).name not in _NO_ROWS and not _is_of_run_or_model(folder, name)]
    has_splits = any(map(names_split, read))
    if has_splits and not is_data_set:
        return unread, ""
    missing = [name for name in unread if not has_splits or names_split(name)]
    not_named = [name for name in unread if has_splits and not names_split(name)]
    if not missing:
        return not_named, ""
    if not is_data_set:
        why, fewer = "a folder with files of its own is read without its subfolders", "*"
    else:
        suffix = next(iter(Counter(map(suffix_of, read))), "")
        why, fewer = "the files of a data set have one suffix", f"**/*{suffix}"
    start = escape(label.rstrip("/"))
    every, some = (f"data.path={shlex.quote(f'{start}/{pattern}')}" for pattern in ("**/*", fewer))
    advice = f"To read all files, set {every}. To leave these out, set {some}."
    if any(map(names_split, below)):
        advice = "Name the files of each split instead: data.train='[…]' data.validation='[…]'."
    number = f"{counted(len(missing), 'file')} in it {'is' if len(missing) == 1 else 'are'} not read"
    return not_named, (
        f"data.path is {label}, but {number}: {name_first(missing, _MAX_NAMED)}. The reason: {why}. {advice}"
    )


def _is_of_run_or_model(folder: Path, name: str) -> bool:
    """Return whether a file is in the folder of a run, or is JSON in the folder of a model or an adapter."""
    marks = [SAVED_CONFIG, *(_OF_MODELS if suffix_of(name) == ".json" else ())]
    parents = [folder / parent for parent in PurePath(name).parents if parent.name]
    return any((parent / mark).is_file() for parent in parents for mark in marks)


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
