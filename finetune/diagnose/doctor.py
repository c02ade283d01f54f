"""`finetune doctor`: examine the launch and the machine of this process, and the whole world under a launcher."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console

from finetune.diagnose.folder_checks import check_folders
from finetune.diagnose.launch_checks import AREA as THIS_PROCESS
from finetune.diagnose.launch_checks import check_address, check_launch, check_sharding
from finetune.diagnose.machine_checks import check_backend, check_devices, check_limits, check_versions
from finetune.diagnose.world_checks import gather, judge_bandwidth, judge_ranks, probe_world, wait_for_all_ranks
from finetune.distributed.ddp_init import cleanup_ddp, initialize_ddp
from finetune.distributed.environment import LaunchEnvironment, read_environment
from finetune.distributed.launch import wished_device
from finetune.errors import FinetuneError, LaunchError
from finetune.fallbacks import Fallbacks
from finetune.findings import Finding, count, exit_code, findings_of_others, ok, problem, show
from finetune.logs import configure_logs
from finetune.runs.folder import RunFolder
from finetune.terminal import print_json

if TYPE_CHECKING:
    from finetune.config.schema import Config

_DEFAULT_TIMEOUT = timedelta(seconds=60)
"""The time to wait for all ranks if `parallel.timeout_minutes` is not set."""


def diagnose(config: Config, *, as_json: bool = False) -> int:
    """Examine the launch and the machine, and print a report on rank 0. Collective under a launcher.

    The configuration need not be complete.

    Returns:
        The exit code: 2 with a problem (with strict: also with a warning), else 0. The same on every rank.

    Raises:
        LaunchError: on ranks other than 0, where the world cannot be formed or measured.
    """
    try:
        environment = read_environment(os.environ)
        launch = [
            check for checks in (check_launch, check_sharding) for check in checks(environment, config, os.environ)
        ]
    except LaunchError as error:
        fix = "start through torchrun, accelerate launch, srun or mpirun, which set all variables, or unset them"
        findings = [problem(THIS_PROCESS, _sentence(error), fix), *_examine_machine(config, local_world_size=1)]
        if not as_json:
            show(findings, Console())
        return _conclude(findings, config, as_json=as_json)
    configure_logs(environment.rank, level=logging.WARNING, num_processes=environment.world_size)
    is_first = environment.rank == 0
    own = [
        *launch,
        *check_address(environment, config, os.environ),
        *_examine_machine(config, environment.local_world_size),
    ]
    if is_first and not as_json:
        show(own, Console())  # now: the other ranks may take a minute to join
    others = _examine_world(environment, config, own) if environment.world_size > 1 else []
    if is_first and not as_json:
        show(others, Console())
    return _conclude([*own, *others], config, as_json=as_json, is_silent=not is_first)


def _examine_machine(config: Config, local_world_size: int) -> list[Finding]:
    return [
        *check_versions(),
        *check_devices(config, local_world_size),
        *check_backend(config),
        *check_limits(config),
        *check_folders(config),
    ]


def _examine_world(environment: LaunchEnvironment, config: Config, own: list[Finding]) -> list[Finding]:
    """Join the world and measure it; return the findings that are not this rank's own. Collective."""
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
        wait_for_all_ranks(timeout)
        others = findings_of_others(gather(own), gather(socket.gethostname()))
        measured = probe_world(context, RunFolder(config.output_dir).path)
    except (FinetuneError, RuntimeError) as error:
        if environment.rank:
            raise error if isinstance(error, FinetuneError) else LaunchError(_unmeasured(error)) from error
        what = _sentence(error) if isinstance(error, FinetuneError) else _unmeasured(error)
        fix = (
            "look at the output of the ranks that are named; run `finetune doctor` alone on their machines; check that "
            "all ranks were started with the same address and port, and that no firewall is between them"
        )
        return [problem("World", what, fix)]
    finally:
        cleanup_ddp()
    return [
        *others,
        ok("World", f"{context.world_size} ranks came together within the timeout of {timeout.total_seconds():g} s"),
        *judge_ranks(measured.ranks, needs_shared_folder=config.resume == "auto"),
        *judge_bandwidth(measured.latency_seconds, measured.bandwidths),
    ]


def _unmeasured(error: Exception) -> str:
    return f"the world was formed, but a rank stopped answering while it was measured: {_sentence(error)}"


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _conclude(findings: Sequence[Finding], config: Config, *, as_json: bool, is_silent: bool = False) -> int:
    """Print the number of findings, or all of them as JSON, and return the exit code."""
    code = exit_code(findings, strict=config.strict)
    if is_silent:
        return code
    if as_json:
        print_json({"exit_code": code, "findings": [asdict(finding) for finding in findings]})
    else:
        sys.stdout.write(f"{count(findings)}\n")
    sys.stdout.flush()
    return code
