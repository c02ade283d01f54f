"""The folder of a run: its paths, and its lock."""

from __future__ import annotations

import os
import re
import tempfile
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Literal, Self

from finetune.config.render import SCHEMA_FILE
from finetune.errors import CheckpointError, RunFailedError
from finetune.limits import MOST_BYTES, open_regular, type_of_file
from finetune.runs.durable import clear_leftovers, describe_os_error, is_leftover
from finetune.runs.file_lock import FileLock, describe_holder, file_lock, is_held_here, try_file_lock
from finetune.units import name_first

LOCK_TIMEOUT_SECONDS = 30.0
"""The longest that a restart waits for processes of a killed launcher, or of another machine, to end."""
SECONDS_TO_DIE = 3.0
"""The longest that a restart waits for a process of this machine that may have been killed a moment ago."""

_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_PROFILE_FILE = re.compile(r"(trace|memory)-steps-\d+-\d+-rank\d+\.json(\.gz)?")
_ROLLOUT_FILE = re.compile(r"step-(\d{6,})\.json\.gz")
_MARKS = {"run.json", "metrics.jsonl", "checkpoints"}
"""Names that only a run writes."""
_FOLDERS = {"checkpoints", "adapter", "base", "profile", "rollouts"}
_NAMES = {*_MARKS, *_FOLDERS, "config.yaml", "rows.safetensors", "base_answers.safetensors", "log.txt"}
"""All that a run writes, except its lock."""
_LEFT_BY_OTHERS = {SCHEMA_FILE, ".DS_Store", ".gitignore", ".gitkeep", "lost+found"}

_reserved: dict[Path, FileLock] = {}
"""The locks of folders that this process will open."""


def existing_folder(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


class RunFolder(AbstractContextManager["RunFolder"]):
    """The paths of a run. The constructor touches nothing; `open` does, and only the main process calls it.

    Example:
        ``with RunFolder("runs/a").open(resume="auto") as folder: ...``
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self.config_file = self.path / "config.yaml"
        self.schema_file = self.path / SCHEMA_FILE
        self.record_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.row_file = self.path / "rows.safetensors"
        self.base_answers = self.path / "base_answers.safetensors"
        self.log_file = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"
        self.base = self.path / "base"
        self.profile = self.path / "profile"
        self.rollouts = self.path / "rollouts"
        self.served_adapter = self.rollouts / "adapter"
        self.lock_file = self.path / ".lock"
        self._lock: FileLock | None = None

    def checkpoint(self, step: int) -> Path:
        """Return the path of a step's checkpoint, whether it exists or not."""
        return self.checkpoints / f"step-{step:06d}"

    def rollout(self, step: int) -> Path:
        """Return the path of the rollout that a step was the first to learn from, whether it exists or not."""
        return self.rollouts / f"step-{step:06d}.json.gz"

    def rollout_steps(self) -> list[int]:
        """Return the steps that have a rollout, in ascending order."""
        return _steps_in(self.rollouts, _ROLLOUT_FILE)

    def refuse_irregular_files(self) -> None:
        """Raise a CheckpointError if a file of the run is not a regular one, is too large or may not be read."""
        for file, most in ((self.config_file, MOST_BYTES), (self.record_file, MOST_BYTES), (self.metrics_file, None)):
            try:
                with suppress(FileNotFoundError, NotADirectoryError):
                    open_regular(file, most=most).close()
            except OSError as error:
                reason = describe_os_error(error)
                raise CheckpointError(f"{file} cannot be read: {reason}. Restore it, or use another run.") from None

    def holds_run(self) -> bool:
        """Whether the folder has files that only a run writes; the lock does not count. False if it cannot be read."""
        # Path.exists raises PermissionError for a folder of another user.
        return any(os.path.exists(self.path / name) for name in _MARKS)  # noqa: PTH110

    def checkpoint_steps(self) -> list[int]:
        """Return the steps that have a checkpoint folder, intact or not, in ascending order."""
        return _steps_in(self.checkpoints, _STEP_FOLDER, only_folders=True)

    def check(self, resume: Literal["never", "auto"] = "never") -> None:
        """Refuse a folder that `open` would refuse, before a model is loaded for minutes. Nothing is written.

        Raises:
            CheckpointError: see `open`.
        """
        try:
            present = {path.name: path for path in self.path.iterdir()}
        except FileNotFoundError:
            return
        except OSError as error:
            is_file = isinstance(error, NotADirectoryError)
            problem = "is not a folder, or a part of the path is a file" if is_file else "cannot be read"
            raise CheckpointError(
                f"output_dir={self.path} {problem}: {describe_os_error(error)}. Name another with output_dir=."
            ) from error
        run_files = sorted(present.keys() & _NAMES)
        if run_files and resume == "never":
            raise CheckpointError(
                f"output_dir={self.path} holds a run already ({', '.join(run_files)}). "
                f"Go on with it by resume=auto, or start another in a new folder with output_dir=. "
                f"Nothing was changed."
            )
        # Writing or deleting through a link would reach outside of the folder, and a FIFO would wait for ever.
        for name in sorted(present.keys() & {*_NAMES, self.lock_file.name}):
            actual = type_of_file(present[name].lstat())
            if actual != ("a folder" if name in _FOLDERS else "a regular file"):
                raise CheckpointError(
                    f"output_dir={self.path}: {name} is {actual}, but finetune reads and writes only files and folders "
                    "inside of a run's folder. Put the file or folder itself there, or name another with output_dir=."
                )
        unknown = sorted(name for name in present if name not in _LEFT_BY_OTHERS and not is_leftover(name))
        if unknown and not present.keys() & {*_MARKS, self.lock_file.name}:
            raise CheckpointError(
                f"output_dir={self.path} is not empty and holds no run of finetune: {name_first(unknown, 5)}. "
                f"Name an empty or a new folder with output_dir=. Nothing was changed."
            )

    def refuse_living_holder(self) -> None:
        """Raise CheckpointError if a living process of this machine is writing the folder.

        A process that was killed a moment ago is waited for: it keeps its locks until the kernel has freed its memory.
        """
        if self.path in _reserved:
            return
        end = time.monotonic() + SECONDS_TO_DIE
        while is_held_here(self.lock_file):
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            raise CheckpointError(
                f"output_dir={self.path} is being written by {describe_holder(self.lock_file)}. Wait for it to end or "
                "stop it, or name another folder with output_dir=."
            )

    def reserve(self) -> bool:
        """Make the folder and take its lock for a later `open` in this process. Return False if it is not free.

        A model takes minutes to load. In that time, no other run must choose this folder.

        Raises:
            OSError: the folder or its lock cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = try_file_lock(self.lock_file)
        if lock is not None:
            _reserved[self.path] = lock
        return lock is not None

    def end_reservation(self) -> None:
        """Release a lock that `open` did not take over, and remove the empty folder and its empty parent."""
        if (lock := _reserved.pop(self.path, None)) is not None:
            lock.release()
            with suppress(OSError):  # not empty
                self.path.rmdir()
                self.path.parent.rmdir()

    def check_writable(self) -> None:
        """Refuse a place where `open` could not write. Only the main process calls this, because only it writes there.

        Raises:
            CheckpointError: nothing can be written where the folder is or would be, or nothing could be read again.
        """
        self._refuse_other_encodings()
        place = existing_folder(self.path)
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise CheckpointError(
                f"output_dir={self.path} cannot be written: {describe_os_error(error)} in {place}. "
                f"Name a folder that you may write with output_dir=."
            ) from error

    def _refuse_other_encodings(self) -> None:
        """Refuse a path that is not UTF-8. safetensors cannot open a file there."""
        try:
            os.fsencode(self.path).decode()
        except UnicodeDecodeError:
            raise CheckpointError(
                f"output_dir={str(self.path)!a} is not valid UTF-8. The library that reads tensors (safetensors) opens "
                "no such path, so the run could not be tested or resumed. Rename the folder, or name another with "
                "output_dir=."
            ) from None

    def open(self, resume: Literal["never", "auto"] = "never") -> Self:
        """Create the folder, take its lock and remove what a killed save left behind. `close` releases the lock.

        With `resume`, `never` refuses a folder that holds a run, and `auto` accepts it.

        Raises:
            CheckpointError: the folder cannot be created or written, holds a run (with `never`) or something that
                is not a run, or a living process is writing it.
        """
        self._refuse_other_encodings()
        self.refuse_living_holder()
        self.check(resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _reserved.pop(self.path, None) or file_lock(
                self.lock_file, timeout_seconds=LOCK_TIMEOUT_SECONDS, waiting_for=f"the run in {self.path}"
            )
            # The content may have changed while we waited for the lock.
            self.check(resume)
            clear_leftovers(self.path, _NAMES.__contains__)
            clear_leftovers(self.checkpoints, _STEP_FOLDER.fullmatch)
            clear_leftovers(self.profile, _PROFILE_FILE.fullmatch)
            clear_leftovers(
                self.rollouts, lambda name: name == self.served_adapter.name or _ROLLOUT_FILE.fullmatch(name)
            )
        except TimeoutError as error:
            raise CheckpointError(
                f"output_dir={self.path} is being written: {error}. Wait for it to end or stop it, "
                f"or name another folder with output_dir=."
            ) from error
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"output_dir={self.path} cannot be written: {describe_os_error(error)}. "
                f"Name a folder that you may write with output_dir=."
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def refuse_lost_folder(self) -> None:
        """Raise RunFailedError if the opened folder was removed or moved. Another run may be at its path by now."""
        if self._lock is not None and self._lock.is_lost():
            raise RunFailedError(
                f"{self.path} is no longer the folder of this run. It was removed, moved or replaced, or its "
                f"{self.lock_file.name} was, which keeps other runs out. The run ends, and writes nothing more there. "
                "If its folder still exists, go on with resume=auto output_dir=FOLDER."
            )

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._lock is None:
            return
        try:
            present = {path.name for path in self.path.iterdir()}
            if present & _NAMES and not present & _MARKS:
                # The start of the run failed early. Only the lock's file still says that the other files are a run's.
                self._lock.forget()
            else:
                self._lock.release()
        except OSError:
            # On a disk that became read-only the lock's file stays, but the kernel's lock is released.
            self._lock.forget()
        self._lock = None

    def __exit__(self, *_: object) -> None:
        self.close()


def _steps_in(folder: Path, pattern: re.Pattern[str], *, only_folders: bool = False) -> list[int]:
    """Return the steps in the names in a folder, in ascending order; none if there is no folder to read."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        matches = [pattern.fullmatch(entry.name) for entry in entries if not only_folders or entry.is_dir()]
        return sorted(int(match[1]) for match in matches if match)
    return []
