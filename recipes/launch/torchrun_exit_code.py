"""Run torchrun, and exit with the exit code of finetune.

torchrun itself exits with 1 after any failure, so that nothing outside can tell a preempted run (75) from a mistake in
the configuration (2). It also kills the processes of a preempted run after 30 seconds. With this script, only the
processes of the run decide how long they need:

    python torchrun_exit_code.py --nnodes 2 --node_rank 0 … -m finetune train …
"""

import signal
import sys

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def ask_workers_to_stop(*_: object) -> None:
    """Pass SIGTERM on to the processes of this node. Without any, exit."""
    workers = psutil.Process().children()
    if not workers:
        sys.exit(128 + signal.SIGTERM)
    for worker in workers:
        worker.terminate()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, ask_workers_to_stop)
    try:
        main(["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # torchrun writes a process that was killed by signal N as -N, shells and schedulers write it as 128 + N.
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
