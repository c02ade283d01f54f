"""List and copy the shipped recipes."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from finetune.config.config_files import shipped_folder
from finetune.errors import ConfigError


def list_recipes() -> list[tuple[str, str]]:
    """Return the name and the first docstring line of each recipe."""
    return [(path.stem, _first_line(path)) for path in sorted(shipped_folder("recipes").glob("*.py"))]


def copy_recipe(name: str, folder: Path) -> Path:
    """Copy a recipe to a folder. The configs that it names stay in the package: a copy would hide them.

    Raises:
        ConfigError: there is no such recipe, or the file exists already. Nothing is written then.
    """
    recipes = {path.stem: path for path in shipped_folder("recipes").glob("*.py")}
    name = name.removesuffix(".py")
    if name not in recipes:
        raise ConfigError(f"there is no recipe {name}. There are: {', '.join(sorted(recipes))}.")
    target = folder / f"{name}.py"
    if target.exists():
        raise ConfigError(f"{target} is there already. Nothing was written; name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(recipes[name], target)
    return target


def _first_line(recipe: Path) -> str:
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
