"""Start this very command again as N processes on this machine, and leave with the exit code of the first that failed.

torch's elastic launcher is the engine: it hands out the launch variables and ends the others when one fails.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Sequence

from finetune.distributed.environment import SPAWN_RUN_ID_PREFIX
from finetune.errors import LaunchError, RunFailedError
from finetune.signals import Terminated

_log = logging.getLogger(__name__)


def run_as_processes(num_processes: int) -> int:
    """Run this process's own command line in `num_processes` workers and wait for them; an exit code.

    Raises:
        LaunchError: there is no command line that could be run again.
        KeyboardInterrupt: stopped from the keyboard; the workers were ended.
    """
    command = _command_to_repeat()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"{SPAWN_RUN_ID_PREFIX}{secrets.token_hex(6)}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    _log.info("starting %d processes on this machine: %s", num_processes, " ".join(command))
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        # The workers have said what went wrong: the launcher adds nothing but the code.
        return _exit_code_of_cause([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        raise KeyboardInterrupt from error
    return 0


def _exit_code_of_cause(codes: Sequence[int]) -> int:
    """The workers end almost at once: those that end with another one's failure have 3, or were ended by a signal."""
    causes = [code for code in codes if code > 0 and code not in (RunFailedError.exit_code, Terminated.exit_code)]
    return causes[0] if causes else RunFailedError.exit_code


def _command_to_repeat() -> list[str]:
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) is None or "-c" in sys.orig_argv[1:2]:
        raise LaunchError(
            "parallel.num_processes starts the command line again, and this session has none (a notebook, or python "
            "-c). Put the code into a script, or start it with torchrun."
        )
    return [sys.executable, *sys.orig_argv[1:]]
