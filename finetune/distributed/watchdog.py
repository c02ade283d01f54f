"""When one rank fails, is killed, stopped, hung or cut off, every rank ends within seconds, and says which one it was.

torch alone leaves the others waiting in a collective, for minutes or forever. Each rank starts a guardian process
(`guardian/`) that sees what a worker cannot see of itself. This module is the worker's side: it says where the worker
is, hears of the world's first fault, and ends this process if it does not leave by itself.
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
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.distributed.guardian.faults import Place, last_line, lost_guardian
from finetune.distributed.guardian.limits import GRACE_SECONDS, LOST_SECONDS, MEET_SECONDS
from finetune.distributed.guardian.link import LineBuffer, occupy_standard_streams
from finetune.distributed.network import is_loopback, own_addresses
from finetune.errors import LaunchError, RunFailedError

_PROGRAM = str(Path(__file__).with_name("guardian") / "__main__.py")
_ANSWER_SECONDS = 2 * MEET_SECONDS + 5.0
_ANSWER_TO_FAULT_SECONDS = 1.0
_SURELY_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
_LAST_WORDS_SECONDS = 2.0
_LONGEST_FAULT = 400
"""Characters. A line is written whole or not at all up to PIPE_BUF bytes, which is 512 on macOS."""


@dataclass(frozen=True, kw_only=True)
class WatchedRank:
    """Who is watched, and what counts as a fault."""

    rank: int
    world_size: int
    master_addr: str
    """An address of rank 0 that every node reaches."""
    launcher_pid: int | None = None
    """The parent that this process must not outlive; None in a plain run, which may outlive its shell."""
    step_timeout: timedelta | None = None
    """The longest time in one timed place; None: no limit."""


class Watchdog:
    """A rank's own guardian, and the world's first fault.

    Args:
        watched: this rank.
        share: hands rank 0's value (plain JSON) to every rank. Collective.
        last_words: called with the fault when this process has not left by itself; for two seconds at most, in a
            thread of its own. What it raises is lost.

    Collective: every rank makes one.

    Raises:
        LaunchError: the guardians of the ranks cannot start or cannot reach each other.
    """

    def __init__(
        self,
        watched: WatchedRank,
        share: Callable[[Any], Any],
        last_words: Callable[[str], None] | None = None,
    ) -> None:
        self._rank = watched.rank
        self._pid = os.getpid()
        self._last_words = last_words
        self._place: dict[str, Any] = {"phase": "set-up", "step": None, "timed": False, "waiting": None, "moves": 0}
        self._fault: str | None = None
        self._has_failed = False
        self._own_words = ""
        self._is_met = False
        self._heard = threading.Event()
        self._closed = threading.Event()
        self._released = threading.Event()
        self._is_guardian_staying = False
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._listener = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        try:
            self._meet(watched, share)
        except BaseException:
            self.close()
            raise

    def at(self, phase: str, step: int | None = None, *, timed: bool = True) -> None:
        """Say where this rank is: a few microseconds.

        Args:
            phase: as a fault names it, for example ``training``.
            step: the optimizer step, where there is one.
            timed: whether the step timeout counts here. Each call starts it anew.
        """
        place = self._place
        self._place = {"phase": phase, "step": step, "timed": timed, "waiting": None, "moves": place["moves"] + 1}
        self._tell(self._place)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A block that waits for other ranks: not its own rank is to blame if it lasts too long.

        Args:
            what: the collective, as a fault names it.
        """
        return _Waiting(self, what)

    @property
    def whereabouts(self) -> str:
        """This rank and where it is, in words."""
        return f"rank {self._rank}, during {Place(phase=self._place['phase'], step=self._place['step'])}"

    def reason(self, wait_seconds: float) -> str | None:
        """The world's first fault; None if no word of one comes in time.

        Args:
            wait_seconds: how long to wait for the word.
        """
        if self._is_here and not self._closed.is_set():
            self._heard.wait(wait_seconds)
        return self._fault

    def fail(self, text: str) -> None:
        """Tell the world that this rank failed. The caller leaves by itself, within `GRACE_SECONDS`.

        Args:
            text: the error in a line; rank, phase and step are put before it.
        """
        if self._has_failed or self._closed.is_set():
            return
        self._has_failed = True
        line = " ".join(text.split())
        short = line if len(line) <= _LONGEST_FAULT else line[: _LONGEST_FAULT - 1] + "…"
        self._own_words = short
        self._tell({"fault": short}, surely=True)

    @property
    def is_said_by_another(self) -> bool:
        """Whether the world's first fault is another rank's, in the words that this one gave to `fail`."""
        fault = self.reason(_ANSWER_TO_FAULT_SECONDS) if self._own_words else None
        return fault is not None and fault.endswith(self._own_words) and not fault.startswith(f"rank {self._rank} ")

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
        if not self._has_failed and self._fault is None:
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

    def _meet(self, watched: WatchedRank, share: Callable[[Any], Any]) -> None:
        """Start the guardian and bring it together with the others. `share` is called whatever goes wrong here."""
        problem: LaunchError | None = None
        meeting: Any = None
        try:
            meeting = self._start_guardian(watched)
        except LaunchError as error:
            problem = error
        meeting = share({"problem": str(problem)} if problem is not None else meeting)
        if problem is not None:
            raise problem
        if "problem" in meeting:
            raise LaunchError(f"rank 0 has no watchdog: {meeting['problem']}")
        self._tell({"meet": meeting}, surely=True)
        self._answer("ready")
        self._is_met = True

    def _start_guardian(self, watched: WatchedRank) -> dict[str, Any] | None:
        """Start it; where rank 0's listens."""
        token = secrets.token_hex(16)
        limit = watched.step_timeout
        settings = {
            "rank": watched.rank,
            "world_size": watched.world_size,
            "worker_pid": self._pid,
            "launcher_pid": watched.launcher_pid,
            "step_timeout": None if limit is None else limit.total_seconds(),
            "token": token,
            "only_here": is_loopback(watched.master_addr),
        }
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
        port = self._answer("listening")["listening"]
        return {"addresses": own_addresses(watched.master_addr), "port": port, "token": token}

    def _answer(self, wanted: str) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            answer = {"fault": f"the guardian process of rank {self._rank} gives no answer"}
        if wanted not in answer:
            raise LaunchError(f"The ranks cannot watch over each other: {answer.get('fault', answer)}")
        return answer

    def _tell(self, message: dict[str, Any], *, surely: bool = False) -> None:
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
            except BlockingIOError:  # a place that is lost is made good by the next one
                if not surely or time.monotonic() > end:
                    return
                time.sleep(0.01)
            except (OSError, ValueError):  # the guardian is gone, which the listener hears, or this end is closed
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
                self._hear(message["fault"])
            elif "beat" not in message:
                self._answers.put(message)
        if not self._closed.is_set() and self._fault is None:
            where = Place(phase=self._place["phase"], step=self._place["step"])
            process.kill()  # stopped, perhaps
            self._hear(lost_guardian(self._rank, where))
        process.wait()

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What the guardian says, until it is gone or silent for too long.

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
            while silent_seconds < LOST_SECONDS or self._released.is_set():
                if not poll.poll(1000):
                    silent_seconds += 1
                    continue
                silent_seconds = 0
                data = os.read(stdout.fileno(), 1 << 16)
                if not data:
                    return
                yield from lines.feed(data)

    def _hear(self, fault: str) -> None:
        """The world has a fault: this process leaves by itself now, or is ended."""
        self._fault = fault
        self._heard.set()
        self._answers.put({"fault": fault})
        if not self._is_met or self._closed.wait(GRACE_SECONDS):
            return
        speaker = threading.Thread(target=self._say_last_words, args=(fault,), name="last-words", daemon=True)
        speaker.start()
        speaker.join(_LAST_WORDS_SECONDS)
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(last_line(fault))
            sys.stderr.flush()
            self._tell({"spoken": True}, surely=True)
        os._exit(RunFailedError.exit_code)

    def _say_last_words(self, fault: str) -> None:
        if self._last_words is not None:
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


class _Waiting:
    """The block of `Watchdog.waiting`. After an error the word stands: the cause may be another rank's."""

    __slots__ = ("_before", "_watchdog", "_what")

    def __init__(self, watchdog: Watchdog, what: str) -> None:
        self._watchdog = watchdog
        self._what = what
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before = self._watchdog._place["waiting"]
        self._say(self._what)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._say(self._before)

    def _say(self, what: str | None) -> None:
        self._watchdog._place["waiting"] = what
        self._watchdog._tell(self._watchdog._place)


_open: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _forget_guardians_of_parent() -> None:
    for watchdog in list(_open):
        watchdog._forget()


os.register_at_fork(after_in_child=_forget_guardians_of_parent)
