"""Sweeps in miniature: phi_tiny learns the orders that are shipped, for a few steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.runs.metrics_reader import read_events

STEPS = 6


def words_of(folder: Path, *words: str, steps: int = STEPS) -> list[str]:
    """The arguments of a sweep in a folder, with a validation after every second step."""
    return [
        *("quickstart", "data.max_rows=24", f"data.cache_dir={folder.parent / 'cache'}", "training.device=cpu"),
        *("training.batch_size=8", f"training.max_steps={steps}", "validation.validate_every=2"),
        *("testing.num_samples=0", "testing.metrics=[]", "testing.compare_base=false", "optim.warmup_steps=0"),
        *(f"output_dir={folder}", *words),
    ]


def noted(trial: Path) -> dict[str, Any]:
    """What the sweep noted of a trial; empty if it noted nothing."""
    file = trial.with_name(f"{trial.name}.ended.json")
    return json.loads(file.read_text()) if file.exists() else {}


def status_of(trial: Path) -> str:
    return json.loads((trial / "run.json").read_text())["status"]


def losses_of(trial: Path) -> Sequence[tuple[Any, Any]]:
    """Step and loss of each step and validation."""
    events = read_events(trial / "metrics.jsonl").events
    return [(event["step"], event["loss"]) for event in events if event["event"] in ("step", "validation")]
