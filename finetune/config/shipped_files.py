"""Find the files of the package: configs/, recipes/ and the assets named ``shipped:…``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from finetune.errors import ConfigError

SHIPPED_PREFIX = "shipped:"

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder(name: Literal["configs", "recipes"]) -> Path:
    """Return the folder inside an installed wheel, or beside the package in a checkout of the repository.

    Raises:
        ConfigError: the installation is incomplete.
    """
    # First inside: beside an installed package lie others, and one may be called "configs".
    for folder in (_PACKAGE / "shipped" / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(f"this installation of finetune has no {name}/ folder. Install the package again.")


def resolve_shipped(path: str) -> str:
    """Return the absolute path of an asset such as ``shipped:phi_tiny``, and any other path unchanged.

    Raises:
        ConfigError: there is no asset of this name.
    """
    if not path.startswith(SHIPPED_PREFIX):
        return path
    name = path.removeprefix(SHIPPED_PREFIX)
    assets = {entry.name: entry for entry in (_PACKAGE / "assets").glob("[!_.]*")}
    if name not in assets:
        there = ", ".join(SHIPPED_PREFIX + asset for asset in sorted(assets)) or "nothing"
        raise ConfigError(f"{path} is not shipped with this package. There is: {there}.")
    return str(assets[name])
