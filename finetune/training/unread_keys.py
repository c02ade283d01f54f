"""Refuse or name the keys that are set and that a run does not read: other keys, its rows or its processes decide.

Only a run that sets one of `finetune.training.checks.SOMETIMES_READ`, or has a reference, imports this.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.config_files import is_address, shipped_folder
from finetune.config.objectives import OBJECTIVES
from finetune.config.schema import as_list
from finetune.errors import ConfigError, ModelError
from finetune.terminal import without_passwords

if TYPE_CHECKING:
    from finetune.config.schema import Config

_log = logging.getLogger(__name__)
_MOST_SHOWN = 60
_NOTHING: tuple[object, ...] = (0, [], "none")
"""Values that ask for nothing to be measured."""
_OF_OTHER_MODEL = {
    "lora.start_from": "Merge that adapter into its base first, and name the merged model in model.path",
    "lora.quantize": "Remove it",
    "lora.new_tokens": "Add the tokens to the tokenizer and the model first",
}
"""Keys of adapters that decide which model is trained, and what to do instead in a run that trains every weight."""


class _Rule(NamedTuple):
    """Keys, when a run reads them, and why it does not read them otherwise."""

    keys: tuple[str, ...]
    """Names of keys, or of sections with a dot at the end."""
    is_read: Callable[[Config], bool]
    why: str


def _is_packed(config: Config) -> bool:
    return config.training.packing and config.training.kernels == "auto"


def _has_model_at_hub(config: Config) -> bool:
    from finetune.model.from_hub import locate, repository_of  # imports torch, which `finetune init` does without

    paths = [None if config.model.config is not None else config.model.path, config.model.tokenizer]
    with suppress(ModelError):
        return any(path is not None and repository_of(locate(path, "model.path"), None) for path in paths)
    return True  # training says what is wrong


def _has_rows_at_hub(config: Config) -> bool:
    paths = as_list(config.data.path)
    is_local = paths and all(path.startswith("shipped:") or is_address(path) or Path(path).exists() for path in paths)
    return bool(config.data.mixture) or not is_local


def _may_have_subsets(config: Config) -> bool:
    """Return whether there may be subsets: at the hub, and in the folder of a downloaded data set."""
    return _has_rows_at_hub(config) or any(Path(path).is_dir() for path in as_list(config.data.path))


_RULES = (
    _Rule(("lora.",), lambda config: config.training.method == "lora", "training.method is full"),
    _Rule(("model.revision",), _has_model_at_hub, "neither the model nor its tokenizer is a hub id"),
    _Rule(("model.fp8_layers",), lambda config: config.model.frozen_precision == "fp8", "frozen_precision is not fp8"),
    _Rule(("data.name",), _may_have_subsets, "data.path is neither a hub id nor a folder"),
    _Rule(("data.revision",), _has_rows_at_hub, "data.path is not a hub id"),
    _Rule(
        ("grpo.epsilon", "grpo.importance_sampling_level"),
        lambda config: config.grpo.num_iterations > 1 or config.rollout.server is not None,
        "grpo.num_iterations is 1, so no ratio changes",
    ),
    _Rule(("data.keep_prompts",), lambda config: config.data.keep is not None, "data.keep is null"),
    _Rule(
        ("training.max_skipped_steps",),
        lambda config: config.training.on_nonfinite == "skip",
        "training.on_nonfinite is stop",
    ),
    _Rule(
        ("training.packing", "training.fused"),
        lambda config: config.training.kernels == "auto",
        "training.kernels is reference",
    ),
    _Rule(("training.share_prefixes",), _is_packed, "the rows of a micro-batch are not packed"),
    _Rule(
        ("early_stopping.min_delta", "early_stopping.metric"),
        lambda config: config.early_stopping.patience is not None,
        "early_stopping.patience is null",
    ),
    _Rule(
        ("rollout.max_difference", "rollout.server_timeout_minutes"),
        lambda config: config.rollout.server is not None,
        "rollout.server is null",
    ),
    _Rule(
        ("rollout.max_turns", "rollout.tool_timeout_seconds"),
        lambda config: bool(config.rollout.tools or config.rollout.environment),
        "rollout.tools and rollout.environment are empty",
    ),
    _Rule(("rollout.max_result_tokens",), lambda config: bool(config.rollout.tools), "rollout.tools is empty"),
    _Rule(("resume_allow",), lambda config: config.resume == "auto", "resume is never"),
    _Rule(
        ("parallel.find_unused_parameters",),
        lambda config: config.parallel.gradient_sync == "ddp",
        "parallel.gradient_sync is not ddp",
    ),
    _Rule(
        ("parallel.reshard_after_forward",),
        lambda config: config.parallel.sharding != "none",
        "parallel.sharding is none",
    ),
)
OF_SPLITS = ("validation.", "checkpoint.best_metric", "testing.", "data.test")
"""How the keys begin that are about validations or the test phase."""
_OF_ANSWERS = ("validation.num_samples", "validation.max_new_tokens", "validation.metrics_from")
"""Keys of the answers that validations measure. With rewards, `rollout.*` says how they are generated."""
_OF_SEVERAL_PROCESSES = ("parallel.backend", "parallel.gradient_sync", "parallel.master_addr", "parallel.master_port")


def refuse_keys_of_others(config: Config, chosen: Mapping[str, object]) -> None:
    """Raise ConfigError for a key that the objective does not read, or for a missing adapter or reference.

    `chosen` has the keys that are set, and their values.
    """
    objective, method = config.objective, config.training.method
    for key, value in chosen.items():
        if not objective.reads_key(key):
            users = " and ".join(other.name for other in OBJECTIVES.values() if other.reads_key(key))
            raise ConfigError(
                f"{key} is {value} ({config.origin(key)}), but training.objective is {objective.name}, which does "
                f"not read it: it belongs to {users}. Remove it."
            )
        if key == "rollout.server" and method != "lora":
            raise ConfigError(
                f"rollout.server is {value} and training.method is {method}, but the server gets the step's weights as "
                "a LoRA adapter. Set training.method=lora, or remove rollout.server."
            )
        if key in _OF_OTHER_MODEL and method == "full":
            raise ConfigError(
                f"{key} is {_shown(value)} ({config.origin(key)}), but training.method is full, which trains every "
                f"weight of model.path as it is there. {_OF_OTHER_MODEL[key]}, or set training.method=lora."
            )
    if config.has_reference:
        _refuse_no_reference(config)


def _refuse_no_reference(config: Config) -> None:
    """Raise ConfigError if there can be no reference, which is the model with its adapter switched off."""
    objective, is_lora = config.objective, config.training.method == "lora"
    without = " or grpo.beta=0" if objective.generates_answers else ""
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


def warn_of(keys: str) -> None:
    """Log what one of the two functions below describes, if it is not empty."""
    if keys:
        _log.warning("%s", keys)


def describe_unread_keys(
    config: Config, chosen: Mapping[str, object], *, has_metrics: bool, world_size: int | None
) -> str:
    """Name the keys that have no effect in this run, all in one line. Empty if all have.

    `chosen` has the keys that are set, and their values. See `find_unread_keys`.
    """
    return _describe(config, chosen, find_unread_keys(config, chosen, has_metrics=has_metrics, world_size=world_size))


def find_unread_keys(
    config: Config, chosen: Iterable[str], *, has_metrics: bool, world_size: int | None
) -> dict[str, str]:
    """Return the keys among `chosen` that have no effect in this run, and why.

    `has_metrics` says whether validations measure generated answers. `world_size` is None if the launch is not known.
    """
    unread: dict[str, str] = {}
    for key in chosen:
        why = next((rule.why for rule in _RULES if key.startswith(rule.keys) and not rule.is_read(config)), "")
        is_of_prompts = config.objective.generates_answers and key == "validation.num_samples"
        if key in _OF_ANSWERS and not has_metrics and not is_of_prompts:
            why = "validations have no metrics"
        elif key == "grpo.epsilon" and config.grpo.loss_type == "cispo" and config.grpo.epsilon_high is not None:
            why = "grpo.loss_type is cispo, which reads grpo.epsilon_high"
        elif world_size == 1 and key in _OF_SEVERAL_PROCESSES:
            why = "one process trains alone"
        if why:
            unread[key] = why
    return unread


def describe_missing_splits(config: Config, chosen: Mapping[str, object], splits: Any) -> str:
    """Name the keys about validations or the test phase in a run without rows for them. Empty if there are none.

    `chosen` has the keys of `OF_SPLITS` that are set, and their values.
    """
    if not chosen:
        return ""
    from finetune.training.loaders import rows_to_test  # imports torch

    has_test = rows_to_test(config, splits) is not None
    reads_prompts = config.early_stopping.max_forgotten is not None or config.data.keep is not None
    unread: dict[str, str] = {}
    for key, value in chosen.items():
        is_of_test = key.startswith(("testing.", "data.test"))
        is_read = has_test or (key == "testing.general_prompts" and reads_prompts)
        if value in _NOTHING or (is_read if is_of_test else splits.validation is not None):
            continue
        of_test = "this run has no test phase (`finetune evaluate` reads them)"
        unread[key] = of_test if is_of_test else "this run has no validation rows"
    return _describe(config, chosen, unread)


def _describe(config: Config, chosen: Mapping[str, object], unread: Mapping[str, str]) -> str:
    """Name keys, by reason. A shipped file sets keys for many kinds of runs, so its keys are left out."""
    by_reason: dict[str, list[str]] = {}
    for key, why in unread.items():
        origin = config.origin(key)
        if not origin.startswith("shipped ") and not Path(origin).absolute().is_relative_to(shipped_folder("configs")):
            by_reason.setdefault(why, []).append(f"{key}={_shown(chosen[key])} ({origin})")
    reasons = "; ".join(f"{', '.join(keys)}, because {why}" for why, keys in by_reason.items())
    return f"set, but without effect in this run: {reasons}" if reasons else ""


def _shown(value: Any) -> str:
    text = without_passwords(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."
