"""`finetune train`."""

from __future__ import annotations

import os
from collections.abc import Sequence


def train_from_words(words: Sequence[str], *, run: str | None = None) -> None:
    """Train the run that the words describe. Collective: every process of the launch."""
    from finetune.config.compose import load_config
    from finetune.distributed.environment import read_environment

    read_environment(os.environ)  # refuses an incomplete launch before the slow imports
    config = load_config(words, run=run)

    from finetune.training.train import train

    train(config)
