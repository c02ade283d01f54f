"""Find the files of a model that are on this machine, in its folder or in the cache of the Hugging Face hub."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

from finetune.config.hub import HubFault, Repository, cached_file, explain_hub_fault, find_fault
from finetune.errors import ModelError
from finetune.logs import warn_once

Part = Literal["config", "tokenizer", "weights"]

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_log = logging.getLogger(__name__)


def has_to_use_cache(repository: Repository, part: Part, key: str) -> bool:
    """Ask the hub for a model, which messages name by its key. Return True if only the copy in the cache can be used.

    Raises:
        ModelError: the hub does not give it, and the cache does not have all of it.
    """
    lacking = missing_from_cache(repository, part)
    fault = find_fault(repository, is_cached=lacking is None)
    if fault is None:
        return False
    if lacking is not None or fault.reason in ("missing", "revision"):
        raise hub_error(fault, repository, key)
    if fault.reason != "offline":
        text = f"{repository.name}: {fault.text}; the copy in the hub's cache is used, which may not be the newest"
        warn_once(_log, text)
    return True


def hub_error(fault: HubFault, repository: Repository, key: str) -> ModelError:
    """Make the error for a model that the hub does not give."""
    from huggingface_hub import constants

    here, lacking = f"the hub's cache ({constants.HF_HUB_CACHE})", missing_from_cache(repository, "weights")
    state = f"is not complete in {here} ({lacking} is missing)" if lacking else f"is in {here}"
    if cached_file(repository, "config.json") is None:
        state = f"is neither a folder here nor in {here}"
    return ModelError(explain_hub_fault(fault, repository, key, state))


def missing_from_cache(repository: Repository, part: Part) -> str | None:
    """Name a file of this part that is not in the hub's cache; None if all are."""
    if part == "tokenizer":
        return None if any(cached_file(repository, name) for name in _TOKENIZERS) else _TOKENIZERS[0]
    if cached_file(repository, "config.json") is None:
        return "config.json"
    if part == "config" or cached_file(repository, _WEIGHTS) is not None:
        return None
    index = cached_file(repository, _INDEX)
    if index is None:
        return _WEIGHTS
    try:
        files = _files_in(index)
    except (ValueError, KeyError, AttributeError):
        return _INDEX
    return next((name for name in files if cached_file(repository, name) is None), None)


def stored_weights(where: str, repository: Repository | None) -> dict[str, Any]:
    """Return a safetensors slice for each weight in a model's files, by name. `slice[:]` reads the weight.

    Empty if the files are not here yet or cannot be read. `where` is the model's folder, and is not read if the model
    is in a repository.
    """
    from safetensors import SafetensorError, safe_open

    def find(name: str) -> Path | None:
        return Path(where, name) if repository is None else cached_file(repository, name)

    try:
        single, index = find(_WEIGHTS), find(_INDEX)
        is_single = single is not None and single.is_file()
        names = [_WEIGHTS] if is_single or index is None else _files_in(index)
        files: list[Any] = [safe_open(find(name), framework="pt") for name in names]
        return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _files_in(index: Path) -> list[str]:
    return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
