"""Join a world of several ranks: find all of them, compare their devices, and start their process group."""

from __future__ import annotations

import itertools
import json
import os
from datetime import timedelta

import torch

from finetune.distributed.environment import GLOO_INTERFACE_VARIABLE, LaunchEnvironment
from finetune.distributed.joined_world import JoinedWorld, ProcessContext
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
from finetune.distributed.rank_devices import device_identity
from finetune.distributed.rendezvous import Rendezvous, Verdict
from finetune.errors import LaunchError
from finetune.fallbacks import Fallback, Fallbacks

_rendezvous_numbers = itertools.count(1)


def join_ranks(
    world: JoinedWorld,
    environment: LaunchEnvironment,
    backend: str,
    device: torch.device,
    timeout: timedelta,
    *,
    flag: bool | None,
    shares_gpus: bool,
    fallbacks: Fallbacks,
) -> ProcessContext:
    """Form the group, and return this process's place in it. See `initialize_ddp`. Collective."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        for name, value in environment.as_variables().items():
            if name not in os.environ:  # Accelerate adopts a group only if the launch variables are there
                world.set_variable(name, value)
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
        world.rendezvous = rendezvous
        world.undo.callback(rendezvous.leave)
        verdict = Verdict("together")
        if environment.rank == 0:
            failure = why_not_wanted(environment) if flag is False else rendezvous.wait_for_all()
            verdict = compare_devices(rendezvous) if failure is None else verdict_on_failure(failure, fallbacks)
        obey(rendezvous, verdict)
        interface = choose_interface(rendezvous, host)
        if interface is not None and GLOO_INTERFACE_VARIABLE not in os.environ:
            world.set_variable(GLOO_INTERFACE_VARIABLE, interface)
        failure = start_backend(rendezvous, backend, timeout, world.undo)
        if failure is not None and backend == "nccl" and not fallbacks.strict:
            nccl_failure, failure = failure, start_backend(rendezvous, "gloo", timeout, world.undo)
            if failure is None:
                world.take(fallbacks, Fallback(what="parallel.backend", wanted=backend, used="gloo", why=nccl_failure))
        if failure is not None:
            obey(rendezvous, verdict_on_failure(failure, fallbacks))
    except TrainsAloneError as decision:
        return _go_on_alone(world, environment, str(decision), device, fallbacks)
    return ProcessContext(True, environment.rank, environment.local_rank, environment.world_size, device)


def _go_on_alone(
    world: JoinedWorld, environment: LaunchEnvironment, reason: str, device: torch.device, fallbacks: Fallbacks
) -> ProcessContext:
    """Return the place of rank 0 in a world that was not formed."""
    world.take(
        fallbacks,
        Fallback(what="ddp", wanted=f"{environment.world_size} processes", used="one process", why=reason),
        warning=f"[Trainer] Warning: DDP was requested but {reason}. Rank 0 trains alone with the same global batch: "
        "the curve stays the same, only slower",
    )
    world.hide_launch()
    world.alone, world.hidden_launch = ProcessContext(False, 0, environment.local_rank, 1, device), environment
    return world.alone
