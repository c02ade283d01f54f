"""The `finetune` command. Heavy imports wait until a command needs them, so `--help` answers at once."""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from finetune.distributed.environment import is_first_process, read_environment, speaks_for_a_node
from finetune.errors import ConfigError, FinetuneError, LaunchError, PreemptedError, RunFailedError
from finetune.logs import configure_logs, is_for_a_person, log_python_warnings
from finetune.signals import Terminated, ignore_stop_signals
from finetune.terminal import as_one_message, fold, prepare_streams

EXIT_BUG = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    from finetune.cli.commands import app

    prepare_streams()
    if sys.stdout.isatty() or sys.stderr.isatty():
        from finetune.cli.help_style import make_help_readable

        make_help_readable()
    given = _command_first(_without_local_rank(sys.argv[1:] if arguments is None else arguments))
    _run(lambda _: app(given, prog_name="finetune"), given, trains=given[:1] == ["train"])


def command(run: Callable[[list[str]], object], *, arguments: Sequence[str] | None = None) -> None:
    """Run a recipe's `main(overrides)` as a command. A `FinetuneError` ends it with one message and its exit code.

    With `-h` or `--help` it prints the recipe's docstring instead. `arguments` replace the process's own.
    """
    prepare_streams()
    given = _without_local_rank(sys.argv[1:] if arguments is None else arguments)
    _run(run if {"-h", "--help"}.isdisjoint(given) else lambda _: _show_recipe(run), given)


def _show_recipe(run: Callable[[list[str]], object]) -> None:
    about = getattr(run, "__globals__", {}).get("__doc__") or "A recipe of finetune."
    sys.stdout.write(f"{about.strip()}\n\nThe keys that people set: finetune train --help\n")


def _run(run: Callable[[list[str]], object], given: list[str], *, trains: bool = True) -> None:
    log_python_warnings()
    if is_for_a_person(sys.stderr) and not _is_one_of_several():
        configure_logs(0)  # before the configuration is read, which may warn
    error: BaseException = SystemExit(0)
    try:
        try:
            Path.cwd()
        except FileNotFoundError:  # relative paths have no meaning, and MKL aborts the process
            raise LaunchError("the current folder was removed. Change to another one, then try again.") from None
        run(given)
    except BaseException as raised:
        error = raised
    try:
        sys.stdout.flush()
    except (BrokenPipeError, RunFailedError, ValueError) as lost:  # ValueError: a user's function closed it
        if isinstance(error, SystemExit) and not error.code:
            error = lost
    # A user who asked a run to stop may ask again while Python ends.
    with ignore_stop_signals(for_good=isinstance(error, PreemptedError)):
        _end(error, trains)


def _end(error: BaseException, trains: bool) -> NoReturn:
    """Print the error once, and exit with its code."""
    if isinstance(error, OSError) and "--install-completion" in sys.argv:
        error = ConfigError(f"{error}. `finetune --show-completion` prints it, for another file that your shell reads.")
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        error = LaunchError(f"{error.strerror}. Set TMPDIR to a folder that can be written, or mount a tmpfs on /tmp.")
    if isinstance(error, FinetuneError):
        if logging.getLogger("finetune").isEnabledFor(logging.DEBUG):
            sys.excepthook(type(error), error, error.__traceback__)
        _report(error)
        _leave(error.exit_code)
    # typer turns Ctrl-C into an exit code.
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == EXIT_INTERRUPTED):
        _say_stopped("\nfinetune: stopped", trains)
        _leave(EXIT_INTERRUPTED)
    if isinstance(error, Terminated):
        _say_stopped(f"finetune: ended {error}", trains)
        _leave(Terminated.exit_code)
    if isinstance(error, BrokenPipeError):  # the reader of stdout has seen enough; typer ends other writes the same way
        _leave(EXIT_BUG)
    if isinstance(error, Exception) and _is_one_of_several():
        sys.excepthook(type(error), error, error.__traceback__)
        _leave(EXIT_BUG)
    raise error


def _say_stopped(what: str, trains: bool) -> None:
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends Python without a traceback
    if is_first_process(os.environ):
        _say(f"{what}. With resume=auto, a run goes on from its last checkpoint." if trains else f"{what}.")


def _leave(code: int) -> NoReturn:
    """Exit. As one of several ranks, skip Python's teardown, which takes seconds with torch while the others wait."""
    if not _is_one_of_several():
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _is_one_of_several() -> bool:
    with suppress(LaunchError):
        return read_environment(os.environ).world_size > 1
    return False


def _report(error: FinetuneError) -> None:
    # Every process has the same config error; one prints it.
    if isinstance(error, ConfigError) and not is_first_process(os.environ):
        return
    if error.is_reported_elsewhere and not speaks_for_a_node(os.environ):
        return
    if isinstance(error, PreemptedError):  # not an error to the user
        _say(f"finetune: {error}")
        return
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    _say(as_one_message(f"finetune: {type(error).__name__}: {error}{where}"))


def _say(text: str) -> None:
    sys.stderr.write(f"{fold(text, sys.stderr, indent='  ')}\n")


def _without_local_rank(arguments: Sequence[str]) -> list[str]:
    """Drop the --local-rank=N of `python -m torch.distributed.launch`; the environment has it too."""
    return [argument for argument in arguments if not re.fullmatch("--local[-_]rank=[0-9]+", argument)]


def _command_first(arguments: list[str]) -> list[str]:
    """Turn ``cmd=train run=quickstart a=b`` into ``train quickstart a=b``."""
    commands = [argument.removeprefix("cmd=") for argument in arguments if argument.startswith("cmd=")]
    # If the first argument is a command, a later `cmd=…` is a prompt.
    if not commands or not ("=" in arguments[0] or arguments[0].startswith("-")):
        return arguments
    runs = [argument.removeprefix("run=") for argument in arguments if argument.startswith("run=")]
    rest = [argument for argument in arguments if not argument.startswith(("cmd=", "run="))]
    return [commands[-1], *runs[-1:], *rest]
