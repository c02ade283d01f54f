"""Join the world that a launcher started, with what the configuration wishes, and leave it again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from finetune.distributed.ddp_init import cleanup_ddp, current_context, initialize_ddp
from finetune.distributed.environment import (
    LaunchEnvironment,
    is_batch_script_body,
    is_cpu_requested,
    read_environment,
)
from finetune.distributed.runtime import Runtime, forget_accelerate
from finetune.errors import LaunchError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.logs import configure_logs
from finetune.run_folder import RunFolder

if TYPE_CHECKING:
    from finetune.config.schema import Config

_log = logging.getLogger(__name__)


@contextmanager
def launch(config: Config, *, trains: bool = True) -> Iterator[Runtime]:
    """Join the world this process was started in, and leave it again whatever happens.

    Collective: every process of the launch enters and leaves. An error before `Runtime.agree_set_up` is raised on all
    ranks, so that none is left waiting.

    Args:
        config: the whole run.
        trains: whether the run will write to its folder, which is then looked at before anything slow begins.

    Raises:
        CheckpointError: the folder holds another run.
        LaunchError: the launcher, the configuration and Accelerate do not describe the same world.
    """
    environment = read_environment(os.environ)
    configure_logs(environment.rank, level=logging.DEBUG if config.training.debug else logging.INFO)
    fallbacks = Fallbacks(strict=config.strict)
    if trains:
        RunFolder(config.output_dir).check(config.resume)
    _check_wish(config, environment, fallbacks)
    torch.manual_seed(config.seed)
    device = "cpu" if is_cpu_requested(os.environ) and config.training.device == "auto" else config.training.device
    wish = None if device == "auto" else device
    context = initialize_ddp(
        timedelta(minutes=config.parallel.timeout_minutes),
        master_addr=config.parallel.master_addr,
        master_port=config.parallel.master_port,
        backend=config.parallel.backend,
        device=wish,
    )
    try:
        if config.training.deterministic:
            torch.use_deterministic_algorithms(True)
        runtime = Runtime(
            context or current_context(wish),
            environment,
            fallbacks,
            precision=config.training.precision,
        )
        _record_other_device(wish, runtime)
        try:
            yield runtime
        except BaseException as error:
            runtime.close(error)
            raise
        runtime.close(None)
    finally:
        if config.training.deterministic:
            torch.use_deterministic_algorithms(False)
        forget_accelerate()
        if context is not None:  # a group that was up before us has an owner, who may launch again
            cleanup_ddp()


def _record_other_device(wish: str | None, runtime: Runtime) -> None:
    if wish is not None and torch.device(wish).type != runtime.device.type:
        why = f"this process sees {torch.cuda.device_count()} CUDA devices"
        runtime.fallbacks.take(Fallback(what="training.device", wanted=wish, used=str(runtime.device), why=why))


def _check_wish(config: Config, environment: LaunchEnvironment, fallbacks: Fallbacks) -> None:
    """Compare what the configuration asks for with what the launcher started."""
    for key, started in (("world_size", environment.world_size), ("rank", environment.rank)):
        asked = getattr(config.parallel, key)
        if asked is not None and asked != started:
            raise LaunchError(
                f"parallel.{key} is {asked} ({config.origin(f'parallel.{key}')}) but {environment.launcher} started "
                f"this process with {key} {started}. Remove the key, or launch to match it."
            )
    if config.ddp is False and environment.world_size > 1:
        raise LaunchError(
            f"ddp is false ({config.origin('ddp')}) but {environment.launcher} started {environment.world_size} "
            "processes, which would train the same thing side by side. Start one process, or drop ddp=False."
        )
    if config.ddp is True and environment.world_size == 1:
        _log.warning("[Trainer] Warning: DDP was requested but WORLD_SIZE is 1: this process trains alone")
        why = "the launcher started one process; use torchrun, accelerate launch or srun for more"
        fallbacks.take(Fallback(what="ddp", wanted="several processes", used="one process", why=why))
    if is_batch_script_body(os.environ):
        _log.warning(
            "this is the body of a Slurm batch script: one process. Prefix the command with srun to start all tasks"
        )
