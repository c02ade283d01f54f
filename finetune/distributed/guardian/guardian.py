"""What every guardian does: watch its own worker, and end it once a fault is known."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Iterable
from contextlib import suppress

from finetune.distributed.guardian.faults import last_line
from finetune.distributed.guardian.limits import (
    HEARTBEAT_SECONDS,
    KILL_SECONDS,
    LINGER_SECONDS,
    LONGEST_WAIT,
    MOST_OF_A_CORE,
    PAUSE,
    UNKILLABLE_SECONDS,
)
from finetune.distributed.guardian.link import Link, Message
from finetune.distributed.guardian.worker import Worker


class LivedClock:
    """Seconds as this process lived them: a suspended job or laptop has missed nothing when it wakes."""

    def __init__(self) -> None:
        self.now = 0.0
        self._seen = time.monotonic()

    def tick(self) -> None:
        """Let time pass, at most a second a turn."""
        seen = time.monotonic()
        self.now += min(seen - self._seen, 1.0)
        self._seen = seen


class Guardian:
    """What hub and spokes have in common: their own worker, and what happens once a fault is known."""

    def __init__(self, settings: Message, worker: Worker, clock: LivedClock) -> None:
        self.rank: int = settings["rank"]
        self.settings = settings
        self.worker = worker
        self.clock = clock
        self.fault: str | None = None
        self.is_ready = False
        self.is_released = False
        """Its worker left in peace, before any fault."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, lambda: self.worker.read(self.clock.now))
        self._fault_at = self._beat_at = self._children_at = 0.0
        self._is_reported = False

    def meet(self) -> None:
        """Find the other guardians."""
        raise NotImplementedError

    def report(self, fault: str, *, is_second_hand: bool = False) -> None:
        """Bring a fault before the hub. Second hand: an error in a collective, which another rank may have caused."""
        raise NotImplementedError

    def watch_others(self) -> None:
        """Look at the other guardians."""
        raise NotImplementedError

    def beat(self) -> None:
        """Tell the other guardians that this one lives, and where its worker is."""
        raise NotImplementedError

    @property
    def links(self) -> Iterable[Link]:
        """The connections to other guardians."""
        raise NotImplementedError

    def run(self) -> None:
        """Watch until there is nothing left to watch."""
        while not self.is_done:
            self._turn()
        self._leave()

    def _turn(self) -> None:
        for key, _ in self.selector.select(LONGEST_WAIT):
            key.data()
        time.sleep(PAUSE)
        self.clock.tick()
        if self.worker.is_silent and 0 in self.selector.get_map():
            self.selector.unregister(0)
        if self.worker.meeting is not None and not self.is_ready:
            self.meet()
        self.worker.grow_older(self.clock.now)
        is_second = self.clock.now - self._beat_at >= HEARTBEAT_SECONDS
        self._watch_worker(is_second)
        if self.fault is None:
            self.watch_others()
        if is_second:
            self._beat_at = self.clock.now
            self.beat()
            self.worker.tell({"beat": True})
        for link in self.links:
            link.send()
        if self.fault is not None and not self.is_released and self.clock.now - self._fault_at >= KILL_SECONDS:
            self.worker.kill()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do."""
        if self.fault is not None:
            is_stuck = self.clock.now - self._fault_at > UNKILLABLE_SECONDS
            return self.is_released or self.worker.is_gone or is_stuck
        return self.is_released and not any(self.links)

    def _watch_worker(self, is_second: bool) -> None:
        worker = self.worker
        if self.is_released or self.fault is not None or self._is_reported:
            return
        if worker.is_gone:
            worker.read(self.clock.now)  # its last words may still be in the pipe
        if worker.has_said_bye and worker.failure is None:
            self._release()
            return
        if is_second and self.clock.now >= self._children_at:
            began = time.process_time()
            worker.note_children()
            self._children_at = self.clock.now + (time.process_time() - began) / MOST_OF_A_CORE
        is_second_hand = False
        if worker.failure is not None:
            wrong = f"failed during {worker.place}: {worker.failure}"
            is_second_hand = worker.place.waiting is not None
        elif worker.is_silent or worker.is_gone:
            wrong = worker.end_in_words()
        else:
            trouble = worker.examine(self.clock.now) if is_second else None
            if trouble is None:
                return
            wrong = trouble
        self._is_reported = True
        self.report(f"rank {self.rank} {wrong}", is_second_hand=is_second_hand)

    def _release(self) -> None:
        self.is_released = True
        self.say_farewell()
        self.worker.tell({"released": True, "is_staying": bool(list(self.links))})
        # Whoever captures the worker's output waits until all copies of it are closed.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)

    def say_farewell(self) -> None:
        """Tell the other guardians that the worker has left in peace."""
        raise NotImplementedError

    def adopt(self, fault: str) -> None:
        """A fault is certain: it is the world's first, and this rank ends with it."""
        if self.fault is not None:
            return
        self.fault = " ".join(fault.split())
        self._fault_at = self.clock.now
        if self.is_released:
            return
        self.worker.tell({"fault": self.fault})
        if not self.is_ready:  # the worker has trained nothing yet, and raises this by itself
            self.is_released = True
            return
        self.worker.note_children()
        if self.worker.is_stopped:
            self.worker.kill()

    def _leave(self) -> None:
        for link in self.links:
            link.send()
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
        if self.fault is not None and not self.is_released:
            self.worker.kill_orphans()
            self.worker.read(self.clock.now)
            if not (self.worker.has_said_last_line or self.worker.has_said_bye):
                _say(last_line(self.fault))
        # A connection closed with something unread is reset, and the other side would lose our last words.
        end = time.monotonic() + LINGER_SECONDS
        remaining = list(self.links)
        while remaining and time.monotonic() < end:
            remaining = [link for link in remaining if not link.receive()[1]]
            time.sleep(PAUSE)


def _say(text: str) -> None:
    """Write to stderr without being kept waiting by whoever should read it."""
    with suppress(OSError), selectors.PollSelector() as selector:
        selector.register(2, selectors.EVENT_WRITE)
        if selector.select(LINGER_SECONDS):
            os.write(2, text.encode(errors="replace")[:4096])
