"""`finetune doctor`: check the launch and the machine of each process, and whether all ranks join one world."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from finetune.config.schema import Config
from finetune.diagnose.launch_checks import AREA as THIS_PROCESS
from finetune.diagnose.launch_checks import check_address, check_launch, check_sharding
from finetune.diagnose.machine_checks import check_devices, check_folders, check_versions, sees_file, write_marker
from finetune.distributed.ddp_init import cleanup_ddp, initialize_ddp
from finetune.distributed.environment import LaunchEnvironment, read_environment
from finetune.distributed.joined_world import ProcessContext
from finetune.distributed.launch import wished_device
from finetune.errors import FinetuneError, LaunchError
from finetune.fallbacks import Fallbacks
from finetune.findings import Finding, count, exit_code, findings_of_others, ok, print_findings, problem, warning
from finetune.logs import configure_logs
from finetune.runs.folder import RunFolder
from finetune.terminal import print_json

Value = TypeVar("Value")

_AREA = "World"
_DEFAULT_TIMEOUT = timedelta(seconds=60)
"""The time to wait for all ranks if `parallel.timeout_minutes` is not set."""
_NUM_SUMMED = 1_000_003


def diagnose(config: Config, *, as_json: bool = False) -> int:
    """Check the launch and the machine, and print a report on rank 0. Collective under a launcher.

    The configuration need not be complete.

    Returns:
        The exit code: 2 with a problem (with strict: also with a warning), else 0. The same on every rank.

    Raises:
        LaunchError: on ranks other than 0, if the ranks cannot form a world.
    """
    try:
        environment = read_environment(os.environ)
        checks = (check_launch, check_sharding, check_address)
        launch = [finding for check in checks for finding in check(environment, config, os.environ)]
    except LaunchError as error:
        fix = "start through torchrun, accelerate launch, srun or mpirun, which set all variables, or unset them"
        environment, launch = read_environment({}), [problem(THIS_PROCESS, _sentence(error), fix)]
    configure_logs(environment.rank, level=logging.WARNING, num_processes=environment.world_size)
    own = [*launch, *check_versions(), *check_devices(config, environment, os.environ), *check_folders(config)]
    is_shown = environment.rank == 0 and not as_json
    if is_shown:
        print_findings(own, Console())  # now: the other ranks may take a minute to join
    findings = own if environment.world_size == 1 else _check_world(environment, config, own)
    code = exit_code(findings, strict=config.strict)
    if is_shown:
        print_findings(findings[len(own) :], Console())
        sys.stdout.write(f"{count(findings)}\n")
    elif environment.rank == 0:
        print_json({"exit_code": code, "findings": [asdict(finding) for finding in findings]})
    sys.stdout.flush()
    return code


def _check_world(environment: LaunchEnvironment, config: Config, own: list[Finding]) -> list[Finding]:
    """Join the world. Return the findings of rank 0, of the other ranks and of the world. Collective."""
    is_set = config.origin("parallel.timeout_minutes") != "default"
    timeout = timedelta(minutes=config.parallel.timeout_minutes) if is_set else _DEFAULT_TIMEOUT
    try:
        context = initialize_ddp(
            timeout,
            master_addr=config.parallel.master_addr,
            master_port=config.parallel.master_port,
            backend=config.parallel.backend,
            device=wished_device(config),
            shares_gpus=config.parallel.share_gpus,
            fallbacks=Fallbacks(strict=True),  # training alone would hide the problem
        )
        assert context is not None  # the command line starts without a group
        # Only gloo names the ranks that have joined and do not answer.
        group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        dist.monitored_barrier(group, timeout, wait_all_ranks=True)
        by_rank, hosts = _gather(own), _gather(socket.gethostname())
        machines = "one machine" if len(set(hosts)) == 1 else f"{len(set(hosts))} machines"
        seconds = f"{timeout.total_seconds():g} s"
        return [
            *by_rank[0],
            *findings_of_others(by_rank, hosts),
            ok(_AREA, f"{len(hosts)} ranks on {machines} joined within {seconds} through {dist.get_backend()}"),
            _check_sums(context, hosts),
            *_check_shared_folder(config, hosts),
        ]
    except (FinetuneError, RuntimeError) as error:
        if not isinstance(error, FinetuneError):
            error = LaunchError(f"the ranks joined, but then one stopped answering: {_sentence(error)}")
        if environment.rank:
            raise error from None
        fix = (
            "look at the output of the ranks that are named; run `finetune doctor` alone on their machines; check that "
            "all ranks were started with the same address and port, and that no firewall is between them"
        )
        return [*own, problem(_AREA, _sentence(error), fix)]
    finally:
        cleanup_ddp()


def _check_sums(context: ProcessContext, hosts: Sequence[str]) -> Finding:
    """Sum known numbers over all ranks, as training sums gradients. Collective."""
    numbers = torch.full((_NUM_SUMMED,), context.rank + 1.0, device=context.device)
    dist.all_reduce(numbers)
    expected = context.world_size * (context.world_size + 1) / 2
    wrong = _ranks_without(bool((numbers == expected).all()), hosts)
    if not wrong:
        return ok(_AREA, "an all-reduce of known numbers gives the right sum on every rank")
    fix = (
        "do not train on this: try parallel.backend=gloo, or NCCL_P2P_DISABLE=1 with nccl, and report the faulty "
        "driver or link"
    )
    return problem(_AREA, f"an all-reduce of known numbers gives a wrong sum on {wrong}", fix)


def _check_shared_folder(config: Config, hosts: Sequence[str]) -> list[Finding]:
    """Check that all ranks see `output_dir`: they read it when a run is resumed. Collective."""
    marker = write_marker(RunFolder(config.output_dir).path) if dist.get_rank() == 0 else None
    try:
        path = _gather(marker)[0]
        blind = _ranks_without(path is None or sees_file(path), hosts)  # returns when all ranks have looked
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)
    if path is None:
        return []  # the check of this folder has reported that rank 0 cannot write there
    if not blind:
        return [ok(_AREA, "all ranks see rank 0's output_dir")]
    judge = problem if config.resume == "auto" else warning
    message = f"{blind} cannot see rank 0's output_dir, which every rank reads when a run is resumed"
    return [judge(_AREA, message, "set output_dir to a folder that all hosts mount at the same path (NFS, Lustre)")]


def _ranks_without(has_passed: bool, hosts: Sequence[str]) -> str:
    """Name the ranks that have not passed a check. Collective."""
    passed = _gather(has_passed)
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in range(len(hosts)) if not passed[rank])


def _gather(value: Value) -> list[Value]:
    """Return every rank's value, in order of rank. Collective."""
    values: list[Value] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
