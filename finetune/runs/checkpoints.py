"""The checkpoints of a run: save, verify, load, prune, publish. Knows no loop; the main process saves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import CheckpointError, RunFailedError
from finetune.runs.durable import (
    Chunks,
    committed_folder,
    disk_failures_end_the_run,
    read_manifest,
    remove_folder,
)
from finetune.runs.folder import RunFolder
from finetune.runs.model_files import encode_full_model, encode_model, encode_tokenizer, load_model
from finetune.runs.optimizer_file import encode_optimizer, load_optimizer
from finetune.runs.state import TrainerState
from finetune.runs.tensors import TensorFile
from finetune.runs.verification import (
    ADAPTER_FILES,
    FULL_FILES,
    OPTIMIZER_FILE,
    STATE_FILE,
    TOKENIZER_FILES,
    read_state,
    unexpected_names,
    verify_published,
    whole_checkpoints,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COPY_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold.

    Attributes:
        step: optimizer steps done.
        files: content by name.
    """

    step: int
    files: Mapping[str, Chunks]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(file.num_bytes for file in self.files.values() if isinstance(file, TensorFile))

    def copied(self) -> Snapshot:
        """The same with copies of all tensors on the host: training may go on while it is written."""
        files = {name: file.copied() if isinstance(file, TensorFile) else file for name, file in self.files.items()}
        return replace(self, files=files)


def take_snapshot(
    folder: RunFolder,
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Snapshot:
    """What a checkpoint of this moment holds. Its tensors are the model's own until `Snapshot.copied`.

    Args:
        folder: an open run folder. If it has a `base/`, the adapter names that as its base.
        step: optimizer steps done; equals `state.step`.
        model: the bare model (a PeftModel or a transformers model), no DDP around it.
        optimizer: any whose state holds tensors and numbers; a wrapper that passes on `state_dict` will do.
        state: where training stands.
        tokenizer: if given, its files and chat template go with the checkpoint.

    Raises:
        CheckpointError: the state of this model or optimizer cannot be kept.
    """
    if step != state.step:
        raise ValueError(f"step={step}, but the state says {state.step}")
    base = folder.base if folder.base.is_dir() else None
    files: dict[str, Chunks] = {
        **encode_model(model, base),
        **encode_optimizer(model, optimizer),
        **(encode_tokenizer(tokenizer) if tokenizer is not None else {}),
        STATE_FILE: [(json.dumps(state.as_record(), indent=2, allow_nan=False) + "\n").encode()],
    }
    return Snapshot(step, files)


def commit_snapshot(folder: RunFolder, snapshot: Snapshot, *, go_on: Callable[[], None] = lambda: None) -> Path:
    """Write a checkpoint: on return it is durable, verified by nothing but its manifest, and logged.

    Args:
        folder: an open run folder.
        snapshot: what to write.
        go_on: called before each piece of a file; what it raises ends the save, which then leaves nothing behind.

    Raises:
        RunFailedError: a weight is not a finite number, or the disk is full or failing; earlier checkpoints are intact.
    """
    bad = [name for file in snapshot.files.values() if isinstance(file, TensorFile) for name in file.not_finite()]
    if bad:
        raise RunFailedError(
            f"step {snapshot.step} is not saved: {len(bad)} of its tensors hold a value that is not finite, the "
            f"first is {bad[0]}. Earlier checkpoints are intact. Lower optim.learning_rate or add optim.warmup_steps."
        )
    path = folder.checkpoint(snapshot.step)
    files = {name: _asking(go_on, chunks) for name, chunks in snapshot.files.items()}
    _commit(path, files, doing="Saving checkpoint")
    _log.info("checkpoint committed step=%d", snapshot.step)
    return path


def load_checkpoint(
    path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> TrainerState:
    """Put a checkpoint into a model and an optimizer of the same make, on whatever device they are.

    Every rank may call it. The content is taken as `newest_valid` or `verify` found it; names and shapes are
    checked in full.

    Args:
        path: a folder that `verify` has nothing against.
        model: the bare model, as for `take_snapshot`.
        optimizer: left out where only the weights are wanted.

    Raises:
        CheckpointError: it does not fit the model or the optimizer, or a file cannot be read.
    """
    state = read_state(path)
    load_model(model, path)
    if optimizer is not None:
        load_optimizer(model, optimizer, path)
    return state


def prune(folder: RunFolder, keep: int, best: int | None) -> list[int]:
    """Remove checkpoints behind the newest `keep`, once the newest of all is known to be whole.

    Args:
        folder: an open run folder.
        keep: how many of the newest stay, counted from the newest valid one; damaged newer ones stay too.
        best: a step whose checkpoint stays besides; None: none.

    Returns:
        The steps removed.

    Raises:
        RunFailedError: the disk refused.
    """
    newest = next(whole_checkpoints(folder), None)
    if newest is None:
        return []
    steps = folder.checkpoint_steps()
    older = [step for step in steps if folder.checkpoint(step) <= newest][:-keep]
    removed = [step for step in older if step != best]
    for step in removed:
        with disk_failures_end_the_run("Removing old checkpoint", folder.checkpoint(step)):
            remove_folder(folder.checkpoint(step))
    return removed


def publish_adapter(folder: RunFolder, checkpoint: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """Make `adapter/` hold a checkpoint's adapter (or full model) with tokenizer and template, in one step.

    Args:
        folder: an open run folder.
        checkpoint: where the model comes from; each file is compared with its manifest while it is copied.
        tokenizer: written where the checkpoint has no tokenizer files of its own.

    Raises:
        CheckpointError: the checkpoint is damaged; `adapter/` is as it was.
        RunFailedError: the disk is full or failing; `adapter/` is as it was.
    """
    if damage := unexpected_names(checkpoint, {OPTIMIZER_FILE, STATE_FILE}):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(damage)}.")
    manifest = read_manifest(checkpoint)
    wanted = {*ADAPTER_FILES, *FULL_FILES, *TOKENIZER_FILES} & manifest.keys()
    files: dict[str, Chunks] = {name: _read_chunks(checkpoint / name) for name in sorted(wanted)}
    if tokenizer is not None and not wanted & set(TOKENIZER_FILES):
        files |= encode_tokenizer(tokenizer)
    _commit(folder.adapter, files, doing="Publishing", expected=manifest)
    return folder.adapter


def save_base(folder: RunFolder, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """Save a randomly initialised base model once as `base/`, before an adapter is put on it.

    A base that is there and whole stays; a resumed run reads its base from it. A torn one is written again.

    Raises:
        RunFailedError: the disk is full or failing.
    """
    if not folder.base.is_dir() or verify_published(folder.base):
        files = {**encode_full_model(model), **(encode_tokenizer(tokenizer) if tokenizer is not None else {})}
        _commit(folder.base, files, doing="Saving base model")
    return folder.base


def _commit(
    path: Path,
    files: Mapping[str, Chunks],
    *,
    doing: str,
    expected: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a folder of files; those that `expected` names must come out as it says."""
    with disk_failures_end_the_run(doing, path), committed_folder(path) as writer:
        for name, content in files.items():
            entry = writer.write(name, content)
            if expected and name in expected and entry != expected[name]:
                raise CheckpointError(f"{name} has changed since it was saved (SHA-256 differs); {path} is as it was.")


def _asking(go_on: Callable[[], None], chunks: Chunks) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        go_on()
        yield chunk


def _read_chunks(path: Path) -> Iterator[bytes]:
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link; a checkpoint holds regular files only.")
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            yield chunk
