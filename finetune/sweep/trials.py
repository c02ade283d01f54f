"""The folder of a sweep: sweep.json says what is tried, and each trial is a run in a folder of its own.

The state and the metrics of a trial are read from its run's files. Only what a run cannot know of itself is noted
beside it, in `trial-007.ended.json`: that the sweep ended it early, or that its process failed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.runs.comparison import differing, format_value
from finetune.runs.durable import describe_os_error, is_leftover, replace_file
from finetune.runs.file_lock import file_lock
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import Points, RecordedRun, mapping
from finetune.terminal import json_text

ENDED_EARLY = "ended early"
FINISHED = ("completed", ENDED_EARLY, "failed")
"""The states of a trial that the sweep does not start again."""
_FILE = "sweep.json"
_LOCK = "sweep.lock"


@dataclass(frozen=True)
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

    def trials_in(self, folder: Path) -> list[Trial]:
        """Return all trials of a sweep in its folder."""
        return [Trial(folder, number, self) for number in range(1, len(self.trials) + 1)]


class Trial:
    """A trial: the run of `finetune train` with the values that were drawn. Trials are counted from 1."""

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
    def run(self) -> RecordedRun:
        """The run's files, as they are now."""
        return RecordedRun(self.folder, self.name, detail="recent")

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
        run = self.run
        if self.note:
            return str(self.note.get("state"))
        return run.state if run.folder.holds_run() or run.state == "running" else "not started"

    @property
    def why(self) -> str:
        """Why it failed; empty if that is not known."""
        return str(self.note.get("why") or self.run.why or "")

    def points(self) -> Points:
        """Return step and metric of each validation, up to the validation after which the trial was ended early."""
        return self.run.points("validation", self._metric)[: self.note.get("validation")]

    def end(self, state: str, why: Mapping[str, Any]) -> None:
        """Note that the trial ended early or failed."""
        replace_file(self._note, _as_file({"state": state, **why}))

    def forget_failure(self) -> None:
        """Let a failed trial start again."""
        self._note.unlink(missing_ok=True)


def open_sweep(folder: Path, asked: Sweep) -> None:
    """Record a sweep in its folder, unless it is there. More trials are added. Several processes may do so at once.

    Raises:
        CheckpointError: the folder cannot be written, or holds another sweep, a run or other files.
    """
    file = folder / _FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / _LOCK, waiting_for=f"the sweep in {folder}"):
            found = (path.name for path in folder.iterdir())
            names = sorted(name for name in found if name != _LOCK and not is_leftover(name))
            if names and _FILE not in names:
                what = "a run" if RunFolder(folder).holds_run() else f"other files ({', '.join(names[:5])})"
                raise CheckpointError(
                    f"output_dir={folder} holds {what} and no sweep. Name a new folder with output_dir=. Nothing was "
                    "changed."
                )
            if not names or _is_longer(folder, asked, _read(file)):
                replace_file(file, _as_file(asdict(asked)))
    except OSError as error:
        raise CheckpointError(
            f"output_dir={folder} cannot be written: {describe_os_error(error)}. Name another with output_dir=."
        ) from error


def _is_longer(folder: Path, asked: Sweep, found: Sweep) -> bool:
    """Return whether trials are added to a recorded sweep. Another sweep is refused."""
    changed = dict(differing([asdict(found), asdict(asked)]))
    if changed.keys() == {"num_trials", "trials"} and asked.trials[: len(found.trials)] == found.trials:
        return True
    if changed:
        shown = (name for name in changed if name != "trials" or len(changed) == 1)
        changes = [
            f"{name} was {format_value(changed[name][0])}, now {format_value(changed[name][1])}" for name in shown
        ]
        raise CheckpointError(
            f"output_dir={folder} holds another sweep: {'; '.join(changes)}. Give the same arguments to go on with it, "
            "or name a new folder with output_dir=. Nothing was changed."
        )
    return False


def _read(file: Path) -> Sweep:
    try:
        return Sweep(**json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged or from another version of finetune. Name another folder with output_dir=."
        ) from error


def _as_file(values: Mapping[str, Any]) -> bytes:
    return f"{json_text(values, indent=2)}\n".encode()
