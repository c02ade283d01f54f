"""The `finetune` command. Nothing heavy is imported before a command needs it: `--help` answers at once."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from finetune.distributed.environment import is_first_process
from finetune.errors import ConfigError, FinetuneError, PeerFailedError

EXIT_BUG = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    from finetune.cli.commands import app

    words = _command_first(list(sys.argv[1:] if arguments is None else arguments))
    command(lambda _: app(words, prog_name="finetune"), arguments=words)


def command(run: Callable[[list[str]], object], *, arguments: Sequence[str] | None = None) -> None:
    """Run a recipe's `main(words)` as a command: our errors end it with one message and their exit code.

    Args:
        run: takes the words of the command line.
        arguments: the words; by default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        run(words)
    except FinetuneError as error:
        if logging.getLogger("finetune").isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        _report(error)
        sys.exit(error.peer_exit_code if isinstance(error, PeerFailedError) else error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("\nfinetune: stopped. Go on from the last checkpoint with resume=auto.\n")
        sys.exit(EXIT_INTERRUPTED)


def _report(error: FinetuneError) -> None:
    # Every process composes the same words: one copy of a config error is enough.
    if isinstance(error, ConfigError) and not is_first_process(os.environ):
        return
    sys.stderr.write(f"finetune: {type(error).__name__}: {error}\n")


def _command_first(words: list[str]) -> list[str]:
    """``cmd=train run=quickstart a=b`` becomes ``train quickstart a=b``."""
    commands = [word.removeprefix("cmd=") for word in words if word.startswith("cmd=")]
    if not commands:
        return words
    runs = [word.removeprefix("run=") for word in words if word.startswith("run=")]
    rest = [word for word in words if not word.startswith(("cmd=", "run="))]
    return [commands[-1], *runs[-1:], *rest]
