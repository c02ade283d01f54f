"""Find YAML files: those that overrides choose (a path, ./configs, or shipped), and the other shipped files.

`model=` and `data=` also take the path or hub id of a model or of rows: `is_path` tells the two apart.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from glob import iglob
from pathlib import Path
from typing import Literal

from finetune.errors import ConfigError

SHIPPED_PREFIX = "shipped:"

PACKAGE = Path(__file__).resolve().parents[1]  # beside which, or in which, the shipped folders are
GROUPS = ("model", "data", "task", "parallel")
"""The groups, in the order in which their files are merged: a later one wins over an earlier one."""
RUN_FILES = "run"
"""The name of the files directly in configs/, beside those of the groups."""
PATH_INSTEAD = {
    "model": "For a model of your own write model=./FOLDER, model=ORG/NAME or model.path=HUB_ID.",
    "data": "For rows of your own write data=FILE, data=./FOLDER, data=ORG/NAME or data.path=HUB_ID.",
}
"""The groups that also take a path or a hub id, which sets the section's `path`, and how to write one."""
SAVED_CONFIG = "config.yaml"
"""The name of the configuration in the folder of a run."""
_TASKS_ELSEWHERE = {"sft": "finetune_lora", "dpo": "finetune_preferences", "pt": "continue_pretraining"}
"""What other tools call a task, and its file in configs/task/."""
LOCAL = "file://"
"""What a path may begin with."""
_SUFFIXES = (".yaml", ".yml")
SUFFIXES_OF_ROWS = re.compile(r"(\.(jsonl?|ndjson|csv|tsv|parquet|gz|zst|bz2|xz))+$")


def shipped_folder(name: Literal["configs", "recipes", "docs"]) -> Path:
    """Return the folder inside an installed wheel, or beside the package in a checkout of the repository.

    Raises:
        ConfigError: the installation is incomplete.
    """
    # First inside: beside an installed package lie others, and one may be called "configs".
    for folder in (PACKAGE / "shipped" / name, PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(f"this installation of finetune has no {name}/ folder. Install the package again.")


def resolve_shipped(path: str) -> str:
    """Return the absolute path of an asset such as ``shipped:phi_tiny``, and any other path unchanged.

    Raises:
        ConfigError: there is no asset of this name.
    """
    if not path.startswith(SHIPPED_PREFIX):
        return path
    name = path.removeprefix(SHIPPED_PREFIX)
    assets = {entry.name: entry for entry in (PACKAGE / "assets").glob("[!_.]*")}
    if name not in assets:
        there = ", ".join(SHIPPED_PREFIX + asset for asset in sorted(assets)) or "nothing"
        raise ConfigError(f"{path} is not shipped with this package. There is: {there}.")
    return str(assets[name])


def is_path(group: str, name: str) -> bool:
    """Return whether ``model=NAME`` or ``data=NAME`` names a model or rows themselves: a path or a hub id.

    A name in configs/<group>/ wins over a file or folder of the same name; ``./NAME`` is always a path.
    """
    if group not in PATH_INSTEAD or name.endswith(_SUFFIXES) or name in named_files(group):
        return False
    is_several = group == "data" and is_list_or_glob(files_in(name))
    return is_several or "/" in name or name.startswith(("~", SHIPPED_PREFIX)) or path_exists(name)


def is_list_or_glob(name: str) -> bool:
    """Return whether a name is several files of rows, ``[a.jsonl, b.jsonl]`` or ``*.jsonl``, and not an address."""
    return name.startswith("[") or ("://" not in name and ("*" in name or "?" in name))


def files_in(name: str) -> str:
    """Return `a.csv,b.jsonl` as a list if one of these files exists. Return any other name as it is."""
    parts = name.split(",")
    is_several = len(parts) > 1 and not name.startswith("[") and not path_exists(name) and any(map(path_exists, parts))
    return json.dumps(parts, ensure_ascii=False) if is_several else name


def is_address(path: str) -> bool:
    """Return whether a path is an address, and not a file or folder of this machine."""
    return "://" in path and not path.startswith(LOCAL)


def is_run_file(argument: str) -> bool:
    """Return whether an argument without a key names a run file, or the folder of a run."""
    if "=" in argument.partition("/")[0] or argument.startswith("-"):  # runs/lr=0.1 is a folder: no key has a slash
        return False
    is_named = argument.endswith(_SUFFIXES) or argument in named_files(RUN_FILES)
    return is_named or path_exists(f"{argument}/{SAVED_CONFIG}", is_file=True)


def is_file_of_rows(argument: str) -> bool:
    """Return whether an argument without a key is files other than a run file: ``finetune train chats.jsonl``."""
    if is_run_file(argument):
        return False
    return is_list_or_glob(files_in(argument)) or (path_exists(argument) and local_path(argument).is_file())


def find_file(group: str, name: str, place: str, problems: list[str]) -> Path | None:
    """Find the file of ``group=NAME`` or ``run=NAME``: a .yaml or .yml path, or a name in configs/<group>/.

    `run=` also takes the folder of a run, for the configuration in it.
    """
    choice = f"{place}: {group}={name}"
    is_run = group == RUN_FILES and (saved := local_path(name) / SAVED_CONFIG).is_file()
    if name.endswith(_SUFFIXES) and not is_run:
        if (path := local_path(name)).is_file():
            return path
        problem = "is not a file" if path.exists() else "does not exist"
        problems.append(f"{choice}: the file {problem} (looked in {Path.cwd()})")
        return None
    files = named_files(group)
    ours = _our_name(name, files)
    if ours is not None:
        return files[ours]
    if is_run:
        return saved
    if group == RUN_FILES and path_exists(f"{name}/run.json", is_file=True):
        problems.append(f"{choice}: this run has no {SAVED_CONFIG} any more. Restore it from a copy.")
        return None
    from finetune.config.key_advice import advise_on_run_file, closest

    folder = "configs" if group == RUN_FILES else f"configs/{group}"
    here = [entry.name for entry in Path().glob("*")] if group in PATH_INSTEAD else []
    stems = {SUFFIXES_OF_ROWS.sub("", candidate): candidate for candidate in [*here, *files]}  # else all are alike
    hint = PATH_INSTEAD.get(group, "")
    if group == RUN_FILES:
        hint = advise_on_run_file(name, exists=path_exists(name), override=override_like(name))
    there = f"There is: {', '.join(sorted(files))}." if files else ""
    message = f"{choice}: there is no {folder}/{name}.yaml, neither here nor shipped"
    if group in (*PATH_INSTEAD, RUN_FILES) and not path_exists(name):
        message += f", and no file or folder of this name (looked in {Path.cwd()})"
    near = "" if hint.startswith("Did") else closest(SUFFIXES_OF_ROWS.sub("", name), stems)
    close = f"Did you mean {stems[near]}?" if near else ""
    problems.append(" ".join(filter(None, (f"{message}.", there, close, hint))))
    return None


def override_like(name: str) -> str:
    """Return the override that chooses a file of this name in a group, such as ``model=phi4``; empty if there is none.

    The name of a group itself gives ``model=NAME``.
    """
    if name in GROUPS:
        return f"{name}=NAME"
    ours = {group: _our_name(name, named_files(group)) for group in GROUPS}
    return next((f"{group}={found}" for group, found in ours.items() if found is not None), "")


def _our_name(name: str, files: Collection[str]) -> str | None:
    """Find a name among ours: task=lora is task=finetune_lora, and model=qwen2.5-7b is qwen2_5_7b."""
    spelled = re.sub("[-.]", "_", name.lower())
    names = (name, spelled, f"finetune_{spelled}", _TASKS_ELSEWHERE.get(spelled.removeprefix("finetune_")))
    return next((known for known in names if known in files), None)


def shown_path(path: Path) -> str:
    """Return a path as messages show it: relative to the current directory, `shipped configs/…`, or absolute."""
    path = path.absolute()
    for folder, prefix in ((Path.cwd(), ""), (shipped_folder("configs").parent, "shipped ")):
        if path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return str(path)


def absolute(path: str | Path) -> str:
    """Return a path as an absolute one, also of what does not exist."""
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 (removes `..`, and refuses no user)


def path_exists(path: str, *, is_file: bool = False) -> bool:
    """Return whether a path leads to a file or folder on this machine, or a glob matches one."""
    try:
        place = Path(absolute(path))
        if is_list_or_glob(path):  # signs in the name of the current folder are no pattern
            return any(iglob(os.path.expanduser(path), recursive=True))  # noqa: PTH111, PTH207 (may be absolute)
        return place.is_file() and bool(place.suffix) if is_file else place.exists()
    except OSError:  # longer than a name may be
        return False


def named_files(group: str) -> dict[str, Path]:
    """Map names to files; a file in ./configs wins over a shipped one."""
    below = "" if group == RUN_FILES else group
    folders = (shipped_folder("configs") / below, Path.cwd() / "configs" / below)
    return {path.stem: path for folder in folders for path in folder.glob("*.y*ml") if path.is_file()}


def local_path(path: str) -> Path:
    """Return the path of a file or folder of this machine, which may be written `file:///rows.jsonl`."""
    return Path(os.path.expanduser(path.removeprefix(LOCAL)))  # noqa: PTH111 (refuses no user)
