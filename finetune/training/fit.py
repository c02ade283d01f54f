"""Check that model, rows, configuration and trainer fit each other, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune.data.labelled import EncodedLabelled
from finetune.errors import ConfigError
from finetune.model.base import max_context
from finetune.training.optim import build_optimizer

if TYPE_CHECKING:
    from finetune.config.schema import Config


def named_splits(splits: Any) -> dict[str, Any]:
    """Return the splits that exist, by name: `train`, `validation`, `test`."""
    return {name: split for name, split in vars(splits).items() if split is not None}


def check_fit(config: Config, model: Any, splits: Any, *, trainer: str, objectives: Sequence[str]) -> None:
    """Refuse a model or trainer that contradicts the configuration, and rows longer than the model's context.

    Raises:
        ConfigError: names both sides.
    """
    if config.training.objective not in objectives:
        raise ConfigError(
            f"training.objective is {config.training.objective} ({config.origin('training.objective')}), but "
            f"{trainer} trains {objectives[0]}. Use PreferenceTrainer (recipes/finetune_preferences.py) or "
            f"`finetune train`, or set training.objective={objectives[0]}."
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
        if isinstance(split, EncodedLabelled) and split.max_length > context and split.longest_stranger > context:
            raise ConfigError(
                f"the {name} split: the longest prompt with the longest answer has {split.longest_stranger} tokens, "
                f"but the model's context ends at {context}. KTO puts prompts before the answers of other rows. "
                f"{advice}"
            )
