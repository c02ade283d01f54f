"""`finetune train`: train the run that the arguments describe."""

from __future__ import annotations

import os
from collections.abc import Sequence

from finetune.logs import configure_logs, importing


def train_from_overrides(overrides: Sequence[str]) -> None:
    """Train the run that `[RUN] OVERRIDES…` describe. Collective: every process of the launch."""
    from finetune.cli.overrides import config_from_overrides
    from finetune.distributed.environment import read_environment

    environment = read_environment(os.environ)  # refuses an incomplete launch before the slow imports
    # `launch` configures the log again: it knows more about the launch, but only after the imports.
    configure_logs(environment.rank, num_processes=environment.world_size)
    config = config_from_overrides(overrides)

    with importing():
        from finetune.training.train import train

    train(config)
