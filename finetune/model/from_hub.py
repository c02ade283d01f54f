"""Find the files of a base model: in a folder, at the Hugging Face hub, or in its cache if the hub does not answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from finetune.config.config_files import resolve_shipped
from finetune.errors import ModelError, first_line
from finetune.logs import hear_libraries, waiting, warn_once
from finetune.model.unsupported import refuse_irregular_folder
from finetune.units import name_first

if TYPE_CHECKING:
    from finetune.config.hub import HubFault, Repository
    from finetune.config.schema import ModelSection

Loaded = TypeVar("Loaded")
Part = Literal["config", "tokenizer", "weights"]

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_log = logging.getLogger(__name__)


def locate_model(section: ModelSection) -> str:
    """Return the hub id in `model.path`, or the absolute path of the folder."""
    if section.path is None:
        raise ModelError("model.path is not set. Choose model=phi4_mini or give model.path=HUB_ID_OR_FOLDER.")
    return locate(section.path, "model.path")


def locate(path: str, key: str) -> str:
    """Return the folder of `shipped:NAME` or of a path. A hub id is returned unchanged.

    Raises:
        ModelError: the folder does not exist or holds no model, or see `refuse_irregular_folder`.
    """
    if path.startswith("shipped:"):
        return str(resolve_shipped(path))
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists()
    if not looks_local:
        return path
    if not folder.is_dir():
        notice = " If a finished run used it, name its new place with --set model.path=FOLDER." * folder.is_absolute()
        raise ModelError(
            f"{key} is {path}, but there is no such folder.{notice} Give a folder that holds a model, or a hub id "
            "like microsoft/phi-4."
        )
    refuse_irregular_folder(folder)
    if key == "model.path" and not (folder / "config.json").is_file():
        names = name_first(sorted(entry.name for entry in folder.iterdir()), 8) or "nothing"
        is_adapter = (folder / "adapter_config.json").is_file()
        hint = " This is an adapter: name its base model in model.path." if is_adapter else ""
        raise ModelError(f"{key} is {path}, which is not a model folder: it has no config.json (found: {names}).{hint}")
    return str(folder.resolve())


def repository_of(where: str, revision: str | None) -> Repository | None:
    """Return the repository that `locate` found; None for a folder."""
    if Path(where).is_absolute():
        return None
    # This module imports `config.hub` only for a model that a hub id names.
    from finetune.config.hub import Repository

    return Repository(where, revision, "model")


def load_part(
    section: ModelSection, load: Callable[[], Loaded], *, where: str | None = None, part: Part = "config"
) -> Loaded:
    """Load a part of a model without progress bars, and turn exceptions into a ModelError of one line.

    `where` is the folder or the hub id that is read; None if none is. If the hub does not give the model, only its
    cache is read.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # also the hub's
    hear_libraries()
    repository = None if where is None else repository_of(where, section.revision)
    own = section.tokenizer if part == "tokenizer" else None
    key = "model.path" if own is None else "model.tokenizer"
    noun = "tokenizer" if part == "tokenizer" else "model"
    name = own or section.path or (section.config or {}).get("model_type")
    source: AbstractContextManager[None] = nullcontext()
    if repository is not None and has_to_use_cache(repository, part, key):
        from finetune.config.hub import cache_only

        source = cache_only()
    with source:
        try:
            with waiting(f"loading the {noun} {name}"):
                return load()
        except Exception as error:  # a damaged file alone raises a dozen types, from many libraries
            if repository is not None:
                from finetune.config.hub import fault_of

                if fault := fault_of(error):
                    raise hub_error(fault, repository, key) from error
            raise ModelError(f"the {noun} {name} cannot be loaded: {first_line(error)}") from error


def has_to_use_cache(repository: Repository, part: Part, key: str) -> bool:
    """Ask the hub for a model, which messages name by its key. Return True if only the copy in the cache can be used.

    Raises:
        ModelError: the hub does not give it, and the cache does not have all of it.
    """
    from finetune.config.hub import find_fault

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

    from finetune.config.hub import cached_file, explain_hub_fault

    here, lacking = f"the hub's cache ({constants.HF_HUB_CACHE})", missing_from_cache(repository, "weights")
    state = f"is not complete in {here} ({lacking} is missing)" if lacking else f"is in {here}"
    if cached_file(repository, "config.json") is None:
        state = f"is neither a folder here nor in {here}"
    return ModelError(explain_hub_fault(fault, repository, key, state))


def missing_from_cache(repository: Repository, part: Part) -> str | None:
    """Name a file of this part that is not in the hub's cache; None if all are."""
    from finetune.config.hub import cached_file

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


def stored_weights(where: str, revision: str | None) -> dict[str, Any]:
    """Return a safetensors slice for each weight in a model's files, by name. `slice[:]` reads the weight.

    Empty if the files are not here yet or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    repository = repository_of(where, revision)

    def find(name: str) -> Path | None:
        if repository is None:
            return Path(where, name)
        from finetune.config.hub import cached_file

        return cached_file(repository, name)

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
