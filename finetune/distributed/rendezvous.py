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
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not in __all__

from finetune.distributed.environment import DEFAULT_MASTER_ADDR, LaunchEnvironment, has_agent_store, launcher_pid
from finetune.distributed.network import (
    NO_STORE,
    PROBE_SECONDS,
    address_of_rank_0,
    allow_connections,
    is_own_address,
    listening_address,
    open_listener,
    probe_store,
)
from finetune.errors import LaunchError, RunFailedError
from finetune.units import format_ranks

_log = logging.getLogger(__name__)

REPORT_SECONDS = 30.0
"""How often a waiting rank logs who is missing."""
_POLL_SECONDS = 0.05
MARGIN_SECONDS = 5.0
"""Added to the timeout when a rank waits for rank 0, which gives its verdict at the timeout."""
_STORE_TIMEOUT = timedelta(seconds=10)
_LEAVE_SECONDS = 10.0
_LONGEST_PROBE_SECONDS = 30.0

_stores: dict[int, TCPStore] = {}
"""The stores of this process by port. They stay open: the ranks of a next launch may come first."""


def open_store(host: str, port: int, world_size: int) -> TCPStore:
    """Open the store for ranks that look for it at `host`; port 0 means any free port."""
    address = listening_address(host)
    listener = open_listener(address, port)
    return TCPStore(
        address or DEFAULT_MASTER_ADDR,  # torch itself would listen on all interfaces
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class Verdict(NamedTuple):
    """Rank 0's decision for all ranks of the launch, with its reason."""

    decision: Literal["together", "alone", "refused"]
    reason: str = ""


class Rendezvous:
    """One rendezvous of the ranks of a launch.

    A launcher's store outlives its workers. After a restart it still holds the keys of the workers before, and no
    variable of the environment says so. So rank 0 makes a token for each rendezvous, and gives it to every rank that
    asks under a key of its own. All other keys are behind the token, and so they are new. `store` has these keys.

    `number` counts this process's rendezvous, so that a rank that is early for the next one cannot join the last. The
    other ranks read `note`, see `joined`.

    Collective: every rank makes one, then calls the same methods in the same order.

    Raises:
        LaunchError: on rank 0, its port cannot be opened; on the others, rank 0 was not found in time.
    """

    def __init__(self, environment: LaunchEnvironment, timeout: timedelta, number: int = 1, note: str = "") -> None:
        self.environment = environment
        self._began = time.monotonic()
        self._timeout = timeout.total_seconds()
        self._next_report = self._began + REPORT_SECONDS
        self._num_verdicts = 0
        self._num_present = environment.world_size
        self._is_over = threading.Event()
        self._answering: threading.Thread | None = None
        self._uses_agent_store = has_agent_store(os.environ)
        self._host = environment.master_addr if self._uses_agent_store else address_of_rank_0(environment)
        allow_connections(environment.world_size)
        if environment.rank == 0:
            server, token = self._find_store() if self._uses_agent_store else self._open_store(), secrets.token_hex(8)
            answer = (PrefixStore(f"finetune/{number}", server), token)
            self._answering = threading.Thread(target=self._answer, args=answer, name="rendezvous", daemon=True)
            self._answering.start()
        else:
            server, token = self._request_token(f"finetune/{number}")
        self.store = PrefixStore(f"finetune/{token}", server)
        if self._ask("add", f"joined/{environment.rank}", 1) > 1:
            raise LaunchError(
                f"rank {environment.rank} has already joined at {self.address}: two processes were started as this "
                "rank, or another launch uses the same address and port. Give each launch a port of its own "
                "(MASTER_PORT, --master_port, --main_process_port)."
            )
        self._post("joined", note)

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
        if self._wait_for_notes("joined", self.environment.world_size, self.seconds_left, self._missing_ranks):
            return None
        joined = self.joined()
        self._num_present = len(joined)
        hint = "" if is_own_address(self._host) else "; this address does not belong to rank 0's machine"
        return (
            f"{self._ranks_without(joined)} of {self.environment.world_size} did not join at {self.address} within "
            f"{self._timeout:g} s (joined: {format_ranks(list(joined))}){hint}. Start every rank with the same "
            "MASTER_ADDR and MASTER_PORT, let the nodes reach this port, or raise parallel.timeout_minutes"
        )

    def joined(self) -> dict[int, str]:
        """Return the notes of the ranks that have joined until now, by rank."""
        return self._notes("joined")

    def share_verdict(self, verdict: Verdict) -> Verdict:
        """Return rank 0's verdict on every rank. The argument of the other ranks is not used. Collective.

        If the ranks do not train together, rank 0 waits until the others have read the verdict: the store ends then.
        """
        self._num_verdicts += 1
        key = f"verdict/{self._num_verdicts}"
        if self.environment.rank == 0:
            self._ask("set", key, json.dumps(verdict))
            if verdict.decision != "together":
                self._wait_for_notes(key, self._num_present - 1, _LEAVE_SECONDS, lambda: "the other ranks, which leave")
            return verdict
        verdict = Verdict(*self._read(key, self._missing_ranks))
        if verdict.decision != "together":
            self._post(key, "")
        return verdict

    def exchange(self, topic: str, note: str, seconds: float) -> dict[int, str]:
        """Return every rank's note by rank. A rank that sends none within the seconds has no entry. Collective."""
        self._post(topic, note)
        self._wait_for_notes(topic, self.environment.world_size, seconds, lambda: f"{topic} on the other ranks")
        return self._notes(topic)

    def leave(self) -> None:
        """Stop answering ranks that come late. Safe to call twice."""
        self._is_over.set()
        if self._answering is not None:
            self._answering.join()

    def _open_store(self) -> TCPStore:
        environment, port = self.environment, self.environment.master_port
        try:
            if port not in _stores:  # torch frees a port only when no object refers to its store any more
                _stores[port] = open_store(self._host, port, environment.world_size)
        except (OSError, RuntimeError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            raise LaunchError(
                f"rank 0 cannot open port {port} for the other ranks ({environment.launcher}): "
                f"{'the port is in use' if in_use else error}. Choose a free port (MASTER_PORT, --master_port, "
                "--main_process_port or parallel.master_port), the same on every rank."
            ) from error
        return _stores[port]

    def _find_store(self) -> TCPStore:
        """Connect once a store answers: torch's own client waits silently, and may wait forever.

        torch's store looks up the name of each peer before it answers any, so with many ranks and a slow name server it
        may be silent for a minute. So a probe waits long: ranks that came back every two seconds would bring new
        lookups faster than the store finishes them.
        """
        host, port, size = self._host, self.environment.master_port, self.environment.world_size
        began, waited, problem = time.monotonic(), self._timeout, "not asked yet"

        def describe() -> str:
            return f"rank 0: {problem}"

        for _ in self._polls(self.seconds_left + MARGIN_SECONDS, describe):
            patience = max(PROBE_SECONDS, min(self.seconds_left, _LONGEST_PROBE_SECONDS))
            store_problem = probe_store(host, port, patience)
            if store_problem is None:
                with suppress(dist.DistError):  # it may close between the two
                    return TCPStore(host, port, size, timeout=_STORE_TIMEOUT, wait_for_workers=False)
            problem = store_problem or "the store answered too late"
            # torchrun's agent opens its store before it starts a worker. If the store refuses, the agent has ended.
            if self._uses_agent_store and problem != NO_STORE and time.monotonic() - began >= MARGIN_SECONDS:
                waited = round(time.monotonic() - began)
                break
        error = RunFailedError if self._uses_agent_store else LaunchError
        raise error(
            f"rank {self.environment.rank} did not find rank 0 of {size} at {self.address} within {waited:g} s "
            f"({self.environment.launcher}): {problem}. Check that rank 0 was started, that MASTER_ADDR and "
            "MASTER_PORT name its machine on every rank, and that no firewall blocks the port; or raise "
            "parallel.timeout_minutes."
        )

    def _answer(self, requests: PrefixStore, token: str) -> None:
        """Rank 0's thread: give the token to every rank that asks, and say which launch this is, until it is over."""
        answer = json.dumps([token, self.environment.world_size, self.environment.launch_id])
        num_answered = 0
        with suppress(RuntimeError):  # the store is gone; the main thread learns it from its own question
            # This goes on for the whole run, so each turn asks one question, however many ranks there are.
            while not self._is_over.wait(_POLL_SECONDS):
                if requests.add("token/count", 0) > num_answered:
                    for line in requests.get("token/notes").splitlines()[num_answered:]:
                        requests.set(json.loads(line)[1], answer)
                        num_answered += 1

    def _request_token(self, prefix: str) -> tuple[TCPStore, str]:
        """Find the store, and get the token from rank 0. A store that closes was the previous rendezvous's."""
        world_size, launch_id = self.environment.world_size, self.environment.launch_id
        while True:
            server, key = self._find_store(), f"token/{secrets.token_hex(8)}"
            self.store = PrefixStore(prefix, server)
            try:
                self._post("token", key)
                token, their_size, their_id = self._read(key, lambda: "missing: rank 0 (a store is open there)")
            except LaunchError as error:
                has_closed = isinstance(error.__cause__, RuntimeError)
                if not has_closed or self.seconds_left == 0:
                    raise
                continue
            if (their_size, their_id) != (world_size, launch_id):
                raise LaunchError(
                    f"rank {self.environment.rank} found another launch at {self.address}: world size {world_size} and "
                    f"id {launch_id!r} here, {their_size} and {their_id!r} on rank 0. Start all ranks with the same "
                    "world size, and give each launch a port of its own."
                )
            return server, token

    def _read(self, key: str, waits_for: Callable[[], str]) -> Any:
        """Wait for what rank 0 writes under a key."""
        for _ in self._polls(self.seconds_left + MARGIN_SECONDS, waits_for):
            if self._ask("check", [key]):
                return json.loads(self._ask("get", key))
        raise LaunchError(
            f"rank {self.environment.rank} got no answer from rank 0 of {self.environment.world_size} at "
            f"{self.address} within {self._timeout:g} s, although a store is open there ({waits_for()}). Look at rank "
            "0's output, start every rank with the same MASTER_ADDR and MASTER_PORT, or raise parallel.timeout_minutes."
        )

    def _post(self, topic: str, note: str) -> None:
        # One key for all notes: with a key for each, a world of N ranks would ask the store N x N times.
        self._ask("append", f"{topic}/notes", json.dumps([self.environment.rank, note]) + "\n")
        self._ask("add", f"{topic}/count", 1)

    def _wait_for_notes(self, topic: str, number: int, seconds: float, waits_for: Callable[[], str]) -> bool:
        """Return whether so many ranks have posted a note within the seconds."""
        return any(self._ask("add", f"{topic}/count", 0) >= number for _ in self._polls(seconds, waits_for))

    def _notes(self, topic: str) -> dict[int, str]:
        return dict(sorted(json.loads(line) for line in self._ask("get", f"{topic}/notes").splitlines()))

    def _missing_ranks(self) -> str:
        return f"missing: {self._ranks_without(self.joined())}"

    def _ranks_without(self, joined: dict[int, str]) -> str:
        return format_ranks([rank for rank in range(self.environment.world_size) if rank not in joined])

    def _polls(self, seconds: float, waits_for: Callable[[], str]) -> Iterator[None]:
        """Yield at least once and until the time is over; log now and then what this rank waits for."""
        deadline = time.monotonic() + seconds
        rank, launcher = self.environment.rank, launcher_pid(os.environ, self.environment)
        while True:
            yield
            if launcher is not None and os.getppid() != launcher:
                raise RunFailedError(
                    f"rank {rank} lost its launcher, process {launcher}, before all ranks had joined at "
                    f"{self.address}. Start the launch again."
                )
            now = time.monotonic()
            if now >= deadline:
                return
            if now >= self._next_report:
                self._next_report = now + REPORT_SECONDS
                place = (rank, self.environment.world_size, self.address, now - self._began, self._timeout)
                message = "[Distributed] rank %d of %d has waited at %s for %.0f s (limit %g s): %s"
                _log.warning(message, *place, waits_for())
            time.sleep(_POLL_SECONDS)

    def _ask(self, verb: str, *args: Any) -> Any:
        """Call a method of the store. If the store is gone, rank 0 or the launcher's agent is gone too."""
        try:
            return getattr(self.store, verb)(*args)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self.environment.rank} lost the store at {self.address}: rank 0 or its launcher has ended. "
                "Look at rank 0's output."
            ) from error
