"""How one kind of launcher tells a process its place: rank and sizes under names of its own.

The names themselves are in `finetune.distributed.environment`; here is what holds for every kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from finetune.errors import LaunchError


class Place(NamedTuple):
    """A process's place among those that were started with it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


@dataclass(frozen=True)
class Family:
    """The names of one kind of launcher, each with alternatives of which the first that is set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, alternatives included."""
        return (*self.rank, *self.world_size, *self.local_rank, *self.local_world_size)

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Whether any of its variables that say which process this is are set."""
        return any(name in environ for name in (*self.rank, *self.world_size, *self.local_rank))

    def place(self, environ: Mapping[str, str], *, processes_here: int | None = None) -> Place:
        """Read this process's place.

        A world of one needs no local rank. Where the number of processes on this node is not said, it is the smallest
        that fits the local rank.

        Args:
            environ: the environment.
            processes_here: the number of processes on this node where the launcher says it in another way.

        Raises:
            LaunchError: variables are missing, malformed or contradict each other.
        """
        rank = number(environ, self.rank)
        world_size = number(environ, self.world_size)
        local_rank = number(environ, self.local_rank)
        if local_rank is None and world_size == 1:
            local_rank = 0
        if rank is None or world_size is None or local_rank is None:
            raise self._incomplete(environ)
        given = number(environ, self.local_world_size)
        local_world_size = processes_here if given is None else given
        if local_world_size is None:
            local_world_size = world_size if local_rank == rank else local_rank + 1
        if not (rank < world_size and local_rank < local_world_size <= world_size):
            raise LaunchError(
                f"The launch variables contradict each other: {self._found(environ)}, {local_world_size} processes on "
                "this node. Expected 0 <= rank < world size and 0 <= local rank < processes on this node <= world "
                "size. Unset them, or start again through the launcher."
            )
        return Place(rank, local_rank, world_size, local_world_size)

    def _found(self, environ: Mapping[str, str]) -> str:
        return ", ".join(f"{name}={environ[name]}" for name in self.names if name in environ) or "none of them"

    def _incomplete(self, environ: Mapping[str, str]) -> LaunchError:
        needed = (self.rank, self.world_size, self.local_rank)
        missing = [" or ".join(names) for names in needed if not any(name in environ for name in names)]
        return LaunchError(
            f"The environment is only half set for a launch through {self.name} variables: found "
            f"{self._found(environ)}; missing {', '.join(missing)}. Start through torchrun, accelerate "
            "launch, srun or mpirun, which set them all, or unset them to train in one process."
        )


def number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The whole number under the first of these names that is set.

    Raises:
        LaunchError: it is not a whole number.
    """
    for name in names:
        if name in environ:
            if not re.fullmatch(r"[0-9]{1,9}", environ[name]):
                raise LaunchError(
                    f"{name} is {environ[name]!r}; expected a whole number. Start again through the launcher."
                )
            return int(environ[name])
    return None
