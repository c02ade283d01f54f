"""Find out whether a signal asked any rank to stop, in phases of many batches without another collective."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from finetune.distributed.collectives import Collectives
from finetune.distributed.ddp_init import rendezvous_store
from finetune.distributed.liveness import Liveness
from finetune.signals import Terminated, received_stop_signal, record_stop_signals

_LOOK_SECONDS = 0.5
_run_numbers = count()


class StopRequests:
    """The stop signals of all ranks.

    If the model is sharded, `is_forward_collective` is set: then all ranks must stop before the same batch.
    """

    def __init__(self, collectives: Collectives, liveness: Liveness) -> None:
        self.is_forward_collective = False
        self._collectives = collectives
        self._liveness = liveness
        self._next_look = 0.0
        # A process that has joined a world may launch several runs. Each has its own key in the store.
        self._key = f"stop requested {next(_run_numbers)}"
        self._stops_in: str | None = None

    @property
    def is_on_this_rank(self) -> bool:
        """Whether a signal asked this process to stop after its step; `train_step` lets all ranks know."""
        return received_stop_signal() is not None

    def is_on_any_rank(self) -> bool:
        """Return whether any rank was asked to stop, in a phase of many batches without a collective.

        A collective only if the weights are sharded. Otherwise a rank that was asked to stop writes to the store of the
        rendezvous, which the other ranks read twice a second. A group that others made has no store, and the answer is
        False on every rank.
        """
        if not self._collectives.context.distributed:
            return self.is_on_this_rank
        if self.is_forward_collective:
            self.synchronize_between_phases()
            return bool(sum(self._collectives.sum([float(self.is_on_this_rank)])))
        store, now = rendezvous_store(), time.monotonic()
        if store is None or (now < self._next_look and not self.is_on_this_rank):
            return False
        self._next_look = now + _LOOK_SECONDS
        try:
            if self.is_on_this_rank:
                store.set(self._key, "")
            return bool(store.check([self._key]))
        except RuntimeError:  # the process that keeps the store is gone: the next collective names it
            return self.is_on_this_rank

    @contextmanager
    def stopping_together(self, phase: str) -> Iterator[None]:
        """Run a block in which a stop signal to one rank ends all ranks, with Terminated.

        The ranks agree before each forward pass, so all of them stop before the same one. The step timeout starts anew
        at each forward pass. If the model is not sharded, the block runs without these changes.
        """
        if not self.is_forward_collective:
            yield
            return
        with record_stop_signals():
            self._stops_in = phase
            try:
                yield
            finally:
                self._stops_in = None

    def before_sharded_forward(self) -> None:
        """Raise Terminated inside `stopping_together` if any rank was asked to stop; wait for all between phases.

        Collective: every rank, before each forward pass of a sharded model.
        """
        if self._stops_in is not None:
            self._liveness.enter_phase(self._stops_in)
            if self.is_on_any_rank():
                raise Terminated
        self.synchronize_between_phases()

    def synchronize_between_phases(self) -> None:
        """Wait for all ranks between phases, because their scripts may decide differently what comes next."""
        if not self._liveness.is_timed:
            self._collectives.synchronize("a forward pass")
