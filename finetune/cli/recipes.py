"""List and copy the shipped recipes."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from finetune.config.shipped_files import shipped_folder
from finetune.errors import ConfigError


def list_recipes() -> list[tuple[str, str]]:
    """Return the name and the first docstring line of each recipe."""
    return [(path.stem, _first_line(path)) for path in sorted(shipped_folder("recipes").glob("*.py"))]


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy a recipe to a folder, with the config files that it names.

    Raises:
        ConfigError: there is no such recipe, or a file exists already. Nothing is written then.
    """
    recipes = {path.stem: path for path in shipped_folder("recipes").glob("*.py")}
    name = name.removesuffix(".py")
    if name not in recipes:
        raise ConfigError(f"there is no recipe {name}. There are: {', '.join(sorted(recipes))}.")
    copies = {recipes[name]: folder / f"{name}.py"}
    for config in _configs_of(recipes[name]):
        copies[config] = folder / "configs" / config.relative_to(shipped_folder("configs"))
    present = [str(target) for target in copies.values() if target.exists()]
    if present:
        raise ConfigError(f"{', '.join(present)} is there already. Nothing was written; name another folder.")
    for source, target in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return list(copies.values())


def _configs_of(recipe: Path) -> list[Path]:
    """Find the config files that a recipe names: ``load_config(overrides, task="…")`` or ``run="…"``."""
    folders = {"task": shipped_folder("configs") / "task", "run": shipped_folder("configs")}
    tree = ast.parse(recipe.read_text(encoding="utf-8"))
    keywords = [(node.arg, node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    named = [(name or "", str(value.value)) for name, value in keywords if isinstance(value, ast.Constant)]
    files = [folders[name] / f"{value}.yaml" for name, value in named if name in folders]
    return [file for file in dict.fromkeys(files) if file.is_file()]


def _first_line(recipe: Path) -> str:
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
