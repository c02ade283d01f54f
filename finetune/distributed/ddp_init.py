"""Join and leave the world that a launcher started.

`initialize_ddp` changes only launch variables that are missing or would mislead Accelerate. `cleanup_ddp` undoes only
these changes, so that the launcher's own settings survive.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from finetune.distributed.device import _resolve_device, device_identity, device_of_rank
from finetune.distributed.environment import (
    GLOO_INTERFACE_VARIABLE,
    WORLD_VARIABLES,
    LaunchEnvironment,
    read_environment,
    with_place,
)
from finetune.errors import LaunchError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.logs import configure_logs, is_configured

if TYPE_CHECKING:  # a process alone needs neither a rendezvous nor a backend
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, not in __all__

    from finetune.distributed.rendezvous import Rendezvous

DEFAULT_TIMEOUT = timedelta(minutes=60)


class ProcessContext(NamedTuple):
    """This process's place in the world."""

    distributed: bool
    rank: int
    local_rank: int
    world_size: int
    device: torch.device


@dataclass
class _JoinedWorld:
    """The world that this process has joined. There is one for each process, like torch's default group."""

    undo: ExitStack = field(default_factory=ExitStack)
    """Everything that `cleanup_ddp` must undo."""
    rendezvous: Rendezvous | None = None
    alone: ProcessContext | None = None
    """The place of rank 0 if it trains for a whole launch: no group is up, but the ranks have decided."""
    hidden_launch: LaunchEnvironment | None = None
    """That launch. Its variables are hidden."""
    fallbacks: tuple[Fallback, ...] = ()
    """What was taken to join. A run that adopts this world later records them too."""

    def take(self, fallbacks: Fallbacks, fallback: Fallback, *, warning: str | None = None) -> None:
        """Take a fallback, and keep it for later runs."""
        fallbacks.take(fallback, warning=warning)
        self.fallbacks = (*self.fallbacks, fallback)

    def set_variable(self, name: str, value: str | None) -> None:
        """Set a variable, or remove it (None). Undoing restores it, unless somebody else has changed it since."""
        before = os.environ.get(name)

        def restore() -> None:
            if os.environ.get(name) == value:
                _set_variable(name, before)

        _set_variable(name, value)
        self.undo.callback(restore)

    def hide_launch(self) -> None:
        """Make this process look alone. Accelerate would wait for the other ranks of a launch."""
        for name in WORLD_VARIABLES:
            if name in os.environ:
                self.set_variable(name, None)


_world = _JoinedWorld()
_rendezvous_numbers = itertools.count(1)


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
    from finetune.distributed.process_group import TrainsAloneError, choose_backend

    own_device = device_of_rank(environment.local_rank, device, shares_gpus=shares_gpus)
    chosen = choose_backend(backend, own_device, shares_gpus=shares_gpus)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    try:
        for name, value in environment.as_variables().items():
            if name not in os.environ:  # Accelerate adopts a group only if the launch variables are there
                _world.set_variable(name, value)
        timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        _initialize_distributed(
            environment, chosen, own_device, timeout, flag=flag, shares_gpus=shares_gpus, fallbacks=fallbacks
        )
    except TrainsAloneError as decision:
        return _go_on_alone(environment, str(decision), own_device, fallbacks)
    except BaseException:
        cleanup_ddp()
        raise
    return ProcessContext(True, environment.rank, environment.local_rank, environment.world_size, own_device)


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
    local_rank, world_size = read_environment(os.environ).local_rank, dist.get_world_size()
    own_device = device_of_rank(local_rank, device, shares_gpus=shares_gpus)
    return ProcessContext(world_size > 1, dist.get_rank(), local_rank, world_size, own_device)


def cleanup_ddp() -> None:
    """End the group and undo our changes to the launch variables. Safe to call twice and after a failure."""
    global _world
    world, _world = _world, _JoinedWorld()
    world.undo.close()


# A script that ends without it aborts small gloo runs, and leaves other ranks waiting for rank 0's verdict.
atexit.register(cleanup_ddp)


def _initialize_distributed(
    environment: LaunchEnvironment,
    backend: str,
    device: torch.device,
    timeout: timedelta,
    *,
    flag: bool | None,
    shares_gpus: bool,
    fallbacks: Fallbacks,
) -> None:
    """Form the group, or raise what `obey` raises. Collective."""
    from finetune.distributed.network import address_of_rank_0, own_address_towards
    from finetune.distributed.process_group import (
        TrainsAloneError,
        choose_interface,
        compare_devices,
        obey,
        start_backend,
        verdict_on_failure,
        why_not_wanted,
    )
    from finetune.distributed.rendezvous import Rendezvous, Verdict

    host = address_of_rank_0(environment)
    identity = None if shares_gpus else device_identity(device)
    note = [f"{device.type} with {backend}", identity, own_address_towards(host)]
    try:
        rendezvous = Rendezvous(environment, timeout, next(_rendezvous_numbers), json.dumps(note))
    except LaunchError as error:
        # Without its port no other rank reaches rank 0: the others do not find it, and leave with an error.
        if environment.rank != 0 or fallbacks.strict:
            raise
        raise TrainsAloneError(str(error)) from error
    _world.rendezvous = rendezvous
    _world.undo.callback(rendezvous.leave)
    verdict = Verdict("together")
    if environment.rank == 0:
        failure = why_not_wanted(environment) if flag is False else rendezvous.wait_for_all()
        verdict = compare_devices(rendezvous) if failure is None else verdict_on_failure(failure, fallbacks)
    obey(rendezvous, verdict)
    interface = choose_interface(rendezvous, host)
    if interface is not None and GLOO_INTERFACE_VARIABLE not in os.environ:
        _world.set_variable(GLOO_INTERFACE_VARIABLE, interface)
    failure = start_backend(rendezvous, backend, timeout, _world.undo)
    if failure is not None and backend == "nccl" and not fallbacks.strict:
        nccl_failure, failure = failure, start_backend(rendezvous, "gloo", timeout, _world.undo)
        if failure is None:
            _world.take(fallbacks, Fallback(what="parallel.backend", wanted=backend, used="gloo", why=nccl_failure))
    if failure is not None:
        obey(rendezvous, verdict_on_failure(failure, fallbacks))


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


def _go_on_alone(
    environment: LaunchEnvironment, reason: str, device: torch.device, fallbacks: Fallbacks
) -> ProcessContext:
    """Return the place of rank 0 in a world that was not formed."""
    _world.take(
        fallbacks,
        Fallback(what="ddp", wanted=f"{environment.world_size} processes", used="one process", why=reason),
        warning=f"[Trainer] Warning: DDP was requested but {reason}. Rank 0 trains alone with the same global batch: "
        "the curve stays the same, only slower",
    )
    _world.hide_launch()
    _world.alone, _world.hidden_launch = ProcessContext(False, 0, environment.local_rank, 1, device), environment
    return _world.alone


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
