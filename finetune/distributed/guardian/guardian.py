"""The base class of all guardians: watch over the own worker, and end it once there is a fault."""

from __future__ import annotations

import os
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from finetune.distributed.guardian.faults import (
    HEARTBEAT_SECONDS,
    KILL_SECONDS,
    LINGER_SECONDS,
    LONGEST_WAIT,
    MOST_OF_A_CORE,
    PAUSE,
    UNKILLABLE_SECONDS,
    found_by_guardian,
    line_of_fault,
)
from finetune.distributed.guardian.link import Link, Message
from finetune.distributed.guardian.worker import Worker
from finetune.errors import Fault


class LivedClock:
    """Count the seconds in which this process ran. The time in which a job or laptop was suspended does not count."""

    def __init__(self) -> None:
        self.now = 0.0
        self._seen = time.monotonic()

    def tick(self) -> None:
        """Add the time since the last call, at most a second."""
        seen = time.monotonic()
        self.now += min(seen - self._seen, 1.0)
        self._seen = seen


class Guardian(ABC):
    """A guardian with its own worker. `Hub` and `Spoke` know how to talk to the others."""

    def __init__(self, settings: Message) -> None:
        self.rank: int = settings["rank"]
        self.settings = settings
        self.worker = Worker(settings)
        self.clock = LivedClock()
        self.fault: Fault | None = None
        self.is_ready = False
        """All guardians are connected."""
        self.is_released = False
        """Its worker left before any fault."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, lambda: self.worker.read(self.clock.now))
        self._fault_at = self._beat_at = self._children_at = self._start_at = 0.0
        self._is_reported = False

    @property
    @abstractmethod
    def _links(self) -> Sequence[Link]:
        """The connections to other guardians."""

    @abstractmethod
    def _connect(self, hub: Message, seconds: float) -> None:
        """Connect to the other guardians; called in every turn until `is_ready`, with the seconds since the first."""

    @abstractmethod
    def _report(self, fault: Fault) -> None:
        """Report a fault to the hub, which decides whether it is the first."""

    @abstractmethod
    def _watch_others(self) -> None:
        """Find faults of the other guardians."""

    @abstractmethod
    def _beat(self) -> None:
        """Send a sign of life and the worker's position to the other guardians."""

    @abstractmethod
    def _say_bye(self) -> None:
        """Report to the other guardians that the worker has left without a fault."""

    def run(self) -> None:
        """Watch until there is nothing left to watch."""
        while not self._is_done:
            self._turn()
        self._leave()

    def _turn(self) -> None:
        for key, _ in self.selector.select(LONGEST_WAIT):
            key.data()
        time.sleep(PAUSE)
        self.clock.tick()
        if self.worker.is_silent and 0 in self.selector.get_map():
            self.selector.unregister(0)
        if self.worker.hub is None:
            self._start_at = self.clock.now
        elif not self.is_ready:
            self._connect(self.worker.hub, self.clock.now - self._start_at)
        self.worker.grow_older(self.clock.now)
        is_second = self.clock.now - self._beat_at >= HEARTBEAT_SECONDS
        self._watch_worker(is_second)
        if self.fault is None:
            self._watch_others()
        if is_second:
            self._beat_at = self.clock.now
            self._beat()
            self.worker.tell({"beat": True})
        for link in self._links:
            link.send()
        if self.fault is not None and not self.is_released and self.clock.now - self._fault_at >= KILL_SECONDS:
            self.worker.kill()

    @property
    def _is_done(self) -> bool:
        if self.fault is not None:
            is_stuck = self.clock.now - self._fault_at > UNKILLABLE_SECONDS
            return self.is_released or self.worker.is_gone or is_stuck
        return self.is_released and not any(self._links)

    def _watch_worker(self, is_second: bool) -> None:
        if self.is_released or self.fault is not None or self._is_reported:
            return
        if self.worker.is_gone:
            self.worker.read(self.clock.now)  # its last words may still be in the pipe
        if self.worker.has_said_bye and self.worker.failure is None:
            self._release()
            return
        if is_second and self.clock.now >= self._children_at:
            began = time.process_time()
            self.worker.note_children()
            self._children_at = self.clock.now + (time.process_time() - began) / MOST_OF_A_CORE
        fault = self._fault_of_worker(is_second)
        if fault is not None:
            self._is_reported = True
            self._report(fault)

    def _fault_of_worker(self, is_second: bool) -> Fault | None:
        worker = self.worker
        if worker.failure is not None:
            return Fault(
                reporter="worker",
                rank=self.rank,
                summary=f"rank {self.rank} failed during {worker.position}",
                error=worker.failure,
                is_second_hand=worker.position.waiting is not None,
            )
        if worker.is_silent or worker.is_gone:
            return found_by_guardian(self.rank, worker.describe_end())
        trouble = worker.examine(self.clock.now) if is_second else None
        return None if trouble is None else found_by_guardian(self.rank, trouble)

    def _release(self) -> None:
        self.is_released = True
        self._say_bye()
        self.worker.tell({"released": True, "is_staying": bool(self._links)})
        # Whoever captures the worker's output waits until all copies of it are closed.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)

    def _adopt(self, fault: Fault) -> None:
        """Take a fault as the world's first one, and end this rank with it."""
        if self.fault is not None:
            return
        self.fault = fault
        self._fault_at = self.clock.now
        if self.is_released:
            return
        self.worker.tell({"fault": asdict(fault)})
        if not self.is_ready:  # the worker has trained nothing yet, and raises the fault
            self.is_released = True
            return
        self.worker.note_children()
        if self.worker.is_stopped:
            self.worker.kill()

    def _leave(self) -> None:
        for link in self._links:
            link.send()
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
        if self.fault is not None and not self.is_released:
            self.worker.kill_orphans()
            self.worker.read(self.clock.now)
            if not (self.worker.has_said_last_line or self.worker.has_said_bye):
                _print_error(line_of_fault(self.fault))
        # A connection closed with something unread is reset, and the other side would lose our last message.
        end = time.monotonic() + LINGER_SECONDS
        remaining = list(self._links)
        while remaining and time.monotonic() < end:
            remaining = [link for link in remaining if not link.receive()[1]]
            time.sleep(PAUSE)


def _print_error(text: str) -> None:
    """Write to stderr, but do not wait for its reader."""
    with suppress(OSError), selectors.PollSelector() as selector:
        selector.register(2, selectors.EVENT_WRITE)
        if selector.select(LINGER_SECONDS):
            os.write(2, text.encode(errors="replace")[:4096])
