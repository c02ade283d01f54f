"""Run a command of finetune with a time limit, and read the error that it ended with."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from finetune.errors import FinetuneError, RunFailedError
from finetune.signals import end_with_parent

_POLL_SECONDS = 0.005
_MOST_LINES = 12
_OUR_ERROR = re.compile(r"^finetune: ")


class StageError(FinetuneError):
    """Say that a stage failed, with the exit code of its command."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def start_command(
    arguments: Sequence[str], log: Path, preexec_fn: Callable[[], object] | None = None
) -> subprocess.Popen[bytes]:
    """Start `finetune ARGUMENTS`, which Ctrl-C does not reach. Its output is added to `log`."""
    words = [sys.executable, "-P", "-m", "finetune", *arguments]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    with log.open("ab") as file:
        return subprocess.Popen(words, stdout=file, preexec_fn=preexec_fn, **options)


def run_command(
    arguments: Sequence[str], log: Path, *, seconds: float, kill_when: Callable[[], bool] = lambda: False
) -> bool:
    """Run `finetune ARGUMENTS` and write its output to `log`. No process of the command is left behind.

    Return whether the command was killed because `kill_when`, which is called every few milliseconds, was true.

    Raises:
        StageError: the command failed, or took longer than `seconds`.
    """
    until = time.monotonic() + seconds
    log.unlink(missing_ok=True)
    process = start_command(arguments, log, partial(end_with_parent, signal.SIGKILL))
    try:
        while process.poll() is None and not kill_when():
            if time.monotonic() >= until:
                message = f"finetune {arguments[0]} had not ended when the time of the rehearsal was over"
                fix = "Give it more with --minutes, or set a smaller training.global_batch_size."
                raise StageError(f"{message}: it hangs, or is slow. {fix}", RunFailedError.exit_code)
            time.sleep(_POLL_SECONDS)
        code = process.poll()
    finally:
        if process.poll() is None:
            _kill_tree(process)
    if code:
        raise StageError(error_in(log), code if code > 0 else RunFailedError.exit_code)
    return code is None


def error_in(log: Path, *, start: int = 0) -> str:
    """Return the error that a command ended with, from its output, which begins at byte `start` of the log."""
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if _OUR_ERROR.match(line):
            return _OUR_ERROR.sub("", "\n".join(lines[number : number + _MOST_LINES]))
    return lines[-1] if lines else "it ended without any output"


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and its children, one by one: the workers are not in its process group."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for member in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()
