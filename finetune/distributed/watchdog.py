"""End every rank within seconds if one rank fails, is killed, stopped, hung or cut off, and name that rank.

torch leaves the other ranks waiting in a collective, for minutes or forever. So each rank starts a guardian process
(`guardian/`), which notices what a worker cannot notice of its own. This module is the worker's side. It reports where
the worker is, learns of the world's first fault, and ends this process if its main thread does not leave.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.distributed.guardian.faults import GRACE_SECONDS, START_SECONDS, Position, line_of_fault, lost_rank
from finetune.distributed.guardian.link import Message
from finetune.distributed.network import listening_address, own_addresses
from finetune.errors import Fault, LaunchError, RunFailedError

_PROGRAM = str(Path(__file__).with_name("guardian") / "__main__.py")
_ANSWER_SECONDS = 3 * START_SECONDS
_ANSWER_TO_FAILURE_SECONDS = 1.0
_SURELY_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
_LONGEST_FAILURE = 400
"""Characters. A line is written whole or not at all up to PIPE_BUF bytes, which is 512 on macOS."""


class Watchdog:
    """A rank's link to its own guardian, and so to the world's first fault.

    Args:
        rank: this rank.
        world_size: the number of ranks.
        master_addr: an address of rank 0 that every node reaches.
        launcher_pid: the parent that this process must not outlive; None in a plain run, which may outlive its shell.
        step_timeout_seconds: the longest time in one timed position; None: no limit.
        broadcast: returns rank 0's value (plain JSON) on every rank. Collective.
        last_words: called with the fault, in another thread, if the main thread does not leave. May raise.

    Collective: every rank makes one.

    Raises:
        LaunchError: the guardians of the ranks cannot start or cannot reach each other.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        master_addr: str,
        launcher_pid: int | None = None,
        step_timeout_seconds: float | None = None,
        broadcast: Callable[[Any], Any],
        last_words: Callable[[Fault], None],
    ) -> None:
        self._rank = rank
        self._pid = os.getpid()
        self._last_words = last_words
        self._position = Position()
        self._fault: Fault | None = None
        self._failure: str | None = None
        """This rank's own error, in one line."""
        self._has_fault = threading.Event()
        self._closed = threading.Event()
        self._released = threading.Event()
        self._guardian: subprocess.Popen[bytes] | None = None
        settings = {
            "rank": rank,
            "world_size": world_size,
            "worker_pid": self._pid,
            "launcher_pid": launcher_pid,
            "step_timeout_seconds": step_timeout_seconds,
            "listen": listening_address(master_addr) if rank == 0 else None,
        }
        try:
            self._connect(settings, master_addr, broadcast)
        except BaseException:
            self._closed.set()
            if self._guardian is not None and self._guardian.stdin is not None:
                self._guardian.stdin.close()
                with suppress(subprocess.TimeoutExpired):  # rank 0's guardian may be telling others why
                    self._guardian.wait(_CLOSE_SECONDS)
                self._guardian.kill()
            raise
        if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):  # a job in the background ignores it
            # The C library calls `_exit` with the signal's number, which is 3, even while a C call holds Python's lock.
            ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.CDLL(None)._exit)
        threading.Thread(target=self._listen, name="watchdog", daemon=True).start()

    def enter_phase(self, phase: str, step: int | None = None, *, timed: bool = True) -> None:
        """Report where this rank is, see `Liveness.enter_phase`. Takes a few microseconds."""
        self._move_to(Position(phase, step, timed, moves=self._position.moves + 1))

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Run a block in which this rank waits for others. On a timeout, a rank that is not waiting is blamed.

        After an error this rank still counts as waiting: another one may be the cause.
        """
        before = self._position.waiting
        self._move_to(replace(self._position, waiting=collective))
        yield
        self._move_to(replace(self._position, waiting=before))

    @contextmanager
    def deadline(self, seconds: float, late: str, record: str) -> Iterator[None]:
        """Run a block that is the fault `late` if it takes longer, see `Liveness.deadline`."""
        before, moves = self._position, self._position.moves
        self._move_to(replace(before, limit=seconds, late=late, record=record, moves=moves + 1), surely=True)
        try:
            yield
        finally:
            self._move_to(replace(before, moves=moves + 2), surely=True)

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
        self._tell({"bye": True}, surely=True)
        if self._failure is None and self._fault is None:
            self._released.wait(_CLOSE_SECONDS)

    @property
    def _is_here(self) -> bool:
        """False in a forked child, which must not speak for its parent."""
        return os.getpid() == self._pid

    def _move_to(self, position: Position, *, surely: bool = False) -> None:
        self._position = position
        self._tell({"position": vars(position)}, surely=surely)

    def _connect(self, settings: Message, master_addr: str, broadcast: Callable[[Any], Any]) -> None:
        """Start the guardian and connect it with the others. Call `broadcast` even if something fails here."""
        place, problem = {}, ""
        try:
            self._guardian = _start_guardian(settings)
            if self._rank == 0:
                place = {"addresses": own_addresses(master_addr), **self._answer()}
        except LaunchError as error:
            problem = str(error)
        place, problem_of_rank_0 = broadcast([place, problem])
        if problem or problem_of_rank_0:
            raise LaunchError(problem or f"rank 0 has no guardian: {problem_of_rank_0}")
        self._tell(place, surely=True)
        self._answer()  # ready

    def _answer(self) -> Message:
        """Return the guardian's next answer while it starts.

        Raises:
            LaunchError: it reports a fault, or is silent.
        """
        stdout = self._guardian.stdout if self._guardian is not None else None
        line = b""
        if stdout is not None:
            answers = select.poll()
            answers.register(stdout, select.POLLIN)
            line = stdout.readline() if answers.poll(1000 * _ANSWER_SECONDS) else b""
        if not line:
            problem = f"the guardian process of rank {self._rank} gives no answer"
            raise LaunchError(f"The ranks cannot watch over each other: {problem}")
        answer: Message = json.loads(line)
        if "fault" in answer:
            raise LaunchError(f"The ranks cannot watch over each other: {Fault(**answer['fault'])}")
        return answer

    def _tell(self, message: Message, *, surely: bool = False) -> None:
        """Write a line to the guardian; whole, and without waiting (a second at most if it must get through)."""
        process = self._guardian
        if process is None or process.stdin is None or not self._is_here or (self._closed.is_set() and not surely):
            return
        line = json.dumps(message).encode() + b"\n"
        end = time.monotonic() + _SURELY_SECONDS if surely else 0.0
        while line:
            try:
                line = line[os.write(process.stdin.fileno(), line) :]
            except BlockingIOError:  # the next position replaces one that is lost
                if not surely or time.monotonic() > end:
                    return
                time.sleep(0.01)
            except (OSError, ValueError):  # the guardian is gone, which the listener notices
                return

    def _listen(self) -> None:
        """Hear the guardian until it lets this worker go or is gone. Runs in the watchdog's thread."""
        process = self._guardian
        if process is None or process.stdin is None or process.stdout is None:
            return
        with process.stdin, process.stdout:
            for line in process.stdout:
                self._end_with(Fault(**json.loads(line)["fault"]))
        self._released.set()
        if not self._closed.is_set() and self._fault is None:
            self._end_with(lost_rank(self._rank, self._position, ""))
        process.wait()

    def _end_with(self, fault: Fault) -> None:
        """Let the main thread leave because the world has a fault, or end this process."""
        self._fault = fault
        self._has_fault.set()
        if self._closed.wait(GRACE_SECONDS):
            return
        with suppress(Exception):
            self._last_words(fault)
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(line_of_fault(fault))
            sys.stderr.flush()
            self._tell({"bye": True}, surely=True)
        os._exit(RunFailedError.exit_code)


def _start_guardian(settings: Message) -> subprocess.Popen[bytes]:
    """Start a guardian, with pipes that do not wait."""
    # If standard input, output or error is closed, a pipe could get its number, and prints would go into the pipe.
    # So open the null device until descriptors 0 to 2 are taken.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    try:
        guardian = subprocess.Popen(
            [sys.executable, "-P", _PROGRAM, json.dumps(settings)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(
            f"rank {settings['rank']} could not start its guardian process with {sys.executable}: {error}."
        ) from error
    if guardian.stdin is not None:
        os.set_blocking(guardian.stdin.fileno(), False)
    return guardian
