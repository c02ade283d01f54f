"""Commands that write one result are for one process."""

from __future__ import annotations

import os

from finetune.distributed.environment import read_environment
from finetune.errors import ConfigError


def refuse_company(command: str) -> None:
    """Say so where a launcher started several processes: each would write the same folder.

    Raises:
        ConfigError: printed once.
    """
    started = read_environment(os.environ).world_size
    if started > 1:
        raise ConfigError(
            f"finetune {command} is for one process, but {started} were started. Run it without a launcher."
        )
