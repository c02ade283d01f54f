"""Compare configurations and runs, for `resume`, `finetune diff` and the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from finetune.config.keys import values
from finetune.config.schema import Config
from finetune.runs.recorded_run import RecordedRun, mapping
from finetune.terminal import without_passwords

MISSING = "–"
_PLACES = {"output_dir", "resume", "resume_allow"}
"""Keys that do not change a run: its folder, and how it is resumed."""
_WORLD = ("world_size", "launcher", "backend", "device", "precision", "num_steps")
_RESULTS = ("step", "best_step", "best_loss", "best_value", "num_skipped_steps")
_SCORES = ("loss", "exact_match", "json_valid")
_DIGITS = 12
"""Shown digits of a digest, enough to tell two apart."""


class Difference(NamedTuple):
    """A fact that differs between runs."""

    part: str
    """`config`, `versions`, `data`, `world` or `result`."""
    name: str
    values: list[Any]
    """One for each run; None also means that the run does not record it."""

    def texts(self) -> list[str]:
        """Return the values as text."""
        return [self._text(value) for value in self.values]

    def as_record(self) -> dict[str, Any]:
        """Convert a difference of two runs to plain values for `--json`."""
        a, b = self.values
        return {"part": self.part, "name": self.name, "a": a, "b": b}

    def _text(self, value: Any) -> str:
        if value is None and self.part != "config":
            return MISSING
        if isinstance(value, float) and self.part == "result":
            return f"{value:.6g}"
        if self.part == "data":  # pairs have a digest for each side
            return "/".join(digest[:_DIGITS] for digest in format_value(value).split("/"))
        return format_value(value)


def differing(sides: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each name whose values differ, with the value of each side (None if a side has none)."""
    for name in dict.fromkeys(name for side in sides for name in side):
        of_sides = [side.get(name) for side in sides]
        if any(value != of_sides[0] for value in of_sides):
            yield name, of_sides


def compare_runs(runs: Sequence[RecordedRun]) -> list[Difference]:
    """Compare runs, settings first. Paths and times are left out.

    Settings are compared only if they can be read for every run.
    """
    facts = [_facts(run) for run in runs]
    if not all(of_run["config"] for of_run in facts):
        facts = [{**of_run, "config": {}} for of_run in facts]
    return [
        Difference(part, name, of_runs)
        for part in facts[0]
        for name, of_runs in differing([of_run[part] for of_run in facts])
    ]


def recorded_facts(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what run.json records beside settings and results, by part (`versions`, `data`, `world`) and name."""
    world = {name: record.get(name) for name in _WORLD} | mapping(record.get("global_batch"))
    return {
        "versions": mapping(record.get("versions")) | {"git_commit": record.get("git_commit")},
        # The digest of the configuration depends on the run's path.
        "data": {name: value for name, value in mapping(record.get("fingerprints")).items() if name != "config"},
        "world": world | {"threads": mapping(record.get("threads")).get("count")},
    }


def loss_difference(recorded: float, computed: float) -> float:
    """Return the difference of two losses relative to max(1, |recorded|), the measure of promise 1."""
    return abs(computed - recorded) / max(1.0, abs(recorded))


def format_value(value: object) -> str:
    """Write a value as on the command line, without passwords."""
    return without_passwords(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def effects_that_count(before: Config, now: Config, *, has_same_rows: bool) -> set[str]:
    """Return the values of `OnResume.matters` that apply to two configurations. Unknown rows count as changed."""
    sides = (before, now)
    has_adapter = any(side.training.method == "lora" for side in sides)
    # A rate that is constant after a warm-up of a fixed length does not depend on the end of the run.
    is_rate_scaled = all(side.optim.schedule != "constant" or 0 < side.optim.warmup_steps < 1 for side in sides)
    has_max_steps = all(side.training.max_steps is not None for side in sides)
    counts = {
        "always": True,
        "rows": not has_same_rows,
        "adapter": has_adapter,
        "noise": any(side.masks_follow_microbatches for side in sides),
        "steps": is_rate_scaled,
        "epochs": is_rate_scaled and not has_max_steps,
        "answers": any(side.validation.metrics or side.objective.generates_answers for side in sides),
    }
    return {name for name, holds in counts.items() if holds}


def is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Return whether `resume.allow` names a key or its section."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _facts(run: RecordedRun) -> dict[str, dict[str, Any]]:
    """Return the facts to compare, by part and name."""
    settings = values(run.config) if run.config else {}
    results = {
        "state": run.state,
        "train_loss": run.last("step", "loss"),
        "validation_loss": run.last("validation", "loss"),
        "train_reward": run.last("step", "reward"),
        "validation_reward": run.last("validation", "reward"),
        **{name: run.result.get(name) for name in _RESULTS},
    }
    for model in ("test_base", "test_tuned"):
        scores = mapping(run.result.get(model))
        results |= {f"{model}.{name}": scores.get(name) for name in _SCORES}
    return {
        "config": {key: value for key, value in settings.items() if key not in _PLACES},
        **recorded_facts(run.record),
        "result": results,
    }
