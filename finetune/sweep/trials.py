"""The folder of a sweep: sweep.json says what is tried, and each trial is a run in a folder of its own.

The state and the metrics of a trial are read from its run's files. Only what a run cannot know of itself is noted
beside it, in `trial-007.ended.json`: that the sweep ended it early, or that its process failed.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.limits import read_regular
from finetune.runs.best_validation import best_point, publishable_points
from finetune.runs.comparison import differing, format_value
from finetune.runs.durable import describe_os_error, is_leftover, replace_file
from finetune.runs.file_lock import file_lock
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import ENDED_EARLY, Points, RecordedRun
from finetune.terminal import json_text

FINISHED = ("completed", ENDED_EARLY, "failed")
"""The states of a trial that the sweep does not start again."""
_FILE = "sweep.json"
_LOCK = "sweep.lock"


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep. They are recorded in sweep.json before the first one starts."""

    arguments: list[str]
    """The arguments of every trial."""
    space: dict[str, str]
    """The values to try, by key and as they were written."""
    seed: int
    """Seed of the draws."""
    metric: str
    """The metric of validations by which trials are compared, without `validation.`."""
    halving: int
    """The factor of successive halving, see `finetune.sweep.running`; 0: no trial ends early."""
    num_trials: int | None
    """The number of trials to draw; None: every combination."""
    trials: list[dict[str, str]]
    """The values of each trial, by key."""


class Trial:
    """A trial: the run of `finetune train` with the values that were drawn. Trials are counted from 1."""

    def __init__(self, folder: Path, number: int, sweep: Sweep) -> None:
        self.name = f"trial-{number:03d}"
        self.values = sweep.trials[number - 1]
        self.folder = folder / self.name
        self.log = folder / f"{self.name}.log"
        self.lock = folder / f"{self.name}.lock"
        self._read: RecordedRun | None = None
        self._metric = sweep.metric
        drawn = (f"{key}={value}" for key, value in self.values.items())
        self.arguments = ["train", *sweep.arguments, *drawn, f"output_dir={self.folder}", "resume=auto"]

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return shlex.join(["finetune", *self.arguments])

    @property
    def run(self) -> RecordedRun:
        """The run's files, as they are now, or as `read_once` has read them."""
        return self._read or RecordedRun(self.folder, self.name, detail="recent")

    def read_once(self) -> None:
        """Read the run's files for the last time, with the losses that a report draws. No trial may run any more."""
        self._read = RecordedRun(self.folder, self.name, detail="thinned")

    @property
    def state(self) -> str:
        """`not started`, or a state of `RecordedRun`."""
        run = self.run
        return "not started" if run.state == "unknown" and not run.folder.holds_run() else run.state

    def points(self) -> Points:
        """Return step and metric of each validation, up to the validation after which the trial was ended early.

        The metric is NaN where weights could not be published (`early_stopping.max_forgotten`).
        """
        run = self.run
        publishable = dict(publishable_points(run, self._metric))
        validations = run.points("validation", self._metric)[: run.note.get("validation")]
        return [(step, publishable.get(step, math.nan)) for step, _ in validations]

    def best_point(self) -> tuple[int, float] | None:
        """Return step and metric of the best of these validations; None without one."""
        return best_point(self.points(), self._metric)

    def end(self, state: str, facts: Mapping[str, Any]) -> None:
        """Note that the trial ended early or failed."""
        replace_file(self.run.note_file, _as_file({"state": state, **facts}))


def open_sweep(folder: Path, sweep: Sweep, *, is_there: bool = False) -> None:
    """Record a sweep in its folder, unless it is there. More trials are added. Several processes may do so at once.

    With `is_there`, the folder must hold a sweep, and nothing is written.

    Raises:
        CheckpointError: the folder cannot be written, or holds another sweep, a run or other files.
    """
    file = folder / _FILE
    if is_there and not file.is_file():
        raise CheckpointError(f"{folder} holds no sweep to report on. Name its folder with output_dir=.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / _LOCK, waiting_for=f"the sweep in {folder}"):
            files = [path.name for path in folder.iterdir() if path.name != _LOCK and not is_leftover(path.name)]
            if files and _FILE not in files:
                content = "a run" if RunFolder(folder).holds_run() else f"other files ({', '.join(sorted(files)[:5])})"
                raise CheckpointError(
                    f"output_dir={folder} holds {content} and no sweep. Name a new folder with output_dir=. Nothing "
                    "was changed."
                )
            if not files or (_is_extended(folder, sweep, _read(file)) and not is_there):
                replace_file(file, _as_file(asdict(sweep)))
    except OSError as error:
        raise CheckpointError(
            f"output_dir={folder} cannot be written: {describe_os_error(error)}. Name another with output_dir=."
        ) from error


def _is_extended(folder: Path, sweep: Sweep, recorded: Sweep) -> bool:
    """Return whether a sweep has more trials than the recorded one. A sweep that differs otherwise is refused."""
    changed = dict(differing([asdict(recorded), asdict(sweep)]))
    if changed.keys() == {"num_trials", "trials"} and sweep.trials[: len(recorded.trials)] == recorded.trials:
        return True
    if not changed:
        return False
    if len(changed) > 1:
        changed.pop("trials", None)  # another setting has changed them
    changes = "; ".join(
        f"{name} was {format_value(old)}, now {format_value(new)}" for name, (old, new) in changed.items()
    )
    raise CheckpointError(
        f"output_dir={folder} holds another sweep: {changes}. Give the same arguments to go on with it, or name a new "
        "folder with output_dir=. Nothing was changed."
    )


def _read(file: Path) -> Sweep:
    try:
        return Sweep(**json.loads(read_regular(file)))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged or from another version of finetune. Name another folder with output_dir=."
        ) from error


def _as_file(values: Mapping[str, Any]) -> bytes:
    return f"{json_text(values, indent=2)}\n".encode()
