"""Find every rank of a launch at one address, and let rank 0 decide who trains. Only this module opens a TCPStore.

torch waits silently for about twice its timeout, and forever if something other than a store answers. So the ranks
join at a store first. While they wait, they name the missing ranks. Then rank 0 gives one verdict, which all ranks
read, and only then they make a process group.

If a store or another rank is gone, torch raises a RuntimeError, often a DistError, which is one too.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not in __all__

from finetune.distributed.environment import DEFAULT_MASTER_ADDR, LaunchEnvironment, has_agent_store, launcher_pid
from finetune.distributed.guardian.faults import format_ranks
from finetune.distributed.network import (
    NO_STORE,
    PROBE_SECONDS,
    address_of_rank_0,
    allow_connections,
    is_own_address,
    listening_address,
    open_listener,
    what_answers,
)
from finetune.errors import LaunchError, RunFailedError

_log = logging.getLogger(__name__)

REPORT_SECONDS = 30.0
"""How often a waiting rank logs who is missing."""
_POLL_SECONDS = 0.05
_MARGIN_SECONDS = 5.0
"""Added to the timeout when a rank waits for rank 0, which gives its verdict at the timeout."""
_STORE_TIMEOUT = timedelta(seconds=10)
_LEAVE_SECONDS = 10.0
_LONGEST_PROBE_SECONDS = 30.0
_IDENTITY = "finetune/identity"


def open_store(host: str, port: int, world_size: int) -> TCPStore:
    """Open the store for ranks that look for it at `host`; port 0 means any free port.

    Raises:
        OSError: the port is taken.
    """
    address = listening_address(host)
    listener = open_listener(address, port)
    port = listener.getsockname()[1]
    return TCPStore(
        address or DEFAULT_MASTER_ADDR,  # torch itself would listen on all interfaces
        port,
        world_size,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


@dataclass(frozen=True)
class Verdict:
    """Rank 0's decision for all ranks of the launch, with its reason."""

    decision: Literal["together", "alone", "refused"]
    why: str = ""


class Rendezvous:
    """One rendezvous of the ranks of a launch.

    A launcher's store outlives its workers. After a restart it still holds the keys of the workers before, and no
    variable of the environment says so. So rank 0 makes a token for each rendezvous, and gives it to every rank that
    asks with a number of its own. All keys under the token are new.

    Collective: every rank makes one, then calls the same methods in the same order.

    Args:
        environment: this process's place in the launch.
        timeout: how long the ranks wait for each other, in total.
        number: counts this process's rendezvous, so that a rank that is early for the next one cannot join the last.
        stores: the open stores of this process by port, to which rank 0 adds its own. torch frees the port of a store
            only when no object refers to the store any more.

    Attributes:
        store: for the process group; its keys belong to this rendezvous.

    Raises:
        LaunchError: on rank 0, its port cannot be opened; on the others, rank 0 was not found in time.
    """

    def __init__(
        self,
        environment: LaunchEnvironment,
        timeout: timedelta,
        number: int = 1,
        *,
        stores: dict[int, TCPStore] | None = None,
    ) -> None:
        self.environment = environment
        self._stores = {} if stores is None else stores
        self._prefix = f"finetune/{environment.launch_id}/{number}"
        self._began = time.monotonic()
        self._timeout = timeout.total_seconds()
        self._next_report = self._began + REPORT_SECONDS
        self._num_verdicts = 0
        self._num_missing = 0
        self._num_readers = 0
        self._found = "not asked yet"
        self._is_over = threading.Event()
        self._token_thread: threading.Thread | None = None
        self._uses_agent_store = has_agent_store(os.environ)
        self._host = environment.master_addr if self._uses_agent_store else address_of_rank_0(environment)
        allow_connections(environment.world_size)
        if environment.rank == 0:
            self._server = self._find_store() if self._uses_agent_store else self._open_store()
            token = secrets.token_hex(8)
            self._token_thread = threading.Thread(target=self._hand_out, args=(token,), name="rendezvous", daemon=True)
            self._token_thread.start()
        else:
            token = self._join()
        self.store = PrefixStore(f"finetune/{token}", self._server)
        if self._ask("add", f"joined/{environment.rank}", 1) > 1:
            raise LaunchError(
                f"rank {environment.rank} has already joined at {self.address}: two processes were started as this "
                "rank, or another launch uses the same address and port. Give each launch a port of its own "
                "(MASTER_PORT, --master_port, --main_process_port)."
            )
        self._ask("append", "joined", f"{environment.rank} ")
        self._ask("add", "num_joined", 1)

    @property
    def address(self) -> str:
        """The host and port of the store."""
        return f"{self._host}:{self.environment.master_port}"

    @property
    def seconds_left(self) -> float:
        """The rest of the timeout, at least 0."""
        return max(0.0, self._began + self._timeout - time.monotonic())

    def wait_for_all(self) -> str | None:
        """Wait until every rank has joined; else return who is missing and what to do about it. Rank 0 only."""
        for _ in self._polls(self.seconds_left, self._who_is_missing):
            if self._ask("add", "num_joined", 0) >= self.environment.world_size:
                return None
        missing = self._missing()
        self._num_missing = len(missing)
        is_here = is_own_address(self._host)
        hint = "" if is_here else "; this address does not belong to rank 0's machine"
        return (
            f"{format_ranks(missing)} of {self.environment.world_size} did not join at {self.address} within "
            f"{self._timeout:g} s (joined: {format_ranks(self._joined())}){hint}. Start every rank with the same "
            "MASTER_ADDR and MASTER_PORT, let the nodes reach this port, or raise parallel.timeout_minutes"
        )

    def give_verdict(self, verdict: Verdict) -> None:
        """Give the verdict to all ranks. Rank 0 only."""
        if verdict.decision != "together":
            self._num_readers = self.environment.world_size - 1 - self._num_missing
        self._num_verdicts += 1
        self._ask("set", f"verdict/{self._num_verdicts}", json.dumps([verdict.decision, verdict.why]))

    def read_verdict(self) -> Verdict:
        """Wait for rank 0's verdict. All ranks but rank 0.

        Raises:
            LaunchError: rank 0 gives none, so that nobody knows whether it trains.
        """
        self._num_verdicts += 1
        key = f"verdict/{self._num_verdicts}"
        for _ in self._polls(self.seconds_left + _MARGIN_SECONDS, self._who_is_missing):
            if self._ask("check", [key]):
                decision, why = json.loads(self._ask("get", key))
                if decision != "together":
                    self._ask("add", "num_read", 1)
                return Verdict(decision, why)
        raise LaunchError(
            f"rank {self.environment.rank} heard nothing from rank 0 at {self.address} within {self._timeout:g} s "
            f"(joined: {format_ranks(self._joined())}; {self._who_is_missing()}). Look at rank 0's output, start "
            "every rank with the same MASTER_ADDR and MASTER_PORT, or raise parallel.timeout_minutes."
        )

    def exchange(self, topic: str, note: str, seconds: float) -> dict[int, str]:
        """Return every rank's note by rank. A rank that sends none within the seconds has no entry. Collective."""
        # One key for all notes: with a key for each, a world of N ranks would ask the store N x N times.
        self._ask("append", f"{topic}/notes", json.dumps([self.environment.rank, note]) + "\n")
        self._ask("add", topic, 1)
        for _ in self._polls(seconds, lambda: f"{topic} on the other ranks"):
            if self._ask("add", topic, 0) >= self.environment.world_size:
                break
        return dict(sorted(json.loads(line) for line in self._ask("get", f"{topic}/notes").splitlines()))

    def leave(self) -> None:
        """End the rendezvous. Rank 0 waits until the others have read that there is no world. Safe to call twice."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        try:
            while not self._is_over.is_set() and time.monotonic() < deadline:
                if self._ask("add", "num_read", 0) >= self._num_readers:
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            self._is_over.set()
            if self._token_thread is not None:
                self._token_thread.join()

    def _hand_out(self, token: str) -> None:
        """Rank 0's thread: give the token to every rank that asks, until the rendezvous is over."""
        store = PrefixStore(self._prefix, self._server)
        num_seen, unanswered = 0, set[int]()
        try:
            # This goes on for the whole run, so each turn asks one question, however many ranks there are.
            while not self._is_over.wait(_POLL_SECONDS):
                num_requests = store.add("num_requests", 0)
                unanswered.update(range(num_seen, num_requests))
                num_seen = num_requests
                for request in sorted(unanswered):
                    if store.check([f"request/{request}"]):  # a rank counts its request before it writes it
                        store.set(f"token/{store.get(f'request/{request}').decode()}", token)
                        unanswered.remove(request)
        except RuntimeError:
            pass  # the store is gone; the main thread learns it from its own question

    def _join(self) -> str:
        """Find the store and get the token. A store that closes meanwhile belonged to the rendezvous before."""
        while True:
            self._server = self._find_store()
            try:
                self._refuse_another_launch()
                return self._request_token()
            except RuntimeError as error:
                if self.seconds_left == 0:
                    raise self._lost_store() from error

    def _request_token(self) -> str:
        store = PrefixStore(self._prefix, self._server)
        rank, number = self.environment.rank, secrets.token_hex(8)
        store.set(f"request/{store.add('num_requests', 1) - 1}", number)
        for _ in self._polls(self.seconds_left + _MARGIN_SECONDS, lambda: "missing: rank 0 (a store is open there)"):
            if store.check([f"token/{number}"]):
                return store.get(f"token/{number}").decode()
        raise LaunchError(
            f"rank {rank} got no answer from rank 0 of {self.environment.world_size} at {self.address} within "
            f"{self._timeout:g} s, although a store is open there. Check that rank 0 was started, and look at its "
            "output."
        )

    def _open_store(self) -> TCPStore:
        """Open this process's store. It stays open for a next launch, to which the other ranks may come first."""
        environment, port = self.environment, self.environment.master_port
        try:
            store = self._stores.get(port) or open_store(self._host, port, environment.world_size)
        except (OSError, RuntimeError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            raise LaunchError(
                f"rank 0 cannot open port {port} for the other ranks ({environment.launcher}): "
                f"{'the port is in use' if in_use else error}. Choose a free port (MASTER_PORT, --master_port, "
                "--main_process_port or parallel.master_port), the same on every rank."
            ) from error
        store.set(_IDENTITY, json.dumps(self._identity))
        self._stores[port] = store
        return store

    def _find_store(self) -> TCPStore:
        """Connect once a store answers: torch's own client waits silently, and may wait forever.

        torch's store looks up the name of each peer before it answers any, so with many ranks and a slow name server it
        may be silent for a minute. Each probe waits twice as long as the one before: ranks that came back every two
        seconds would bring new lookups faster than the store finishes them.
        """
        environment = self.environment
        host, port, size = self._host, environment.master_port, environment.world_size
        began, patience = time.monotonic(), PROBE_SECONDS
        for _ in self._polls(self.seconds_left + _MARGIN_SECONDS, lambda: f"rank 0: {self._found}"):
            asked = time.monotonic()
            answer = what_answers(host, port, patience)
            if answer is None:
                with suppress(dist.DistError):  # it may close between the two
                    return TCPStore(host, port, size, timeout=_STORE_TIMEOUT, wait_for_workers=False)
            self._found = answer or "the store answered too late"
            if time.monotonic() - asked >= patience:
                patience = min(2 * patience, max(PROBE_SECONDS, self.seconds_left), _LONGEST_PROBE_SECONDS)
            # torchrun's agent opens its store before it starts a worker. If the store refuses, the agent has ended.
            if self._uses_agent_store and self._found != NO_STORE and time.monotonic() - began >= _MARGIN_SECONDS:
                break
        if self._uses_agent_store:
            raise RunFailedError(
                f"rank {environment.rank} did not find the store of its launcher ({environment.launcher}) at "
                f"{self.address} within {time.monotonic() - began:.0f} s: {self._found}. The launcher of rank 0 has "
                "ended, or its machine cannot be reached any more. Start the launch again."
            )
        raise LaunchError(
            f"rank {environment.rank} did not find rank 0 of {environment.world_size} at {self.address} within "
            f"{self._timeout:g} s ({environment.launcher}): {self._found}. Check that rank 0 was started, that "
            "MASTER_ADDR and MASTER_PORT name its machine on every rank, and that no firewall blocks the port; or "
            "raise parallel.timeout_minutes."
        )

    @property
    def _identity(self) -> dict[str, str | int]:
        return {"launch_id": self.environment.launch_id, "world_size": self.environment.world_size}

    def _refuse_another_launch(self) -> None:
        """Two launches that share a port would mix their ranks."""
        if self._uses_agent_store:
            return
        for _ in self._polls(_MARGIN_SECONDS, lambda: "the identity of the store"):
            if self._server.check([_IDENTITY]):
                break
        else:
            raise LaunchError(f"the store at {self.address} does not belong to finetune. Choose another port.")
        theirs, ours = json.loads(self._server.get(_IDENTITY)), self._identity
        differing = (name for name in ours if ours[name] != theirs.get(name))
        different = [f"{name} {ours[name]!r} here, {theirs.get(name)!r} on rank 0" for name in differing]
        if different:
            raise LaunchError(
                f"rank {self.environment.rank} found another launch at {self.address}: {'; '.join(different)}. "
                "Start all ranks with the same world size, and give each launch a port of its own."
            )

    def _polls(self, seconds: float, waits_for: Callable[[], str]) -> Iterator[None]:
        """Yield at least once and until the time is over; log now and then what this rank waits for."""
        deadline = time.monotonic() + seconds
        launcher = launcher_pid(os.environ, self.environment)
        while True:
            yield
            if launcher is not None and os.getppid() != launcher:
                raise RunFailedError(
                    f"rank {self.environment.rank} lost its launcher, process {launcher}, before all ranks had joined "
                    f"at {self.address}. Start the launch again."
                )
            now = time.monotonic()
            if now >= deadline:
                return
            if now >= self._next_report:
                self._next_report = now + REPORT_SECONDS
                _log.warning(
                    "[Distributed] rank %d of %d has waited at %s for %.0f s (limit %g s): %s",
                    self.environment.rank,
                    self.environment.world_size,
                    self.address,
                    now - self._began,
                    self._timeout,
                    waits_for(),
                )
            time.sleep(_POLL_SECONDS)

    def _who_is_missing(self) -> str:
        return f"missing: {format_ranks(self._missing())}"

    def _joined(self) -> list[int]:
        return sorted(map(int, self._ask("get", "joined").split()))

    def _missing(self) -> list[int]:
        return sorted(set(range(self.environment.world_size)) - set(self._joined()))

    def _ask(self, verb: str, *args: Any) -> Any:
        """Call a method of the store. If the store is gone, rank 0 or the launcher's agent is gone too."""
        try:
            return getattr(self.store, verb)(*args)
        except RuntimeError as error:
            raise self._lost_store() from error

    def _lost_store(self) -> LaunchError:
        return LaunchError(
            f"rank {self.environment.rank} lost the store at {self.address}: rank 0 or its launcher has ended. "
            "Look at rank 0's output."
        )
