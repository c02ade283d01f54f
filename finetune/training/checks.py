"""Check a run before anything is written: its paths and the hub first, then whether model, rows and trainer fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.config.hub import Repository
from finetune.config.objectives import OBJECTIVES, SECTIONS
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import check_local_rows, missing_here
from finetune.data.preferences import EncodedLabelled
from finetune.data.preferences import EncodedPairs
from finetune.errors import ConfigError, DataError, ModelError
from finetune.inference.prompts import read_general_prompts
from finetune.model.base import max_context
from finetune.model.from_hub import Part, has_to_use_cache, locate, missing_from_cache, repository_of
from finetune.training.optim import build_optimizer

if TYPE_CHECKING:
    from finetune.config.schema import Config, ModelSection


def check_objective(config: Config) -> None:
    """Refuse settings that the objective does not read, and a run that has not what its objective needs.

    Raises:
        ConfigError: a key is set that belongs to other objectives. Or the run trains every weight although a server
            generates its answers. Or it trains every weight or starts from another adapter, although its reference is
            the model with its adapter switched off.
    """
    objective, is_lora = OBJECTIVES[config.training.objective], config.training.method == "lora"
    for section in SECTIONS:
        values = getattr(config, section)
        for name, field in type(values).model_fields.items():
            key, value = f"{section}.{name}", getattr(values, name)
            # A run's config.yaml names every key, and a key that was not set has its default there.
            is_set = config.origin(key) != "default" and value != field.get_default(call_default_factory=True)
            if is_set and not objective.reads_key(key):
                users = " and ".join(other.name for other in OBJECTIVES.values() if other.reads_key(key))
                raise ConfigError(
                    f"{key} is {value} ({config.origin(key)}), but training.objective is {objective.name}, which does "
                    f"not read it: it belongs to {users}. Remove it."
                )
    if config.rollout.server is not None and not is_lora:
        raise ConfigError(
            f"rollout.server is {config.rollout.server} and training.method is {config.training.method}, but the "
            "server gets the step's weights as a LoRA adapter. Set training.method=lora, or remove rollout.server."
        )
    if not has_reference(config):
        return
    without = " or grpo.beta=0" if objective.rows == "prompts" else ""
    if not is_lora:
        raise ConfigError(
            f"training.method is {config.training.method}, but the reference of {objective.title} is the base with its "
            f"adapter switched off. Set training.method=lora{without}."
        )
    if config.lora.start_from is not None:
        raise ConfigError(
            f"lora.start_from is {config.lora.start_from}, but the reference of {objective.title} is the base without "
            "any adapter. Merge that adapter into its base first, and name the merged model in model.path"
            f"{without and f';{without} needs no reference'}."
        )


def has_reference(config: Config) -> bool:
    """Return whether a step also computes the log-probabilities of the base."""
    objective = OBJECTIVES[config.training.objective]
    return objective.has_reference or (objective.rows == "prompts" and config.grpo.beta > 0)


def check_paths(config: Config) -> None:
    """Refuse files and folders that do not exist, all in one error. Nothing is read, and the hub is not asked.

    Raises:
        DataError: rows are missing, and perhaps the model as well.
        ModelError: a folder of the model is missing.
    """
    problems = missing_here(config.data)
    try:
        read_general_prompts(config.testing.general_prompts)
    except DataError as error:
        problems.append(str(error))
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

    Rows are read only if the model is not on this machine yet. Otherwise training reads them at once anyway. With
    `needs_weights`, the run reads the model's weights, if they are not random.

    Raises:
        DataError: rows are missing, cannot be read or have no known format.
        ModelError: a folder is missing, or the hub does not give the model and its cache does not have all of it.
    """
    check_paths(config)
    at_hub = list(_parts_at_hub(config.model, needs_weights=needs_weights))
    is_to_download = any(missing_from_cache(repository, part) for repository, part, _ in at_hub)
    check_local_rows(config.data, OBJECTIVES[config.training.objective].reads if is_to_download else None)
    for repository, part, key in at_hub:
        has_to_use_cache(repository, part, key)


def named_splits(splits: Any) -> dict[str, Any]:
    """Return the splits that exist, by name: `train`, `validation`, `test`."""
    return {name: split for name, split in vars(splits).items() if split is not None}


def raw_digests(splits: Any) -> dict[str, list[str]]:
    """Return the `digest_row` of each row, by split. Both sides of a pair are from one row."""
    return {name: split.sides[0].raw_digests() for name, split in named_splits(splits).items()}


def check_fit(config: Config, model: Any, splits: Any) -> None:
    """Refuse rows or a model that contradict the configuration, and rows longer than the model's context.

    Raises:
        ConfigError: names both sides.
    """
    row_type = {"pairs": EncodedPairs, "labelled": EncodedLabelled}.get(
        OBJECTIVES[config.training.objective].rows, EncodedExamples
    )
    if not isinstance(splits.train, row_type):
        raise ConfigError(
            f"training.objective is {config.training.objective} ({config.origin('training.objective')}), but the rows "
            f"are encoded for {_objectives_of(splits.train)}. Encode them with encode_for_objective, or set "
            "training.objective to the objective of these rows."
        )
    has_adapter = hasattr(model, "peft_config")
    if has_adapter != (config.training.method == "lora"):
        raise ConfigError(
            f"training.method is {config.training.method} ({config.origin('training.method')}) but the model "
            f"that was built {'carries an adapter' if has_adapter else 'has no adapter'}. Use the recipe "
            f"for this method, or set training.method={'lora' if has_adapter else 'full'}."
        )
    build_optimizer(model, config.optim)  # raises its errors before the run's folder is opened
    context = max_context(model)
    if context is None:
        return
    advice = f"Set data.max_length={context} (it is {config.data.max_length}, {config.origin('data.max_length')})."
    for name, split in named_splits(splits).items():
        longest = int(split.lengths.max()) if len(split) else 0
        if longest > context:
            raise ConfigError(
                f"the {name} split has a row of {longest} tokens, but the model's context ends at {context}. {advice}"
            )
        if isinstance(split, EncodedLabelled) and split.max_length > context and split.longest_mismatched > context:
            raise ConfigError(
                f"the {name} split: the longest prompt with the longest answer has {split.longest_mismatched} tokens, "
                f"but the model's context ends at {context}. KTO puts prompts before the answers of other rows. "
                f"{advice}"
            )


def _objectives_of(rows: Any) -> str:
    """Name the objectives for which rows were encoded."""
    read = {EncodedPairs: "pairs", EncodedLabelled: "labelled"}.get(type(rows), "answers")
    return " or ".join(name for name, objective in OBJECTIVES.items() if objective.rows == read)


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
