"""Verify what a run has saved. Imports no torch, so that `finetune checkpoints` answers at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from finetune.errors import CheckpointError
from finetune.runs.durable import find_damage, read_manifest
from finetune.runs.folder import RunFolder
from finetune.runs.state import STATE_FILE, read_state

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
FULL_FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
OPTIMIZER_FILE = "optimizer.safetensors"
_log = logging.getLogger(__name__)


def verify_checkpoint(path: Path) -> list[str]:
    """List the problems of a checkpoint folder, one line per file; empty if all bytes are as written."""
    problems = unexpected_names(path, {OPTIMIZER_FILE, STATE_FILE}) or find_damage(path)
    if problems:
        return problems
    try:
        step = read_state(path).step
    except CheckpointError as error:
        return [str(error)]
    return [] if path.name == f"step-{step:06d}" else [f"{STATE_FILE}: is of step {step}, not of {path.name}"]


def verify_published(path: Path) -> list[str]:
    """List the problems of `adapter/` or `base/`, which hold a model and no training state."""
    return unexpected_names(path, set()) or find_damage(path)


def newest_valid(folder: RunFolder, verify: Callable[[Path], list[str]] = verify_checkpoint) -> Path | None:
    """Find the newest intact checkpoint. A warning names each damaged one on the way, which stays as it is.

    If the checkpoint of the best step is damaged, an older one is preferred, from which the best is trained again.
    `verify` is `verify_checkpoint`, or a function that remembers its results.
    """
    without_best = None
    for path in whole_checkpoints(folder, verify):
        best = read_state(path).best_step
        if best not in folder.checkpoint_steps() or not (problems := verify(folder.checkpoint(best))):
            return path
        without_best = without_best or path
        _log.warning("checkpoint %s is whole, but its best step %d is damaged: %s", path, best, "; ".join(problems))
    return without_best


def whole_checkpoints(folder: RunFolder, verify: Callable[[Path], list[str]] = verify_checkpoint) -> Iterator[Path]:
    """Yield the intact checkpoints, newest first. A warning names each damaged one on the way; see `newest_valid`."""
    for step in reversed(folder.checkpoint_steps()):
        path = folder.checkpoint(step)
        if problems := verify(path):
            _log.warning("checkpoint %s is damaged and not used: %s", path, "; ".join(problems))
        else:
            yield path


def unexpected_names(path: Path, required: Collection[str]) -> list[str]:
    """Return the problems of a manifest: names that finetune does not write there, and required names that it lacks."""
    try:
        names = read_manifest(path).keys()
    except ValueError as error:
        return [str(error)]
    known = {*required, *ADAPTER_FILES, *FULL_FILES, *TOKENIZER_FILES}
    problems = [f"{name}: not a file that finetune writes there" for name in sorted(names - known)]
    problems += [f"{name}: missing" for name in sorted(set(required) - names)]
    if not (set(ADAPTER_FILES) <= names or {"config.json", "model.safetensors"} <= names):
        problems.append("neither an adapter nor a model is in it")
    return problems
