"""The hub in rank 0's guardian: it connects all guardians, and decides which fault was first."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, replace

from finetune.distributed.guardian.faults import (
    SECOND_HAND_SECONDS,
    START_SECONDS,
    TICK_SECONDS,
    describe_late,
    found_at_start,
    lost_rank,
)
from finetune.distributed.guardian.link import Message, Peer
from finetune.distributed.network import open_listener
from finetune.errors import Fault
from finetune.units import format_ranks

_CONNECT_SECONDS = 1.0
_HELLO_SECONDS = 5.0
_MOST_UNAUTHENTICATED = 64
_TOKEN_BYTES = 32
_HELLO_BYTES = _TOKEN_BYTES + 8


def hello(token: str, rank: int) -> bytes:
    """Return the first bytes that a guardian sends to the hub: the token and its rank."""
    return f"{token}{rank:08d}".encode()


def connect(place: Message, rank: int) -> Peer:
    """Return the connection to the hub once it has accepted this rank.

    Raises:
        ConnectionError: it did not accept this rank in time.
    """
    errors: dict[str, str] = {}
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        for address in place["addresses"]:
            try:
                connection = socket.create_connection((address, place["port"]), timeout=_CONNECT_SECONDS)
                connection.sendall(hello(place["token"], rank))
                connection.settimeout(_HELLO_SECONDS)
                if connection.recv(1):
                    return Peer(connection)
                raise ConnectionResetError
            except (ConnectionResetError, BrokenPipeError):  # it has too many others
                errors[address] = "it closed the connection before it accepted this rank"
            except OSError as error:
                errors[address] = str(error)
        time.sleep(TICK_SECONDS)
    tried = "; ".join(f"{address}: {error}" for address, error in errors.items())
    raise ConnectionError(
        f"rank {rank} could not reach the guardian of rank 0 at port {place['port']} within {START_SECONDS:g} s "
        f"({tried})"
    )


class Hub:
    """All guardians are connected to it, rank 0's own by a pair of sockets. Each sends the `token` first.

    `peers` are the guardians of the ranks that have not left, and `fault` is the first fault of the world.
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
        self._addresses: list[str] = []
        self._unauthenticated: dict[socket.socket, float] = {}
        """When each was accepted; the oldest first."""
        self._second_hand: tuple[float, Fault] | None = None

    def start(self, place: Message) -> Peer:
        """Return rank 0's own connection. From now on, the hub expects the others at the place."""
        near, far = socket.socketpair()
        self._addresses = place["addresses"]
        self.peers[0] = Peer(far)
        return Peer(near)

    def turn(self, now: float, *, is_beat: bool) -> None:
        """Hear all guardians, and look for faults. On a beat, send a sign of life with rank 0's position."""
        if self._listener is not None:
            self._accept(self._listener, now)
        for rank, peer in list(self.peers.items()):
            self._hear(rank, peer, now)
        if self.fault is None:
            self._look_for_faults(now)
        if is_beat:
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
                self._unauthenticated[connection] = now
        while len(self._unauthenticated) > _MOST_UNAUTHENTICATED + self._world_size:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.close()
        for connection, accepted_at in list(self._unauthenticated.items()):
            received = b""
            with suppress(OSError):
                received = connection.recv(_HELLO_BYTES, socket.MSG_PEEK)
            if len(received) == _HELLO_BYTES or now - accepted_at > _HELLO_SECONDS:
                del self._unauthenticated[connection]
                if not self._admit(connection, received, now):
                    connection.close()
        if len(self.peers) == self._world_size:
            self._listener = None
            for unneeded in (listener, *self._unauthenticated):
                unneeded.close()
            self._unauthenticated.clear()
            self._tell_all({"ready": True})

    def _admit(self, connection: socket.socket, received: bytes, now: float) -> bool:
        """Admit a guardian that has sent the token and a missing rank; return whether it was admitted."""
        token, digits = received[:_TOKEN_BYTES], received[_TOKEN_BYTES:]
        if not hmac.compare_digest(token, self.token.encode()) or not digits.isdigit():
            return False
        rank = int(digits)
        if rank in self.peers or not 0 < rank < self._world_size:
            return False
        with suppress(OSError):
            connection.recv(_HELLO_BYTES)
            connection.send(b"\n")
        self.peers[rank] = Peer(connection, now)
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
        if peer.end is not None or peer.is_silent(now):
            self._take_fault(lost_rank(rank, peer.position, peer.end), now)

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
        """Find missing guardians, steps that take too long, and a second-hand fault that is the only one."""
        if self._listener is not None and now > START_SECONDS:
            missing = [rank for rank in range(self._world_size) if rank not in self.peers]
            summary = (
                f"no guardian of {format_ranks(missing)} reached the guardian of rank 0 at "
                f"{', '.join(self._addresses)} port {self.port} within {START_SECONDS:g} s"
            )
            self._take_fault(found_at_start(summary), now)
        if self._step_timeout is not None:
            late = describe_late({rank: peer.position for rank, peer in self.peers.items()}, self._step_timeout)
            if late is not None:
                self._take_fault(late, now)
        if self._second_hand is not None and now >= self._second_hand[0]:
            self._take_fault(replace(self._second_hand[1], is_second_hand=False), now)
