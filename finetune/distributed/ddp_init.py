"""Start and end the process group: the only calls of `init_process_group` and `destroy_process_group`.

`initialize_ddp` and `cleanup_ddp` are twins. The first writes only launch variables that are missing, the second
removes only what the first wrote, so that a launcher's own settings survive us.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from finetune.distributed.device import _pick_device, _resolve_device
from finetune.distributed.environment import LaunchEnvironment, has_agent_store, read_environment, with_place
from finetune.errors import LaunchError

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=60)
_variables_written: dict[str, str] = {}
_group_is_ours = False
_num_groups = 0


class ProcessContext(NamedTuple):
    """This process's place in the world."""

    distributed: bool
    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def initialize_ddp(
    timeout: timedelta | None = None,
    *,
    rank: int | None = None,
    worldsize: int | None = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
) -> ProcessContext | None:
    """Join the world that the launcher described, or the one given in words.

    Collective: called by every process of the launch; returns when all have arrived.

    Args:
        timeout: how long a collective may wait, 60 minutes by default.
        rank: this process's rank, with `worldsize`, where no launcher set it (torch.multiprocessing.spawn).
        worldsize: number of processes.
        master_addr: address of rank 0.
        master_port: port of rank 0.
        backend: ``nccl`` or ``gloo``; by default nccl with CUDA and gloo without.
        device: the device of this process, by default the GPU with its local rank or the CPU.

    Returns:
        This process's place, or None when a group is up already. A world of one needs no group: `distributed` is False.

    Raises:
        LaunchError: contradictory variables, nccl without CUDA, or ranks that did not come.
    """
    if dist.is_initialized():
        return None
    environment = _environment_with(rank, worldsize, master_addr, master_port)
    forced_cpu = device is not None and torch.device(device).type == "cpu"
    if environment.world_size == 1:
        return ProcessContext(False, 0, 0, 1, _resolve_device(device))
    place = torch.device("cpu") if forced_cpu else _pick_device(environment.local_rank)
    chosen = _choose_backend(backend, place)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    _write_missing_variables(environment)
    try:
        _initialize_distributed(environment, chosen, timeout or DEFAULT_TIMEOUT)
    except BaseException:
        cleanup_ddp()
        raise
    return ProcessContext(True, environment.rank, environment.local_rank, environment.world_size, place)


def current_context(device: str | torch.device | None = None) -> ProcessContext:
    """This process's place in the group that is up already.

    Args:
        device: the device of this process, by default the GPU with its local rank or the CPU.
    """
    local_rank = read_environment(os.environ).local_rank
    forced_cpu = device is not None and torch.device(device).type == "cpu"
    place = torch.device("cpu") if forced_cpu else _pick_device(local_rank)
    return ProcessContext(dist.get_world_size() > 1, dist.get_rank(), local_rank, dist.get_world_size(), place)


def cleanup_ddp() -> None:
    """End the group and remove the variables that we wrote. Safe to call twice and after a failure."""
    global _group_is_ours
    if _group_is_ours and dist.is_initialized():
        # Leaving without this aborts small gloo runs.
        dist.destroy_process_group()
    _group_is_ours = False
    while _variables_written:
        name, value = _variables_written.popitem()
        if os.environ.get(name) == value:
            del os.environ[name]


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


def _write_missing_variables(environment: LaunchEnvironment) -> None:
    """Accelerate adopts a group only where the launch variables are in the environment."""
    for name, value in environment.as_variables().items():
        if name not in os.environ:
            os.environ[name] = value
            _variables_written[name] = value


def _initialize_distributed(environment: LaunchEnvironment, backend: str, timeout: timedelta) -> None:
    global _group_is_ours, _num_groups
    address = f"tcp://{environment.master_addr}:{environment.master_port}"
    # torchrun's agent already holds a store at the address; "env://" knows how to share it.
    method = "env://" if has_agent_store(os.environ) else address
    # The agent's store outlives a group: under the same names a second one would wait for the ports of the first.
    _num_groups += 1
    try:
        meeting = rendezvous(method, environment.rank, environment.world_size, timeout=timeout)
        store, rank, world_size = next(meeting)
        store.set_timeout(timeout)
        store = PrefixStore(f"finetune/{_num_groups}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {environment.rank} could not join the world of {environment.world_size} at "
            f"{environment.master_addr}:{environment.master_port} ({environment.launcher}, {backend}): {error}. Check "
            "that all processes were started with the same address and port, and that the port is free."
        ) from error
    _group_is_ours = True
    # nccl would guess this process's GPU from its rank.
    dist.barrier(device_ids=[torch.cuda.current_device()] if backend == "nccl" else None)
    _log.info(
        "[Distributed] Initialized with backend=%s rank=%d world_size=%d",
        backend,
        environment.rank,
        environment.world_size,
    )
