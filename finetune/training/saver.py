"""Save checkpoints in the background, and publish the best one as `adapter/`.

Training waits while the state is copied; a thread writes the copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.errors import RunFailedError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.runs.checkpoints import Snapshot, commit_snapshot, disk_need, prune, publish_adapter
from finetune.runs.folder import RunFolder
from finetune.runs.state import TrainerState, read_state
from finetune.runs.tensors import is_sharded
from finetune.runs.verification import verify_checkpoint, verify_published
from finetune.training.cadence import Cadence
from finetune.training.memory.choice import free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import CheckpointSection


_LAST_WORDS_SECONDS = 0.5
_SHARE_OF_FREE_MEMORY = 0.5
"""A larger copy could use up the memory that the run itself needs."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is on the disk, and the time it took."""

    step: int
    path: Path
    num_bytes: int
    """The size of its tensors."""
    blocked_seconds: float
    """The time that training waited: for an earlier save, and for the copy."""
    write_seconds: float


class Saver:
    """Write checkpoints, one at a time. Main process only; call every method from the thread that trains.

    `before` is called right before each commit, in the thread that writes. `error` is why the newest checkpoint could
    not be written; None if it is on the disk.
    """

    def __init__(
        self,
        folder: RunFolder,
        keys: CheckpointSection,
        fallbacks: Fallbacks,
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._keys = keys
        self._fallbacks = fallbacks
        self._before = before
        self._in_background = keys.background
        self._writer: _Writer | None = None
        self.error: Exception | None = None

    def save(self, snapshot: Snapshot, *, best: int | None) -> list[Saved]:
        """Begin to write a checkpoint, after the one before is finished. The one of the step `best` is not pruned.

        Returns:
            The checkpoints that were written since the last call.

        Raises:
            RunFailedError: the checkpoint before this one could not be written, or this one, if not in the background.
        """
        began = time.monotonic()
        saved = self.finish()
        if self._in_background and (any(map(is_sharded, snapshot.tensors)) or not self._has_room(snapshot)):
            self._in_background = False
        if self._in_background:
            snapshot = snapshot.copied()
        self._writer = _Writer(snapshot, self._folder, keep=self._keys.save_total_limit, best=best, before=self._before)
        if self._in_background:
            self._writer.start()
            self._writer.blocked_seconds = time.monotonic() - began
            return saved
        self._writer.run()
        self._writer.blocked_seconds = time.monotonic() - began
        _log.info("training waited %.2f s for the checkpoint of step %d", self._writer.blocked_seconds, snapshot.step)
        return [*saved, *self.finish()]

    def collect(self) -> list[Saved]:
        """Return the checkpoint that has been written since the last call, without waiting. Raises as `save` does."""
        return [] if self._writer is None or self._writer.is_alive() else self.finish()

    def finish(self, *, is_last: bool = False) -> list[Saved]:
        """Wait for the save in progress, and raise as `save` does. If it is the last of the run, also raise `error`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.wait()
            self.error = writer.error
        if is_last and self.error is not None:
            raise self.error
        if writer is None:
            return []
        if writer.error is not None:
            if self._keys.on_disk_failure == "stop" or not isinstance(writer.error.__cause__, OSError):
                raise writer.error
            what, used = f"saving step {writer.snapshot.step}", "training goes on (checkpoint.on_disk_failure=continue)"
            self._fallbacks.take(Fallback(what=what, wanted="a checkpoint", used=used, why=str(writer.error)))
        return writer.saved

    def close(self, error: BaseException | None) -> list[Saved]:
        """End the thread, and return as `save`. A save in progress is finished, unless the run is to stop at once."""
        writer, self._writer = self._writer, None
        if writer is None:
            return []
        if error is not None and not isinstance(error, Exception):
            writer.is_abandoned = True
        is_leaving = threading.current_thread() is not threading.main_thread()  # a watchdog ends this process
        writer.wait(_LAST_WORDS_SECONDS if is_leaving else None)
        if writer.error is not None and error is not None:
            _log.error("%s", writer.error)  # the run ends by another one
        return writer.saved

    def _has_room(self, snapshot: Snapshot) -> bool:
        free = free_memory(torch.device("cpu"), num_sharing=1)  # a thread without any never begins, and Python waits
        if snapshot.num_bytes <= free * _SHARE_OF_FREE_MEMORY:
            return True
        why = f"a copy takes {snapshot.num_bytes:,} bytes of memory, {free:,} are free"
        wanted, used = "written in the background", "written while training waits"
        self._fallbacks.take(Fallback(what="checkpoint.background", wanted=wanted, used=used, why=why))
        return False


class _Writer(threading.Thread):
    """One save, as a thread or as a plain call of `run`. At its end `saved` or `error` is set."""

    def __init__(
        self, snapshot: Snapshot, folder: RunFolder, *, keep: int, best: int | None, before: Callable[[], None]
    ) -> None:
        super().__init__(name="finetune-saver", daemon=True)
        self.snapshot = snapshot
        self.folder = folder
        self.keep = keep
        self.best = best
        self.before = before
        self.blocked_seconds = 0.0
        self.is_abandoned = False
        self.error: Exception | None = None
        self._path: Path | None = None
        self._write_seconds = 0.0

    @property
    def saved(self) -> list[Saved]:
        """The checkpoint; none if it was not written."""
        if self._path is None:
            return []
        seconds = {"blocked_seconds": self.blocked_seconds, "write_seconds": self._write_seconds}
        return [Saved(step=self.snapshot.step, path=self._path, num_bytes=self.snapshot.num_bytes, **seconds)]

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the thread, if this save has one."""
        if self.ident is not None:
            self.join(timeout)

    def run(self) -> None:
        """Commit the checkpoint and prune older ones."""
        began = time.monotonic()
        try:
            self.before()
            self._path = commit_snapshot(self.folder, self.snapshot, go_on=self._go_on)
            try:
                prune(self.folder, self.keep, self.best)
            except RunFailedError as error:
                _log.warning("%s; the checkpoint of step %d is committed", str(error).rstrip("."), self.snapshot.step)
        except Exception as error:
            self.error = error
        self._write_seconds = time.monotonic() - began

    def _go_on(self) -> None:
        if self.is_abandoned:
            raise RunFailedError(f"step {self.snapshot.step} is not saved: the run was stopped at once")


def log_disk_need(folder: RunFolder, snapshot: Snapshot, cadence: Cadence, *, keep: int, has_best: bool) -> None:
    """Log the size of a run's checkpoints after a step, when the optimizer has its state. Warn if they do not fit."""
    folder.refuse_lost_folder()
    at_once = cadence.most_checkpoints(keep=keep, has_best=has_best)
    need = disk_need(folder, snapshot, at_once=at_once)
    _log.info("disk: %s", need)
    if need.total > need.free + _bytes_in(folder.checkpoints):
        _log.warning(
            "the checkpoints do not fit the disk of %s: make room, or lower checkpoint.save_total_limit", folder.path
        )


def _bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder. A save in the background may rename or remove them meanwhile."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):  # passes over a folder that is gone; Path.rglob raises
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += Path(parent, name).lstat().st_size
    return num_bytes


def publish_best(
    folder: RunFolder, state: TrainerState, tokenizer: PreTrainedTokenizerBase, *, keep: int, has_trained: bool
) -> int | None:
    """Publish the best checkpoint as `adapter/`, or the last where nothing was validated or the best was not saved.

    A checkpoint that was saved only because the run was preempted does not count: the result would depend on it. If the
    run was complete when it was started, it has not trained.

    Returns:
        The step that `adapter/` holds; None if `adapter/` is kept, because it is intact and its checkpoint is damaged.

    Raises:
        CheckpointError: the checkpoint is damaged.
        RunFailedError: the disk is full or failing, or the folder was removed or moved.
    """
    folder.refuse_lost_folder()
    best = state.best_step if state.best_step in folder.checkpoint_steps() else None
    problems = [] if best is None else verify_checkpoint(folder.checkpoint(best))
    if best is not None and not problems and not read_state(folder.checkpoint(best)).is_due:
        best = None
    if state.best_step is not None and best is None:
        _log.warning(
            "the best validation was at step %d, after which checkpoint.save_every saves no checkpoint: "
            "adapter/ holds the last step, %d",
            state.best_step,
            state.step,
        )
    if problems:
        stays = not has_trained and not verify_published(folder.adapter)
        outcome = "stays, and is whole" if stays else f"holds the last step, {state.step}"
        _log.warning("the best step, %d, is damaged (%s): adapter/ %s", best, "; ".join(problems), outcome)
        if stays:
            return None
        best = None
    published = best or state.step
    publish_adapter(folder, folder.checkpoint(published), tokenizer)
    prune(folder, keep, state.best_step)  # a killed run may have left too many
    _log.info("adapter/ holds step %d", published)
    return published
