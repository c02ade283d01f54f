"""A barrier at the ranks' store, which needs no backend. It names a rank that has left or waits for something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

from finetune.errors import Fault, RunFailedError

_LOOK_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0


class StoreBarrier:
    """A barrier at a store whose keys belong to this world alone. All ranks wait at it many times, in the same order.

    Collective: every rank makes one.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._num_waits = 0

    def wait(self, activity: str, first_fault: Callable[[float], Fault | None]) -> None:
        """Wait until all ranks are here for the same activity. Collective.

        `first_fault` waits for so many seconds, and returns the world's first fault if there is one.

        Raises:
            RunFailedError: another rank has left or waits for something else, or the world has a fault.
        """
        self._num_waits += 1
        try:
            first = self._store.compare_set(str(self._num_waits), "", activity).decode()
            if first != activity:
                raise _alone(activity, f"another is in {first}")
            self._count("here", 1)
            while self._count("here", 0) < self._world_size:
                # A rank may have come, seen that all are here, and left meanwhile.
                if self._store.check(["left"]) and self._count("here", 0) < self._world_size:
                    raise _alone(activity, f"rank {self._store.get('left').decode()} has left")
                fault = first_fault(_LOOK_SECONDS)
                if fault is not None:
                    raise RunFailedError(str(fault), fault=fault)
            self._count("seen", 1)
        except RuntimeError as error:
            raise _alone(activity, "rank 0, which keeps the store, has left") from error

    def leave(self) -> None:
        """Tell the other ranks that this rank will not come to the barrier again. Not a collective.

        The store ends with rank 0. So rank 0 waits until the others have seen that all ranks had come the last time.
        """
        patience = time.monotonic() + _PATIENCE_SECONDS
        with suppress(RuntimeError):  # rank 0 and its store are gone: no rank waits there
            self._store.compare_set("left", "", str(self._rank))
            while self._rank == 0 and self._num_waits > 0 and self._count("seen", 0) < self._world_size:
                if time.monotonic() > patience:
                    break
                time.sleep(_LOOK_SECONDS)

    def _count(self, name: str, number: int) -> int:
        """Add to a number of ranks at the current wait, and return it."""
        return self._store.add(f"{self._num_waits}/{name}", number)


def _alone(activity: str, reason: str) -> RunFailedError:
    return RunFailedError(
        f"this rank is in {activity}, but {reason}. With parallel.sharding=fsdp2 each rank holds a shard of the "
        "weights, so all of them must compute: call run_test and whatever runs the model on every rank, not on rank 0 "
        "alone."
    )
