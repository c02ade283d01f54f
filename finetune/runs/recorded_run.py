"""Read the folder of a run that is complete, failed, stopped or still running. Nothing in it is changed."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from finetune.config.compose import compose
from finetune.config.config_files import SAVED_CONFIG
from finetune.config.objectives import OBJECTIVES, ObjectiveFacts
from finetune.config.schema import Config
from finetune.errors import CheckpointError, ConfigError
from finetune.limits import open_regular, read_regular
from finetune.runs.durable import MANIFEST, describe_os_error
from finetune.runs.file_lock import is_held
from finetune.runs.folder import RunFolder
from finetune.runs.killed import why_killed
from finetune.runs.metrics import Event, number_in, step_of
from finetune.runs.metrics_reader import Detail, EventsRead, read_events
from finetune.runs.record import Status, read_run_record
from finetune.runs.state import read_state
from finetune.runs.verification import newest_valid, verify_checkpoint, verify_published
from finetune.units import name_first

Points = list[tuple[int, float]]
"""Step and value. A value may be NaN or infinite."""

ENDED_EARLY = "ended early"
"""The state of a trial that its sweep ended."""
LATEST = "latest"
"""Names the newest intact checkpoint."""
_MOST_STEPS = 6
"""Checkpoints that a message names, the nearest first."""
_DEEPEST = 4
"""The levels of folders to search. The limit prevents a search of a whole disk by mistake."""
_SILENT_SECONDS = 600.0
"""A run of another user that has written nothing for so long may have ended. Its lock cannot be tested."""
_LOCK_OF_OTHERS = (
    "its lock belongs to another user, and nothing was written for 10 minutes: it may run on another machine, or "
    "it was killed"
)
_SCORES = ("exact_match", "json_valid", "loss")


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """One folder with a manifest: a checkpoint, or `adapter/` or `base/`, which have no step."""

    name: str
    step: int | None
    validation_loss: float | None
    """The validation loss after that step, in nats per target token; None if it was not measured or is not finite."""
    num_bytes: int
    saved: str
    """The time when its manifest was written, in UTC, ISO 8601."""
    problems: list[str]
    """A line for each damaged file; empty if all bytes are as they were written."""


class RecordedRun:
    """A run, read from its files. Each file is read once, when it is first needed. Text in it may be untrusted.

    Args:
        path: the run's folder.
        name: the run's name beside others; default: its path.
        detail: the events to read if there are many.
    """

    def __init__(self, path: str | Path, name: str | None = None, *, detail: Detail = "all") -> None:
        self.folder = RunFolder(path)
        self.name = name or str(path)
        self._detail = detail
        self._problems: dict[Path, str] = {}
        self._verify = functools.cache(verify_checkpoint)

    @cached_property
    def config(self) -> Config | None:
        """config.yaml, with former keys read as the current ones; None if it cannot be read."""
        file = self.folder.config_file
        try:
            # Each line is a key. A line that was cut must not be read as a shorter value.
            if read_regular(file).endswith(b"\n"):
                return compose([], run=str(file), complete=False)
            problem = "is empty or cut short"
        except FileNotFoundError:
            problem = "is missing"
        except OSError as error:
            problem = f"cannot be read: {describe_os_error(error)}"
        except ConfigError as error:
            problem = f"cannot be read: {error}"
        self._problems[file] = f"{file.name} {problem}"
        return None

    @property
    def why_no_config(self) -> str:
        """The reason that config.yaml cannot be read; empty if it can."""
        return "" if self.config else self._problems[self.folder.config_file]

    @cached_property
    def record(self) -> dict[str, Any]:
        """run.json; empty if it is missing, half-written, or has a field of another type than runs write."""
        file = self.folder.record_file
        try:
            record = read_run_record(file)
        except CheckpointError as error:
            self._problems[file] = str(error).removesuffix(".")
            return {}
        if record is None:
            self._problems[file] = f"{file.name} is {'half-written and is left out' if file.exists() else 'missing'}"
        return record or {}

    @cached_property
    def _events(self) -> EventsRead:
        file = self.folder.metrics_file
        try:
            read = read_events(file, self._detail)
        except OSError as error:
            self._problems[file] = f"{file.name} cannot be read: {describe_os_error(error)}"
            return EventsRead([])
        num_lines = len(read.events) + read.num_left_out + read.num_thinned
        problems = []
        if read.num_left_out:
            problems.append(f"{read.num_left_out} of {num_lines} lines are half-written and left out")
        if read.num_thinned:
            problems.append(
                f"{read.num_thinned:,} of {num_lines:,} events are left out. The highest and the lowest losses are kept"
            )
        if problems:
            self._problems[file] = f"{file.name}: {'; '.join(problems)}"
        elif not file.exists():
            self._problems[file] = f"{file.name} is missing"
        return read

    @property
    def problems(self) -> list[str]:
        """The problems of reading, as sentences without a full stop."""
        _ = self.config, self.record, self._events  # what is read notes its problem
        files = (self.folder.config_file, self.folder.record_file, self.folder.metrics_file)
        return [self._problems[file] for file in files if file in self._problems]

    @property
    def num_tokens(self) -> float:
        """The number of tokens that the run has trained on, summed over its steps."""
        return self._events.num_tokens

    @cached_property
    def objective(self) -> ObjectiveFacts:
        """The training objective. If a run records rewards but no objective, it is from a version that only had dpo."""
        name = self.config.training.objective if self.config else "sft"
        return OBJECTIVES["dpo" if name == "sft" and self.points("step", "reward_margin") else name]

    @property
    def status(self) -> str:
        """The status in run.json, or `unknown`. The run may have been killed since."""
        return self.record.get("status") or "unknown"

    @property
    def note_file(self) -> Path:
        """The file beside the folder in which a sweep notes that it ended this trial, or that its process failed."""
        folder = self.folder.path.absolute()
        return folder.parent / f"{folder.name}.ended.json"

    @cached_property
    def note(self) -> dict[str, Any]:
        """What is in the note of a sweep; empty if there is none."""
        try:
            return mapping(json.loads(read_regular(self.note_file)))
        except (OSError, ValueError, RecursionError):
            return {}

    @cached_property
    def why_unreadable(self) -> str:
        """The error of `RunFolder.refuse_irregular_files`; empty if all files of the run can be read."""
        try:
            self.folder.refuse_irregular_files()
        except CheckpointError as error:
            return str(error)
        return ""

    @property
    def state(self) -> str:
        """`running`, `completed`, `failed`, `stopped`, `preempted`, `unreadable`, `unknown`, or `ended early`.

        A sweep ends trials early. A killed run leaves run.json unchanged. Only the kernel's lock shows whether a run is
        still in progress. Another user's lock may be that of a killed run, so the state is then `unknown`.
        """
        if self.why_unreadable:
            return "unreadable"
        if is_held(self.folder.lock_file):
            return "unknown" if self._has_lock_of_unknown_state else "running"
        noted = self.note.get("state")
        if noted in ("failed", ENDED_EARLY) and self.status != "completed":  # it may have been continued
            return str(noted)
        if self.status == "running":
            return "stopped"
        return self.status if self.status in get_args(Status) else "unknown"

    @cached_property
    def _has_lock_of_unknown_state(self) -> bool:
        """Whether this user may not test the lock, no process of this machine holds it, and nothing was written lately.

        A process of another machine may hold it.
        """
        file, newest = self.folder.lock_file, self.written
        try:
            with open_regular(file):
                return False
        except OSError:
            pass
        try:
            status = file.stat()
            last = max(status.st_mtime, newest.timestamp() if newest else 0.0)
            place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
            held = {line.split()[-3] for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()}
        except (OSError, IndexError):  # a system without this list
            return False
        return place not in held and time.time() - last > _SILENT_SECONDS

    @property
    def result(self) -> dict[str, Any]:
        """The result in run.json; empty before the end."""
        return self.part("result")

    @property
    def why(self) -> str | None:
        """The reason that the run failed, stopped or cannot be read, if it is known."""
        if self.state == "unknown" and is_held(self.folder.lock_file):
            return _LOCK_OF_OTHERS
        if self.state == "stopped" and self.status == "running":
            return why_killed(self.record)
        noted = None if self.status == "completed" else self.note.get("why")
        why = self.why_unreadable or noted or self.result.get("why") or self.result.get("error")
        return why if isinstance(why, str) else None

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of the whole run, if they are known."""
        return self.record.get("num_steps")

    @property
    def started(self) -> str | None:
        """The time of the last start, in UTC, ISO 8601."""
        starts = self.entries("starts")
        return starts[-1] if starts else None

    @property
    def finished(self) -> str | None:
        """The time of the end, in the same form; None before it."""
        return self.record.get("finished")

    @property
    def last_step(self) -> int | None:
        """The last optimizer step; None before the first."""
        return max((step for event in self.of("step") if (step := step_of(event)) is not None), default=None)

    @property
    def written(self) -> datetime | None:
        """The time when metrics.jsonl was last written, in UTC."""
        try:
            return datetime.fromtimestamp(self.folder.metrics_file.stat().st_mtime, UTC)
        except OSError:
            return None

    def part(self, name: str) -> dict[str, Any]:
        """Return a mapping in run.json; empty if it is missing."""
        return self.record.get(name) or {}

    def entries(self, name: str) -> list[Any]:
        """Return a list in run.json; empty if it is missing."""
        return self.record.get(name) or []

    def of(self, event_type: str) -> list[Event]:
        """Return the events of one type, in their order."""
        return [event for event in self._events.events if event["event"] == event_type]

    def points(self, event_type: str, name: str) -> Points:
        """Return one value of each event of a type, in ascending steps. The last event of a step counts."""
        values = {
            step: value
            for event in self.of(event_type)
            if (step := step_of(event)) is not None and (value := number_in(event, name)) is not None
        }
        return sorted(values.items())

    def last(self, event_type: str, name: str) -> float | None:
        """Return the last value of this name; None if there is none, or it is not finite."""
        points = finite(self.points(event_type, name)[-1:])
        return points[0][1] if points else None

    def scores(self) -> dict[str, dict[str, float]]:
        """Return the metrics of the test phase, by model (base, tuned) and name."""
        return {
            str(event.get("model")): {
                name: value
                for name in _SCORES
                if (value := number_in(event, name)) is not None and math.isfinite(value)
            }
            for event in self.of("test")
        }

    @property
    def tested_split(self) -> str:
        """The split that the test phase measured: `test`, or `validation` in a run without test rows."""
        return str(self.result.get("test_split", "test"))

    @property
    def rows_of_test_loss(self) -> str:
        """`4 of 5 rows` if `testing.drop_last` left rows out of the test losses, else empty."""
        rows, left_out = (whole(self.result.get(name)) for name in ("test_rows", "test_rows_left_out"))
        return f"{rows - left_out:,} of {rows:,} rows" if rows and left_out else ""

    @cached_property
    def checkpoints(self) -> list[SavedFolder]:
        """The checkpoints in ascending steps, after every byte was compared with the manifests."""
        losses = dict(finite(self.points("validation", "loss")))
        folders = (
            examine_folder(self.folder.checkpoint(step), self._verify, step=step, validation_loss=losses.get(step))
            for step in self.folder.checkpoint_steps()
        )
        return [folder for folder in folders if folder]

    @cached_property
    def published(self) -> list[SavedFolder]:
        """`adapter/` and `base/`, if they exist, compared likewise."""
        folders = (examine_folder(path, verify_published) for path in (self.folder.adapter, self.folder.base))
        return [folder for folder in folders if folder]

    @cached_property
    def resumes_from(self) -> int | None:
        """The step from which `resume=auto` continues; None if it would start from the beginning."""
        newest = newest_valid(self.folder, self._verify)
        return read_state(newest).step if newest else None

    def find_weights(self, checkpoint: str | None = None) -> Path:
        """Return the folder of the published weights, or of a checkpoint, after every byte was compared.

        Args:
            checkpoint: a step, a checkpoint's name or path, or `latest`; None: the published weights in `adapter/`.

        Raises:
            CheckpointError: there are no such weights, or they are damaged.
        """
        folder = self.folder
        try:
            steps = folder.checkpoint_steps()
        except OSError as error:
            reason = describe_os_error(error)
            raise CheckpointError(
                f"{folder.checkpoints} cannot be read: {reason}. Restore it, or use another run."
            ) from None
        if checkpoint is None:
            if not folder.adapter.is_dir():
                why, newest_step = "the run did not complete. Continue it with resume=auto.", str(*steps[-1:])
                if self.state == "running":  # it keeps only its newest checkpoints
                    why, newest_step = "it still trains. Wait for its end.", LATEST
                hint = f" Or add --checkpoint {newest_step} to generate, chat, evaluate or merge." if steps else ""
                raise CheckpointError(f"{self.name} has no adapter/ yet: {why}{hint}")
            if problems := verify_published(folder.adapter):
                if folder.adapter.is_symlink():  # which a resumed run refuses too
                    folder.check("auto")
                raise CheckpointError(
                    f"{folder.adapter} is damaged: {'; '.join(problems)}. Run the training again with resume=auto to "
                    "repair it."
                )
            return folder.adapter
        parent, _, name = checkpoint.rstrip("/").rpartition("/")
        number = name.removeprefix("step-")
        wanted = int(number) if number.isdecimal() else max(steps, default=0)
        nearest = map(str, sorted(steps, key=lambda step: abs(step - wanted)))
        present = f"steps {name_first([*nearest], _MOST_STEPS)}" if steps else "none"
        if checkpoint == LATEST:
            newest = newest_valid(folder, self._verify)
            if newest is None:
                raise CheckpointError(
                    f"{self.name} has no whole checkpoint (there: {present}). See `finetune checkpoints {self.name}`."
                )
            return newest
        places = (Path(parent).resolve(), (folder.path / parent).resolve())
        is_here = not parent or folder.checkpoints.resolve() in places
        if not (number.isdecimal() and int(number) in steps and is_here):
            raise CheckpointError(
                f"--checkpoint is {checkpoint}, but {self.name} has no such checkpoint (there: {present}). Choose one, "
                f"or say {LATEST}."
            )
        path = folder.checkpoint(int(number))
        if problems := self._verify(path):
            raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}. Choose another (there: {present}).")
        return path


def examine_folder(
    path: Path, verify: Callable[[Path], list[str]], *, step: int | None = None, validation_loss: float | None = None
) -> SavedFolder | None:
    """Examine a folder; None if it does not exist, since a run in progress may have removed an old checkpoint."""
    try:
        files = [file.lstat() for file in path.iterdir() if file.is_file() and not file.is_symlink()]
        problems = verify(path)
        manifest = path / MANIFEST
        written = (manifest if manifest.exists() else path).lstat().st_mtime
    except FileNotFoundError:
        return None
    return SavedFolder(
        name=path.name,
        step=step,
        validation_loss=validation_loss,
        num_bytes=sum(file.st_size for file in files),
        saved=datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds"),
        problems=problems,
    )


def open_run(path: Path, name: str | None = None, *, detail: Detail = "all") -> RecordedRun:
    """Open the run in a folder, see `RecordedRun`. A run that has just started may have only its lock.

    Raises:
        CheckpointError: the folder holds no run, or a file of it cannot be read.
    """
    run = RecordedRun(path, name, detail=detail)
    folder = run.folder
    folder.refuse_irregular_files()
    if not (folder.holds_run() or folder.config_file.is_file() or is_held(folder.lock_file)):
        raise CheckpointError(
            f"{path} is not the folder of a run: it has none of config.yaml, run.json, metrics.jsonl and checkpoints/. "
            f"{suggest_run(path)} `finetune runs FOLDER` lists those in a folder."
        )
    return run


def suggest_run(path: Path) -> str:
    """Return a sentence that says what to give in place of a folder that holds no run."""
    if (path / "sweep.json").is_file():
        page = path / "report.html"
        compared = f"; {page} compares all of them" if page.is_file() else ""
        return f"It holds a sweep: give one of its trials, such as {path / 'trial-001'}{compared}."
    # adapter/ and a checkpoint are in the folder of their run; runs/a-merged and runs/a-gguf are beside runs/a.
    beside = [
        place.with_name(place.name.rpartition("-")[0]) for place in (path, Path("runs", path)) if "-" in place.name[1:]
    ]
    meant = next((folder for folder in (*path.parents[:2], *beside) if (folder / SAVED_CONFIG).is_file()), None)
    return f"Give one, for example {meant or 'runs/quickstart'}."


def open_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Open runs to compare, with thinned events. Each is named by the shortest end of its path that no other run has.

    Raises:
        CheckpointError: a path is not the folder of a run, or is named twice.
    """
    resolved = [RunFolder(path).path.resolve() for path in paths]
    if twice := [path for path in resolved if resolved.count(path) > 1]:
        raise CheckpointError(f"{twice[0]} is named twice. Name each run once.")
    names = []
    for path in resolved:
        others = [other for other in resolved if other != path]
        ends = ("/".join(path.parts[-count:]) for count in range(1, len(path.parts) + 1))
        names.append(next(end for end in ends if not any(f"/{other}".endswith(f"/{end}") for other in others)))
    return [open_run(path, name, detail="thinned") for path, name in zip(paths, names, strict=True)]


def find_runs(folder: Path) -> list[RecordedRun]:
    """Find the runs in a folder and below, named by their relative path. Nothing of them is read yet.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give the one that holds your runs; the default is runs.")
    return [
        RecordedRun(path, str(path) if path == folder else path.relative_to(folder).as_posix(), detail="recent")
        for path in _run_folders(folder, _DEEPEST)
    ]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    below: list[Path] = []
    try:
        is_run = RunFolder(folder).holds_run()
        if not is_run and depth > 0:
            below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    if is_run:
        yield folder
    for path in below:
        if not path.name.startswith("."):
            yield from _run_folders(path, depth - 1)


def finite(points: Points) -> Points:
    """Return the points with finite values."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def name_on_one_line(name: object) -> str:
    """Return a name for a line of its own: a line break in it could make one run look like two."""
    return str(name).replace("\n", "<U+000A>")


def mapping(value: object) -> dict[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def whole(value: object) -> int | None:
    """Return the value if it is an integer, else None."""
    return value if type(value) is int else None
