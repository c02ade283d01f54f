"""Read rank and sizes from the variables of one family of launchers.

The names themselves are in `finetune.distributed.environment`; this module holds what is true of every family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetune.errors import LaunchError


@dataclass(frozen=True)
class LauncherVariables:
    """The variables of one family of launchers. Each text lists alternatives: the first one that is set counts."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""

    @property
    def names(self) -> list[str]:
        """All names, alternatives included."""
        return f"{self.rank} {self.world_size} {self.local_rank} {self.local_world_size}".split()

    def are_present(self, environ: Mapping[str, str]) -> bool:
        """Return whether a variable is set that says which process this is."""
        return any(name in environ for name in f"{self.rank} {self.world_size} {self.local_rank}".split())

    def read(self, environ: Mapping[str, str], *, processes_here: int | None = None) -> dict[str, int]:
        """Read rank, local_rank, world_size and local_world_size.

        A world of one needs no local rank. If no variable says how many processes run on this node, the answer is all
        of them if local rank and rank are equal, else the smallest number that fits the local rank. `processes_here`
        is that number if the launcher gives it in another way.

        Raises:
            LaunchError: variables are missing, malformed or contradict each other.
        """
        rank, world_size = read_number(environ, self.rank), read_number(environ, self.world_size)
        local_rank = read_number(environ, self.local_rank)
        if local_rank is None and world_size == 1:
            local_rank = 0
        if rank is None or world_size is None or local_rank is None:
            raise self._incomplete(environ)
        given = read_number(environ, self.local_world_size)
        local_world_size = processes_here if given is None else given
        if local_world_size is None:
            local_world_size = world_size if local_rank == rank else local_rank + 1
        if not (rank < world_size and local_rank < local_world_size <= world_size):
            raise LaunchError(
                f"The launch variables contradict each other: {self._found(environ)}, {local_world_size} processes on "
                "this node. Expected 0 <= rank < world size and 0 <= local rank < processes on this node <= world "
                "size. Unset them, or start again through the launcher."
            )
        sizes = {"world_size": world_size, "local_world_size": local_world_size}
        return {"rank": rank, "local_rank": local_rank, **sizes}

    def _found(self, environ: Mapping[str, str]) -> str:
        return ", ".join(f"{name}={environ[name]}" for name in self.names if name in environ) or "none of them"

    def _incomplete(self, environ: Mapping[str, str]) -> LaunchError:
        needed = (self.rank, self.world_size, self.local_rank)
        missing = [names.replace(" ", " or ") for names in needed if not any(name in environ for name in names.split())]
        return LaunchError(
            f"The environment is incomplete for a launch through {self.name} variables: found "
            f"{self._found(environ)}; missing {', '.join(missing)}. Start through torchrun, accelerate "
            "launch, srun or mpirun, which set them all, or unset them to train in one process."
        )


def read_number(environ: Mapping[str, str], names: str) -> int | None:
    """Return the whole number under the first of these names (between spaces) that is set.

    Raises:
        LaunchError: it is not a whole number.
    """
    for name in names.split():
        if name in environ:
            if not re.fullmatch(r"[0-9]{1,9}", environ[name]):
                raise LaunchError(
                    f"{name} is {environ[name]!r}; expected a whole number. Start again through the launcher."
                )
            return int(environ[name])
    return None
