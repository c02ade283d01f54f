"""Locate a base model in a folder or at the Hugging Face hub, and load a part of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from finetune.config.config_files import resolve_shipped
from finetune.errors import ModelError, first_line
from finetune.logs import hear_libraries, waiting
from finetune.model.unsupported import refuse_irregular_folder
from finetune.units import name_first

if TYPE_CHECKING:
    from finetune.config.hub import Repository
    from finetune.config.schema import ModelSection
    from finetune.model.local_files import Part

Loaded = TypeVar("Loaded")


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
        has_adapter = any((folder / name / "adapter_config.json").is_file() for name in ("", "adapter"))
        hint = f" Name its adapter's base in {key}, and train on with lora.start_from={path}." if has_adapter else ""
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
    own, noun = (section.tokenizer, "tokenizer") if part == "tokenizer" else (None, "model")
    key = "model.path" if own is None else "model.tokenizer"
    name = own or section.path or (section.config or {}).get("model_type")
    source: AbstractContextManager[None] = nullcontext()
    if repository is not None:
        from finetune.config.hub import cache_only
        from finetune.model.local_files import has_to_use_cache

        if has_to_use_cache(repository, part, key):
            source = cache_only()
    with source:
        try:
            with waiting(f"loading the {noun} {name}"):
                return load()
        except Exception as error:  # a damaged file alone raises a dozen types, from many libraries
            if repository is not None:
                from finetune.config.hub import fault_of
                from finetune.model.local_files import hub_error

                if fault := fault_of(error):
                    raise hub_error(fault, repository, key) from error
            fix = ". Set PYTHONUTF8=1: the path is not ASCII" if isinstance(error, UnicodeEncodeError) else ""
            raise ModelError(f"the {noun} {name} cannot be loaded: {first_line(error)}{fix}") from error
