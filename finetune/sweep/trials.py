"""The folder of a sweep: sweep.json says what is tried, and each trial is a run in a folder of its own.

The state and the metrics of a trial are read from its run's files. Only what a run cannot know of itself is noted
beside it, in `trial-007.ended.json`: that the sweep ended it early, or that its process failed.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, ConfigError
from finetune.runs.comparison import differing, format_value
from finetune.runs.durable import describe_os_error, replace_file
from finetune.runs.file_lock import file_lock
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import Points, RecordedRun, mapping
from finetune.terminal import json_text

SWEEP_FILE = "sweep.json"
ENDED_EARLY = "ended early"
NOT_STARTED = "not started"
FINISHED = ("completed", ENDED_EARLY, "failed")
"""The states of a trial that the sweep does not start again."""
_VERSION = 1
_COMPARED = ("arguments", "space", "seed", "metric", "halving", "num_trials")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep tries. It is recorded in sweep.json before the first trial starts."""

    arguments: list[str]
    """The arguments of every trial."""
    space: dict[str, str]
    """The values that are tried, by key and as they were written."""
    seed: int
    """Seed of the draws."""
    metric: str
    """The metric of validations by which trials are compared, without `validation.`."""
    halving: int
    """See `finetune.sweep.halving`; 0: no trial ends early."""
    num_trials: int | None
    """The number of trials to draw; None: every combination."""
    trials: list[dict[str, str]]
    """The values of each trial, by key."""


class Trial:
    """A trial: the run of `finetune train` with the values that were drawn.

    Args:
        folder: the folder of the sweep.
        number: counted from 1.
        sweep: what the sweep tries.
    """

    def __init__(self, folder: Path, number: int, sweep: Sweep) -> None:
        self.name = f"trial-{number:03d}"
        self.values = sweep.trials[number - 1]
        self.folder = folder / self.name
        self.log = folder / f"{self.name}.log"
        self.lock = folder / f"{self.name}.lock"
        self._note = folder / f"{self.name}.ended.json"
        self._metric = sweep.metric
        drawn = (f"{key}={value}" for key, value in self.values.items())
        self.arguments = ["train", *sweep.arguments, *drawn, f"output_dir={self.folder}", "resume=auto"]

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return shlex.join(["finetune", *self.arguments])

    @property
    def process_arguments(self) -> list[str]:
        """The command as it is run."""
        return [sys.executable, "-m", "finetune", *self.arguments]

    @property
    def run(self) -> RecordedRun:
        """The run's files, as they are now."""
        return RecordedRun(self.folder, self.name)

    @property
    def note(self) -> dict[str, Any]:
        """What `end` noted; empty if the sweep did not end this trial and it did not fail."""
        try:
            return mapping(json.loads(self._note.read_bytes()))
        except (OSError, ValueError):
            return {}

    @property
    def state(self) -> str:
        """`not started`, `ended early`, or a state of `RecordedRun`."""
        noted = self.note.get("state")
        if noted in (ENDED_EARLY, "failed"):
            return str(noted)
        state = self.run.state
        return NOT_STARTED if state == "unknown" and not self.run.folder.holds_run() else state

    @property
    def why(self) -> str:
        """Why it failed; empty if that is not known."""
        return str(self.note.get("why") or self.run.why or "")

    def end(self, state: str, **why: Any) -> None:
        """Note that the trial ended early or failed."""
        replace_file(self._note, f"{json_text({'state': state, **why}, indent=2)}\n".encode())

    def forget_failure(self) -> None:
        """Let a failed trial start again."""
        self._note.unlink(missing_ok=True)

    def points(self) -> Points:
        """Return step and metric of each validation. Those after the one that ended the trial early do not count."""
        return self.run.points("validation", self._metric)[: self.note.get("validation")]


def trials_of(folder: Path, sweep: Sweep) -> list[Trial]:
    """Return all trials of a sweep."""
    return [Trial(folder, number, sweep) for number in range(1, len(sweep.trials) + 1)]


def open_sweep(folder: Path, asked: Sweep) -> Sweep:
    """Record a sweep in its folder, or find it there. Several processes may do so at once.

    Returns:
        The recorded sweep. A greater number of trials is added to it.

    Raises:
        CheckpointError: the folder cannot be written, or holds another sweep, a run or other files.
    """
    file = folder / SWEEP_FILE
    try:
        _refuse_other_files(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / ".lock", waiting_for=f"the sweep in {folder}"):
            _refuse_other_files(folder)
            found = _read(file) if file.exists() else None
            if found is not None and not _is_longer(asked, found):
                _refuse_another(folder, asked, found)
                return found
            replace_file(file, f"{json_text({'version': _VERSION, **asdict(asked)}, indent=2)}\n".encode())
            return asked
    except OSError as error:
        raise CheckpointError(
            f"output_dir={folder} cannot be written: {describe_os_error(error)}. Name another with output_dir=."
        ) from error


def _refuse_other_files(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if SWEEP_FILE not in names and [name for name in names if name != ".lock"]:
        what = "a run" if RunFolder(folder).holds_run() else f"other files ({', '.join(names[:5])})"
        raise CheckpointError(
            f"output_dir={folder} holds {what} and no sweep. Name a new folder with output_dir=. Nothing was changed."
        )


def _read(file: Path) -> Sweep:
    try:
        values = json.loads(file.read_bytes())
        return Sweep(**{name: values[name] for name in (*_COMPARED, "trials")})
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file} is damaged or from another version of finetune. Name another folder with output_dir=."
        ) from error


def _is_longer(asked: Sweep, found: Sweep) -> bool:
    """Return whether only trials are added to a recorded sweep."""
    same = all(getattr(asked, name) == getattr(found, name) for name in _COMPARED if name != "num_trials")
    return same and len(asked.trials) > len(found.trials) and asked.trials[: len(found.trials)] == found.trials


def _refuse_another(folder: Path, asked: Sweep, found: Sweep) -> None:
    sides = [{name: getattr(sweep, name) for name in _COMPARED} for sweep in (asked, found)]
    changes = [f"{name} is {format_value(new)}, and was {format_value(old)}" for name, (new, old) in differing(sides)]
    if changes:
        raise CheckpointError(
            f"output_dir={folder} holds another sweep: {'; '.join(changes)}. Give the same arguments to go on with it, "
            "or name a new folder with output_dir=. Nothing was changed."
        )


def number_of(trials: Sequence[Trial], only: int) -> Trial:
    """Return one trial by its number, counted from 1.

    Raises:
        ConfigError: there is no such trial.
    """
    if not 1 <= only <= len(trials):
        raise ConfigError(f"--only is {only}, but this sweep has the trials 1 to {len(trials)}.")
    return trials[only - 1]
