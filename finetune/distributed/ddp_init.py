"""Start and end the process group: the only calls of `init_process_group` and `destroy_process_group`.

`initialize_ddp` and `cleanup_ddp` are twins. The first changes only launch variables that are missing or would mislead
Accelerate, the second takes back only what the first changed, so that a launcher's own settings survive us.
"""

from __future__ import annotations

import atexit
import logging
import os
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, not in __all__
from torch.distributed.distributed_c10d import _set_pg_timeout

from finetune.distributed.device import _pick_device, _resolve_device, device_identity, refuse_shared_devices
from finetune.distributed.environment import (
    GLOO_INTERFACE_VARIABLE,
    LaunchEnvironment,
    read_environment,
    with_place,
)
from finetune.distributed.launch_variables import hide_world, restore, write_missing
from finetune.distributed.network import interface_towards, is_own_address, own_address_towards
from finetune.distributed.rendezvous import RollCall, Verdict
from finetune.errors import LaunchError, LeftToMain
from finetune.fallbacks import Fallback, Fallbacks
from finetune.logs import configure_logs, is_configured

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=60)
_MOST_START_SECONDS = 300.0
"""For a backend to connect ranks that are all present: one that hangs is no reason to wait for an hour."""
_LEAST_START_SECONDS = 5.0


class ProcessContext(NamedTuple):
    """This process's place in the world."""

    distributed: bool
    rank: int
    local_rank: int
    world_size: int
    device: torch.device


class _State:
    """What this process joined: one for each process, for `cleanup_ddp` to take back."""

    group_is_ours = False
    num_meetings = 0
    roll_call: RollCall | None = None
    alone: Joined | None = None
    fallbacks: tuple[Fallback, ...] = ()


class Joined(NamedTuple):
    """Who this process is although no group is up: rank 0 of a launch that it trains for alone."""

    context: ProcessContext
    environment: LaunchEnvironment


def initialize_ddp(
    timeout: timedelta | None = None,
    *,
    rank: int | None = None,
    worldsize: int | None = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    flag: bool | None = None,
    fallbacks: Fallbacks | None = None,
) -> ProcessContext | None:
    """Join the world that the launcher described, or the one given in words.

    If the world cannot be formed, rank 0 goes on alone and says so, and the other ranks leave once they have its word;
    under strict fallbacks it is an error on all of them.

    Collective: called by every process of the launch; returns when all have arrived.

    Args:
        timeout: how long the ranks wait for each other, now and in a collective; 60 minutes by default.
        rank: this process's rank, with `worldsize`, where no launcher set it (torch.multiprocessing.spawn).
        worldsize: number of processes.
        master_addr: address of rank 0.
        master_port: port of rank 0.
        backend: ``nccl`` or ``gloo``; by default nccl with CUDA and gloo without.
        device: the device of this process, by default the GPU with its local rank or the CPU.
        flag: the run's `ddp`: True: several processes are expected; False: rank 0 alone; None: as launched.
        fallbacks: where a downgrade is recorded, and whether one is refused.

    Returns:
        This process's place, or None when a group is up already. A world of one needs no group: `distributed` is False.

    Raises:
        LaunchError: contradictory variables, nccl without CUDA, two ranks on one GPU, rank 0 not found.
        LeftToMain: rank 0 has confirmed that it trains alone; leaves the process with exit code 0.
    """
    if dist.is_initialized():
        return None
    if _State.alone is not None:
        return _State.alone.context
    environment = _environment_with(rank, worldsize, master_addr, master_port)
    if not is_configured():  # a script in the form of the guides begins here
        configure_logs(environment.rank)
    fallbacks = Fallbacks() if fallbacks is None else fallbacks  # an empty list of them is false
    if environment.world_size == 1:
        return _alone(environment, device, flag, fallbacks)
    forced_cpu = device is not None and _resolve_device(device).type == "cpu"
    place = torch.device("cpu") if forced_cpu else _pick_device(environment.local_rank)
    chosen = _choose_backend(backend, place)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    try:
        write_missing(environment.as_variables())
        why_alone = _initialize_distributed(
            environment, chosen, DEFAULT_TIMEOUT if timeout is None else timeout, flag=flag, fallbacks=fallbacks
        )
        if why_alone is not None:
            return _go_on_alone(environment, why_alone, place, fallbacks)
        _compare_devices(place)
    except BaseException:
        cleanup_ddp()
        raise
    return ProcessContext(True, environment.rank, environment.local_rank, environment.world_size, place)


def is_joined() -> bool:
    """Whether `initialize_ddp` has settled this process's world already, or somebody else has."""
    return dist.is_initialized() or _State.alone is not None


def joined_environment() -> LaunchEnvironment:
    """What the launcher said, also where its variables are hidden since this process goes on alone."""
    return _State.alone.environment if _State.alone is not None else read_environment(os.environ)


def joined_fallbacks() -> tuple[Fallback, ...]:
    """The downgrades that were taken to settle the world."""
    return _State.fallbacks


def meeting_store() -> PrefixStore | None:
    """Where the ranks of this world can leave words for each other; None alone, and in a group that others made."""
    return None if _State.roll_call is None else _State.roll_call.store


def current_context(device: str | torch.device | None = None) -> ProcessContext:
    """This process's place in the group that is up already.

    Args:
        device: the device of this process, by default the GPU with its local rank or the CPU.
    """
    local_rank = read_environment(os.environ).local_rank
    forced_cpu = device is not None and _resolve_device(device).type == "cpu"
    place = torch.device("cpu") if forced_cpu else _pick_device(local_rank)
    return ProcessContext(dist.get_world_size() > 1, dist.get_rank(), local_rank, dist.get_world_size(), place)


def cleanup_ddp() -> None:
    """End the group and take back our changes to the launch variables. Safe to call twice and after a failure."""
    if _State.group_is_ours and dist.is_initialized():
        # Leaving without this aborts small gloo runs.
        dist.destroy_process_group()
    _State.group_is_ours = False
    if _State.roll_call is not None:
        try:
            _State.roll_call.leave()
        except LaunchError as error:
            _log.debug("%s", error)
        _State.roll_call = None
    _State.alone, _State.fallbacks = None, ()
    restore()


# A script that ends without it aborts small gloo runs, and leaves a rank waiting for rank 0's word.
atexit.register(cleanup_ddp)


def _is_env_distributed() -> bool:
    """True where a launcher started this process as one of several."""
    return read_environment(os.environ).world_size > 1


def _should_use_distributed(flag: bool | None) -> bool:
    """Settle `ddp`: True asks for it where possible, False never, None takes what the launcher started."""
    return flag is not False and _is_env_distributed()


def _environment_with(
    rank: int | None, worldsize: int | None, master_addr: str | None, master_port: int | str | None
) -> LaunchEnvironment:
    if (rank is None) != (worldsize is None):
        raise LaunchError(f"rank={rank} and worldsize={worldsize} belong together: give both or neither.")
    if rank is None or worldsize is None:
        environment = read_environment(os.environ)
    else:
        environment = read_environment(with_place(os.environ, rank, worldsize))
    if master_addr is not None:
        environment = replace(environment, master_addr=master_addr)
    if master_port is not None:
        environment = replace(environment, master_port=int(master_port))
    return environment


def _choose_backend(backend: str | None, device: torch.device) -> str:
    if backend in (None, "auto"):
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError(
            "backend=nccl needs a CUDA device and this process computes on the CPU. Use backend=gloo or auto."
        )
    return str(backend)


def _initialize_distributed(
    environment: LaunchEnvironment,
    backend: str,
    timeout: timedelta,
    *,
    flag: bool | None = None,
    fallbacks: Fallbacks,
) -> str | None:
    """Form the group; None when it is up, else (on rank 0 only) why this process goes on alone. Collective."""
    if backend == "nccl" and environment.world_size > 1 and not fallbacks.strict:
        candidates = [backend, "gloo"]
    else:
        candidates = [backend]
    _State.num_meetings += 1
    try:
        roll_call = _State.roll_call = RollCall(environment, timeout, _State.num_meetings)
    except LaunchError as error:
        # Without its port rank 0 cannot be heard: the others do not find it, and leave with an error.
        if environment.rank != 0 or fallbacks.strict:
            raise
        return str(error)
    why = None
    if environment.rank == 0:
        why = _why_not_wanted(environment) if flag is False else roll_call.wait_for_all()
    why = _settle(roll_call, why, fallbacks)
    if why is not None:
        return why
    for candidate in candidates:
        failure = _start_backend(roll_call, environment, candidate, timeout)
        if failure is None:
            if candidate != backend:
                _take(fallbacks, Fallback(what="parallel.backend", wanted=backend, used=candidate, why=str(why)))
            return None
        why = failure
        if dist.is_initialized():
            dist.destroy_process_group()
    return _settle(roll_call, why, fallbacks)


def _why_not_wanted(environment: LaunchEnvironment) -> str:
    return (
        f"ddp=False refuses it: {environment.launcher} started {environment.world_size} processes. Start one process, "
        "or drop ddp=False"
    )


def _settle(roll_call: RollCall, why: str | None, fallbacks: Fallbacks) -> str | None:
    """Rank 0 gives its verdict, the others obey it. None: together; else, on rank 0, why it goes on alone.

    Raises:
        LaunchError: rank 0 is strict.
        LeftToMain: on the others, where rank 0 goes on alone.
    """
    environment = roll_call.environment
    if environment.rank == 0:
        verdict = Verdict("together") if why is None else Verdict("refused" if fallbacks.strict else "alone", why)
        roll_call.give_verdict(verdict)
    else:
        verdict = roll_call.read_verdict()
    if verdict.kind == "refused":
        raise LaunchError(f"{verdict.why}. No rank goes on alone.")
    if verdict.kind == "alone" and environment.rank != 0:
        _log.warning(
            "[Distributed] rank 0 trains alone: rank %d of %d leaves (%s)",
            environment.rank,
            environment.world_size,
            verdict.why,
        )
        raise LeftToMain
    return None if verdict.kind == "together" else verdict.why


def _start_backend(roll_call: RollCall, environment: LaunchEnvironment, backend: str, timeout: timedelta) -> str | None:
    """Connect the ranks, which are all present; None, or which of them could not and why. Collective."""
    seconds = min(_MOST_START_SECONDS, max(roll_call.seconds_left, _LEAST_START_SECONDS))
    roll_call.store.set_timeout(timedelta(seconds=seconds))
    interface = interface_towards(_address_of_a_peer(roll_call, seconds) or environment.master_addr)
    if interface is not None:
        write_missing({GLOO_INTERFACE_VARIABLE: interface})
    problem = ""
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(backend, roll_call.store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=seconds),
        )
        _State.group_is_ours = True
        # nccl would guess this process's GPU from its rank.
        dist.barrier(device_ids=[torch.cuda.current_device()] if backend == "nccl" else None)
        _set_pg_timeout(timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        problem = str(error).split("\n", 1)[0]
    notes = roll_call.exchange(f"start of {backend}", problem, seconds + _LEAST_START_SECONDS)
    failed = {rank: notes.get(rank, "said nothing") for rank in range(environment.world_size) if notes.get(rank) != ""}
    if failed:
        rank, text = next(iter(failed.items()))
        return f"{backend} did not start on {len(failed)} of {environment.world_size} ranks (rank {rank}: {text})"
    _log.info(
        "[Distributed] Initialized with backend=%s rank=%d world_size=%d",
        backend,
        environment.rank,
        environment.world_size,
    )
    return None


def _address_of_a_peer(roll_call: RollCall, seconds: float) -> str | None:
    """An address of another machine in this world; None where there is none. On rank 0's machine its own name may mean
    127.0.1.1, so that MASTER_ADDR does not tell by which way the others come. Collective.
    """
    mine = own_address_towards(roll_call.environment.master_addr) or ""
    notes = roll_call.exchange("address", mine, seconds)
    return next((address for address in notes.values() if address and not is_own_address(address)), None)


def _compare_devices(place: torch.device) -> None:
    """Two ranks that see one GPU each may see the same one. Collective."""
    roll_call = _State.roll_call
    if roll_call is None or place.type != "cuda":
        return
    notes = roll_call.exchange("device", device_identity(place) or "", _MOST_START_SECONDS)
    refuse_shared_devices([notes.get(rank) or None for rank in range(roll_call.environment.world_size)])


def _alone(
    environment: LaunchEnvironment, device: str | torch.device | None, flag: bool | None, fallbacks: Fallbacks
) -> ProcessContext:
    """A world of one, as it was launched."""
    if flag is True:
        why = f"{environment.launcher} started one process; use torchrun, accelerate launch, srun or"
        fallbacks.take(
            Fallback(
                what="ddp",
                wanted="several processes",
                used="one process",
                why=f"{why} parallel.num_processes for more",
            ),
            warning="[Trainer] Warning: DDP was requested but WORLD_SIZE is 1: this process trains alone",
        )
    hide_world()
    return ProcessContext(False, 0, 0, 1, _resolve_device(device))


def _go_on_alone(environment: LaunchEnvironment, why: str, place: torch.device, fallbacks: Fallbacks) -> ProcessContext:
    """Rank 0 of a world that was not formed."""
    _take(
        fallbacks,
        Fallback(what="ddp", wanted=f"{environment.world_size} processes", used="one process", why=why),
        warning=f"[Trainer] Warning: DDP was requested but {why}. Rank 0 trains alone with the same global batch: the "
        "curve stays the same, only slower",
    )
    hide_world()
    context = ProcessContext(False, 0, environment.local_rank, 1, place)
    _State.alone = Joined(context, environment)
    return context


def _take(fallbacks: Fallbacks, fallback: Fallback, *, warning: str | None = None) -> None:
    """A run that adopts this world later records it too."""
    fallbacks.take(fallback, warning=warning)
    _State.fallbacks = (*_State.fallbacks, fallback)
