"""Start and end the process group of ranks that have found each other, and decide what happens if they cannot.

Only this module calls `init_process_group` and `destroy_process_group`.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, not in __all__
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout

from finetune.distributed.environment import LaunchEnvironment
from finetune.distributed.network import interface_towards, is_own_address
from finetune.distributed.rank_devices import refuse_different_devices, refuse_shared_devices
from finetune.distributed.rendezvous import Rendezvous, Verdict
from finetune.errors import LaunchError, LeftToMain, first_line
from finetune.fallbacks import Fallbacks

_log = logging.getLogger(__name__)

_MOST_START_SECONDS = 300.0
"""The longest that a backend may take to connect ranks that are all present."""
_LEAST_START_SECONDS = 5.0
_LOOK_SECONDS = 0.01
_set_timeout = getattr(dist, "set_timeout", _set_pg_timeout)
"""The public name is newer than torch 2.13. Beside it, the private one warns that it is deprecated."""


class TrainsAloneError(Exception):
    """Rank 0 goes on alone, for this reason. Raised on rank 0 only."""


def choose_backend(backend: str | None, device: torch.device, *, shares_gpus: bool = False) -> str:
    """Return the backend of a process on this device, where ``None`` and ``auto`` leave the choice to it."""
    if backend in (None, "auto"):
        return "nccl" if device.type == "cuda" and not shares_gpus else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError(
            "backend=nccl needs a CUDA device and this process computes on the CPU. Use backend=gloo or auto."
        )
    return str(backend)


def why_not_wanted(environment: LaunchEnvironment) -> str:
    """Say why `ddp=False` refuses a launch of several processes."""
    return (
        f"ddp=False refuses it: {environment.launcher} started {environment.world_size} processes. Start one process, "
        "or drop ddp=False"
    )


def verdict_on_failure(failure: str, fallbacks: Fallbacks) -> Verdict:
    """Return what rank 0 decides if the ranks cannot train together."""
    return Verdict("refused", f"{failure}. No rank goes on alone.") if fallbacks.strict else Verdict("alone", failure)


def compare_devices(rendezvous: Rendezvous) -> Verdict:
    """Refuse ranks on different types of device or two on one GPU: a backend would hang with them."""
    ranks = {rank: json.loads(note) for rank, note in rendezvous.joined().items()}
    try:
        refuse_different_devices({rank: device_type for rank, (device_type, _, _) in ranks.items()})
        refuse_shared_devices({rank: identity for rank, (_, identity, _) in ranks.items()})
    except LaunchError as error:
        return Verdict("refused", str(error))
    return Verdict("together")


def choose_interface(rendezvous: Rendezvous, host: str) -> str | None:
    """Return gloo's network interface: on one machine, it listens on loopback only.

    On rank 0's machine its own name may mean 127.0.1.1, so MASTER_ADDR does not tell which way the others come; an
    address of another machine does.
    """
    addresses = (json.loads(note)[2] for note in rendezvous.joined().values())
    peers = (address for address in addresses if address and not is_own_address(address))
    return interface_towards(next(peers, host))


def obey(rendezvous: Rendezvous, verdict: Verdict) -> None:
    """Share rank 0's verdict, and return if the ranks train together. Collective.

    Raises:
        LaunchError: the launch is refused.
        LeftToMain, TrainsAloneError: rank 0 trains alone, and this is another rank, or rank 0.
    """
    rank, world_size = rendezvous.environment.rank, rendezvous.environment.world_size
    decision, reason = rendezvous.share_verdict(verdict)
    if decision == "refused":
        raise LaunchError(reason)
    if decision == "alone" and rank == 0:
        raise TrainsAloneError(reason)
    if decision == "alone":
        _log.warning("[Distributed] rank 0 trains alone: rank %d of %d leaves (%s)", rank, world_size, reason)
        raise LeftToMain


def start_backend(rendezvous: Rendezvous, backend: str, timeout: timedelta, undo: ExitStack) -> str | None:
    """Connect the ranks, which are all present, and return which of them could not connect and why. Collective.

    If that fails, no group is left, whatever the error: `cleanup_ddp` would wait for a collective that hangs. Otherwise
    `undo` ends the group.
    """
    with ExitStack() as unless_started:
        unless_started.callback(_end_group, aborts=backend == "nccl")
        failure = _connect_ranks(rendezvous, backend)
        if failure is None:
            _set_timeout(timeout)
            rendezvous.store.set_timeout(timeout)
            undo.callback(_end_group)  # without it, small gloo runs abort at their end
            unless_started.pop_all()
    return failure


def _connect_ranks(rendezvous: Rendezvous, backend: str) -> str | None:
    rank, world_size = rendezvous.environment.rank, rendezvous.environment.world_size
    seconds = min(_MOST_START_SECONDS, max(rendezvous.seconds_left, _LEAST_START_SECONDS))
    limit = timedelta(seconds=seconds)
    rendezvous.store.set_timeout(limit)
    problem = ""
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(backend, rendezvous.store),
            rank=rank,
            world_size=world_size,
            # At the limit nccl would end the process from a thread of its own. `_finish` gives up before.
            timeout=2 * limit if backend == "nccl" else limit,
        )
        if backend == "nccl":  # it would guess this process's GPU from its rank
            _finish(dist.barrier(device_ids=[torch.cuda.current_device()], async_op=True), seconds)
        else:
            dist.barrier()
    except (RuntimeError, ValueError) as error:
        # nccl's own reason stands lines below the first, which is the same for all of them.
        problem = f"{first_line(error)} {str(error).partition('Last error:')[2].strip()}".strip()
    notes = rendezvous.exchange(f"start of {backend}", problem, seconds + _LEAST_START_SECONDS)
    failed = {rank: notes.get(rank, "no answer") for rank in range(world_size) if notes.get(rank) != ""}
    if failed:
        first, text = next(iter(failed.items()))
        return f"{backend} did not start on {len(failed)} of {world_size} ranks (rank {first}: {text})"
    _log.info("[Distributed] Initialized with backend=%s rank=%d world_size=%d", backend, rank, world_size)
    return None


def _finish(work: dist.Work, seconds: float) -> None:
    """Wait for a collective, but only for so long. The time limit of the backend itself would end this process.

    Raises:
        RuntimeError: it failed, or has not ended in time.
    """
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"its first collective has not ended within {seconds:.0f} seconds")
        time.sleep(_LOOK_SECONDS)
    work.wait()


def _end_group(*, aborts: bool = False) -> None:
    """End the group, if it is up. Without `aborts`, nccl waits for an unfinished collective."""
    if dist.is_initialized():
        if aborts:
            _abort_process_group()
        else:
            dist.destroy_process_group()
