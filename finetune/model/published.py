"""The included facts about published models, for `finetune plan` and `finetune doctor --model`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from finetune.engine.decoder import family_of
from finetune.model.from_hub import locate_model, repository_of
from finetune.model.local_files import missing_from_cache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from finetune.config.schema import ModelSection

_PUBLISHED = Path(__file__).with_name("published.yaml")


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


@cache
def _all_published() -> dict[str, Published]:
    models = yaml.safe_load(_PUBLISHED.read_text(encoding="utf-8"))
    return {
        name: Published(facts["source"], facts["config"], facts.get("rope", {}), facts.get("pretraining_tokens"))
        for name, facts in models.items()
    }
