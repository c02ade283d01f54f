"""`finetune train`."""

from __future__ import annotations

import os
from collections.abc import Sequence


def train_from_words(words: Sequence[str]) -> None:
    """Train the run that `[RUN] WORDS…` describe. Collective: every process of the launch."""
    from finetune.cli.words import config_from_words
    from finetune.distributed.environment import read_environment

    read_environment(os.environ)  # refuses an incomplete launch before the slow imports
    config = config_from_words(words)

    from finetune.training.train import train

    train(config)
