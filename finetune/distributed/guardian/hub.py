"""The hub in rank 0's guardian: it connects all guardians, and decides which fault was first."""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, replace

from finetune.distributed.guardian.faults import (
    HELLO_SECONDS,
    REMEDY,
    SECOND_HAND_SECONDS,
    START_SECONDS,
    describe_late,
    format_ranks,
    lost_guardian,
    unreachable,
)
from finetune.distributed.guardian.link import Message, Peer
from finetune.distributed.network import open_listener
from finetune.errors import Fault

_MOST_UNAUTHENTICATED = 64
_TOKEN_BYTES = 32
_HELLO_BYTES = _TOKEN_BYTES + 8


def hello(token: str, rank: int) -> bytes:
    """Return the first bytes that a guardian sends to the hub: the token and its rank."""
    return f"{token}{rank:08d}".encode()


class Hub:
    """All guardians are connected to it, rank 0's own by a pair of sockets.

    Attributes:
        token: a guardian must send it first.
        port: where the hub listens, until all guardians are connected.
        peers: the guardians of the ranks that have not left.
        fault: the first fault of the world.
    """

    def __init__(self, settings: Message) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.peers: dict[int, Peer] = {}
        self.fault: Fault | None = None
        self._world_size: int = settings["world_size"]
        self._step_timeout: float | None = settings["step_timeout_seconds"]
        self._listener: socket.socket | None = open_listener(settings["listen"])
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._place: Message = {}
        self._started_at = 0.0
        self._unauthenticated: dict[socket.socket, tuple[float, bytes]] = {}
        """When each was accepted, and the bytes that it has sent."""
        self._second_hand: tuple[float, Fault] | None = None

    def start(self, place: Message, now: float) -> Peer:
        """Expect the guardians from now on, and return rank 0's own connection to the hub."""
        near, far = socket.socketpair()
        self._place, self._started_at = place, now
        self.peers[0] = Peer(far, now)
        return Peer(near, now)

    def turn(self, now: float, *, is_second: bool) -> None:
        """Hear all guardians, and look for faults. Once a second, send a sign of life with rank 0's position."""
        if self._listener is not None:
            self._accept(self._listener, now)
        for rank, peer in list(self.peers.items()):
            self._hear(rank, peer, now)
        if self.fault is None:
            self._look_for_faults(now)
        if is_second:
            self._tell_all({"position": asdict(self.peers[0].position)} if 0 in self.peers else {})
        for peer in self.peers.values():
            peer.send()

    def _tell_all(self, message: Message) -> None:
        for peer in self.peers.values():
            peer.send(message)

    def _accept(self, listener: socket.socket, now: float) -> None:
        """Accept connections, drop the oldest if there are too many, and admit those that send the token."""
        with suppress(OSError):
            for _ in range(_MOST_UNAUTHENTICATED):
                connection, _ = listener.accept()
                connection.setblocking(False)
                self._unauthenticated[connection] = (now, b"")
        while len(self._unauthenticated) > _MOST_UNAUTHENTICATED + self._world_size:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.close()
        for connection in list(self._unauthenticated):
            accepted_at, received = self._unauthenticated.pop(connection)
            data: bytes | None
            try:
                data = connection.recv(_HELLO_BYTES - len(received))
            except BlockingIOError:
                data = None
            except OSError:
                data = b""
            received += data or b""
            if data != b"" and len(received) < _HELLO_BYTES and now - accepted_at <= HELLO_SECONDS:
                self._unauthenticated[connection] = (accepted_at, received)
            elif not self._admit(connection, received, now):
                connection.close()
        if len(self.peers) == self._world_size:
            self._listener = None
            for closed in (listener, *self._unauthenticated):
                closed.close()
            self._unauthenticated.clear()
            self._tell_all({"ready": True})

    def _admit(self, connection: socket.socket, received: bytes, now: float) -> bool:
        """Admit a guardian that has sent the token and a missing rank; return whether it was admitted."""
        token, rank = received[:_TOKEN_BYTES], received[_TOKEN_BYTES:]
        if not hmac.compare_digest(token, self.token.encode()) or not rank.isdigit():
            return False
        if not 0 < int(rank) < self._world_size or int(rank) in self.peers:
            return False
        self.peers[int(rank)] = Peer(connection, now)
        return True

    def _hear(self, rank: int, peer: Peer, now: float) -> None:
        for message in peer.hear(now):
            if "fault" in message:
                self._take_fault(message["fault"], now)
            if "bye" in message:
                self._part_with(rank)
                if rank == 0:
                    self._tell_all({"left": True})
                return
        if peer.end is not None:
            self._part_with(rank)
            self._take_fault(lost_guardian(rank, peer.position, peer.end), now)

    def _part_with(self, rank: int) -> None:
        self.peers.pop(rank).connection.close()

    def _take_fault(self, fault: Fault, now: float) -> None:
        """Make the fault the world's first one. A second-hand fault is taken only if no other one comes soon."""
        if fault.is_second_hand and self._second_hand is None:
            self._second_hand = (now + SECOND_HAND_SECONDS, fault)
        elif self.fault is None and not fault.is_second_hand:
            self.fault = fault
            self._tell_all({"fault": asdict(fault)})

    def _look_for_faults(self, now: float) -> None:
        """Find missing and silent guardians, steps that take too long, and a second-hand fault that is the only one."""
        if self._listener is not None and self._place and now - self._started_at > START_SECONDS:
            missing = [rank for rank in range(self._world_size) if rank not in self.peers]
            summary = (
                f"no guardian of {format_ranks(missing)} reached the guardian of rank 0 at "
                f"{', '.join(self._place['addresses'])} port {self.port} within {START_SECONDS:g} s. {REMEDY}"
            )
            self._take_fault(Fault(reporter="guardian", rank=None, summary=summary), now)
        for rank, peer in self.peers.items():
            if peer.is_silent(now):
                self._take_fault(unreachable(rank, peer.position), now)
        if self._step_timeout is not None and self._listener is None:
            late = describe_late({rank: peer.position for rank, peer in self.peers.items()}, self._step_timeout)
            if late is not None:
                self._take_fault(late, now)
        if self._second_hand is not None and now >= self._second_hand[0]:
            self._take_fault(replace(self._second_hand[1], is_second_hand=False), now)
