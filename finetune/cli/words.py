"""The arguments of `train` and of the commands before a run: `[RUN] WORDS…`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from finetune.config.compose import compose
from finetune.config.config_files import is_file_of_rows
from finetune.config.schema import Config

DEFAULT_TASK = "finetune_lora"
"""The task of a command that names neither a task nor a run file. A run file says all that it wants itself."""


def config_from_words(
    words: Sequence[str], *, command: str = "train", complete: bool = True, needs_data: bool = True
) -> Config:
    """Compose the configuration that `finetune COMMAND [RUN] WORDS…` describes.

    Args:
        words: the arguments of the command.
        command: the command's name, for messages.
        complete: also require a model and data.
        needs_data: False: require only a model.

    Raises:
        ConfigError: with every problem found.
    """
    run, rest = run_and_words(words)
    return compose(
        rest,
        run=run,
        defaults={} if run else {"task": DEFAULT_TASK},
        complete=complete,
        needs_data=needs_data,
        typed=shlex.join(["finetune", command, *words]),
    )


def run_and_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the run file, if one is named, and the words.

    The first word without an equals sign is the run file, unless it is a file of rows; `run=` names one anywhere.
    """
    if words and "=" not in words[0] and not is_file_of_rows(words[0]):
        return words[0], list(words[1:])
    return next((word.removeprefix("run=") for word in words if word.startswith("run=")), None), list(words)
