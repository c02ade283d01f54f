"""Prepare this process for the worker processes of its data loaders: `training.num_workers`."""

from __future__ import annotations

import atexit
import multiprocessing
import sys
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from finetune.distributed.network import allow_open_files


def prepare_for_workers(loaders: Iterable[DataLoader[Any] | None]) -> None:
    """Allow as many open files as the system does, and end workers with this process, also after an error.

    A worker hands over each tensor as an open file. Python waits at its end for processes that are left, and workers
    ignore the SIGTERM that it sends them.

    On Linux, workers are forked, unless the script has chosen `spawn`. From Python 3.14 on, a worker would otherwise
    import the user's script again, and a script without `if __name__ == "__main__"` would start a second run.
    """
    allow_open_files()
    if sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) != "spawn":
        for loader in loaders:
            if loader is not None and loader.num_workers:
                loader.multiprocessing_context = "fork"
    # Declares torch's handler of SIGCHLD as set. It would raise that a worker was killed while a file is written, too.
    signal_handling._SIGCHLD_handler_set = True
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)


def _kill_workers() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
