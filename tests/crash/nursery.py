"""A process that has everything imported, and forks off runs: a start costs a fraction of a second.

It reads one JSON object a line from stdin (`start` or `wait`) and answers each with one line on stdout.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tqdm

from finetune.cli import main as finetune
from finetune.cli.overrides import train_from_overrides
from tests.crash.operations import watch
from tests.launches import free_port, place_variables

_LIMIT_SECONDS = 300.0
_PATIENCE_SECONDS = 10.0
"""How long the other ranks have to see by themselves that one is gone; then they are sent SIGTERM, as by a launcher."""


def main(warm_up: list[str]) -> None:
    """Do one run here, so that nothing is left to import; then serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    tqdm.tqdm.monitor_interval = 0  # else it starts a thread, and a fork wants one thread only
    train_from_overrides(warm_up)
    gc.freeze()  # the end of each run collects garbage: it need not visit all of torch, nor copy its pages
    threads = len(list(Path("/proc/self/task").iterdir()))
    answers.write(json.dumps({"threads": threads}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"pids": start(**request["start"])} if "start" in request else wait(request["wait"])
        answers.write(json.dumps(answer) + "\n")


def start(*, ranks: int, **run: Any) -> list[int]:
    """Fork the processes of a run, by rank: several are one world, as a launcher would start them."""
    if ranks == 1:
        return [fork(variables={}, **run)]
    port = free_port()
    first = fork(variables=place_variables(0, ranks, port), **run)
    run |= {"kill_at": None, "operations": None}
    return [first, *(fork(variables=place_variables(rank, ranks, port), **run) for rank in range(1, ranks))]


def fork(
    *, words: list[str], log: str, folder: str, kill_at: int | None, operations: str | None, variables: dict[str, str]
) -> int:
    """Fork a process that writes its screen to `log`. It kills itself right before operation `kill_at`, from 1 on."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.environ.update(variables)
        screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
        seen: list[str] = []
        if kill_at is not None or operations is not None:
            seen = watch(Path(folder), kill_at or 0, die)
        code = run(words)
        if operations is not None:
            Path(operations).write_text("\n".join(seen))
    finally:
        os._exit(code)


def die(operation: str) -> None:
    """Say before what, and be gone."""
    os.write(2, f"killed before: {operation}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


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


def wait(pids: list[int]) -> dict[str, Any]:
    """How the processes of a run ended, by rank: exit codes, or minus the signal; those that hang are killed.

    Returns:
        `statuses`; `seconds`, from the first that failed to the last.
    """
    statuses: dict[int, int | str] = {}
    began = time.monotonic()
    failed_at: float | None = None
    is_told = False
    while True:
        for pid in [pid for pid in pids if pid not in statuses]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                failed_at = failed_at or (time.monotonic() if status else None)
        left = [pid for pid in pids if pid not in statuses]
        if not left:
            seconds = time.monotonic() - failed_at if failed_at else 0.0
            return {"statuses": [statuses[pid] for pid in pids], "seconds": seconds}
        if time.monotonic() - began > _LIMIT_SECONDS:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                statuses[pid] = "hung"
        elif failed_at and not is_told and time.monotonic() - failed_at > _PATIENCE_SECONDS:
            is_told = True
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # torch takes seconds to go
