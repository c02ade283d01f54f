"""Run a guardian. Each worker (`finetune.distributed.watchdog`) starts this file, with the settings on stdin."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Started by path, since the worker may have found the package through a search path that a child does not inherit.
_ROOT = str(Path(__file__).resolve().parents[3])
sys.path.insert(0, _ROOT)
import finetune  # noqa: E402, F401

sys.path.remove(_ROOT)

from finetune.distributed.guardian.link import Message, occupy_standard_streams  # noqa: E402
from finetune.distributed.guardian.star import Hub, Spoke  # noqa: E402


def _read_settings() -> Message | None:
    """Read the first line of stdin. It holds the token, which other users could read on a command line."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    settings: Message = json.loads(line)
    return settings


def _prepare_process() -> None:
    """Ignore signals that are meant for the worker, leave its working directory, and allow many connections."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    occupy_standard_streams()
    os.chdir("/")
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _main() -> None:
    """Guard the worker that started this process until there is nothing left to guard."""
    _prepare_process()
    settings = _read_settings()
    if settings is None:
        return
    os.set_blocking(0, False)
    os.set_blocking(1, False)
    guardian = Hub(settings) if settings["rank"] == 0 else Spoke(settings)
    guardian.run()


if __name__ == "__main__":
    _main()
