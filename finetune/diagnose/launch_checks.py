"""Check the launch of this process: its world, settings that contradict it, and the address where the ranks join.

Training refuses most of these launches. The checks call the functions with which training refuses them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from finetune.config.schema import Config
from finetune.diagnose.machine_checks import LAUNCHING_PAGE
from finetune.distributed.accelerate_settings import (
    compare_accelerate_command,
    refused_settings,
    settings_of_accelerate,
)
from finetune.distributed.environment import (
    LAUNCH_VARIABLES,
    WORLD_VARIABLES,
    LaunchEnvironment,
    given_address,
    has_agent_store,
    is_batch_script_body,
)
from finetune.distributed.launch import refuse_another_launch
from finetune.distributed.network import is_loopback, is_own_address, own_name_is_loopback, probe_store
from finetune.distributed.sharding import refuse_uneven_shards, refuse_what_is_not_sharded
from finetune.errors import ConfigError, LaunchError
from finetune.findings import Finding, ok, problem, warning, what_and_fix

AREA = "This process"
_ADDRESS = "Address"
_SHARDING = "Sharding"


def check_launch(environment: LaunchEnvironment, config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report the world that the launch variables describe, and everything that contradicts it."""
    names = dict.fromkeys((*LAUNCH_VARIABLES, *WORLD_VARIABLES))
    variables = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
    derived = " ".join(f"{name}={value}" for name, value in environment.as_variables().items() if name not in environ)
    launcher = "no launcher" if environment.launcher == "none" else environment.launcher
    yield ok(
        AREA,
        f"started by {launcher}: rank {environment.rank} of {environment.world_size}, local rank "
        f"{environment.local_rank} of {environment.local_world_size}, on {socket.gethostname()}",
    )
    yield ok(
        AREA, f"read from the environment: {variables or 'nothing'}; by default or derived: {derived or 'nothing'}"
    )
    for setting, explanation in refused_settings(environ):
        reason, _, fix = explanation.partition(". ")
        yield problem(AREA, f"accelerate launch asks for {setting}: {reason}", fix)
    try:
        refuse_another_launch(config, environment)
        dropped = compare_accelerate_command(config, environment)
        if dropped is not None:  # training only records it
            yield problem(AREA, *what_and_fix(dropped.why, page=LAUNCHING_PAGE))
    except LaunchError as error:
        yield problem(AREA, *what_and_fix(str(error), page=LAUNCHING_PAGE))
    yield from _check_number(environment, config)
    if is_batch_script_body(environ):
        message = "this is the body of a Slurm batch script: one process, whatever the number of tasks asked for"
        yield warning(AREA, message, "prefix the command with srun")


def check_sharding(environment: LaunchEnvironment, config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report how many processes would share the weights, also if accelerate asks for it, or why they could not."""
    if refused_settings(environ):
        return  # reported with the launch
    started = environment.world_size
    if environment.may_spawn:
        started = config.parallel.num_processes or started
    try:
        config = config.with_values(settings_of_accelerate(config, environ, world_size=started, trains=True))
        refuse_what_is_not_sharded(config, trains=True)
        if started > 1:
            refuse_uneven_shards(config, started)
    except (ConfigError, LaunchError) as error:
        yield problem(_SHARDING, *what_and_fix(str(error), page=LAUNCHING_PAGE))
        return
    if config.parallel.sharding == "none":
        return
    setting = f"parallel.sharding is fsdp2 ({config.origin('parallel.sharding')})"
    if started == 1:
        message = f"{setting}, but one process cannot shard anything: it would be a plain run that keeps all weights"
        yield warning(_SHARDING, message, "start several processes, or drop the key")
        return
    size = config.parallel.shard_size or started
    copies = "" if size == started else f", in {started // size} copies"
    yield ok(_SHARDING, f"{setting}: {size} processes would shard the weights{copies}")


def check_address(environment: LaunchEnvironment, config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the address leads to rank 0 and that its port is still free there."""
    is_held_by_agent = has_agent_store(environ)
    host = environment.master_addr if is_held_by_agent else config.parallel.master_addr or environment.master_addr
    port = environment.master_port if is_held_by_agent else config.parallel.master_port or environment.master_port
    is_alone = environment.world_size == 1
    if is_alone and not config.parallel.master_port and given_address(environ) == (None, None):
        yield ok(_ADDRESS, "one process: no address is needed")
        return
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        fix = "set MASTER_ADDR or parallel.master_addr to a name or address of rank 0's machine (see `hostname -I`)"
        yield problem(_ADDRESS, f"{host} cannot be resolved on {socket.gethostname()}: {error}", fix)
        return
    if environment.local_world_size < environment.world_size:
        yield from _check_reach(host)
    if environment.rank:
        yield ok(_ADDRESS, f"{host}:{port} resolves")
    elif is_held_by_agent:
        fault = probe_store(host, port)
        if fault is None:
            yield ok(_ADDRESS, f"torchrun's agent answers at {host}:{port}")
        else:
            fix = "end what is left of the previous launch, and start torchrun again"
            yield problem(_ADDRESS, f"torchrun's agent does not answer at {host}:{port}: {fault}", fix)
    elif not is_own_address(host):
        fix = "start rank 0 there, or set MASTER_ADDR or parallel.master_addr to an address of this machine"
        message = f"rank 0 runs here on {socket.gethostname()}, but {host} is no address of this machine"
        yield warning(_ADDRESS, message, fix)
    else:
        yield _check_port(port, is_alone=is_alone)


def _check_number(environment: LaunchEnvironment, config: Config) -> Iterator[Finding]:
    """Find launches in which another number of processes would train than was asked for."""
    num_processes = config.parallel.num_processes or 1
    if config.ddp is False and environment.world_size > 1:
        message = f"ddp is false ({config.origin('ddp')}), but {environment.world_size} processes were started"
        yield problem(AREA, message, "start one process, or drop ddp=False")
    elif environment.may_spawn and num_processes > 1:
        message = f"train would start {num_processes} processes here; this report covers one process"
        fix = f"to check all of them, run torchrun --standalone --nproc_per_node {num_processes} -m finetune doctor …"
        yield warning(AREA, message, fix)
    elif environment.world_size == 1 and config.ddp is True:
        message = f"ddp is true ({config.origin('ddp')}), but one process was started: it would train alone"
        yield warning(AREA, message, "start through torchrun, accelerate launch or srun, or drop ddp=True")


def _check_reach(host: str) -> Iterator[Finding]:
    """Check that the machines of a world reach each other by name."""
    if is_loopback(host):
        message = f"on every machine {host} means that machine itself, but the world spans several machines"
        fix = "set MASTER_ADDR or parallel.master_addr to an address of rank 0's machine that the others reach"
        yield warning(_ADDRESS, message, fix)
    if own_name_is_loopback():
        message = (
            f"this machine's own name, {socket.gethostname()}, resolves to 127.x here, and torchrun gives that name to "
            "the other machines"
        )
        fix = "start torchrun with --local_addr and this machine's address, or correct the name in /etc/hosts"
        yield warning(_ADDRESS, message, fix)


def _check_port(port: int, *, is_alone: bool) -> Finding:
    """Check that a process can listen on a port of this machine."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does; a living listener still counts
        try:
            trial.bind(("", port))
            trial.listen(1)
            return ok(_ADDRESS, f"port {port} is free")
        except OSError as error:
            message = f"port {port} of {socket.gethostname()} is not free to listen on: {error}"
    fix = (
        f"`ss -ltnp 'sport = :{port}'` names the process that holds it; end that process, or set MASTER_PORT or "
        "parallel.master_port to another port"
    )
    return (warning if is_alone else problem)(_ADDRESS, message, fix)
