"""Observe the worker from its guardian."""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path

import psutil

from finetune.distributed.guardian.faults import STOPPED_SECONDS, Position
from finetune.distributed.guardian.link import Link, Message
from finetune.errors import Fault


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
        self._memory_kills = deque([_memory_kills()], maxlen=10)

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
        """Return the fault if the worker has failed, has ended, is stopped or has lost its launcher; None otherwise.

        Args:
            now: seconds since this guardian began to watch.
            is_beat: whether a heartbeat is due. Only then is the system asked for the worker's state.
        """
        if self.failure is not None:
            summary = f"failed during {self.position}"
        elif self.is_gone:  # nobody but its parent can see its exit code
            place = f"process {self._pid} on {socket.gethostname()}"
            summary = f"was killed during {self.position}: {place} ended without reporting an error"
            if _memory_kills() > self._memory_kills[0]:
                summary += "; the kernel's out-of-memory killer was at work on that machine just then"
        elif is_beat and (state := self._examine(now)) is not None:
            summary = state
        else:
            return None
        is_second_hand = self.failure is not None and self.position.waiting is not None
        text = f"rank {self._rank} {summary}"
        return Fault(rank=self._rank, summary=text, error=self.failure or "", is_second_hand=is_second_hand)

    def _examine(self, now: float) -> str | None:
        """Describe the worker if it is stopped or has lost its launcher."""
        self._memory_kills.append(_memory_kills())
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
        self._stopped_since = (self._stopped_since or now) if is_stopped else None
        if self._stopped_since is None or now - self._stopped_since < STOPPED_SECONDS:
            return None
        return f"is stopped (SIGSTOP) during {self.position}: its process is {self._pid} on {socket.gethostname()}"

    def kill(self) -> None:
        """Kill the worker. While it is the parent, its number cannot belong to another process."""
        if os.getppid() == self._pid:
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)


def _memory_kills() -> int:
    """Return how often this machine's kernel has killed a process for memory; 0 if the kernel does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
