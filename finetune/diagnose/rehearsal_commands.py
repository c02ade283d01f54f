"""The commands of a rehearsal: run as their user would run them, with an end, and with nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from finetune.errors import RunFailedError

_MOST_LINES = 12
_OUR_ERROR = re.compile(r"^finetune: ")
_ANY_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")


class StageError(Exception):
    """A stage failed: the error in words, and the exit code of its command."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


class Commands:
    """Runs commands of finetune.

    Args:
        minutes: end a command that still runs after so many minutes from now.
    """

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        self._until = time.monotonic() + 60 * minutes

    def run(self, log: Path, *arguments: str) -> None:
        """Run a command to its end.

        Args:
            log: the file for its output.
            arguments: what follows `finetune`.

        Raises:
            StageError: it failed, or did not end in time.
        """
        with self.started(log, *arguments) as process:
            try:
                process.wait(max(0.0, self._until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._overtime(arguments[0]) from None
        refuse_failure(process, log)

    @contextmanager
    def started(self, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command in a block, and leave none of its processes behind."""
        command = [sys.executable, "-m", "finetune", *arguments]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_tree(process)

    def refuse_overtime(self, command: str) -> None:
        """Raise `StageError` once the time is up."""
        if time.monotonic() >= self._until:
            raise self._overtime(command)

    def _overtime(self, command: str) -> StageError:
        what = f"finetune {command} had not ended {self._minutes:g} minutes after the start: it hangs, or is slow"
        fix = "Give it more with --minutes, or set a smaller training.global_batch_size."
        return StageError(f"{what}. {fix}", RunFailedError.exit_code)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all that it started, also the workers, which are not in its process group."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for each in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def refuse_failure(process: subprocess.Popen[bytes], log: Path) -> None:
    """Raise `StageError` with the error of a command that has failed."""
    if process.poll():
        code = process.returncode
        raise StageError(_error_in(log), code if code > 0 else RunFailedError.exit_code)


def _error_in(log: Path) -> str:
    """Return the error that a command ended with, from its output."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((place for place, line in enumerate(lines) if _OUR_ERROR.match(line)), None)
    if first is not None:
        text = "\n".join(lines[first : first + _MOST_LINES])
        return _OUR_ERROR.sub("", text)
    raised = [line for line in lines if _ANY_ERROR.match(line)]
    return (raised or [line for line in lines if line.strip()] or ["it ended without a word"])[-1]
