"""Join and leave the world that a launcher started.

`initialize_ddp` changes only launch variables that are missing or would mislead Accelerate. `cleanup_ddp` undoes only
these changes, so that the launcher's own settings survive.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from finetune.distributed.device import _resolve_device
from finetune.distributed.environment import LaunchEnvironment, read_environment, with_place
from finetune.distributed.joined_world import JoinedWorld, ProcessContext
from finetune.fallbacks import Fallback, Fallbacks
from finetune.logs import configure_logs, is_configured

if TYPE_CHECKING:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, not in __all__

DEFAULT_TIMEOUT = timedelta(minutes=60)
_world = JoinedWorld()


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
    shares_gpus: bool = False,
    fallbacks: Fallbacks | None = None,
) -> ProcessContext | None:
    """Join the world that the launcher described, or the one that the arguments describe.

    If the world cannot be formed, rank 0 goes on alone and says so, and the other ranks leave once they know it; under
    strict fallbacks it is an error on all. Collective: called by every process; returns when all have joined.

    Args:
        timeout: how long the ranks wait for each other, now and in a collective; 60 minutes by default.
        rank: this process's rank, with `worldsize`, where no launcher set it (torch.multiprocessing.spawn).
        worldsize: number of processes.
        master_addr: address of rank 0.
        master_port: port of rank 0.
        backend: ``nccl`` or ``gloo``; by default nccl with CUDA and gloo without.
        device: the device of this process, by default the GPU with its local rank or the CPU.
        flag: the run's `ddp`: True: several processes are expected; False: rank 0 alone; None: as launched.
        shares_gpus: the run's `parallel.share_gpus`: let several ranks compute on one GPU, by default through gloo.
        fallbacks: where a downgrade is recorded, and whether one is refused.

    Returns:
        This process's place, or None when a group is up already. A world of one needs no group: `distributed` is False.

    Raises:
        LaunchError: contradictory variables, nccl without CUDA, ranks on different types of device or two on one GPU,
            rank 0 not found.
        LeftToMain: rank 0 has confirmed that it trains alone; leaves the process with exit code 0.
    """
    if dist.is_initialized():
        return None
    if _world.alone is not None:
        return _world.alone
    environment = read_environment(with_place(os.environ, rank, worldsize))
    port = environment.master_port if master_port is None else int(master_port)
    environment = replace(environment, master_addr=master_addr or environment.master_addr, master_port=port)
    if not is_configured():  # a script in the form of the guides begins here
        configure_logs(environment.rank, num_processes=environment.world_size)
    fallbacks = fallbacks or Fallbacks()
    if environment.world_size == 1:
        return _alone(environment, device, flag, fallbacks)
    from finetune.distributed.joining import join_ranks
    from finetune.distributed.process_group import choose_backend
    from finetune.distributed.rank_devices import device_of_rank

    own_device = device_of_rank(environment.local_rank, device, shares_gpus=shares_gpus)
    chosen = choose_backend(backend, own_device, shares_gpus=shares_gpus)
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    try:
        return join_ranks(
            _world, environment, chosen, own_device, timeout, flag=flag, shares_gpus=shares_gpus, fallbacks=fallbacks
        )
    except BaseException:
        cleanup_ddp()
        raise


def is_joined() -> bool:
    """Return whether this process has joined a world already, through `initialize_ddp` or otherwise."""
    return dist.is_initialized() or _world.alone is not None


def joined_environment() -> LaunchEnvironment:
    """Return this process's launch, also if its variables are hidden because this process goes on alone."""
    return _world.hidden_launch or read_environment(os.environ)


def joined_fallbacks() -> tuple[Fallback, ...]:
    """Return the fallbacks that were taken to join the world."""
    return _world.fallbacks


def rendezvous_store() -> PrefixStore | None:
    """Return the store of all ranks; None in a world of one, and in a group that others made."""
    return None if _world.rendezvous is None else _world.rendezvous.store


def current_context(device: str | torch.device | None = None, *, shares_gpus: bool = False) -> ProcessContext:
    """Return this process's place in a group that exists already. See `initialize_ddp` for the arguments."""
    from finetune.distributed.rank_devices import device_of_rank

    local_rank, world_size = read_environment(os.environ).local_rank, dist.get_world_size()
    own_device = device_of_rank(local_rank, device, shares_gpus=shares_gpus)
    return ProcessContext(world_size > 1, dist.get_rank(), local_rank, world_size, own_device)


def cleanup_ddp() -> None:
    """End the group and undo our changes to the launch variables. Safe to call twice and after a failure."""
    global _world
    world, _world = _world, JoinedWorld()
    world.undo.close()


# A script that ends without it aborts small gloo runs, and leaves other ranks waiting for rank 0's verdict.
atexit.register(cleanup_ddp)


def _alone(
    environment: LaunchEnvironment, device: str | torch.device | None, flag: bool | None, fallbacks: Fallbacks
) -> ProcessContext:
    """Return the place of a process that was launched alone."""
    if flag is True:
        has_launcher = environment.launcher != "none"
        start = f"{environment.launcher} started one process" if has_launcher else "there is no launcher"
        why = f"{start}; use torchrun, accelerate launch, srun or parallel.num_processes for several processes"
        fallbacks.take(
            Fallback(what="ddp", wanted="several processes", used="one process", why=why),
            warning="[Trainer] Warning: DDP was requested but WORLD_SIZE is 1: this process trains alone",
        )
    _world.hide_launch()
    return ProcessContext(False, 0, 0, 1, _resolve_device(device))
