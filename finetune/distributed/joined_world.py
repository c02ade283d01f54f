"""The world that a process has joined: its place there, and what must be undone when it leaves."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from finetune.distributed.environment import WORLD_VARIABLES, LaunchEnvironment
from finetune.fallbacks import Fallback, Fallbacks

if TYPE_CHECKING:  # a process alone needs no rendezvous
    from finetune.distributed.rendezvous import Rendezvous


class ProcessContext(NamedTuple):
    """This process's place in the world."""

    distributed: bool
    rank: int
    local_rank: int
    world_size: int
    device: torch.device


@dataclass
class JoinedWorld:
    """The world that this process has joined. There is one for each process, like torch's default group."""

    undo: ExitStack = field(default_factory=ExitStack)
    """Everything that `cleanup_ddp` must undo."""
    rendezvous: Rendezvous | None = None
    alone: ProcessContext | None = None
    """The place of rank 0 if it trains for a whole launch: no group is up, but the ranks have decided."""
    hidden_launch: LaunchEnvironment | None = None
    """That launch. Its variables are hidden."""
    fallbacks: tuple[Fallback, ...] = ()
    """What was taken to join. A run that adopts this world later records them too."""

    def take(self, fallbacks: Fallbacks, fallback: Fallback, *, warning: str | None = None) -> None:
        """Take a fallback, and keep it for later runs."""
        fallbacks.take(fallback, warning=warning)
        self.fallbacks = (*self.fallbacks, fallback)

    def set_variable(self, name: str, value: str | None) -> None:
        """Set a variable, or remove it (None). Undoing restores it, unless somebody else has changed it since."""
        before = os.environ.get(name)

        def restore() -> None:
            if os.environ.get(name) == value:
                _set_variable(name, before)

        _set_variable(name, value)
        self.undo.callback(restore)

    def hide_launch(self) -> None:
        """Make this process look alone. Accelerate would wait for the other ranks of a launch."""
        for name in WORLD_VARIABLES:
            if name in os.environ:
                self.set_variable(name, None)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
