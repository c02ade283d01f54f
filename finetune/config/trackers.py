"""Check that the trackers of `training.report_to` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from finetune.config.schema import Config
from finetune.errors import ConfigError

_TRACKER_PACKAGES = {"mlflow": "mlflow-skinny sqlalchemy alembic"}
"""The packages of a tracker whose name is not enough: with constraints.txt, the full mlflow installs as 1.x only."""


def refuse_missing_trackers(config: Config) -> None:
    """Refuse a run whose trackers are not installed, before anything slow begins. Only the main process needs them.

    Raises:
        ConfigError: names the trackers and the command that installs them.
    """
    missing = [name for name in dict.fromkeys(config.training.report_to) if not is_tracker_installed(name)]
    if missing:
        packages = " ".join(_TRACKER_PACKAGES.get(name, name) for name in missing)
        raise ConfigError(
            f"training.report_to ({config.origin('training.report_to')}) names {', '.join(missing)}, which is not "
            f"installed. Run pip install {packages}, or drop it; metrics.jsonl has every figure anyway."
        )


def is_tracker_installed(name: str) -> bool:
    """Return whether a tracker is installed. A plain folder of its name, which wandb creates, does not count."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None
