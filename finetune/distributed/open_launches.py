"""The launches that this process is in. A script may launch again before a launch has ended, as a callback does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from finetune.distributed.accelerate_library import forget_accelerate
from finetune.distributed.ddp_init import is_joined
from finetune.engine.fused import switch_fused, switch_replays
from finetune.errors import LaunchError
from finetune.logs import give_back_logs
from finetune.signals import after_fork_in_child, is_in_steps

_open: list[threading.Thread] = []
"""The thread of each launch that has not ended."""
_lock = threading.Lock()
after_fork_in_child(_open.clear)


@contextmanager
def open_launch(*, trains: bool) -> Iterator[bool]:
    """Within the block, this process is in a launch. Yield whether another one is open.

    The process has one random generator, one state of accelerate and one log. The block gives them back to the other
    launch as they were. A script without another launch gets its random generator and its loggers back.

    Raises:
        LaunchError: another thread is in a launch, or a callback trains or launches on several ranks.
    """
    mine = threading.current_thread()
    with _lock:
        others = [thread for thread in _open if thread.is_alive()]
        _refuse_second_run(others, trains=trains)
        _open.append(mine)
    restore = None
    if others:
        from finetune.distributed.nested_launch import copy_state

        restore = copy_state()
        _reset_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(gpus, device_type="cuda"):
            yield restore is not None
    finally:
        if mine in _open:  # a forked child is in no launch
            _open.remove(mine)
        _reset_state()
        if restore is None:
            give_back_logs()
        elif _open:
            restore()


def _refuse_second_run(others: list[threading.Thread], *, trains: bool) -> None:
    """Raise LaunchError if a launch would change the numbers of another one."""
    if any(thread is not threading.current_thread() for thread in others):
        # transformers sets torch's default type for the whole process while it loads a model.
        raise LaunchError(
            "another thread of this process is in a run: it trains, answers, evaluates or merges. Both threads would "
            "share one random generator and torch's default type, so both could get other numbers. Start the second "
            "after the first has returned, or in another process."
        )
    if others and is_in_steps() and (trains or is_joined()):
        what = "A second run" if trains else "With several ranks, a second launch"
        raise LaunchError(
            f"this process is training, and its run has called a function that launches again. {what} cannot begin "
            "inside a callback, a metric or a reward function. Call it after the run has returned, or start it as a "
            "process of its own."
        )


def _reset_state() -> None:
    """Reset what a launch has set for the whole process."""
    switch_fused(False)
    switch_replays(False)
    forget_accelerate()
