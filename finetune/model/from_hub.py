"""Find the files of a base model: in a folder, at the Hugging Face hub, or in its cache if the hub does not answer."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import yaml

from finetune.config.config_files import resolve_shipped
from finetune.errors import ModelError, first_line
from finetune.logs import hear_libraries, waiting, warn_once
from finetune.model.unsupported import refuse_irregular_folder
from finetune.units import name_first

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from finetune.config.hub import HubFault, Repository
    from finetune.config.schema import ModelSection

Loaded = TypeVar("Loaded")
Part = Literal["config", "tokenizer", "weights"]

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PUBLISHED = Path(__file__).with_name("published.yaml")
_log = logging.getLogger(__name__)


class Published(NamedTuple):
    """The included facts about a published model."""

    source: str
    """The address of its config.json."""
    sizes: dict[str, Any]
    """Keys of config.json, and `rope_type`."""
    rope: Mapping[str, Any] = {}
    """Keys of config.json for rotary positions that are scaled otherwise than by LongRoPE. They change no size."""
    pretraining_tokens: float | None = None
    """The tokens of its training, as its model card says."""

    def as_config(self) -> dict[str, Any]:
        """Return the sizes and the rotary positions as `model.config`."""
        from finetune.engine.decoder import family_of

        sizes = {**self.sizes, **copy.deepcopy(self.rope)}
        if (rope_type := sizes.pop("rope_type", None)) is not None:
            head = sizes["hidden_size"] // sizes["num_attention_heads"]
            num_pairs = int(head * sizes.get("partial_rotary_factor", 1.0)) // 2
            original = sizes["original_max_position_embeddings"]
            # The published factors change no size. These differ, so that a proof sees which of them are used.
            short, long = ([1 + most * pair / num_pairs for pair in range(num_pairs)] for most in (1, 8))
            rope = {"type": rope_type, "short_factor": short, "long_factor": long}
            rope |= family_of(sizes["model_type"]).rope_sizes
            sizes["rope_scaling"] = {**rope, "original_max_position_embeddings": original}
        return sizes

    def differences(self, config: PretrainedConfig) -> Iterator[str]:
        """Name the sizes that differ in the hub's config.json."""
        rope = getattr(config, "rope_parameters", None) or {}
        for key, shipped in self.sizes.items():
            published = getattr(config, key, rope.get(key, shipped))
            if published != shipped:
                yield f"{key} is {published} in its config.json and {shipped} in the sizes shipped with finetune"


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
        notice = (
            " If a run used it, it was moved or deleted since: name its new place with --base." * folder.is_absolute()
        )
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


def published_sizes(section: ModelSection) -> Published | None:
    """Return the included facts about the model of this section; None for another model or another revision."""
    return None if section.config or section.revision is not None else _all_published().get(section.path or "")


def with_sizes_here(section: ModelSection) -> tuple[ModelSection, str | None]:
    """Return the section with the model's sizes, and why they are the included ones, if they are.

    Raises:
        ModelError: `model.path` names no model.
    """
    published = published_sizes(section)
    repository = None if published is None else repository_of(locate_model(section), section.revision)
    if published is None or repository is None or missing_from_cache(repository, "config") is None:
        return section, None
    from finetune.config.hub import find_fault

    fault = find_fault(repository)
    if fault is None:
        return section, None
    reason = f"{fault.text}, so the sizes of {section.path} are those shipped with finetune ({published.source})"
    return section.model_copy(update={"config": published.as_config()}), reason


def _files_in(index: Path) -> list[str]:
    return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))


@cache
def _all_published() -> dict[str, Published]:
    models = yaml.safe_load(_PUBLISHED.read_text(encoding="utf-8"))
    return {
        name: Published(facts["source"], facts["config"], facts.get("rope", {}), facts.get("pretraining_tokens"))
        for name, facts in models.items()
    }
