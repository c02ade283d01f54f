"""Find every rank of a launch at one address, and settle together who trains. The only module that opens a TCPStore.

torch waits in silence, for about twice its timeout, and forever where something other than a store answers. So the
ranks find each other here first: each says that it is present, the missing are named while the others wait, and rank 0
gives one verdict that all of them read. Only then is a process group made.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not in __all__

from finetune.distributed.environment import LaunchEnvironment, has_agent_store, launcher_pid
from finetune.distributed.network import is_own_address
from finetune.errors import LaunchError, RunFailedError

_log = logging.getLogger(__name__)

SAY_WHO_IS_MISSING_SECONDS = 30.0
_POLL_SECONDS = 0.05
_MARGIN_SECONDS = 5.0
"""What a rank waits longer than the timeout for rank 0's verdict: rank 0 gives it at the timeout."""
_STORE_TIMEOUT = timedelta(seconds=10)
_FAREWELL_SECONDS = 10.0


@dataclass(frozen=True)
class Verdict:
    """What rank 0 says, once, to all ranks of the launch."""

    kind: Literal["together", "alone", "refused"]
    why: str = ""


class RollCall:
    """One meeting of the ranks of a launch.

    A launcher's store outlives its workers: after a restart it holds what the dead ones said, with nothing in the
    environment to tell. So rank 0 makes a token for the meeting, and hands it to each rank that says hello with a
    number of its own; whatever is said under the token is new.

    Collective: every rank makes one, then calls the same methods in the same order.

    Args:
        environment: what the launcher said about this process.
        timeout: how long the ranks wait for each other, in all.
        number: of this process's meetings, so that a rank that is early for the next one does not walk into the last.

    Attributes:
        store: for the process group, under names of this meeting.

    Raises:
        LaunchError: on rank 0, its port cannot be opened; on the others, rank 0 was not found in time.
    """

    def __init__(self, environment: LaunchEnvironment, timeout: timedelta, number: int = 1) -> None:
        self.environment = environment
        self._hall = f"finetune/{environment.launch_id}/{number}"
        self._began = time.monotonic()
        self._timeout = timeout.total_seconds()
        self._next_word = self._began + SAY_WHO_IS_MISSING_SECONDS
        self._num_verdicts = 0
        self._is_store_lost = False
        self._num_missing = 0
        self._num_owed = 0
        self._over = threading.Event()
        self._welcoming: threading.Thread | None = None
        self._hosts = environment.rank == 0 and not has_agent_store(os.environ)
        if environment.rank == 0:
            self._server = self._open_store() if self._hosts else self._find_store()
            token = secrets.token_hex(8)
            self._welcoming = threading.Thread(target=self._welcome, args=(token,), name="roll-call", daemon=True)
            self._welcoming.start()
        else:
            token = self._come_in()
        self.store = PrefixStore(f"finetune/{token}", self._server)
        if self._store("add", f"present/{environment.rank}", 1) > 1:
            raise LaunchError(
                f"rank {environment.rank} has joined at {self.address} already: two processes were started as this "
                "rank, or another launch uses the same address and port. Give each launch a port of its own "
                "(MASTER_PORT, --master_port, --main_process_port)."
            )
        self._store("add", "arrived", 1)

    @property
    def address(self) -> str:
        """Where the ranks meet."""
        return f"{self.environment.master_addr}:{self.environment.master_port}"

    @property
    def seconds_left(self) -> float:
        """Of the timeout, at least 0."""
        return max(0.0, self._began + self._timeout - time.monotonic())

    def wait_for_all(self) -> str | None:
        """Rank 0 only: wait until every rank is present. None, or who is missing and what to do."""
        for _ in self._polls(self.seconds_left, self._who_is_missing):
            if self._store("add", "arrived", 0) >= self.environment.world_size:
                return None
        missing = self._missing()
        self._num_missing = len(missing)
        return (
            f"{_ranks(missing)} of {self.environment.world_size} did not come to {self.address} within "
            f"{self._timeout:g} s (present: {_ranks(self._present())}){self._strange_address()}. Start every rank with "
            "the same MASTER_ADDR and MASTER_PORT, let the nodes reach this port, or raise parallel.timeout_minutes"
        )

    def give_verdict(self, verdict: Verdict) -> None:
        """Rank 0 only."""
        if verdict.kind != "together":
            self._num_owed = self.environment.world_size - 1 - self._num_missing
        self._num_verdicts += 1
        self._store("set", f"verdict/{self._num_verdicts}", json.dumps([verdict.kind, verdict.why]))

    def read_verdict(self) -> Verdict:
        """The other ranks: what rank 0 says; it is awaited.

        Raises:
            LaunchError: rank 0 says nothing, so that nobody knows whether it trains.
        """
        self._num_verdicts += 1
        key = f"verdict/{self._num_verdicts}"
        for _ in self._polls(self.seconds_left + _MARGIN_SECONDS, self._who_is_missing):
            if self._store("check", [key]):
                kind, why = json.loads(self._store("get", key))
                if kind != "together":
                    self._store("add", "told", 1)
                return Verdict(kind, why)
        raise LaunchError(
            f"rank {self.environment.rank} heard no word from rank 0 at {self.address} within {self._timeout:g} s "
            f"(present: {_ranks(self._present())}; missing: {_ranks(self._missing())}). See what rank 0 says, start "
            "every rank with the same MASTER_ADDR and MASTER_PORT, or raise parallel.timeout_minutes."
        )

    def exchange(self, topic: str, note: str, seconds: float) -> dict[int, str]:
        """Every rank's note by rank; a rank that says nothing in that time has no entry. Collective."""
        rank, world_size = self.environment.rank, self.environment.world_size
        self._store("set", f"{topic}/{rank}", note)
        self._store("add", topic, 1)
        for _ in self._polls(seconds, lambda: f"{topic} on the other ranks"):
            if self._store("add", topic, 0) >= world_size:
                break
        keys = {other: f"{topic}/{other}" for other in range(world_size)}
        return {other: self._store("get", key).decode() for other, key in keys.items() if self._store("check", [key])}

    def leave(self) -> None:
        """End the meeting. Rank 0 waits until the others have heard that there is no world. May be called twice."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        try:
            while (
                not self._over.is_set()
                and time.monotonic() < deadline
                and self._store("add", "told", 0) < self._num_owed
            ):
                time.sleep(_POLL_SECONDS)
        finally:
            self._over.set()
            if self._welcoming is not None:
                self._welcoming.join()

    def _welcome(self, token: str) -> None:
        """Rank 0's thread: hand the token to every rank that comes, until the meeting is over."""
        hall = PrefixStore(self._hall, self._server)
        num_welcomed = dict.fromkeys(range(1, self.environment.world_size), 0)
        try:
            while not self._over.wait(_POLL_SECONDS):
                for rank, before in num_welcomed.items():
                    hello = f"hello/{rank}/{before + 1}"
                    if hall.check([hello]):
                        hall.set(f"welcome/{hall.get(hello).decode()}", token)
                        num_welcomed[rank] += 1
        except (dist.DistError, RuntimeError):
            pass  # the store is gone; the main thread hears it from its own question

    def _come_in(self) -> str:
        """The meeting's token. A store that closes meanwhile was that of the meeting before."""
        while True:
            self._server = self._find_store()
            try:
                self._refuse_another_launch()
                return self._greet()
            except LaunchError:
                if not self._is_store_lost or self.seconds_left == 0:
                    raise
                self._is_store_lost = False

    def _greet(self) -> str:
        """The meeting's token, from rank 0."""
        hall = PrefixStore(self._hall, self._server)
        rank, number = self.environment.rank, secrets.token_hex(8)
        count = self._store("add", f"hello/{rank}", 1, on=hall)
        self._store("set", f"hello/{rank}/{count}", number, on=hall)
        for _ in self._polls(self.seconds_left + _MARGIN_SECONDS, lambda: "missing: rank 0 (its store is there)"):
            if self._store("check", [f"welcome/{number}"], on=hall):
                return str(self._store("get", f"welcome/{number}", on=hall).decode())
        raise LaunchError(
            f"rank {rank} was not greeted by rank 0 of {self.environment.world_size} at {self.address} within "
            f"{self._timeout:g} s, although a store answers there. See what rank 0 says, and whether it was started."
        )

    def _open_store(self) -> TCPStore:
        """The store of this process at its port, which stays open for a next launch: the others may be there before."""
        environment = self.environment
        try:
            store = _open_stores.get(environment.master_port) or TCPStore(
                # Rank 0 talks to its own store over loopback, whatever the others call this machine.
                "127.0.0.1",
                environment.master_port,
                environment.world_size,
                is_master=True,
                timeout=_STORE_TIMEOUT,
                wait_for_workers=False,
            )
        except (dist.DistError, RuntimeError) as error:
            in_use = "EADDRINUSE" in str(error) or "in use" in str(error)
            raise LaunchError(
                f"rank 0 cannot open port {environment.master_port} for the {environment.world_size - 1} other ranks "
                f"({environment.launcher}): {'the port is in use' if in_use else error}. Choose a free port "
                "(MASTER_PORT, --master_port, --main_process_port or parallel.master_port), the same on every rank."
            ) from error
        identity = {"launch_id": environment.launch_id, "world_size": environment.world_size}
        store.set(_IDENTITY, json.dumps(identity))
        _open_stores[environment.master_port] = store
        return store

    def _find_store(self) -> TCPStore:
        """Connect once a store answers: torch's own client waits without a word, and can wait forever."""
        environment = self.environment
        place = (environment.master_addr, environment.master_port)
        # torchrun's agent opens its store before it starts a worker: one that does not answer went with its agent.
        seconds = (0.0 if has_agent_store(os.environ) else self.seconds_left) + _MARGIN_SECONDS
        for _ in self._polls(seconds, lambda: f"rank 0: {what_answers(*place)}"):
            if what_answers(*place) is not None:
                continue
            with suppress(dist.DistError):  # it may close between the two
                return TCPStore(
                    *place, environment.world_size, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False
                )
        if has_agent_store(os.environ):
            raise RunFailedError(
                f"rank {environment.rank} did not find the store of its launcher ({environment.launcher}) at "
                f"{self.address} within {seconds:g} s: {what_answers(*place) or 'too late'}. The launcher of rank 0 is "
                "gone, or its machine cannot be reached any more. Start the launch again."
            )
        raise LaunchError(
            f"rank {environment.rank} did not find rank 0 of {environment.world_size} at {self.address} within "
            f"{self._timeout:g} s ({environment.launcher}): {what_answers(*place) or 'too late'}. Check that rank 0 "
            "was started, that MASTER_ADDR and MASTER_PORT name its machine on every rank, and that no firewall stands "
            "between; or raise parallel.timeout_minutes."
        )

    def _refuse_another_launch(self) -> None:
        """A port that two launches share would mix their ranks."""
        if self._hosts or has_agent_store(os.environ):
            return
        environment = self.environment
        for _ in self._polls(_MARGIN_SECONDS, lambda: "the store to say whose it is"):
            if self._store("check", [_IDENTITY], on=self._server):
                break
        else:
            raise LaunchError(f"the store at {self.address} is not one of finetune's. Choose another port.")
        theirs = json.loads(self._store("get", _IDENTITY, on=self._server))
        ours = {"launch_id": environment.launch_id, "world_size": environment.world_size}
        if theirs != ours:
            different = [
                f"{name} {ours[name]!r} here, {theirs.get(name)!r} on rank 0"
                for name in ours
                if ours[name] != theirs.get(name)
            ]
            raise LaunchError(
                f"rank {environment.rank} met another launch at {self.address}: {'; '.join(different)}. "
                "Start all ranks with the same world size, and give each launch a port of its own."
            )

    def _polls(self, seconds: float, waits_for: Callable[[], str]) -> Iterator[None]:
        """Come by at least once, then until the time is over, and say from time to time what is waited for."""
        deadline = time.monotonic() + seconds
        launcher = launcher_pid(os.environ, self.environment)
        while True:
            yield
            if launcher is not None and os.getppid() != launcher:
                raise RunFailedError(
                    f"rank {self.environment.rank} lost its launcher, process {launcher}, before all ranks had met at "
                    f"{self.address}. Start the launch again."
                )
            now = time.monotonic()
            if now >= deadline:
                return
            if now >= self._next_word:
                self._next_word = now + SAY_WHO_IS_MISSING_SECONDS
                _log.warning(
                    "[Distributed] rank %d of %d waits at %s since %.0f s (limit %g s): %s",
                    self.environment.rank,
                    self.environment.world_size,
                    self.address,
                    now - self._began,
                    self._timeout,
                    waits_for(),
                )
            time.sleep(_POLL_SECONDS)

    def _who_is_missing(self) -> str:
        return f"missing: {_ranks(self._missing())}"

    def _present(self) -> list[int]:
        ranks = range(self.environment.world_size)
        return [rank for rank in ranks if self._store("check", [f"present/{rank}"])]

    def _missing(self) -> list[int]:
        return sorted(set(range(self.environment.world_size)) - set(self._present()))

    def _store(self, verb: str, *args: Any, on: Any = None) -> Any:
        """Ask the store; where it is gone, rank 0 or the launcher's agent is."""
        try:
            return getattr(on or self.store, verb)(*args)
        except (dist.DistError, RuntimeError) as error:
            self._is_store_lost = True
            raise LaunchError(
                f"rank {self.environment.rank} lost the store at {self.address}: rank 0 or its launcher has ended. "
                "See what rank 0 says."
            ) from error

    def _strange_address(self) -> str:
        """A word of warning where the address is not this machine's, although rank 0 is here."""
        return "" if is_own_address(self.environment.master_addr) else "; that address is not one of rank 0's machine"


_IDENTITY = "finetune/identity"
_open_stores: dict[int, TCPStore] = {}
"""By port. A closed store would free its port only once torch has let go of it everywhere."""


def what_answers(host: str, port: int) -> str | None:
    """None where a torch store answers at the address, else what does.

    A store echoes the four bytes behind a ping: torch/csrc/distributed/c10d/TCPStore.cpp, VALIDATE = 0 with the magic
    number of TCPStoreBackend.hpp, PING = 13. `tests/distributed/test_rendezvous.py` tries it on the installed torch.
    """
    nonce = os.urandom(4)
    try:
        connection = socket.create_connection((host, port), timeout=2.0)
    except socket.gaierror:
        return f"the name {host} is not known here"
    except OSError as error:
        return error.strerror or "no answer"
    with connection:
        try:
            connection.sendall(struct.pack("<BIB", 0, 0x3C85F7CE, 13) + nonce)
            answer = connection.recv(4)
        except OSError:
            answer = b""
    return None if answer == nonce else "what listens there is no store of torch"


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 1, 3``, at most a dozen of them."""
    listed = list(ranks)
    if not listed:
        return "none"
    shown = ", ".join(map(str, listed[:12])) + (", …" if len(listed) > 12 else "")
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}"
