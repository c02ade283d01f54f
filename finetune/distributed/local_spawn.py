"""Start this command again as N processes on this machine, and leave with the exit code of the first that failed.

This process keeps the store in which the processes find each other. It listens on loopback only. torch's elastic
launcher would listen on all interfaces, and would unpickle what any peer writes.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from finetune.distributed.environment import DEFAULT_MASTER_ADDR, SPAWN_RUN_ID_PREFIX, variables_of_spawn
from finetune.distributed.network import is_loopback
from finetune.distributed.rendezvous import open_store
from finetune.errors import LaunchError, PreemptedError, RunFailedError
from finetune.signals import Terminated, raise_at_once, stop_signals_go_to
from finetune.threads import share_cores
from finetune.units import counted

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_TERMINATE_SECONDS = 30.0
"""For the other processes to end after one has failed. Then they are killed."""


def run_as_processes(num_processes: int, *, master_addr: str | None = None, master_port: int | None = None) -> int:
    """Run this process's own command line in `num_processes` workers, wait for them, and return their exit code.

    By default, rank 0 is at 127.0.0.1 and a free port.

    Raises:
        LaunchError: there is no command line to run again, the address is no loopback address, or the port is taken.
        RunFailedError: a worker was killed, and no other worker has reported it.
        KeyboardInterrupt: stopped from the keyboard before a worker was started.
    """
    command = _command_to_repeat()
    address = master_addr or DEFAULT_MASTER_ADDR
    if not is_loopback(address):
        raise LaunchError(
            f"parallel.master_addr is {address}, but parallel.num_processes is {num_processes} and starts all "
            "processes on this machine, where they listen on a loopback address. Remove parallel.master_addr."
        )
    try:
        store = open_store(address, master_port or 0, num_processes)
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"the processes cannot meet at {address}:{master_port or 'a free port'}: {error}. Set "
            "parallel.master_port to a free port, or remove it: finetune then finds one."
        ) from error
    _log.info("starting %s on this machine: %s", counted(num_processes, "process"), " ".join(command))
    share_cores(num_processes)
    run_id = f"{SPAWN_RUN_ID_PREFIX}{secrets.token_hex(6)}"
    workers: list[subprocess.Popen[bytes]] = []
    with _signals_go_to_workers() as sent:
        try:
            for rank in range(num_processes):
                place = variables_of_spawn(rank, num_processes, address, store.port, run_id)
                environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **place}  # as torchrun sets it
                # In a session of its own: Ctrl-C in a terminal then reaches it once, from here.
                workers.append(subprocess.Popen(command, env=environment, start_new_session=True))
            first_failed, codes = _wait_for(workers)
        finally:
            for worker in workers:
                worker.kill()
    if first_failed is not None and not sent:
        _raise_if_nobody_reported(first_failed, codes)
    # The workers have reported what went wrong: the launcher adds only the exit code.
    return _exit_code_of_cause(codes, sent) if any(codes) else 0


def _wait_for(workers: Sequence[subprocess.Popen[bytes]]) -> tuple[int | None, list[int]]:
    """Wait for all workers. Return the first rank that failed, or None, and the exit codes of all.

    When a worker fails, ask the others to end, and later kill them. A preempted worker has not failed: all ranks have
    agreed to leave, and rank 0 may still write.
    """
    first_failed, deadline = None, None
    while None in (codes := [worker.poll() for worker in workers]):
        first_failed = _first_failed(codes) if first_failed is None else first_failed
        if deadline is None and first_failed is not None:
            deadline = time.monotonic() + _TERMINATE_SECONDS
            for worker in workers:
                worker.terminate()
        elif deadline is not None and time.monotonic() > deadline:
            for worker in workers:
                worker.kill()
        time.sleep(_POLL_SECONDS)
    ended = [worker.wait() for worker in workers]
    return _first_failed(ended) if first_failed is None else first_failed, ended


def _first_failed(codes: Sequence[int | None]) -> int | None:
    """Return the lowest rank that has failed, or None. `codes` has None for a rank that still runs."""
    return next((r for r, code in enumerate(codes) if code not in (None, 0, PreemptedError.exit_code)), None)


def _raise_if_nobody_reported(first_failed: int, codes: Sequence[int]) -> None:
    """Raise RunFailedError if the first worker that failed was killed and no worker has noticed.

    A worker that has left the run is not watched. SIGTERM, which the launcher sent because of it, looks to the others
    like the request to stop of a user.
    """
    as_asked = (0, PreemptedError.exit_code, Terminated.exit_code)
    if codes[first_failed] < 0 and all(code < 0 or code in as_asked for code in codes):
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-codes[first_failed], f"signal {-codes[first_failed]}")
        raise RunFailedError(
            f"rank {first_failed} was killed by {name}, and the launcher ended the other ranks. Often memory has run "
            "out. Committed checkpoints are intact: resume=auto"
        )


@contextmanager
def _signals_go_to_workers() -> Iterator[list[int]]:
    """Forward signals to the workers inside the block, and list them. Without workers, a signal ends the block."""
    sent: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        workers = psutil.Process().children()
        if not workers:
            raise_at_once(number, frame)
        sent.append(number)
        for worker in workers:
            with suppress(psutil.Error):
                worker.send_signal(number)

    with stop_signals_go_to(forward):
        yield sent


def _exit_code_of_cause(codes: Sequence[int], sent: Sequence[int]) -> int:
    """Return the exit code of the worker that failed first. The others then end with 3, or by a signal.

    The code of a killed worker is minus the signal's number. `sent` has the signals that were passed on to the workers.
    """
    failed, preempted, terminated = RunFailedError.exit_code, PreemptedError.exit_code, Terminated.exit_code
    causes = [code for code in codes if code > 0 and code not in (failed, preempted, terminated)]
    if causes:
        return causes[0]
    if preempted in codes and failed not in codes:
        return preempted
    is_as_asked = signal.SIGTERM in sent and all(code in (terminated, -signal.SIGTERM) for code in codes)
    return terminated if is_as_asked else failed


def _command_to_repeat() -> list[str]:
    main = sys.modules["__main__"]
    # A worker would find nothing left on standard input, and end with success.
    if getattr(main, "__file__", None) in (None, "<stdin>", "/dev/stdin") or "-c" in sys.orig_argv[1:2]:
        raise LaunchError(
            "parallel.num_processes runs the command line again, and this session has none (a notebook, python -c, or "
            "a script on standard input). Put the code into a file, or start it with torchrun."
        )
    return [sys.executable, *sys.orig_argv[1:]]
