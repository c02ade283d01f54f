"""Observe the worker from its guardian."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path

import psutil

from finetune.distributed.guardian.faults import STOPPED_SECONDS, Position
from finetune.distributed.guardian.link import LineBuffer, Message

_READ_BYTES = 1 << 16


class Worker:
    """The process that started this guardian, and that the guardian watches over."""

    def __init__(self, settings: Message) -> None:
        self.pid: int = settings["worker_pid"]
        self.launcher_pid: int | None = settings["launcher_pid"]
        self.position = Position()
        self.failure: str | None = None
        """Its error in one line, once it has reported one."""
        self.has_said_bye = False
        self.has_said_last_line = False
        self.is_silent = False
        self.hub: Message | None = None
        """Where rank 0's guardian listens, and the token that it wants."""
        self.children: list[psutil.Process] = []
        self._lines = LineBuffer()
        self._moved_at = 0.0
        self._stopped_since: float | None = None
        self._memory_kills = deque([_memory_kills()], maxlen=10)
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):  # gone already: `is_gone` says so
            self._process = psutil.Process(self.pid)

    @property
    def is_gone(self) -> bool:
        """Whether the worker has ended: the kernel then reparents this process, even if the worker is a zombie."""
        return os.getppid() != self.pid

    def read(self, now: float) -> None:
        """Read what the worker has written."""
        try:
            while data := os.read(0, _READ_BYTES):
                for message in self._lines.feed(data):
                    self._take(message, now)
            self.is_silent = True
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self.is_silent = True

    def _take(self, message: Message, now: float) -> None:
        if "position" in message:
            position = Position(**message["position"])
            if position.moves != self.position.moves:
                self._moved_at = now
            self.position = position
        self.failure = self.failure or message.get("failure")
        self.hub = self.hub or message.get("hub")
        self.has_said_bye = self.has_said_bye or "bye" in message
        self.has_said_last_line = self.has_said_last_line or "spoken" in message

    def grow_older(self, now: float) -> None:
        """Count the time since it moved."""
        self.position.age = now - self._moved_at

    def tell(self, message: Message) -> None:
        """Send a message to the worker, unless it has closed the pipe."""
        with suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")

    def examine(self, now: float) -> str | None:
        """Describe the fault if the worker is stopped or has lost its launcher; None otherwise. Costs a system call."""
        self._memory_kills.append(_memory_kills())
        if self._process is None:
            return None
        try:
            is_stopped = self._process.status() == psutil.STATUS_STOPPED
            parent = self._process.ppid()
        except psutil.Error:
            return None
        self._stopped_since = (self._stopped_since or now) if is_stopped else None
        is_long = self._stopped_since is not None and now - self._stopped_since >= STOPPED_SECONDS
        if is_long and not self._is_launcher_stopped():
            return f"is stopped (SIGSTOP) during {self.position}: its process is {self.pid} on {socket.gethostname()}"
        if self.launcher_pid is not None and parent != self.launcher_pid and not self.is_gone:
            return f"lost its launcher, process {self.launcher_pid}, during {self.position}"
        return None

    def _is_launcher_stopped(self) -> bool:
        """Whether the whole job was stopped on purpose (Ctrl-Z), to go on later."""
        try:
            return self.launcher_pid is not None and psutil.Process(self.launcher_pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def describe_end(self) -> str:
        """Describe how the worker ended. A guardian cannot see the exit code of its own parent."""
        place = f"process {self.pid} on {socket.gethostname()}"
        hint = ""
        if _memory_kills() > self._memory_kills[0]:
            hint = "; the kernel's out-of-memory killer was at work on that machine just then"
        return f"was killed during {self.position}: {place} ended without reporting an error{hint}"

    @property
    def is_stopped(self) -> bool:
        """Whether the worker is stopped, so that it cannot leave."""
        return self._stopped_since is not None

    def note_children(self) -> None:
        """Remember who would be orphaned. A child in a session of its own (a tracker) is meant to outlive it."""
        if self._process is None or self.is_gone:
            return
        with suppress(psutil.Error, OSError):
            session = os.getsid(self.pid)
            self.children = [c for c in self._process.children(recursive=True) if _session_of(c) == session]

    def kill(self) -> None:
        """End it now. Only ever our parent: its number cannot have gone to another process."""
        if not self.is_gone:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def kill_orphans(self) -> None:
        """End the data loaders and the like that it left behind."""
        for child in self.children:
            with suppress(psutil.Error):
                child.kill()  # psutil checks that the number still belongs to the same process


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _memory_kills() -> int:
    """Return how often this machine's kernel has killed a process for memory; 0 if the kernel does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
