"""Run a guardian. Each worker (`finetune.distributed.watchdog`) starts this file, with the settings as JSON."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Started by path, because the worker may have found the package through a search path that a child does not inherit.
_ROOT = str(Path(__file__).resolve().parents[3])
sys.path.insert(0, _ROOT)
import finetune  # noqa: E402, F401

sys.path.remove(_ROOT)

from finetune.distributed.guardian.guardian import Guardian  # noqa: E402


def _main() -> None:
    """Guard the worker that started this process until there is nothing left to guard."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # meant for the worker
    os.chdir("/")
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the hub has a connection to each rank
    Guardian(json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    _main()
