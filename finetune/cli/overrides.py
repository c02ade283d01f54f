"""Read the arguments of `train` and of the commands before a run, `[RUN] OVERRIDES…`, and train."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from finetune.cli.commands import Overrides
from finetune.config.compose import DEFAULT_TASK, compose
from finetune.config.config_files import is_file_of_rows, is_run_file
from finetune.config.schema import Config
from finetune.config.yaml_reader import Setting
from finetune.distributed.environment import read_environment
from finetune.logs import configure_logs, importing


def train_from_overrides(overrides: Overrides = None) -> None:
    """Train the run that `[RUN] OVERRIDES…` describe. Collective: every process of the launch."""
    environment = read_environment(os.environ)  # refuses an incomplete launch before the slow imports
    # `launch` configures the log again: it knows more about the launch, but only after the imports.
    configure_logs(environment.rank, num_processes=environment.world_size)
    config = config_from_overrides(overrides or [])

    with importing():
        from finetune.training.train import train

    train(config)


def config_from_overrides(
    overrides: Sequence[str],
    *,
    command: str = "train",
    complete: bool = True,
    needs_data: bool = True,
    translated: Sequence[Setting] = (),
) -> Config:
    """Compose the configuration that `finetune COMMAND [RUN] OVERRIDES…` describes.

    If `complete` is true, require a model, and with `needs_data` also data. Messages name the command. The
    settings `translated` from another tool take the place of a run file.

    Raises:
        ConfigError: with every problem found.
    """
    run, rest = run_and_overrides(overrides)
    return compose(
        rest,
        run=run,
        defaults={} if run or translated else {"task": DEFAULT_TASK},
        complete=complete,
        needs_data=needs_data,
        typed=shlex.join(["finetune", command, *overrides]),
        translated=translated,
    )


def run_and_overrides(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the run file, if one is named, and the overrides.

    The first argument is the run file if it has no equals sign and is not a file of rows. A later argument is the run
    file if it names an existing one or ends with .yaml. `run=` names one anywhere.
    """
    if overrides and "=" not in overrides[0] and not is_file_of_rows(overrides[0]):
        return overrides[0], list(overrides[1:])
    named = [each.removeprefix("run=") for each in overrides if each.startswith("run=") or is_run_file(each)]
    return (named[0] if named else None), list(overrides)
