"""Rank 0's guardian: the others come to it, and it decides what the world's first fault was."""

from __future__ import annotations

import hmac
import selectors
import socket
from contextlib import suppress
from dataclasses import asdict

from finetune.distributed.guardian.faults import (
    REMEDY,
    Place,
    describe_late,
    lost_guardian,
    ranks_in_words,
    unreachable,
)
from finetune.distributed.guardian.guardian import Guardian, LivedClock
from finetune.distributed.guardian.limits import HELLO_SECONDS, LOST_SECONDS, MEET_SECONDS, SECOND_HAND_SECONDS
from finetune.distributed.guardian.link import Link, Message
from finetune.distributed.guardian.worker import Worker

_MOST_STRANGERS = 64


class Hub(Guardian):
    """Rank 0's guardian: all others are connected to it, and it decides which fault was the first."""

    def __init__(self, settings: Message, worker: Worker, clock: LivedClock) -> None:
        super().__init__(settings, worker, clock)
        self.peers: dict[int, Link] = {}
        self._strangers: list[Link] = []
        self._meeting_since: float | None = None
        self._second_hand: tuple[float, str] | None = None
        self._listener: socket.socket | None = _listen(only_here=settings["only_here"])
        self._listener.setblocking(False)
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        worker.tell({"listening": self._listener.getsockname()[1]})

    @property
    def links(self) -> list[Link]:
        """The connections of ranks that have not left."""
        return [link for link in self.peers.values() if not link.has_left]

    def meet(self) -> None:
        """Wait until all have come."""
        if self._meeting_since is None:
            self._meeting_since = self.clock.now
        missing = [rank for rank in range(1, self.settings["world_size"]) if rank not in self.peers]
        if missing and self.clock.now - self._meeting_since > MEET_SECONDS and self.fault is None:
            self.report(
                f"the watchdog of {ranks_in_words(missing)} did not reach the watchdog of rank 0 at "
                f"{_places(self.worker.meeting)} within {MEET_SECONDS:g} s. {REMEDY}"
            )
        if missing or self.fault is not None:
            return
        self.is_ready = True
        self._stop_listening()
        for link in self.links:
            link.send({"ready": True})
        self.worker.tell({"ready": True})

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for link in list(self._strangers):
            self._drop(link)

    def _accept(self) -> None:
        with suppress(OSError):
            while self._listener is not None:
                link = Link(self._listener.accept()[0], self.clock.now)
                if len(self._strangers) >= _MOST_STRANGERS + self.settings["world_size"]:
                    link.connection.close()
                    continue
                self._strangers.append(link)
                self.selector.register(link.connection, selectors.EVENT_READ, lambda link=link: self._hear(link))

    def _hear(self, link: Link) -> None:
        messages, is_end = link.receive()
        for message in messages:
            if link.rank is not None:
                self._take(link, message)
            elif not self._let_in(link, message):
                is_end = True
                break
        if is_end:
            self._drop(link)
            # An answered fault or a farewell comes before the end of the connection in good order.
            if link.rank is not None and not link.has_left:
                link.has_left = True
                self.report(lost_guardian(link.rank, link.place), is_second_hand=False)

    def _let_in(self, link: Link, message: Message) -> bool:
        rank, token = message.get("rank"), str(message.get("token"))
        if not hmac.compare_digest(token.encode(errors="surrogatepass"), self.settings["token"].encode()):
            return False
        if type(rank) is not int or not 0 < rank < self.settings["world_size"] or rank in self.peers:
            return False
        self._strangers.remove(link)
        link.welcome(rank)
        self.peers[rank] = link
        return True

    def _take(self, link: Link, message: Message) -> None:
        link.heard_at = self.clock.now
        if "beat" in message:
            link.place = Place.from_message(message["beat"])
        if "fault" in message:
            self.report(str(message["fault"]), is_second_hand=bool(message.get("is_second_hand")))
        if "bye" in message:
            link.has_left = True

    def _drop(self, link: Link) -> None:
        self.selector.unregister(link.connection)
        link.connection.close()
        if link in self._strangers:
            self._strangers.remove(link)

    def report(self, fault: str, *, is_second_hand: bool = False) -> None:
        """Make it the world's fault; one at second hand only if no other comes soon."""
        if not is_second_hand:
            self.adopt(fault)
        elif self._second_hand is None:
            self._second_hand = (self.clock.now + SECOND_HAND_SECONDS, fault)

    def adopt(self, fault: str) -> None:
        """As every guardian does, and all others are told."""
        if self.fault is None:
            super().adopt(fault)
            for link in self.links:
                link.send({"fault": self.fault})

    def watch_others(self) -> None:
        """Look for strangers that say nothing, ranks not heard of, and steps that take too long."""
        now = self.clock.now
        for stranger in [link for link in self._strangers if now - link.heard_at > HELLO_SECONDS]:
            self._drop(stranger)
        for link in self.links:
            if now - link.heard_at > LOST_SECONDS and link.rank is not None:
                self.report(unreachable(link.rank, link.place))
        if self._second_hand is not None and now >= self._second_hand[0]:
            self.adopt(self._second_hand[1])
        limit = self.settings["step_timeout"]
        if limit is not None and self.is_ready and self.fault is None:
            places = {link.rank: link.place for link in self.links if link.rank is not None}
            if not self.is_released:
                places[0] = self.worker.place
            late = describe_late(places, limit)
            if late is not None:
                self.report(late)

    def beat(self) -> None:
        """To every rank that is still there."""
        for link in self.links:
            link.send({"beat": asdict(self.worker.place), "left": self.is_released})

    def say_farewell(self) -> None:
        """Rank 0's worker is gone in peace; its guardian stays for the others."""
        self.beat()


def _places(meeting: Message | None) -> str:
    addresses = (meeting or {}).get("addresses", [])
    return f"{', '.join(addresses)} port {(meeting or {}).get('port')}"


def _listen(*, only_here: bool) -> socket.socket:
    """A socket at a free port, of this machine alone or of all its addresses."""
    if only_here:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # compiled in, but switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
