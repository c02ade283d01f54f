"""Observe a worker, report its fault to the hub, and end it once the world has a fault."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from finetune.distributed.guardian.faults import (
    HEARTBEAT_SECONDS,
    KILL_SECONDS,
    LINGER_SECONDS,
    QUIT_SECONDS,
    SECOND_HAND_SECONDS,
    STOPPED_SECONDS,
    TICK_SECONDS,
    Position,
    line_of_fault,
    lost_rank,
)
from finetune.distributed.guardian.hub import Hub
from finetune.distributed.guardian.link import Link, Message, Peer
from finetune.errors import Fault, FinetuneError, RunFailedError
from finetune.main_memory import memory_kills
from finetune.runs.killed import killed_since


class Worker(Link):
    """The process that started this guardian, and that the guardian watches over."""

    def __init__(self, settings: Message) -> None:
        super().__init__(reader=0, writer=1)
        self.position = Position()
        self.failure: str | None = None
        """Its error in one line, once it has reported one."""
        self.has_said_bye = False
        self.is_gone = False
        self._rank: int = settings["rank"]
        self._pid: int = settings["worker_pid"]
        self._launcher_pid: int | None = settings["launcher_pid"]
        self._moved_at = 0.0
        self._stopped_since: float | None = None
        self._is_alone = settings["world_size"] == 1
        self._memory_kills = deque([memory_kills()], maxlen=10)
        self._quit_at: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the worker was stopped when it was examined last, so that it cannot leave."""
        return self._stopped_since is not None

    def read(self, now: float) -> None:
        """Check whether the worker has ended, and take the messages that it has sent."""
        # The kernel then reparents this process, even if the worker is a zombie. Its last words are in the pipe.
        self.is_gone = os.getppid() != self._pid
        with suppress(EOFError):
            for message in self.receive():
                if "position" in message:
                    position = Position(**message["position"])
                    if position.moves != self.position.moves:
                        self._moved_at = now
                    self.position = position
                self.failure = self.failure or message.get("failure")
                self.has_said_bye = self.has_said_bye or "bye" in message
        self.position.age = now - self._moved_at

    def find_fault(self, now: float, *, is_beat: bool) -> Fault | None:
        """Return the fault if the worker has failed, has ended, is stopped or has lost its launcher; None otherwise."""
        if self.failure is not None:
            summary = f"failed during {self.position}"
        elif self.is_gone:  # nobody but its parent can see its exit code
            place = f"process {self._pid} on {socket.gethostname()}"
            summary = f"was killed during {self.position}: {place} ended without reporting an error"
            if killed_since(self._memory_kills[0]):
                summary += "; the kernel's out-of-memory killer was at work on that machine just then"
        elif self.position.limit is not None and self.position.age > self.position.limit:
            return Fault(rank=self._rank, summary=self.position.late)
        elif is_beat and (state := self._examine(now)) is not None:
            summary = state
        else:
            return None
        is_second_hand = self.failure is not None and self.position.waiting is not None
        text = f"rank {self._rank} {summary}"
        return Fault(rank=self._rank, summary=text, error=self.failure or "", is_second_hand=is_second_hand)

    def _examine(self, now: float) -> str | None:
        """Describe the worker if it is stopped or has lost its launcher."""
        self._memory_kills.append(memory_kills())
        try:
            worker = psutil.Process(self._pid)
            is_stopped = worker.status() == psutil.STATUS_STOPPED
            if self._launcher_pid is not None:
                if worker.ppid() != self._launcher_pid:
                    return f"lost its launcher, process {self._launcher_pid}, during {self.position}"
                # The whole job may be stopped on purpose (Ctrl-Z), to continue later.
                is_stopped = is_stopped and psutil.Process(self._launcher_pid).status() != psutil.STATUS_STOPPED
        except psutil.Error:
            return None
        if is_stopped and self._is_alone:  # nobody waits for it, and its deadlines begin anew
            self._moved_at = now
            return None
        self._stopped_since = (self._stopped_since or now) if is_stopped else None
        if self._stopped_since is None or now - self._stopped_since < STOPPED_SECONDS:
            return None
        return f"is stopped (SIGSTOP) during {self.position}: its process is {self._pid} on {socket.gethostname()}"

    def kill(self, now: float) -> None:
        """End the worker: with exit code 3, or by force if it is stopped or still there after `QUIT_SECONDS`."""
        if os.getppid() != self._pid:  # only while it is the parent, its number cannot belong to another process
            return
        with suppress(OSError):
            if self.is_stopped or (self._quit_at is not None and now - self._quit_at >= QUIT_SECONDS):
                os.kill(self._pid, signal.SIGKILL)
            elif self._quit_at is None:
                self._quit_at = now
                os.kill(self._pid, signal.SIGQUIT)


class Guardian:
    """The guardian of one worker. Rank 0's guardian also runs the hub."""

    def __init__(self, settings: Message, link: Peer, hub: Hub | None) -> None:
        self._worker = Worker(settings)
        self._hub = hub
        self._link = link
        self._now = 0.0
        """The seconds in which this process ran. Time in which a job or laptop was suspended does not count."""
        self._seen_at = time.monotonic()
        self._beat_at = 0.0
        self._reported: Fault | None = None
        """The fault that this guardian has sent to the hub."""
        self._reported_at = 0.0
        self._fault: Fault | None = None
        """The fault with which this rank ends."""
        self._fault_at = 0.0
        self._is_ready = False
        """All guardians are connected."""
        self._is_released = False
        """The worker has left before any fault."""
        self._has_rank_0_left = False
        self._is_alone = False
        """The hub is lost."""

    def run(self) -> None:
        """Watch until there is nothing left to watch."""
        while not self._is_done:
            time.sleep(TICK_SECONDS)
            self._turn()
        self._leave()

    @property
    def _is_done(self) -> bool:
        if self._fault is not None:
            return self._is_released or self._worker.is_gone
        return self._is_released and (self._hub is None or not self._hub.peers or self._hub.fault is not None)

    def _turn(self) -> None:
        seen_at = time.monotonic()
        self._now += min(seen_at - self._seen_at, 1.0)
        self._seen_at = seen_at
        if is_beat := self._now - self._beat_at >= HEARTBEAT_SECONDS:
            self._beat_at = self._now
        self._worker.read(self._now)
        if is_beat:
            self._link.send({"position": asdict(self._worker.position)})
        if self._hub is not None:
            self._hub.turn(self._now, is_beat=is_beat)
        self._hear_hub()
        self._watch_worker(is_beat)
        self._link.send()
        self._worker.send()
        if self._fault is not None and not self._is_released and self._now - self._fault_at >= KILL_SECONDS:
            self._worker.kill(self._now)

    def _hear_hub(self) -> None:
        """Take the messages of the hub. Without a hub, this rank continues if rank 0 has left without a fault."""
        for message in self._link.hear(self._now):
            self._has_rank_0_left = self._has_rank_0_left or "left" in message
            if "ready" in message:
                self._is_ready = True
                self._worker.send({"ready": True})
            if "fault" in message:
                self._adopt(message["fault"])
        if not self._is_alone and (self._link.end is not None or self._link.is_silent(self._now)):
            self._is_alone = True
            if self._reported is None and not self._has_rank_0_left and not self._is_released:
                self._adopt(lost_rank(0, self._link.position, self._link.end))
        patience = 0.0 if self._is_alone else LINGER_SECONDS + SECOND_HAND_SECONDS
        if self._reported is not None and self._now - self._reported_at > patience:
            self._adopt(self._reported)

    def _watch_worker(self, is_beat: bool) -> None:
        worker = self._worker
        if self._is_released or self._fault is not None or self._reported is not None:
            return
        if worker.has_said_bye and worker.failure is None:
            self._release()
            return
        self._reported = worker.find_fault(self._now, is_beat=is_beat)
        if self._reported is not None:
            self._reported_at = self._now
            self._link.send({"fault": asdict(self._reported)})

    def _release(self) -> None:
        """Let the worker go in peace, once the others know it."""
        self._is_released = True
        self._link.send({"bye": True})
        if self._hub is not None:
            self._hub.turn(self._now, is_beat=False)
        # The end of its pipe tells the worker. Whoever captures the worker's stderr waits for the end of all copies.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)

    def _adopt(self, fault: Fault) -> None:
        """Take a fault as the world's first one, and end this rank with it."""
        if self._fault is not None:
            return
        self._fault, self._fault_at = fault, self._now
        if self._is_released:
            return
        self._worker.send({"fault": asdict(fault)})
        if not self._is_ready:  # the worker has trained nothing yet, and raises the fault
            self._is_released = True
        elif self._worker.is_stopped:
            self._worker.kill(self._now)

    def _leave(self) -> None:
        """Print the last line for a worker that could not, and let the last messages arrive."""
        peers = [self._link, *(self._hub.peers.values() if self._hub is not None else ())]
        for peer in peers:
            peer.send()
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        if self._fault is not None and not self._is_released:
            self._worker.read(self._now)
            if self._worker.position.record and not self._worker.has_said_bye:
                from finetune.runs.record import RunRecord

                with suppress(FinetuneError):
                    RunRecord(Path(self._worker.position.record)).fail(f"{RunFailedError.__name__}: {self._fault}")
            # Not if the reader of stderr has stopped reading.
            if not self._worker.has_said_bye and select.select([], [2], [], LINGER_SECONDS)[1]:
                with suppress(OSError):
                    os.write(2, line_of_fault(self._fault).encode(errors="replace")[:4096])
        # A connection closed with something unread is reset, and the other side would lose the last message.
        end = time.monotonic() + LINGER_SECONDS
        while any(peer.end is None for peer in peers) and time.monotonic() < end:
            time.sleep(TICK_SECONDS)
            for peer in peers:
                peer.hear(self._now)
