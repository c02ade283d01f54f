"""The command line, with little memory for what trains: from its third step on, by the kernel's own limit."""

from __future__ import annotations

import resource
from typing import Any

import psutil

from finetune.cli import main
from finetune.training import training_run

LIMITED_FROM = 3
ROOM_BYTES = 300 << 20
"""Far more than a short row takes, less than half of what the attention to a long one does."""
_train_step = training_run.train_step
_num_steps = 0


def train_step(*args: Any, **options: Any) -> Any:
    """Train as ever, with what room there is."""
    global _num_steps
    _num_steps += 1
    if _num_steps == LIMITED_FROM:
        room = psutil.Process().memory_info().vms + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    return _train_step(*args, **options)


if __name__ == "__main__":
    training_run.train_step = train_step
    main()
