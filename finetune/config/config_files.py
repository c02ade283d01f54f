"""Find the YAML files that words choose: by path, in ./configs, or shipped with the package."""

from __future__ import annotations

import re
from pathlib import Path

from finetune.config.keys import did_you_mean
from finetune.shipped_files import shipped_folder

GROUPS = ("model", "data", "task", "parallel")
"""The group words, in the order in which their files are merged: a later one wins over an earlier one."""

RUN_FILES = "run"
"""The name in `list_configs` of the files directly in configs/."""

_PATH_INSTEAD = {
    "model": "For a hub id or a folder write model.path={name}.",
    "data": "For rows of your own write data.path={name}.",
}


def find_file(group: str, name: str, place: str, problems: list[str]) -> Path | None:
    """Find the file of ``group=NAME`` or ``run=NAME``: a .yaml or .yml path, or a name in configs/<group>/."""
    word = f"{place}: {group}={name}"
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if path.is_file():
            return path
        what = "is not a file" if path.exists() else "does not exist"
        problems.append(f"{word}: the file {what} (looked in {Path.cwd()})")
        return None
    files = _named_files(group)
    if name in files:
        return files[name]
    folder = "configs" if group == RUN_FILES else f"configs/{group}"
    hints = [did_you_mean(name, files), _hint(group, name)]
    there = f"There is: {', '.join(sorted(files))}." if files else ""
    message = f"{word}: there is no {folder}/{name}.yaml, neither here nor shipped."
    problems.append(" ".join(part for part in (message, there, *hints) if part))
    return None


def list_configs() -> dict[str, list[tuple[str, str]]]:
    """List the names of `run` and of every group, each with the description in the file's first line."""
    return {
        group: [(name, _description(path)) for name, path in sorted(_named_files(group).items())]
        for group in (RUN_FILES, *GROUPS)
    }


def shown_path(path: Path) -> str:
    """Return a path as messages show it: relative to the current directory, `shipped configs/…`, or absolute."""
    path = path.absolute()
    for folder, prefix in ((Path.cwd(), ""), (shipped_folder("configs").parent, "shipped ")):
        if path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return str(path)


def _hint(group: str, name: str) -> str:
    inside = Path(name) / "config.yaml"
    if group == RUN_FILES and inside.is_file():
        return f"For the run in this folder write run={inside}."
    if group in _PATH_INSTEAD and re.search(r"[/.~:]", name):
        return _PATH_INSTEAD[group].format(name=name)
    return ""


def _named_files(group: str) -> dict[str, Path]:
    """Map names to files; a file in ./configs wins over a shipped one."""
    below = "" if group == RUN_FILES else group
    folders = (shipped_folder("configs") / below, Path.cwd() / "configs" / below)
    return {path.stem: path for folder in folders for path in folder.glob("*.y*ml") if path.is_file()}


def _description(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            line = file.readline(200)
    except (OSError, UnicodeDecodeError):
        return ""
    return line.lstrip("# ").rstrip() if line.startswith("#") else ""
