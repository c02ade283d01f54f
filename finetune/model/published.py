"""Read the sizes of published models that finetune includes, for commands that work without the hub."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from finetune.config.hub import find_fault
from finetune.model.base import locate_model
from finetune.model.from_hub import missing_from_cache, repository_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from finetune.config.schema import ModelSection

_FILE = Path(__file__).with_name("published.yaml")


class Published(NamedTuple):
    """The included facts about a published model."""

    source: str
    """The address of its config.json."""
    sizes: dict[str, Any]
    """Keys of config.json, and `rope_type`."""

    def as_config(self) -> dict[str, Any]:
        """Return the sizes as `model.config`."""
        sizes = dict(self.sizes)
        if (rope_type := sizes.pop("rope_type", None)) is not None:
            head = sizes["hidden_size"] // sizes["num_attention_heads"]
            factors = [1.0] * (int(head * sizes.get("partial_rotary_factor", 1.0)) // 2)  # they change no size
            original = sizes["original_max_position_embeddings"]
            rope = {"type": rope_type, "short_factor": factors, "long_factor": factors}
            if sizes["model_type"] == "phimoe":
                rope |= {"short_mscale": 1.0, "long_mscale": 1.0}
            sizes["rope_scaling"] = {**rope, "original_max_position_embeddings": original}
        return sizes

    def differences(self, config: PretrainedConfig) -> Iterator[str]:
        """Name the sizes that differ in the hub's config.json."""
        rope = getattr(config, "rope_parameters", None) or {}
        for key, ours in self.sizes.items():
            theirs = getattr(config, key, rope.get(key, ours))
            if theirs != ours:
                yield f"{key} is {theirs} in its config.json and {ours} in the sizes shipped with finetune"


def published_sizes(section: ModelSection) -> Published | None:
    """Return the included facts about the model of this section; None for another model or another revision."""
    return None if section.config or section.revision is not None else _all().get(section.path or "")


def with_sizes_here(section: ModelSection) -> tuple[ModelSection, str | None]:
    """Return the section with the model's sizes, and why they are the included ones, if they are.

    Raises:
        ModelError: `model.path` names no model.
    """
    published = published_sizes(section)
    repository = None if published is None else repository_of(locate_model(section), section.revision)
    if published is None or repository is None or missing_from_cache(repository, "config") is None:
        return section, None
    fault = find_fault(repository)
    if fault is None:
        return section, None
    why = f"{fault.text}, so the sizes of {section.path} are those shipped with finetune ({published.source})"
    return section.model_copy(update={"config": published.as_config()}), why


@cache
def _all() -> dict[str, Published]:
    models = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: Published(found["source"], found["config"]) for name, found in models.items()}
