"""Save, prune and publish the checkpoints of a run. Only the main process writes."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.errors import CheckpointError, RunFailedError
from finetune.limits import read_chunks
from finetune.runs.durable import Chunks, committed_folder, disk_failures_end_the_run, read_manifest, remove_folder
from finetune.runs.folder import RunFolder
from finetune.runs.model_files import encode_full_model, encode_model, encode_tokenizer
from finetune.runs.optimizer_file import encode_optimizer
from finetune.runs.state import STATE_FILE, TrainerState, read_state
from finetune.runs.tensors import TensorFile
from finetune.runs.verification import (
    OPTIMIZER_FILE,
    TOKENIZER_FILES,
    unexpected_names,
    verify_published,
    whole_checkpoints,
)
from finetune.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, before it is written."""

    step: int
    """Optimizer steps done."""
    files: Mapping[str, Chunks]
    """Content by name."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(file.num_bytes for file in self._tensor_files)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, as they follow each other in the files."""
        return [tensor for file in self._tensor_files for _, tensor in file.ordered]

    def copied(self) -> Snapshot:
        """Copy all tensors to the host, so that training can continue while they are written."""
        return self._with(TensorFile.copied)

    def read_by(self, full_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Snapshot:
        """Return a snapshot that calls `full_tensor` with each sharded tensor when it is written."""
        return self._with(lambda file: replace(file, full_tensor=full_tensor))

    def refuse_not_finite(self) -> None:
        """Refuse to save numbers that are not finite. Looks only at this process's shards.

        Raises:
            RunFailedError: a value is not a finite number.
        """
        bad = [name for file in self._tensor_files for name in file.not_finite()]
        if bad:
            raise RunFailedError(
                f"step {self.step} is not saved: {len(bad)} of its tensors hold a value that is not finite, the first "
                f"is {bad[0]}. Earlier checkpoints are intact. Lower optim.learning_rate, and go on from the last of "
                "them: resume=auto resume.allow=optim"
            )

    @property
    def _tensor_files(self) -> list[TensorFile]:
        return [file for file in self.files.values() if isinstance(file, TensorFile)]

    def _with(self, change: Callable[[TensorFile], TensorFile]) -> Snapshot:
        files = {name: change(file) if isinstance(file, TensorFile) else file for name, file in self.files.items()}
        return replace(self, files=files)


class DiskNeed(NamedTuple):
    """Sizes in bytes, without headers and small files."""

    model: int
    """The weights in one checkpoint: the adapter, or the whole model."""
    optimizer: int | None
    """The optimizer's state in one checkpoint; None if it cannot be predicted."""
    at_once: int
    """The most checkpoints on disk at one time, including the one being written."""
    free: int
    """Free space at the run's folder."""

    @property
    def checkpoint(self) -> int:
        """Size of one checkpoint."""
        return self.model + (self.optimizer or 0)

    @property
    def total(self) -> int:
        """The most bytes on disk at the same time, including `adapter/`."""
        return self.checkpoint * self.at_once + self.model

    def __str__(self) -> str:
        optimizer = "not known yet" if self.optimizer is None else format_bytes(self.optimizer)
        checkpoint, model, total = map(format_bytes, (self.checkpoint, self.model, self.total))
        return (
            f"a checkpoint takes {checkpoint} (model {model}, optimizer {optimizer}); at most {self.at_once} of them "
            f"and adapter/ take {total}; {format_bytes(self.free)} are free"
        )


def disk_need(folder: RunFolder, snapshot: Snapshot, *, at_once: int) -> DiskNeed:
    """Return the size of `at_once` checkpoints like this one, which was taken after a step."""
    optimizer = snapshot.files.get(OPTIMIZER_FILE)
    optimizer_bytes = optimizer.num_bytes if isinstance(optimizer, TensorFile) else 0
    return DiskNeed(
        snapshot.num_bytes - optimizer_bytes,
        optimizer_bytes,
        at_once,
        free=shutil.disk_usage(folder.path).free,
    )


def take_snapshot(
    folder: RunFolder, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainerState
) -> Snapshot:
    """Collect the content of a checkpoint. Its tensors are the model's own until `Snapshot.copied`.

    Nothing is exchanged with other processes: sharded tensors are still sharded, see `Snapshot.read_by`. The model is
    not wrapped in DDP. If the run has a `base/`, the adapter names that as its base.

    Raises:
        CheckpointError: the state of this model or optimizer cannot be saved.
    """
    base = folder.base if folder.base.is_dir() else None
    files: dict[str, Chunks] = {
        **encode_model(model, base),
        **encode_optimizer(model, optimizer),
        STATE_FILE: [(json.dumps(state.as_record(), indent=2, allow_nan=False) + "\n").encode()],
    }
    return Snapshot(state.step, files)


def commit_snapshot(folder: RunFolder, snapshot: Snapshot, *, go_on: Callable[[], None] = lambda: None) -> Path:
    """Write a checkpoint and log it. On return it is durable; it has not been read back.

    `go_on` is called before each piece of a file. An exception from it ends the save, which leaves nothing behind.

    Raises:
        RunFailedError: a weight is not a finite number, or the disk is full or failing; earlier checkpoints are intact.
    """
    snapshot.refuse_not_finite()
    path = folder.checkpoint(snapshot.step)

    def interruptible(chunks: Chunks) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            go_on()
            yield chunk

    files = {name: interruptible(chunks) for name, chunks in snapshot.files.items()}
    commit_files(path, files, doing="Saving checkpoint")
    _log.info("checkpoint committed step=%d", snapshot.step)
    return path


def prune(folder: RunFolder, keep: int, best: int | None) -> list[int]:
    """Remove all checkpoints but the newest `keep`, and return their steps.

    They are counted back from the newest valid checkpoint. Damaged newer ones stay. The checkpoint of the step `best`
    stays, too.

    Raises:
        RunFailedError: the disk refused.
    """
    newest = next(whole_checkpoints(folder), None)
    if newest is None:
        return []
    last = read_state(newest).step
    steps = [step for step in folder.checkpoint_steps() if step <= last]
    removed = [step for step in steps[:-keep] if step != best]
    for step in removed:
        with disk_failures_end_the_run("Removing old checkpoint", folder.checkpoint(step)):
            remove_folder(folder.checkpoint(step))
    return removed


def publish_adapter(folder: RunFolder, checkpoint: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """Replace `adapter/`, in one step, by a checkpoint's adapter (or full model) with tokenizer and template.

    Each file is compared with the checkpoint's manifest while it is copied. The tokenizer is written if the checkpoint
    has no tokenizer files.

    Raises:
        CheckpointError: the checkpoint is damaged; `adapter/` is as it was.
        RunFailedError: the disk is full or failing; `adapter/` is as it was.
    """
    if damage := unexpected_names(checkpoint, {OPTIMIZER_FILE, STATE_FILE}):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(damage)}.")
    manifest = read_manifest(checkpoint)
    names = sorted(manifest.keys() - {OPTIMIZER_FILE, STATE_FILE})
    files: dict[str, Chunks] = {name: read_chunks(checkpoint / name) for name in names}
    if tokenizer is not None and not manifest.keys() & set(TOKENIZER_FILES):
        files |= encode_tokenizer(tokenizer)
    commit_files(folder.adapter, files, doing="Publishing", expected=manifest)
    return folder.adapter


def save_base(folder: RunFolder, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """Save a randomly initialised base model as `base/`, before an adapter is put on it.

    A resumed run reads its base from there, so an intact one stays as it is. A damaged one is written again.

    Raises:
        RunFailedError: the disk is full or failing.
    """
    if not folder.base.is_dir() or verify_published(folder.base):
        files = {**encode_full_model(model), **(encode_tokenizer(tokenizer) if tokenizer is not None else {})}
        commit_files(folder.base, files, doing="Saving base model")
    return folder.base


def commit_files(
    path: Path, files: Mapping[str, Chunks], *, doing: str, expected: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write a folder of files, and compare those in `expected` with their size and digest there."""
    with disk_failures_end_the_run(doing, path), committed_folder(path) as writer:
        for name, content in files.items():
            entry = writer.write(name, content)
            if expected and name in expected and entry != expected[name]:
                raise CheckpointError(f"{name} has changed since it was saved (SHA-256 differs); {path} is as it was.")
