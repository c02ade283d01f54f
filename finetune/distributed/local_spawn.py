"""Start this command again as N processes on this machine, and leave with the exit code of the first that failed.

torch's elastic launcher starts the processes: it sets the launch variables, and ends the others when one fails.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from finetune.distributed.environment import SPAWN_RUN_ID_PREFIX
from finetune.distributed.network import is_own_address
from finetune.errors import LaunchError, PreemptedError, RunFailedError
from finetune.signals import Terminated, stop_signals_go_to
from finetune.threads import share_cores

_log = logging.getLogger(__name__)


def run_as_processes(num_processes: int, *, master_addr: str | None = None, master_port: int | None = None) -> int:
    """Run this process's own command line in `num_processes` workers, wait for them, and return their exit code.

    Args:
        num_processes: the number of workers.
        master_addr: an address of this machine, for rank 0; None: localhost.
        master_port: the port of rank 0; None: a free one.

    Raises:
        LaunchError: there is no command line to run again, the address is not this machine's, or the port is taken.
        KeyboardInterrupt: stopped from the keyboard before a worker was started.
    """
    command = _command_to_repeat()
    address = master_addr or "localhost"
    if not is_own_address(address):
        raise LaunchError(
            f"parallel.master_addr is {address}, which is no address of this machine, but parallel.num_processes is "
            f"{num_processes} and starts all processes here. Remove parallel.master_addr."
        )
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"{SPAWN_RUN_ID_PREFIX}{secrets.token_hex(6)}",
        rdzv_backend="c10d" if master_port is None else "static",
        rdzv_endpoint="localhost:0" if master_port is None else f"{address}:{master_port}",  # 0: a free port
        rdzv_configs={"rank": 0},
        local_addr=address,
        max_restarts=0,
        monitor_interval=0.1,
        # The workers handle the other signals themselves: elastic would kill them 30 s later, and would undo nohup.
        signals_to_handle="SIGQUIT",
    )
    _log.info("starting %d processes on this machine: %s", num_processes, " ".join(command))
    share_cores(num_processes)
    with _signals_go_to_workers() as sent:
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            # The workers have reported what went wrong: the launcher adds only the exit code.
            return _exit_code_of_cause([failure.exitcode for failure in error.failures.values()], sent)
        except DistNetworkError as error:
            raise LaunchError(
                f"the processes cannot meet at {address}:{master_port or 'a free port'}: {error}. Set "
                "parallel.master_port to a free port, or remove it: finetune then finds one."
            ) from error
    return 0


@contextmanager
def _signals_go_to_workers() -> Iterator[list[int]]:
    """Forward signals to the workers inside the block, and list them. Without workers, a signal ends the block."""
    sent: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        workers = psutil.Process().children()
        if not workers:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
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
    if getattr(main, "__file__", None) is None or "-c" in sys.orig_argv[1:2]:
        raise LaunchError(
            "parallel.num_processes runs the command line again, and this session has none (a notebook, or python "
            "-c). Put the code into a script, or start it with torchrun."
        )
    return [sys.executable, *sys.orig_argv[1:]]
