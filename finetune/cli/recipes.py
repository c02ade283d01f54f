"""`finetune recipes`: list the shipped recipes, or copy one, or a file for a launcher, to a folder."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.run_options import JsonOption
from finetune.errors import ConfigError
from finetune.runs.durable import replace_file
from finetune.runs.output_files import writes
from finetune.terminal import print_json, say


def show_recipes(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the recipes by name, with the first line of their docstrings."""
    if context.invoked_subcommand is not None:
        return
    about = {
        name: (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        for name, path in _recipes().items()
    }
    if as_json:
        print_json(about, indent=None)
        return
    for name, description in about.items():
        say(f"{name:<20} {description}", indent=" " * 21)
    say(f"\nFiles for launchers and for GitHub: {', '.join(_launch_files())}", indent="  ")
    say("\nCopy one to this folder: finetune recipes copy finetune_lora")


def copy_recipe(
    name: Annotated[str, typer.Argument(help="A name from `finetune recipes`.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write to.")] = Path(),
) -> None:
    """Copy a recipe or a launch file to a folder. The configs that it names stay in the package: a copy hides them.

    Raises:
        ConfigError: there is no such file, it exists in the folder already, or it cannot be written there. Nothing is
            written then.
        RunFailedError: the disk is full.
    """
    recipes, launch_files = _recipes(), _launch_files()
    source = launch_files.get(name) or recipes.get(name.removesuffix(".py"))
    if source is None:
        raise ConfigError(f"there is no recipe {name}. There are: {', '.join([*recipes, *launch_files])}.")
    target = folder / source.name
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already. Nothing was written; name another folder.")
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise ConfigError(f"{folder} is not a folder. Nothing was written; name another folder.")
    with writes(target, "Name another folder: finetune recipes copy NAME FOLDER."):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(target, source.read_bytes())
    read = 'its first lines say how to start it, and the lines marked "edit" are for you to change'
    say(f"wrote {target}\nnext: {read if source in launch_files.values() else _first_command(target)}")


def _first_command(recipe: Path) -> str:
    """Return the first command in the docstring of a copied recipe, with the path of the copy."""
    lines = (ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or "").splitlines()
    named = f"recipes/{recipe.name}"
    return next(line.strip().replace(named, shlex.quote(str(recipe))) for line in lines if named in line)


def _recipes() -> dict[str, Path]:
    from finetune.config.config_files import shipped_folder

    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.py"))}


def _launch_files() -> dict[str, Path]:
    from finetune.config.config_files import shipped_folder

    paths = (path for folder in ("github", "launch") for path in sorted((shipped_folder("recipes") / folder).iterdir()))
    return {path.name: path for path in paths if path.is_file() and path.suffix != ".md"}
