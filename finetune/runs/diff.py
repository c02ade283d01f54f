"""`finetune diff`: what two runs have different, in configuration, versions, data, world and results."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.keys import fields
from finetune.logs import configure_logs
from finetune.runs.listing import mapping_in, read_config, refuse_what_is_no_run, summarise
from finetune.runs.record import read_run_record

if TYPE_CHECKING:
    from rich.table import Table

    from finetune.runs.folder import RunFolder

_PLACES = {"output_dir", "resume", "resume_allow"}
"""Keys that say where a run lies and how it was started again, not what it is."""
_WORLD = ("world_size", "launcher", "backend", "num_steps")
_RESULTS = ("step", "best_step", "best_loss", "num_skipped_steps")
_SCORES = ("loss", "exact_match", "json_valid")
_MISSING = "–"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that two runs have different."""

    part: str
    """`config`, `versions`, `data`, `world` or `result`."""
    name: str
    a: Any
    """None too where the run does not say."""
    b: Any


def diff_runs(first: Path, second: Path, *, as_json: bool = False) -> int:
    """Print what two runs have different.

    Returns:
        The exit code, as `diff` has it: 0 where nothing is different, else 1.

    Raises:
        CheckpointError: one of them is no run's folder.
    """
    configure_logs(0, level=logging.ERROR)
    folders = refuse_what_is_no_run(first), refuse_what_is_no_run(second)
    differences = compare_runs(*folders)
    unread = [str(folder.config_file) for folder in folders if read_config(folder) is None]
    if as_json:
        record = {
            "a": str(folders[0].path),
            "b": str(folders[1].path),
            "differences": [vars(difference) for difference in differences],
            "not_compared": unread,
        }
        sys.stdout.write(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        return int(bool(differences))
    if differences:
        from rich.console import Console

        Console().print(_table(differences, str(first), str(second)))
    else:
        sys.stdout.write(f"{first} and {second}: nothing is different, but where they lie and when they ran\n")
    for file in unread:
        sys.stdout.write(f"{file} is missing or cannot be read: the configurations were not compared\n")
    return int(bool(differences))


def compare_runs(first: RunFolder, second: RunFolder) -> list[Difference]:
    """What two runs have different, the configuration first; places and times are left out."""
    sides = [_facts(first), _facts(second)]
    if any(not side["config"] for side in sides):
        for side in sides:
            side["config"] = {}
    found: list[Difference] = []
    for part in sides[0]:
        found += _different(part, sides[0][part], sides[1][part])
    return found


def _facts(folder: RunFolder) -> dict[str, dict[str, Any]]:
    record = read_run_record(folder.record_file) or {}
    fingerprints = mapping_in(record, "fingerprints")
    return {
        "config": _config(folder),
        "versions": mapping_in(record, "versions") | {"git_commit": record.get("git_commit")},
        "data": {name: value for name, value in fingerprints.items() if name != "config"},  # it says where the run lies
        "world": {name: record.get(name) for name in _WORLD} | _global_batch(record),
        "result": _results(folder, mapping_in(record, "result")),
    }


def _config(folder: RunFolder) -> dict[str, Any]:
    config = read_config(folder)
    if config is None:
        return {}
    values = config.model_dump(mode="json")
    found = {}
    for key in fields():
        section, _, name = key.rpartition(".")
        if key not in _PLACES:
            found[key] = values[section][name] if section else values[name]
    return found


def _global_batch(record: dict[str, Any]) -> dict[str, Any]:
    return {"global_batch_size": mapping_in(record, "global_batch").get("global_batch_size")}


def _results(folder: RunFolder, result: dict[str, Any]) -> dict[str, Any]:
    run = summarise(folder.path)
    found: dict[str, Any] = {"state": run.state, "train_loss": run.train_loss, "validation_loss": run.validation_loss}
    found |= {name: result.get(name) for name in _RESULTS}
    for model in ("base", "tuned"):
        scores = mapping_in(result, f"test_{model}")
        found |= {f"test_{model}.{name}": scores.get(name) for name in _SCORES}
    return found


def _different(part: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield Difference(part=part, name=name, a=a.get(name), b=b.get(name))


def _table(differences: list[Difference], first: str, second: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("")
    table.add_column("what", overflow="fold")
    for name in (first, second):
        table.add_column(Text(name), overflow="fold")
    part = ""
    for one in differences:
        shown = (Text(_shown(one, value)) for value in (one.a, one.b))
        table.add_row(one.part if one.part != part else "", Text(one.name), *shown)
        part = one.part
    return table


def _shown(difference: Difference, value: Any) -> str:
    if value is None:
        return "null" if difference.part == "config" else _MISSING
    if isinstance(value, float) and difference.part == "result":
        return f"{value:.6g}"
    if isinstance(value, str):
        return value[:12] if difference.part == "data" else value
    return json.dumps(value, ensure_ascii=False)
