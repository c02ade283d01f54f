"""Check what a run names, in the order of what the answer costs: this machine first, then one question to the hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from finetune.config.hub import Repository
from finetune.data.examples import check_local_rows, missing_here
from finetune.errors import DataError, ModelError
from finetune.model.base import locate
from finetune.model.from_hub import Part, has_to_use_cache, missing_from_cache, repository_of

if TYPE_CHECKING:
    from finetune.config.schema import Config, ModelSection


def check_paths(config: Config) -> None:
    """Refuse files and folders that are not on this machine, all of them at once. Nothing is read and nothing asked.

    Args:
        config: the whole run.

    Raises:
        DataError: rows are not here, and perhaps the model is not either.
        ModelError: a folder of the model is not here.
    """
    problems = missing_here(config.data)
    try:
        list(_parts_at_hub(config.model, needs_weights=True))
    except ModelError as error:
        if not problems:
            raise
        problems.append(str(error))
    if len(problems) > 1:
        raise DataError("\n  ".join([f"the run has {len(problems)} problems:", *problems]))
    if problems:
        raise DataError(problems[0])


def check_inputs(config: Config, *, needs_weights: bool) -> None:
    """Refuse a model or rows that a run could not use, before anything is downloaded or encoded.

    Rows are looked at where the model is not here yet: otherwise they are read at once anyway.

    Args:
        config: the whole run.
        needs_weights: the run reads the model's weights, if they are not random.

    Raises:
        DataError: rows are not here, cannot be read or have no known format.
        ModelError: a folder is not here, or the hub does not give the model and its cache does not have all of it.
    """
    check_paths(config)
    at_hub = list(_parts_at_hub(config.model, needs_weights=needs_weights))
    is_to_download = any(missing_from_cache(repository, part) for repository, part, _ in at_hub)
    check_local_rows(config.data, has_format=is_to_download and config.training.objective == "sft")
    for repository, part, key in at_hub:
        has_to_use_cache(repository, part, key)


def _parts_at_hub(section: ModelSection, *, needs_weights: bool) -> Iterator[tuple[Repository, Part, str]]:
    """Yield what a run reads from the hub, and the key that names it."""
    model: Part = "weights" if needs_weights and section.init != "random" else "config"
    parts: list[tuple[str | None, Part, str]] = [
        (None if section.config is not None else section.path, model, "model.path"),
        (section.tokenizer or section.path, "tokenizer", "model.tokenizer" if section.tokenizer else "model.path"),
    ]
    for path, part, key in parts:
        repository = None if path is None else repository_of(locate(path, key), section.revision)
        if repository is not None:
            yield repository, part, key
