"""What commands about runs share: options, the rules for options that cannot be used together, and colours."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from finetune.distributed.environment import read_environment
from finetune.errors import ConfigError, DataError, first_line
from finetune.logs import PACKAGE, configure_logs, give_back_logs

STYLES = {
    **{"running": "cyan", "completed": "green", "failed": "red", "unreadable": "red"},
    **dict.fromkeys(("stopped", "preempted", "ended early"), "magenta"),
}
"""The colours of the states of runs, in tables."""
Folder = TypeVar("Folder", Path, Path | None)


def find_run_folder(folder: Folder) -> Folder:
    """Return `runs/NAME` if there is no folder NAME here, but a run of this name in `runs`. Else return the folder.

    Raises:
        ConfigError: the folder cannot be looked for.
    """
    from finetune.config.config_files import SAVED_CONFIG

    try:
        if folder:
            folder.stat()
        return folder
    except (FileNotFoundError, NotADirectoryError):
        in_runs = Path("runs", folder or "")
        return in_runs if (in_runs / SAVED_CONFIG).is_file() else folder
    except (OSError, ValueError) as error:  # closed by another user, a name that is too long, or one with a NUL
        raise ConfigError(f"{str(folder)[:200]!r} is no folder that can be read: {first_line(error)[:200]}") from error


def read_run_arguments(
    run: object, base: object = None, checkpoint: object = None, *, name: str = "run"
) -> tuple[Path, str | None, str | None]:
    """Return the folder, the base and the checkpoint that a script names. `name` is the argument of the run.

    Raises:
        ConfigError: an argument has a type that it cannot have, or the folder cannot be read.
    """
    if not isinstance(run, (str, os.PathLike)) or "\0" in os.fspath(run):
        raise ConfigError(f"{name} is {run!r}; expected the folder of a run, or its name in runs.")
    if not isinstance(base, (str, os.PathLike, type(None))):
        raise ConfigError(f"base is {base!r}; expected a folder or a hub id.")
    if not isinstance(checkpoint, (str, int, type(None))) or isinstance(checkpoint, bool):
        raise ConfigError(f"checkpoint is {checkpoint!r}; expected a step, or the text latest.")
    return (
        find_run_folder(Path(run)),
        None if base is None else os.fspath(base),
        None if checkpoint is None else str(checkpoint),
    )


RunFolderArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_FOLDER",
        help="A run's folder, or its name in runs: runs/quickstart, or quickstart.",
        callback=find_run_folder,
    ),
]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", help="Use this checkpoint: a step, or `latest`. Default: adapter/.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run's configuration.")
]
StepsOption = Annotated[
    str | None,
    typer.Option(
        "--steps",
        metavar="N-M",
        help="The steps to compute, from 1 or from the step after a kept checkpoint. Default: a few of them.",
    ),
]
SystemOption = Annotated[
    str | None,
    typer.Option(help="The system prompt; empty: none. Default: the most frequent one in the training rows."),
]
ToolsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A JSON file with the tools to offer; empty: none. Default: the most frequent ones in the training rows.",
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option(help="Maximum number of tokens in an answer.", min=1)]
TemperatureOption = Annotated[
    float | None, typer.Option(help="Sample at this temperature. Default: take the most likely token.")
]
TopPOption = Annotated[
    float | None, typer.Option(help="Sample from the most likely tokens whose probabilities add up to this.", max=1.0)
]
TopKOption = Annotated[int | None, typer.Option(help="Sample from this many of the most likely tokens.", min=1)]
SeedOption = Annotated[int | None, typer.Option(help="Seed of the sampling. Default: 0.", min=0)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="Plan for this device: 'H100 80GB'. Default: the device of this machine.")
]


def read_seed_option(seed: int | None, temperature: float | None, top_p: float | None, top_k: int | None) -> int:
    """Return the seed of `--seed`. Refuse it without an option that samples, because greedy answers need no seed."""
    sampling = {"--temperature": temperature, "--top-p": top_p, "--top-k": top_k}
    OptionRules({"--seed": seed, **sampling}).need("--seed", *sampling)
    return seed or 0


def refuse_password(value: str | None) -> str | None:
    """Refuse an address with a password or a token, which messages and files would repeat.

    Raises:
        ConfigError: the address has one; the message shows the address without it.
    """
    from finetune.config.checks import password_problem

    if value is not None and (problem := password_problem(value)):
        raise ConfigError(problem)
    return value


BaseOption = Annotated[
    str | None, typer.Option("--base", help="Load the base model from this folder or hub id.", callback=refuse_password)
]


def read_tools_option(file: str | None) -> str | None:
    """Return the tools in a file, a JSON list as in the column `tools` of a row; None stays None, and empty means none.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    from finetune.data.turns import parse_tools
    from finetune.data.values import BadRowError

    if not file:
        return file
    path = Path(file).expanduser()
    try:
        return parse_tools(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--tools is {path}, which cannot be read: {error}. Correct the path.") from error
    except BadRowError as error:
        raise DataError(f"--tools: {error}.") from None


def log_as_this_rank(level: int = logging.INFO) -> None:
    """Configure the log before the runtime does so, for what reading a run's folder says."""
    configure_logs(read_environment(os.environ).rank, level=level)


@contextmanager
def giving_back_logs() -> Iterator[None]:
    """Give a script its loggers back if the block raises before a launch begins. A launch does so at its end."""
    is_of_script = logging.getLogger(PACKAGE).propagate  # False within a run, which keeps its logger
    try:
        yield
    except BaseException:
        if is_of_script:
            give_back_logs()
        raise


def refuse_several_processes(command: str) -> None:
    """Refuse to run in several processes, which would all write the same folder.

    Raises:
        ConfigError: several processes were started; printed once.
    """
    started = read_environment(os.environ).world_size
    if started > 1:
        raise ConfigError(
            f"finetune {command} needs one process, but {started} were started. Run it without a launcher."
        )


class OptionRules:
    """Rules about the options that a user gave.

    Args:
        options: the value of each option by its name on the command line. None and False mean that the user did not
            give the option.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._given = {name for name, value in options.items() if value is not None and value is not False}

    def need(self, option: str, *alternatives: str) -> None:
        """Refuse an option when the user gave none of the options that it needs.

        Raises:
            ConfigError: names the option and what it needs.
        """
        if option in self._given and self._given.isdisjoint(alternatives):
            raise ConfigError(
                f"{option} needs {' or '.join(alternatives)}, which was not given. Add it, or leave out {option}."
            )

    def exclude(self, option: str, *others: str, because: str) -> None:
        """Refuse an option when the user also gave one of the others.

        `because` is the reason and what to do instead, as sentences.

        Raises:
            ConfigError: names the options that were given together, and the reason.
        """
        together = [other for other in others if other in self._given]
        if option in self._given and together:
            raise ConfigError(f"{option} and {' and '.join(together)} cannot be given together: {because}")
