"""A process that has everything imported, and forks off runs: a start costs a fraction of a second.

It reads one JSON object a line from stdin (`start` or `wait`) and answers each with one line on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tqdm

from finetune.cli import main as finetune
from finetune.cli.train import train_from_words
from tests.crash.operations import watch

_LIMIT_SECONDS = 90.0


def main(warm_up: list[str]) -> None:
    """Do one run here, so that nothing is left to import; then serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    tqdm.tqdm.monitor_interval = 0  # else it starts a thread, and a fork wants one thread only
    train_from_words(warm_up)
    threads = len(list(Path("/proc/self/task").iterdir()))
    answers.write(json.dumps({"threads": threads}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"pid": start(**request["start"])} if "start" in request else {"status": wait(request["wait"])}
        answers.write(json.dumps(answer) + "\n")


def start(*, words: list[str], log: str, folder: str, kill_at: int | None, operations: str | None) -> int:
    """Fork a run that writes its screen to `log`. It kills itself right before operation `kill_at`, counted from 1."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
        seen: list[str] = []
        if kill_at is not None or operations is not None:
            seen = watch(Path(folder), kill_at or 0, lambda: os.kill(os.getpid(), signal.SIGKILL))
        code = run(words)
        if operations is not None:
            Path(operations).write_text("\n".join(seen))
    finally:
        os._exit(code)


def run(words: list[str]) -> int:
    """What the `finetune` command does with these words; its exit code."""
    try:
        finetune(words)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def wait(pid: int) -> Any:
    """How a child ended: its exit code, or minus the signal that killed it; a child that hangs is killed."""
    began = time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > _LIMIT_SECONDS:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hung"
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1:])
