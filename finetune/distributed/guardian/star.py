"""Connect the guardians: rank 0's is the hub, the others are spokes. The hub decides which fault was first."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import asdict

from finetune.distributed.guardian.faults import (
    CONNECT_SECONDS,
    HELLO_SECONDS,
    LINGER_SECONDS,
    LONGEST_WAIT,
    LOST_SECONDS,
    REMEDY,
    SECOND_HAND_SECONDS,
    START_SECONDS,
    describe_late,
    format_ranks,
    lost_guardian,
    unreachable,
)
from finetune.distributed.guardian.guardian import Guardian
from finetune.distributed.guardian.link import Link, Message
from finetune.distributed.network import open_listener
from finetune.errors import Fault

_MOST_UNAUTHENTICATED = 64


class Hub(Guardian):
    """Rank 0's guardian. All others connect to it."""

    def __init__(self, settings: Message) -> None:
        super().__init__(settings)
        self._peers: dict[int, Link] = {}
        self._unauthenticated: list[Link] = []
        self._second_hand: tuple[float, Fault] | None = None
        self._listener: socket.socket | None = open_listener(settings["listen"])
        self._listener.setblocking(False)
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.worker.tell({"listening": self._listener.getsockname()[1]})

    @property
    def _links(self) -> list[Link]:
        return [link for link in self._peers.values() if not link.has_left]

    def _connect(self, hub: Message, seconds: float) -> None:
        missing = [rank for rank in range(1, self.settings["world_size"]) if rank not in self._peers]
        if missing and seconds > START_SECONDS and self.fault is None:
            self._adopt(
                _failed_start(
                    f"no guardian of {format_ranks(missing)} reached the guardian of rank 0 at "
                    f"{', '.join(hub['addresses'])} port {hub['port']} within {START_SECONDS:g} s"
                )
            )
        if missing or self.fault is not None:
            return
        self.is_ready = True
        self._stop_listening()
        for link in self._links:
            link.send({"ready": True})
        self.worker.tell({"ready": True})

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for link in list(self._unauthenticated):
            self._drop(link)

    def _accept(self) -> None:
        """Accept some of the waiting connections. When there are too many without the token, drop the oldest ones."""
        with suppress(OSError):
            for _ in range(_MOST_UNAUTHENTICATED):
                if self._listener is None:
                    return
                link = Link(self._listener.accept()[0], self.clock.now)
                if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED + self.settings["world_size"]:
                    self._drop(self._unauthenticated[0])
                self._unauthenticated.append(link)
                self.selector.register(link.connection, selectors.EVENT_READ, lambda link=link: self._hear(link))

    def _hear(self, link: Link) -> None:
        if link.rank is None and link not in self._unauthenticated:
            return  # dropped in this very turn
        messages, is_end = link.receive()
        for message in messages:
            if link.rank is not None:
                self._take(link, message)
            elif not self._admit(link, message):
                is_end = True
                break
        if is_end:
            self._drop(link)
            # An answered fault or a bye comes before the end of the connection in good order.
            if link.rank is not None and not link.has_left:
                link.has_left = True
                self._report(lost_guardian(link.rank, link.position, link.garbage))

    def _admit(self, link: Link, message: Message) -> bool:
        """Accept a peer that has the token and a rank that is still missing; return whether it was accepted."""
        rank, token = message.get("rank"), str(message.get("token"))
        if not hmac.compare_digest(token.encode(errors="surrogatepass"), self.settings["token"].encode()):
            return False
        if type(rank) is not int or not 0 < rank < self.settings["world_size"] or rank in self._peers:
            return False
        self._unauthenticated.remove(link)
        link.admit(rank)
        self._peers[rank] = link
        return True

    def _take(self, link: Link, message: Message) -> None:
        link.heard_at = self.clock.now
        if "position" in message:
            link.position = message["position"]
        if "fault" in message:
            self._report(message["fault"])
        if "bye" in message:
            link.has_left = True

    def _drop(self, link: Link) -> None:
        self.selector.unregister(link.connection)
        link.connection.close()
        if link in self._unauthenticated:
            self._unauthenticated.remove(link)

    def _report(self, fault: Fault) -> None:
        """Adopt the fault. A second-hand fault is adopted only if no other one comes soon."""
        if not fault.is_second_hand:
            self._adopt(fault)
        elif self._second_hand is None:
            self._second_hand = (self.clock.now + SECOND_HAND_SECONDS, fault)

    def _adopt(self, fault: Fault) -> None:
        if self.fault is None:
            super()._adopt(fault)
            for link in self._links:
                link.send({"fault": asdict(fault)})

    def _watch_others(self) -> None:
        """Drop peers that do not authenticate, and find silent ranks and steps that take too long."""
        now = self.clock.now
        for peer in [link for link in self._unauthenticated if now - link.heard_at > HELLO_SECONDS]:
            self._drop(peer)
        for link in self._links:
            if now - link.heard_at > LOST_SECONDS and link.rank is not None:
                self._report(unreachable(link.rank, link.position))
        if self._second_hand is not None and now >= self._second_hand[0]:
            self._adopt(self._second_hand[1])
        limit = self.settings["step_timeout_seconds"]
        if limit is not None and self.is_ready and self.fault is None:
            positions = {link.rank: link.position for link in self._links if link.rank is not None}
            if not self.is_released:
                positions[0] = self.worker.position
            late = describe_late(positions, limit)
            if late is not None:
                self._report(late)

    def _beat(self) -> None:
        for link in self._links:
            link.send({"position": asdict(self.worker.position), "left": self.is_released})

    def _say_bye(self) -> None:
        """The guardian of rank 0 stays for the others."""
        self._beat()


class Spoke(Guardian):
    """The guardian of every other rank. It is connected to the hub alone."""

    def __init__(self, settings: Message) -> None:
        super().__init__(settings)
        self._link: Link | None = None
        self._tried: dict[str, OSError] = {}
        self._num_tries = 0
        self._is_accepted = False
        """The hub has answered, which it does only after it has seen the token."""
        self._has_hub_left = False
        self._unanswered: tuple[float, Fault] | None = None

    @property
    def _links(self) -> list[Link]:
        return [] if self._link is None or self._link.has_left else [self._link]

    def _connect(self, hub: Message, seconds: float) -> None:
        """Connect to the hub and show the token. The hub reports when all guardians are connected."""
        if self.fault is not None or self._is_reported:
            return
        if self._link is None:
            if seconds <= START_SECONDS:
                self._try_an_address(hub)
            else:
                tried = "; ".join(f"{address}: {error}" for address, error in self._tried.items())
                self._adopt(
                    _failed_start(
                        f"rank {self.rank} could not reach the guardian of rank 0 at port {hub['port']} within "
                        f"{START_SECONDS:g} s ({tried})"
                    )
                )
        elif seconds > 2 * START_SECONDS:
            self._adopt(_failed_start(f"rank {self.rank} heard nothing from the guardian of rank 0"))

    def _try_an_address(self, hub: Message) -> None:
        """Try one of the hub's addresses. Later turns try the others, because the worker expects signs of life."""
        addresses = hub["addresses"]
        address = addresses[self._num_tries % len(addresses)]
        self._num_tries += 1
        try:
            connection = socket.create_connection((address, hub["port"]), timeout=CONNECT_SECONDS)
        except OSError as error:
            self._tried[address] = error
            time.sleep(LONGEST_WAIT)
            return
        self._tried[address] = ConnectionError("it closed the connection before it accepted this rank")
        self._link = Link(connection, self.clock.now, rank=0)
        self._link.send({"token": hub["token"], "rank": self.rank})
        self.selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        link = self._link
        if link is None:
            return
        messages, is_end = link.receive()
        for message in messages:
            link.heard_at = self.clock.now
            self._is_accepted = True
            if "position" in message:
                link.position = message["position"]
                self._has_hub_left = "left" in message and message["left"]
            if "ready" in message:
                self.is_ready = True
                self.worker.tell({"ready": True})
            if "fault" in message:
                self._adopt(message["fault"])
        if is_end and self._is_accepted:
            self._lose(lost_guardian(0, link.position, link.garbage))
        elif is_end:  # too many other connections: `_connect` tries again
            self._close_link()

    def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self.selector.unregister(link.connection)
            link.connection.close()

    def _lose(self, fault: Fault) -> None:
        """Handle the loss of the hub. If rank 0 has left without a fault, this rank goes on without a hub."""
        self._close_link()
        if self._unanswered is not None:
            self._adopt(self._unanswered[1])
        elif not self._has_hub_left and not self.is_released:
            self._adopt(fault)

    def _report(self, fault: Fault) -> None:
        """Report the fault to the hub, which answers with the world's first fault. Without an answer, adopt it."""
        if self._link is None:
            self._adopt(fault)
            return
        self._link.send({"fault": asdict(fault)})
        self._unanswered = (self.clock.now + LINGER_SECONDS + SECOND_HAND_SECONDS, fault)

    def _watch_others(self) -> None:
        if self._unanswered is not None and self.clock.now >= self._unanswered[0]:
            self._adopt(self._unanswered[1])
        elif self._link is not None and self.clock.now - self._link.heard_at > LOST_SECONDS and self.is_ready:
            self._lose(unreachable(0, self._link.position))

    def _beat(self) -> None:
        for link in self._links:
            link.send({"position": asdict(self.worker.position)})

    def _say_bye(self) -> None:
        for link in self._links:
            link.send({"bye": True})

    @property
    def _is_done(self) -> bool:
        """A spoke stays for no one but its worker."""
        return self.is_released or super()._is_done


def _failed_start(summary: str) -> Fault:
    return Fault(reporter="guardian", rank=None, summary=f"{summary}. {REMEDY}")
