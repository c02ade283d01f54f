"""Prepare this process for the worker processes of its data loaders: `training.num_workers`."""

from __future__ import annotations

import atexit
import multiprocessing

from torch.utils.data._utils import signal_handling

from finetune.distributed.network import allow_open_files


def prepare_for_workers() -> None:
    """Allow as many open files as the system does, and end workers with this process, also after an error.

    A worker hands over each tensor as an open file. Python waits at its end for processes that are left, and workers
    ignore the SIGTERM that it sends them.
    """
    allow_open_files()
    # Declares torch's handler of SIGCHLD as set. It would raise that a worker was killed while a file is written, too.
    signal_handling._SIGCHLD_handler_set = True
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)


def _kill_workers() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
