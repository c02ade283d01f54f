"""List the files that overrides choose, each with its description, and the models by family."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from finetune.config.config_files import GROUPS, RUN_FILES, named_files

MADE_FOR = "Phi, which finetune is made for"
_OTHERS = ("SmolLM", "Qwen", "Llama", "Mistral", "Gemma", "OLMo", "Granite")
_FAMILIES = {
    "phi": MADE_FOR,
    **{name.lower(): f"{name}, which it trains too" for name in _OTHERS},
    "": "others in ./configs",
}
"""The families of models, by how the names in configs/model/ begin."""


def list_configs() -> dict[str, list[tuple[str, str]]]:
    """List the names of `run` and of every group, each with the description in the file's first line."""
    return {
        group: [(name, _description(path)) for name, path in sorted(named_files(group).items())]
        for group in (RUN_FILES, *GROUPS)
    }


def list_model_families() -> dict[str, list[tuple[str, str]]]:
    """List the models of `list_configs` by family, `MADE_FOR` first."""
    families: dict[str, list[tuple[str, str]]] = {family: [] for family in _FAMILIES.values()}
    for name, description in list_configs()["model"]:
        family = next(family for start, family in _FAMILIES.items() if name.startswith(start))
        families[family].append((name, description))
    return {family: models for family, models in families.items() if models}


def other_models() -> list[str]:
    """Return a line for each family but `MADE_FOR`, with the names of its models."""
    others = {family: dict(models) for family, models in list_model_families().items() if family != MADE_FOR}
    return [f"{family.partition(',')[0]}: {', '.join(names)}" for family, names in others.items()]


def _description(path: Path) -> str:
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline(200)
        return line.lstrip("# ").rstrip() if line.startswith("#") else ""
    return ""
