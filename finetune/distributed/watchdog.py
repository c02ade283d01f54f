"""End every rank within seconds if one rank fails, is killed, stopped, hung or cut off, and name that rank.

torch leaves the other ranks waiting in a collective, for minutes or forever. So each rank starts a guardian process
(`guardian/`), which notices what a worker cannot notice of its own. This module is the worker's side. It reports where
the worker is, learns of the world's first fault, and ends this process if its main thread does not leave.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune.distributed.guardian.faults import (
    GRACE_SECONDS,
    SILENT_SECONDS,
    START_SECONDS,
    Position,
    line_of_fault,
    lost_guardian,
)
from finetune.distributed.guardian.link import LineBuffer, Message, occupy_standard_streams
from finetune.distributed.network import listening_address, own_addresses
from finetune.errors import Fault, LaunchError, RunFailedError
from finetune.signals import after_fork_in_child

_PROGRAM = str(Path(__file__).with_name("guardian") / "__main__.py")
_ANSWER_SECONDS = 2 * START_SECONDS + 5.0
_ANSWER_TO_FAILURE_SECONDS = 1.0
_SURELY_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
_LAST_WORDS_SECONDS = 2.0
_LONGEST_FAILURE = 400
"""Characters. A line is written whole or not at all up to PIPE_BUF bytes, which is 512 on macOS."""


@dataclass(frozen=True, kw_only=True)
class WatchedRank:
    """The rank to watch, and the limits for it."""

    rank: int
    world_size: int
    master_addr: str
    """An address of rank 0 that every node reaches."""
    launcher_pid: int | None = None
    """The parent that this process must not outlive; None in a plain run, which may outlive its shell."""
    step_timeout_seconds: float | None = None
    """The longest time in one timed position; None: no limit."""


class Watchdog:
    """A rank's link to its own guardian, and so to the world's first fault.

    Args:
        watched: this rank.
        broadcast: returns rank 0's value (plain JSON) on every rank. Collective.
        last_words: called with the fault if the main thread does not leave. It runs in a thread of its own, for two
            seconds at most, and its exceptions are lost.

    Collective: every rank makes one.

    Raises:
        LaunchError: the guardians of the ranks cannot start or cannot reach each other.
    """

    def __init__(
        self,
        watched: WatchedRank,
        broadcast: Callable[[Any], Any],
        last_words: Callable[[Fault], None],
    ) -> None:
        self._rank = watched.rank
        self._pid = os.getpid()
        self._last_words = last_words
        self._position = Position()
        self._fault: Fault | None = None
        self._failure: str | None = None
        """This rank's own error, in one line."""
        self._is_ready = False
        self._has_fault = threading.Event()
        self._closed = threading.Event()
        self._released = threading.Event()
        self._is_guardian_staying = False
        self._answers: queue.SimpleQueue[Message | Fault] = queue.SimpleQueue()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._listener = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        try:
            self._connect_guardians(watched, broadcast)
        except BaseException:
            self.close()
            raise

    def enter_phase(self, phase: str, step: int | None = None, *, timed: bool = True) -> None:
        """Report where this rank is, see `Liveness.enter_phase`. Takes a few microseconds."""
        self._move_to(Position(phase, step, timed, moves=self._position.moves + 1))

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Run a block that waits for other ranks: if it lasts too long, they are to blame and not this rank.

        After an error this rank still counts as waiting: another one may be the cause.
        """
        before = self._position.waiting
        self._move_to(replace(self._position, waiting=collective))
        yield
        self._move_to(replace(self._position, waiting=before))

    @property
    def whereabouts(self) -> str:
        """This rank and its position, as a message names it."""
        return f"rank {self._rank}, during {self._position}"

    def first_fault(self, wait_seconds: float) -> Fault | None:
        """Return the world's first fault; None if this rank does not learn of one in time."""
        if self._is_here and not self._closed.is_set():
            self._has_fault.wait(wait_seconds)
        return self._fault

    def fail(self, error: str) -> None:
        """Report to the world that this rank failed, and why. The caller must leave within `GRACE_SECONDS`."""
        if self._failure is not None or self._closed.is_set():
            return
        line = " ".join(error.split())
        self._failure = line if len(line) <= _LONGEST_FAILURE else line[: _LONGEST_FAILURE - 1] + "…"
        self._tell({"failure": self._failure}, surely=True)

    @property
    def is_reported_elsewhere(self) -> bool:
        """Whether another rank failed first, with the very error that this one gave to `fail`."""
        fault = self.first_fault(_ANSWER_TO_FAILURE_SECONDS) if self._failure is not None else None
        return fault is not None and fault.rank != self._rank and fault.error == self._failure

    def close(self) -> None:
        """Leave the watched world in peace. Safe to call twice; never raises.

        After a fault the guardian stays until this process is gone, and kills it if that takes too long.
        """
        if not self._is_here or self._closed.is_set():
            return
        self._closed.set()
        if self._guardian is None:
            return
        self._tell({"bye": True}, surely=True)
        if self._failure is None and self._fault is None:
            self._released.wait(_CLOSE_SECONDS)
        with suppress(OSError):
            if self._guardian.stdin is not None:
                self._guardian.stdin.close()
        is_leaving = self._released.is_set() and not self._is_guardian_staying
        if is_leaving and threading.current_thread() is not self._listener:
            self._listener.join(_CLOSE_SECONDS)

    @property
    def _is_here(self) -> bool:
        """False in a forked child, which must not speak for its parent."""
        return os.getpid() == self._pid

    def _move_to(self, position: Position) -> None:
        self._position = position
        self._tell({"position": vars(position)})

    def _connect_guardians(self, watched: WatchedRank, broadcast: Callable[[Any], Any]) -> None:
        """Start the guardian and connect it with the others. Call `broadcast` even if something fails here."""
        problem: LaunchError | None = None
        hub: Any = None
        try:
            hub = self._start_guardian(watched)
        except LaunchError as error:
            problem = error
        hub = broadcast(hub if problem is None else {"problem": str(problem)})
        if problem is not None:
            raise problem
        if "problem" in hub:
            raise LaunchError(f"rank 0 has no guardian: {hub['problem']}")
        self._tell({"hub": hub}, surely=True)
        self._answer()  # ready
        self._is_ready = True

    def _start_guardian(self, watched: WatchedRank) -> Message | None:
        """Start the guardian. On rank 0, return where it listens and the token that it asks for."""
        token = secrets.token_hex(16)
        listen = listening_address(watched.master_addr) if watched.rank == 0 else None
        settings = {**asdict(watched), "worker_pid": self._pid, "token": token, "listen": listen}
        occupy_standard_streams()
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-P", _PROGRAM],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"rank {watched.rank} could not start its guardian process with {sys.executable}: {error}."
            ) from error
        if self._guardian.stdin is not None:
            os.set_blocking(self._guardian.stdin.fileno(), False)
        _open.add(self)
        self._listener.start()
        self._tell(settings, surely=True)
        if watched.rank != 0:
            return None
        port = self._answer()["listening"]
        return {"addresses": own_addresses(watched.master_addr), "port": port, "token": token}

    def _answer(self) -> Message:
        """Return the guardian's next answer while it starts.

        Raises:
            LaunchError: it reports a fault or is silent.
        """
        answer: Message | Fault | str
        try:
            answer = self._answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            answer = f"the guardian process of rank {self._rank} gives no answer"
        if not isinstance(answer, dict):
            raise LaunchError(f"The ranks cannot watch over each other: {answer}")
        return answer

    def _tell(self, message: Message, *, surely: bool = False) -> None:
        """Write a line to the guardian; whole, and without waiting (a second at most if it must get through)."""
        process = self._guardian
        if process is None or process.stdin is None or not self._is_here:
            return
        if self._closed.is_set() and not surely:
            return
        line = json.dumps(message).encode() + b"\n"
        end = time.monotonic() + _SURELY_SECONDS if surely else 0.0
        while True:
            try:
                line = line[os.write(process.stdin.fileno(), line) :]
                if not line:
                    return
            except BlockingIOError:  # the next position replaces one that is lost
                if not surely or time.monotonic() > end:
                    return
                time.sleep(0.01)
            except (OSError, ValueError):  # the guardian is gone, which the listener notices, or this end is closed
                return

    def _listen(self) -> None:
        """The watchdog's thread: from the guardian's first line until it is gone."""
        process = self._guardian
        if process is None:
            return
        for message in self._messages():
            if "released" in message:
                self._is_guardian_staying = message["is_staying"]
                self._released.set()
            elif "fault" in message:
                self._end_with(Fault(**message["fault"]))
            elif "beat" not in message:
                self._answers.put(message)
        if not self._closed.is_set() and self._fault is None:
            process.kill()  # stopped, perhaps
            self._end_with(lost_guardian(self._rank, self._position))
        process.wait()

    def _messages(self) -> Iterator[Message]:
        """Read the guardian's messages until it is gone or silent for too long.

        The silence is counted in waits of a second: this process may itself have been stopped, or busy in C.
        """
        stdout = self._guardian.stdout if self._guardian is not None else None
        if stdout is None:
            return
        lines = LineBuffer()
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        silent_seconds = 0
        with stdout:
            while silent_seconds < SILENT_SECONDS or self._released.is_set():
                if not poll.poll(1000):
                    silent_seconds += 1
                    continue
                silent_seconds = 0
                data = os.read(stdout.fileno(), 1 << 16)
                if not data:
                    return
                yield from lines.feed(data)

    def _end_with(self, fault: Fault) -> None:
        """Let the main thread leave because the world has a fault, or end this process."""
        self._fault = fault
        self._has_fault.set()
        self._answers.put(fault)
        if not self._is_ready or self._closed.wait(GRACE_SECONDS):
            return
        speaker = threading.Thread(target=self._say_last_words, args=(fault,), name="last-words", daemon=True)
        with suppress(RuntimeError):  # no thread starts any more once the interpreter ends
            speaker.start()
            speaker.join(_LAST_WORDS_SECONDS)
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(line_of_fault(fault))
            sys.stderr.flush()
            self._tell({"spoken": True}, surely=True)
        os._exit(RunFailedError.exit_code)

    def _say_last_words(self, fault: Fault) -> None:
        with suppress(Exception):
            self._last_words(fault)

    def _forget(self) -> None:
        """Close a forked child's copies of the pipes: the guardian waits for the end of the last one."""
        process = self._guardian
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        process.returncode = 0  # not this process's child


_open: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _forget_guardians_of_parent() -> None:
    for watchdog in list(_open):
        watchdog._forget()


after_fork_in_child(_forget_guardians_of_parent)
