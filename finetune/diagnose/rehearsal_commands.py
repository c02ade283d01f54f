"""Run one command of a rehearsal as a user would run it, with a time limit, and leave none of its processes behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from finetune.errors import FinetuneError, RunFailedError

_POLL_SECONDS = 0.005
_MOST_LINES = 12
_OUR_ERROR = re.compile(r"^finetune: ")
_ANY_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")


class StageError(FinetuneError):
    """Say that a stage failed, with the exit code of its command."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


class Commands:
    """Run commands of finetune under one common time limit.

    Args:
        minutes: a command that still runs this many minutes from now is killed.
    """

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        self._until = time.monotonic() + 60 * minutes

    def run(self, log: Path, *arguments: str, kill_when: Callable[[], bool] | None = None) -> bool:
        """Run a command to its end, or kill it and its children when `kill_when` returns true.

        The arguments are without `finetune`. While the command runs, `kill_when` is called every few milliseconds.

        Returns:
            Whether `kill_when` ended the command.

        Raises:
            StageError: the command failed, or ran beyond the time limit.
        """
        command = [sys.executable, "-P", "-m", "finetune", *arguments]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            while process.poll() is None and not (kill_when is not None and kill_when()):
                self._refuse_overtime(arguments[0])
                time.sleep(_POLL_SECONDS)
            code = process.poll()
        finally:
            if process.poll() is None:
                _kill_tree(process)
        if code:
            raise StageError(error_in(log), code if code > 0 else RunFailedError.exit_code)
        return code is None

    def _refuse_overtime(self, command: str) -> None:
        if time.monotonic() >= self._until:
            what = f"finetune {command} had not ended {self._minutes:g} minutes after the start: it hangs, or is slow"
            fix = "Give it more with --minutes, or set a smaller training.global_batch_size."
            raise StageError(f"{what}. {fix}", RunFailedError.exit_code)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and its children, one by one: the workers are not in its process group."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for each in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def error_in(log: Path) -> str:
    """Return the error that a command ended with, from its output."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if _OUR_ERROR.match(line):
            return _OUR_ERROR.sub("", "\n".join(lines[number : number + _MOST_LINES]))
    return ([line for line in lines if _ANY_ERROR.match(line)] or lines or ["it ended without any output"])[-1]
