"""The guardian of every rank but 0: connected to the hub, and to no one else."""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import asdict

from finetune.distributed.guardian.faults import REMEDY, Place, lost_guardian, unreachable
from finetune.distributed.guardian.guardian import Guardian, LivedClock
from finetune.distributed.guardian.limits import (
    CONNECT_SECONDS,
    LINGER_SECONDS,
    LONGEST_WAIT,
    LOST_SECONDS,
    MEET_SECONDS,
    SECOND_HAND_SECONDS,
)
from finetune.distributed.guardian.link import Link, Message
from finetune.distributed.guardian.worker import Worker


class Spoke(Guardian):
    """The guardian of every other rank: connected to the hub, and to no one else."""

    def __init__(self, settings: Message, worker: Worker, clock: LivedClock) -> None:
        super().__init__(settings, worker, clock)
        self._link: Link | None = None
        self._meeting_since: float | None = None
        self._tried: dict[str, OSError] = {}
        self._num_tries = 0
        self._has_hub_left = False
        self._unanswered: tuple[float, str] | None = None

    @property
    def links(self) -> list[Link]:
        """The connection to the hub, while there is one that is needed."""
        return [] if self._link is None or self._link.has_left else [self._link]

    def meet(self) -> None:
        """Connect to the hub and show the token; the hub says when all are there."""
        if self.fault is not None or self._is_reported:
            return
        if self._meeting_since is None:
            self._meeting_since = self.clock.now
        seconds = self.clock.now - self._meeting_since
        if self._link is None:
            self._connect()
            if self._link is None and seconds > MEET_SECONDS:
                tried = "; ".join(f"{address}: {error}" for address, error in self._tried.items())
                self.adopt(
                    f"rank {self.rank} could not reach the watchdog of rank 0 at port {self._meeting['port']} within "
                    f"{MEET_SECONDS:g} s ({tried}). {REMEDY}"
                )
        elif seconds > 2 * MEET_SECONDS:
            self.adopt(f"rank {self.rank} heard nothing from the watchdog of rank 0. {REMEDY}")

    @property
    def _meeting(self) -> Message:
        return self.worker.meeting or {}

    def _connect(self) -> None:
        """Try one of the hub's addresses, the others in later turns: the worker waits for signs of life meanwhile."""
        addresses = self._meeting["addresses"]
        address = addresses[self._num_tries % len(addresses)]
        self._num_tries += 1
        try:
            connection = socket.create_connection((address, self._meeting["port"]), timeout=CONNECT_SECONDS)
        except OSError as error:
            self._tried[address] = error
            time.sleep(LONGEST_WAIT)
            return
        self._link = Link(connection, self.clock.now, rank=0)
        self._link.send({"token": self._meeting["token"], "rank": self.rank})
        self.selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        link = self._link
        if link is None:
            return
        messages, is_end = link.receive()
        for message in messages:
            link.heard_at = self.clock.now
            if "beat" in message:
                link.place = Place.from_message(message["beat"])
                self._has_hub_left = bool(message.get("left"))
            if "ready" in message:
                self.is_ready = True
                self.worker.tell({"ready": True})
            if "fault" in message:
                self.adopt(str(message["fault"]))
        if is_end:
            self._lose(lost_guardian(0, link.place))

    def _lose(self, fault: str) -> None:
        """The hub is gone. A rank 0 that left before takes nothing from this rank but its overseer."""
        link, self._link = self._link, None
        if link is not None:
            self.selector.unregister(link.connection)
            link.connection.close()
        if self._unanswered is not None:
            self.adopt(self._unanswered[1])
        elif not self._has_hub_left and not self.is_released:
            self.adopt(fault)

    def report(self, fault: str, *, is_second_hand: bool = False) -> None:
        """Tell the hub, which answers with the world's first fault; without an answer this one is it."""
        if self._link is None:
            self.adopt(fault)
            return
        self._link.send({"fault": fault, "is_second_hand": is_second_hand})
        self._unanswered = (self.clock.now + LINGER_SECONDS + SECOND_HAND_SECONDS, fault)

    def watch_others(self) -> None:
        """Look whether the hub is there and answers."""
        if self._unanswered is not None and self.clock.now >= self._unanswered[0]:
            self.adopt(self._unanswered[1])
        elif self._link is not None and self.clock.now - self._link.heard_at > LOST_SECONDS and self.is_ready:
            self._lose(unreachable(0, self._link.place))

    def beat(self) -> None:
        """To the hub."""
        for link in self.links:
            link.send({"beat": asdict(self.worker.place)})

    def say_farewell(self) -> None:
        """The hub no longer waits for this rank."""
        for link in self.links:
            link.send({"bye": True})

    @property
    def is_done(self) -> bool:
        """A spoke stays for no one but its worker."""
        return self.is_released or super().is_done
