"""Whether the trackers that a run asks for are installed, told without importing any of them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from finetune.errors import ConfigError

if TYPE_CHECKING:
    from finetune.config.schema import Config


_PACKAGES = {"mlflow": "mlflow-skinny sqlalchemy alembic"}
"""What brings a tracker, where it is called otherwise. Of the whole mlflow only 1.x installs beside constraints.txt."""


def refuse_missing_trackers(config: Config) -> None:
    """Say so before anything slow begins where a tracker's package is not there. Only the main process needs it.

    Raises:
        ConfigError: names it and the command that installs it.
    """
    missing = [name for name in dict.fromkeys(config.training.report_to) if not is_installed(name)]
    if missing:
        packages = " ".join(_PACKAGES.get(name, name) for name in missing)
        raise ConfigError(
            f"training.report_to ({config.origin('training.report_to')}) names {', '.join(missing)}, which is not "
            f"installed. Run pip install {packages}, or drop it; metrics.jsonl has every figure anyway."
        )


def is_installed(name: str) -> bool:
    """Each module is called as its tracker. A mere folder of that name, as wandb leaves one, is no package."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None
