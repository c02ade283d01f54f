"""A run's folder: what lies where in it, and who may write it."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from finetune.errors import CheckpointError
from finetune.runs.durable import clear_leftovers, describe_os_error, is_leftover
from finetune.runs.file_lock import FileLock, file_lock

LOCK_TIMEOUT_SECONDS = 30.0
"""How long a restart waits for the dying processes of the run before it."""

_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_LEFT_BY_OTHERS = {".DS_Store", ".gitignore", ".gitkeep", "lost+found"}


class RunFolder:
    """The paths of a run. Making one touches nothing; `open` does, and only on the main process.

    Example:
        ``with RunFolder("runs/a").open(resume="auto") as folder: ...``
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self.config_file = self.path / "config.yaml"
        self.record_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.log_file = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"
        self.base = self.path / "base"
        self.lock_file = self.path / ".lock"
        self._lock: FileLock | None = None

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.checkpoints / f"step-{step:06d}"

    def holds_run(self) -> bool:
        """Whether something lies there that only a run writes, its lock left out of account."""
        return any(path.exists() for path in (self.record_file, self.metrics_file, self.checkpoints))

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint folder, whole or not, in rising order."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP_FOLDER.fullmatch(path.name) for path in self.checkpoints.iterdir())
        steps = (int(match[1]) for match in matches if match)
        return sorted(step for step in steps if self.checkpoint(step).is_dir())

    def check(self, resume: Literal["never", "auto"] = "never") -> None:
        """Refuse now what `open` would refuse later; nothing is written. A model takes minutes to load.

        Raises:
            CheckpointError: see `open`.
        """
        self._refuse_what_is_not_ours(resume)

    def open(self, resume: Literal["never", "auto"] = "never") -> Self:
        """Create the folder, take its lock and remove what a killed save left behind. `close` releases it.

        Args:
            resume: never: the folder must hold no run yet; auto: it may hold one.

        Raises:
            CheckpointError: it cannot be created or written, holds another run (with never), holds
                something that is no run, or a living process is writing it.
        """
        self._refuse_what_is_not_ours(resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = file_lock(
                self.lock_file, timeout_seconds=LOCK_TIMEOUT_SECONDS, waiting_for=f"the run in {self.path}"
            )
            # What stood there may have changed while we waited for the lock.
            self._refuse_what_is_not_ours(resume)
            clear_leftovers(self.path, self._our_names().__contains__)
            clear_leftovers(self.checkpoints, lambda name: _STEP_FOLDER.fullmatch(name) is not None)
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

    def close(self) -> None:
        """Release the lock. May be called twice."""
        if self._lock is None:
            return
        try:
            if self._is_known_by_its_lock():
                self._lock.forget()
            else:
                self._lock.release()
        except OSError:
            # A disk that became read-only keeps the lock's file. The kernel's lock is what counts, and it goes.
            self._lock.forget()
        self._lock = None

    def _is_known_by_its_lock(self) -> bool:
        """Whether the lock's file is all that tells a run's folder, as after a start that failed early."""
        present = {path.name for path in self.path.iterdir()}
        return bool(present & self._our_names().keys()) and not present & (self._marks() - {self.lock_file.name})

    def _marks(self) -> set[str]:
        """Names that only a run writes."""
        return {self.lock_file.name, self.record_file.name, self.metrics_file.name, self.checkpoints.name}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _our_names(self) -> dict[str, Path]:
        """What a run writes, by name, the lock left out."""
        paths = (
            self.config_file,
            self.record_file,
            self.metrics_file,
            self.log_file,
            self.checkpoints,
            self.adapter,
            self.base,
        )
        return {path.name: path for path in paths}

    def _refuse_what_is_not_ours(self, resume: Literal["never", "auto"]) -> None:
        try:
            present = {path.name: path for path in self.path.iterdir()}
        except FileNotFoundError:
            return
        except NotADirectoryError as error:
            raise CheckpointError(
                f"output_dir={self.path} is not a folder, or a part of the path is a file. "
                f"Name another with output_dir=."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"output_dir={self.path} cannot be read: {describe_os_error(error)}. Name another with output_dir=."
            ) from error
        ours = sorted(present.keys() & self._our_names().keys())
        if ours and resume == "never":
            raise CheckpointError(
                f"output_dir={self.path} holds a run already ({', '.join(ours)}). "
                f"Go on with it by resume=auto, or start another in a new folder with output_dir=. "
                f"Nothing was changed."
            )
        self._refuse_links(present)
        self._refuse_strangers(present)

    def _refuse_links(self, present: dict[str, Path]) -> None:
        """A link under one of our names would make us write or delete outside of the folder."""
        names = {*self._our_names(), self.lock_file.name}
        links = sorted(name for name, path in present.items() if name in names and path.is_symlink())
        if links:
            raise CheckpointError(
                f"output_dir={self.path}: {', '.join(links)} is a symbolic link, but finetune writes "
                f"only inside of a run's folder. Put the file or folder itself there, or name another with output_dir=."
            )

    def _refuse_strangers(self, present: dict[str, Path]) -> None:
        """A folder is a run's if something lies there that only a run writes; any other must be empty."""
        strangers = sorted(name for name in present if name not in _LEFT_BY_OTHERS and not is_leftover(name))
        if strangers and not self._marks() & present.keys():
            shown = ", ".join(strangers[:5]) + (", …" if len(strangers) > 5 else "")
            raise CheckpointError(
                f"output_dir={self.path} is not empty and holds no run of finetune: {shown}. "
                f"Name an empty or a new folder with output_dir=. Nothing was changed."
            )
