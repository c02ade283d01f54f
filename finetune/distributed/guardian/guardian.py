"""Watch over a worker, report its fault to the hub, and end it once the world has a fault."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import asdict

from finetune.distributed.guardian.faults import (
    CONNECT_SECONDS,
    HEARTBEAT_SECONDS,
    KILL_SECONDS,
    LINGER_SECONDS,
    REMEDY,
    SECOND_HAND_SECONDS,
    START_SECONDS,
    TICK_SECONDS,
    found_by_guardian,
    line_of_fault,
    lost_guardian,
    unreachable,
)
from finetune.distributed.guardian.hub import Hub, hello
from finetune.distributed.guardian.link import Message, Peer
from finetune.distributed.guardian.worker import Worker
from finetune.errors import Fault


class Guardian:
    """The guardian of one worker. Rank 0's guardian also runs the hub.

    Attributes:
        now: the seconds in which this process ran. Time in which a job or laptop was suspended does not count.
        link: the connection to the hub.
        fault: the fault with which this rank ends.
    """

    def __init__(self, settings: Message) -> None:
        self.rank: int = settings["rank"]
        self.worker = Worker(settings)
        self.hub = Hub(settings) if self.rank == 0 else None
        self.link: Peer | None = None
        self.now = 0.0
        self.fault: Fault | None = None
        self._fault_at = 0.0
        self._reported: Fault | None = None
        """The fault that this guardian has sent to the hub."""
        self._reported_at = 0.0
        self._is_ready = False
        """All guardians are connected."""
        self._is_accepted = False
        """The hub has answered, which it does only after it has seen the token."""
        self._is_released = False
        """The worker has left before any fault."""
        self._has_rank_0_left = False
        self._connect_since: float | None = None
        self._connect_errors: dict[str, OSError] = {}
        self._num_connects = 0
        self._seen_at = time.monotonic()
        self._beat_at = 0.0
        if self.hub is not None:
            self.worker.send({"port": self.hub.port, "token": self.hub.token})

    def run(self) -> None:
        """Watch until there is nothing left to watch."""
        while not self._is_done:
            time.sleep(TICK_SECONDS)
            self._turn()
        self._leave()

    @property
    def _is_done(self) -> bool:
        if self.fault is not None:
            return self._is_released or self.worker.is_gone
        return self._is_released and (self.hub is None or not self.hub.peers or self.hub.fault is not None)

    def _turn(self) -> None:
        seen_at = time.monotonic()
        self.now += min(seen_at - self._seen_at, 1.0)
        self._seen_at = seen_at
        if is_second := self.now - self._beat_at >= HEARTBEAT_SECONDS:
            self._beat_at = self.now
        self.worker.read(self.now)
        if self.link is None:
            self._connect()
        elif is_second:
            self.link.send({"position": asdict(self.worker.position)})
        if self.hub is not None:
            self.hub.turn(self.now, is_second=is_second)
        if self.link is not None:
            self._hear(self.link)
        self._watch_worker(is_second)
        for link in (self.link, self.worker):
            if link is not None:
                link.send()
        if self.fault is not None and not self._is_released and self.now - self._fault_at >= KILL_SECONDS:
            self.worker.kill()

    def _connect(self) -> None:
        """Try to connect to the hub at one of its addresses, and show the token. Later turns try the others."""
        place = self.worker.place
        if place is None or self._is_ready or self.fault is not None or self._reported is not None:
            return
        if self.hub is not None:
            self.link = self.hub.start(place, self.now)
            return
        self._connect_since = self.now if self._connect_since is None else self._connect_since
        if self.now - self._connect_since > START_SECONDS:
            tried = "; ".join(f"{address}: {error}" for address, error in self._connect_errors.items())
            summary = (
                f"rank {self.rank} could not reach the guardian of rank 0 at port {place['port']} within "
                f"{START_SECONDS:g} s ({tried}). {REMEDY}"
            )
            self._adopt(Fault(reporter="guardian", rank=None, summary=summary))
            return
        address = place["addresses"][self._num_connects % len(place["addresses"])]
        self._num_connects += 1
        try:
            connection = socket.create_connection((address, place["port"]), timeout=CONNECT_SECONDS)
            connection.sendall(hello(place["token"], self.rank))
        except OSError as error:
            self._connect_errors[address] = error
            return
        self._connect_errors[address] = ConnectionError("it closed the connection before it accepted this rank")
        self.link = Peer(connection, self.now)

    def _hear(self, link: Peer) -> None:
        """Take the messages of the hub, and find out whether it is lost."""
        for message in link.hear(self.now):
            self._is_accepted = True
            self._has_rank_0_left = self._has_rank_0_left or "left" in message
            if "ready" in message:
                self._is_ready = True
                self.worker.send({"ready": True})
            if "fault" in message:
                self._adopt(message["fault"])
        if link.end is not None and not self._is_accepted:  # the hub had too many connections: try again
            self._close_link(link)
        elif link.end is not None:
            self._lose_hub(link, lost_guardian(0, link.position, link.end))
        elif link.is_silent(self.now):
            self._lose_hub(link, unreachable(0, link.position))
        elif self._reported is not None and self.now - self._reported_at > LINGER_SECONDS + SECOND_HAND_SECONDS:
            self._adopt(self._reported)

    def _lose_hub(self, link: Peer, fault: Fault) -> None:
        """Handle the loss of the hub. If rank 0 has left without a fault, this rank continues without a hub."""
        self._close_link(link)
        if self._reported is not None:
            self._adopt(self._reported)
        elif not self._has_rank_0_left and not self._is_released:
            self._adopt(fault)

    def _close_link(self, link: Peer) -> None:
        link.connection.close()
        self.link = None

    def _watch_worker(self, is_second: bool) -> None:
        worker = self.worker
        if self._is_released or self.fault is not None or self._reported is not None:
            return
        if is_gone := worker.is_gone:
            worker.read(self.now)  # its last words may still be in the pipe
        if worker.failure is not None:
            fault = Fault(
                reporter="worker",
                rank=self.rank,
                summary=f"rank {self.rank} failed during {worker.position}",
                error=worker.failure,
                is_second_hand=worker.position.waiting is not None,
            )
        elif worker.has_said_bye:
            self._release()
            return
        elif is_gone:
            fault = found_by_guardian(self.rank, worker.describe_end())
        elif is_second and (trouble := worker.examine(self.now)) is not None:
            fault = found_by_guardian(self.rank, trouble)
        else:
            return
        self._reported, self._reported_at = fault, self.now
        if self.link is None:
            self._adopt(fault)
        else:
            self.link.send({"fault": asdict(fault)})

    def _release(self) -> None:
        """Let the worker go in peace, once the others know it."""
        self._is_released = True
        if self.link is not None:
            self.link.send({"bye": True})
        if self.hub is not None:
            self.hub.turn(self.now, is_second=False)
        # The end of its pipe tells the worker. Whoever captures the worker's stderr waits for the end of all copies.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)

    def _adopt(self, fault: Fault) -> None:
        """Take a fault as the world's first one, and end this rank with it."""
        if self.fault is not None:
            return
        self.fault, self._fault_at = fault, self.now
        if self._is_released:
            return
        self.worker.send({"fault": asdict(fault)})
        if not self._is_ready:  # the worker has trained nothing yet, and raises the fault
            self._is_released = True
        elif self.worker.is_stopped:
            self.worker.kill()

    def _leave(self) -> None:
        peers = list(self.hub.peers.values()) if self.hub is not None else [self.link] if self.link is not None else []
        for peer in peers:
            peer.send()
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        if self.fault is not None and not self._is_released:
            self.worker.read(self.now)
            # Not if its reader has stopped reading.
            if not self.worker.has_said_bye and select.select([], [2], [], LINGER_SECONDS)[1]:
                with suppress(OSError):
                    os.write(2, line_of_fault(self.fault).encode(errors="replace")[:4096])
        # A connection closed with something unread is reset, and the other side would lose the last message.
        end = time.monotonic() + LINGER_SECONDS
        while peers and time.monotonic() < end:
            time.sleep(TICK_SECONDS)
            for peer in peers:
                peer.hear(self.now)
            peers = [peer for peer in peers if peer.end is None]
