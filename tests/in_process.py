"""Scripts and commands in the process of the tests: what they write and how they end, without another one's imports."""

from __future__ import annotations

import io
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from threading import current_thread, main_thread
from typing import NamedTuple
from unittest.mock import patch

from finetune.cli import main
from finetune.signals import STOP_SIGNALS


class Ended(NamedTuple):
    """How a script or a command ended."""

    returncode: int
    stdout: str
    """Both streams together, as `tests.launches` gives them."""
    answer: str
    """Standard output alone."""
    errors: str
    """Standard error alone."""


def run_script(script: Path, words: Sequence[str | Path]) -> Ended:
    """A script as `python SCRIPT WORDS…` runs it."""
    arguments, path = [str(script), *map(str, words)], [str(script.parent), *sys.path]
    with patch.object(sys, "argv", arguments), patch.object(sys, "path", path):
        ended = _watch(lambda: runpy.run_path(str(script), run_name="__main__"))
    module = sys.modules.get("finetune.training.trainer_ddp")
    if module is not None and (trainer := module.TrainerDDP._open) is not None:
        trainer.close()  # as the end of its process would
    return ended


def run_finetune(*words: str | Path, code: int | None = None) -> Ended:
    """`finetune WORDS…`, which must end with this code if one is given.

    Not under launch variables of several processes, where an error ends the whole process.
    """
    ended = _watch(lambda: main(list(map(str, words))))
    assert code in (None, ended.returncode), ended.stdout
    return ended


class _Both(io.StringIO):
    """A stream that writes to another one too."""

    def __init__(self, other: io.StringIO) -> None:
        super().__init__()
        self._other = other

    def write(self, text: str) -> int:
        self._other.write(text)
        return super().write(text)


def _watch(run: Callable[[], object]) -> Ended:
    screen = io.StringIO()
    answer, errors = _Both(screen), _Both(screen)
    code = 0
    # A preempted command ignores stop signals for good, because its process is about to end.
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with redirect_stdout(answer), redirect_stderr(errors):
        try:
            run()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            for number, handler in handlers.items() if current_thread() is main_thread() else ():
                signal.signal(number, handler)
    return Ended(code, screen.getvalue(), answer.getvalue(), errors.getvalue())
