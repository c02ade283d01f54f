"""One rank that joins a world and reports what became of it; started by the tests with launch variables of their own.

Words: the folder to report to, then a JSON object: timeout (seconds), flag, strict, backend, lasts (seconds alone, or
until the folder has a file `over`), worlds (how many to join, one after the other).
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from finetune.distributed import ddp_init, process_group
from finetune.distributed.environment import LAUNCH_VARIABLES, WORLD_VARIABLES
from finetune.errors import FinetuneError, LeftToMain
from finetune.fallbacks import Fallbacks
from finetune.logs import configure_logs
from tests.launches import write_report
from tests.listening import listeners_of


def join(wish, fallbacks):
    context = ddp_init.initialize_ddp(
        timedelta(seconds=wish.get("timeout", 30)), flag=wish.get("flag"), fallbacks=fallbacks, device="cpu"
    )
    seen = {"world_size": context.world_size, "distributed": context.distributed, "backend": "none"}
    if context.distributed:
        value = torch.tensor([context.rank + 1.0])
        dist.all_reduce(value)
        listens = sorted({listener.address for listener in listeners_of([os.getpid()])})
        seen |= {"sum": value.item(), "backend": dist.get_backend(), "listens": listens}
    else:
        end = time.monotonic() + wish.get("lasts", 0)
        while time.monotonic() < end and not Path(sys.argv[1], "over").exists():
            time.sleep(0.05)
    return seen


def main(folder, words):
    wish = json.loads(words)
    rank = int(os.environ["RANK"])
    configure_logs(rank)
    if wish.get("backend"):  # what a machine with a GPU chooses, on one without
        process_group.choose_backend = lambda *_, **__: wish["backend"]
    before = {name: os.environ.get(name) for name in (*LAUNCH_VARIABLES, *WORLD_VARIABLES)}
    fallbacks = Fallbacks(strict=wish.get("strict", False))
    began = time.monotonic()
    seen = {}
    try:
        for _ in range(wish.get("worlds", 1) - 1):
            join(wish, fallbacks)
            ddp_init.cleanup_ddp()
        seen = join(wish, fallbacks)
    except (FinetuneError, LeftToMain) as error:
        seen = {"error": type(error).__name__, "text": str(error)}
        if isinstance(error, LeftToMain):
            raise
    finally:
        seen["seconds"] = time.monotonic() - began
        ddp_init.cleanup_ddp()
        after = {name: os.environ.get(name) for name in before}
        write_report(folder, rank, seen | {"fallbacks": fallbacks.as_records(), "clean": before == after})
    if "error" in seen:
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
