"""Run a guardian. Each worker (`finetune.distributed.watchdog`) starts this file, with the settings as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

# Started by path, because the worker may have found the package through a search path that a child does not inherit.
_ROOT = str(Path(__file__).resolve().parents[3])
sys.path.insert(0, _ROOT)
import finetune  # noqa: E402, F401

sys.path.remove(_ROOT)

from finetune.distributed.guardian.faults import found_at_start  # noqa: E402
from finetune.distributed.guardian.guardian import Guardian  # noqa: E402
from finetune.distributed.guardian.hub import Hub, connect  # noqa: E402
from finetune.distributed.guardian.link import Link  # noqa: E402
from finetune.distributed.network import allow_open_files  # noqa: E402


def _main() -> None:
    """Guard the worker that started this process until there is nothing left to guard."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # meant for the worker
    os.chdir("/")
    allow_open_files()  # the hub has a connection to each rank
    settings = json.loads(sys.argv[1])
    hub = Hub(settings) if settings["rank"] == 0 else None
    if hub is not None:
        os.write(1, json.dumps({"port": hub.port, "token": hub.token}).encode() + b"\n")
    line = sys.stdin.readline()  # from rank 0's worker, by way of this worker
    if not line:
        return
    place = json.loads(line)
    try:
        link = connect(place, settings["rank"]) if hub is None else hub.start(place)
    except ConnectionError as error:
        Link(0, 1).send({"fault": asdict(found_at_start(str(error)))})
        return
    Guardian(settings, link, hub).run()


if __name__ == "__main__":
    _main()
