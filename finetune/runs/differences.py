"""Settings side by side: with the schema's defaults, and of several runs with each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from finetune.config.checks import without_passwords
from finetune.config.keys import fields, section_class
from finetune.config.schema import Config
from finetune.runs.recorded_run import RecordedRun, mapping

MISSING = "–"
_FOLDER_KEYS = {"output_dir", "resume"}
"""They say where a run is and how it was started again, not what it is."""


class SettingRow(NamedTuple):
    """One key of a run's configuration."""

    key: str
    value: str
    default: str
    is_changed: bool
    meaning: str


class DifferenceRow(NamedTuple):
    """One fact that is not the same for all runs."""

    name: str
    values: list[str]


def setting_rows(run: RecordedRun) -> list[SettingRow]:
    """Every key that the run's config.yaml has, in its order."""
    defaults = _defaults()
    rows = []
    for key, value in _folded(run.settings).items():
        default = defaults.get(key, ...)
        field = fields().get(key)
        rows.append(
            SettingRow(
                key=key,
                value=shown(value),
                default=MISSING if default is ... else shown(default),
                is_changed=default is ... or shown(default) != shown(value),
                meaning=(field.description or "").replace("`", "") if field else "not a key of this version",
            )
        )
    return rows


def difference_rows(runs: Sequence[RecordedRun]) -> list[DifferenceRow]:
    """What is not the same for all runs: settings first, then data, world, versions."""
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for of_run in facts for name in of_run))
    rows = [DifferenceRow(name, [of_run.get(name, MISSING) for of_run in facts]) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]


def differing_settings(runs: Sequence[RecordedRun]) -> list[DifferenceRow]:
    """Of `difference_rows` those that the user has set."""
    keys = {key for run in runs for key in _folded(run.settings)} - _FOLDER_KEYS
    return [row for row in difference_rows(runs) if row.name in keys]


def shown(value: object) -> str:
    """A value as it is written in words."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return without_passwords(text)


def _facts(run: RecordedRun) -> dict[str, str]:
    settings = {key: shown(value) for key, value in _folded(run.settings).items() if key not in _FOLDER_KEYS}
    prints = mapping(run.record.get("fingerprints"))
    digests = {f"fingerprint of {name}": str(value)[:12] for name, value in prints.items() if name != "config"}
    names = ("launcher", "world_size", "backend", "git_commit")
    worlds = {name: shown(run.record[name]) for name in names if name in run.record}
    batch = {name: shown(value) for name, value in mapping(run.record.get("global_batch")).items()}
    versions = {f"version of {name}": str(value) for name, value in mapping(run.record.get("versions")).items()}
    return {**settings, **digests, **worlds, **batch, **versions}


def _defaults() -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in Config().model_dump().items():
        if section_class(name) is None:
            values[name] = value
        else:
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
    return values


def _folded(settings: dict[str, object]) -> dict[str, object]:
    """Keys that take a mapping as one value: the reader gives a setting for each of its keys."""
    folded: dict[str, Any] = {}
    known = fields()
    for dotted, value in settings.items():
        parts = dotted.split(".")
        above = next((".".join(parts[:n]) for n in range(1, len(parts)) if ".".join(parts[:n]) in known), None)
        if above is None:
            folded[dotted] = value
        else:
            folded.setdefault(above, {})
            if isinstance(folded[above], dict):
                folded[above][dotted.removeprefix(f"{above}.")] = value
    return folded
