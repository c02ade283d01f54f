"""Join the world that a launcher started, as the configuration asks, and leave it again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.config.config_files import absolute
from finetune.config.schema import DataSection
from finetune.config.yaml_reader import OVERRIDES
from finetune.distributed.ddp_init import (
    cleanup_ddp,
    current_context,
    initialize_ddp,
    is_joined,
    joined_environment,
    joined_fallbacks,
)
from finetune.distributed.device import accelerator_type, refuse_modes, rounded_products
from finetune.distributed.environment import (
    LaunchEnvironment,
    given_address,
    has_accelerate_settings,
    is_batch_script_body,
)
from finetune.distributed.joined_world import ProcessContext
from finetune.distributed.liveness import explain
from finetune.distributed.open_launches import open_launch
from finetune.distributed.runtime import Runtime
from finetune.engine.fused import kernels_kept_in
from finetune.errors import ConfigError, LaunchError, PreemptedError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.logs import configure_logs
from finetune.runs.folder import RunFolder
from finetune.signals import (
    ignore_stop_signals,
    raise_at_once,
    received_stop_signal,
    stop_signals_go_to,
    stops_after_step,
    was_stopped_in_set_up,
)
from finetune.terminal import outlive_readers

if TYPE_CHECKING:
    from finetune.config.schema import Config

_log = logging.getLogger(__name__)


@contextmanager
def launch(config: Config, *, trains: bool = True, log_level: int = logging.INFO) -> Iterator[Runtime]:
    """Join the world that this process was started in, and leave it again whatever happens.

    With `parallel.num_processes`, if no launcher started several processes, this process becomes the launcher: it
    starts its own command line that many times, waits, and leaves with their exit code.

    Collective: every process of the launch enters and leaves. Once the guardians are connected, an error before
    `Collectives.agree_set_up` is raised on all ranks, so that none is left waiting; before, the others may wait for
    `parallel.timeout_minutes`.

    Args:
        config: the whole run.
        trains: whether the run will write to its folder, which is then checked before anything slow begins.
        log_level: the lowest level to log, unless `training.debug` asks for all.

    Raises:
        CheckpointError: the folder holds another run.
        ConfigError: a tracker of `training.report_to` is not installed for rank 0, or this device cannot do what the
            configuration asks for.
        LaunchError: the launcher, the configuration and Accelerate do not describe the same world.
        PreemptedError: a signal came before the first step.
        SystemExit: this process only started others, or rank 0 trains alone (`LeftToMain`).
    """
    with open_launch(trains=trains) as is_nested, _join_and_leave(config, trains, log_level, is_nested) as runtime:
        yield runtime


@contextmanager
def _join_and_leave(config: Config, trains: bool, log_level: int, is_nested: bool) -> Iterator[Runtime]:
    """Do what `launch` does. `is_nested`: this process is in another launch, which owns the world."""
    refuse_modes(trains=trains)  # only now: another thread, which loads a model in its type, is refused as a thread
    environment = joined_environment()
    num_processes = config.parallel.num_processes or 1
    is_to_spawn = environment.may_spawn and num_processes > 1 and not is_joined()
    started = num_processes if is_to_spawn else environment.world_size
    if trains:
        outlive_readers()
    configure_logs(environment.rank, level=logging.DEBUG if config.training.debug else log_level, num_processes=started)
    fallbacks = Fallbacks(strict=config.strict)
    launcher_settings = _settings_of_launcher(config, world_size=started, trains=trains)
    config = config.with_values(launcher_settings)
    if config.parallel.sharding != "none":
        from finetune.distributed.sharding import refuse_what_is_not_sharded

        refuse_what_is_not_sharded(config, trains=trains)
    _compare_with_launch(config, environment, fallbacks)
    place = config.parallel
    master_addr = place.master_addr or environment.master_addr
    master_port = place.master_port or environment.master_port
    environment = replace(environment, master_addr=master_addr, master_port=master_port)
    if is_to_spawn:
        from finetune.distributed.local_spawn import run_as_processes

        raise SystemExit(run_as_processes(num_processes, master_addr=place.master_addr, master_port=place.master_port))
    torch.manual_seed(config.seed)
    is_adopted = is_nested or is_joined()  # then it has an owner, who may launch again
    context = _join(config, fallbacks)
    with ExitStack() as signals, ExitStack() as leaving, _hidden_fsdp():
        signals.enter_context(_signals_of_run(environment, trains=trains))
        leaving.callback(lambda: _log.info("Process %d cleanup completed", environment.rank))
        if not is_adopted:
            leaving.callback(cleanup_ddp)
        for fallback in joined_fallbacks() if is_adopted else ():
            fallbacks.take(fallback)
        leaving.enter_context(kernels_kept_in(_folder_of_kernels(config)))
        leaving.enter_context(_torch_settings(deterministic=config.training.deterministic))
        _refuse_what_mps_lacks(config, context.device)
        runtime = Runtime(context, environment, fallbacks, config, launcher_settings)
        try:
            _check_world(config, runtime, trains=trains)
            yield runtime
        except BaseException as error:
            # A launcher sends SIGTERM to the ranks that outlive another: it must not interrupt their last writes.
            signals.enter_context(ignore_stop_signals())
            named = explain(error, runtime.liveness.watchdog)
            runtime.close(named)
            if was_stopped_in_set_up(named):
                named = _stopped_in_set_up()
            if named is error:
                raise
            raise named from error
        runtime.close(None)


def _settings_of_launcher(config: Config, *, world_size: int, trains: bool) -> dict[str, tuple[object, str]]:
    """Return the keys that the launcher sets, see `settings_of_accelerate`. Only accelerate sets any."""
    if not has_accelerate_settings(os.environ):
        return {}
    from finetune.distributed.accelerate_settings import settings_of_accelerate

    return settings_of_accelerate(config, os.environ, world_size=world_size, trains=trains)


def _hidden_fsdp() -> AbstractContextManager[None]:
    """Return a block in which libraries do not see that accelerate was asked for FSDP."""
    if not has_accelerate_settings(os.environ):
        return nullcontext()
    from finetune.distributed.accelerate_settings import hide_fsdp

    return hide_fsdp()


def _compare_with_launch(config: Config, environment: LaunchEnvironment, fallbacks: Fallbacks) -> None:
    """Compare the configuration with the launch, and log or record what was started in place of several processes."""
    refuse_another_launch(config, environment)
    if has_accelerate_settings(os.environ):
        from finetune.distributed.accelerate_settings import compare_accelerate_command

        if dropped := compare_accelerate_command(config, environment):
            fallbacks.take(dropped)
    if is_batch_script_body(os.environ):
        _log.warning(
            "Slurm gave this job several tasks, but this process was started outside of srun: it is one process. "
            "Prefix the command with srun to start all tasks"
        )


def _signals_of_run(environment: LaunchEnvironment, *, trains: bool) -> AbstractContextManager[None]:
    """Stop one process at once during set-up. Several ranks stop together after a step."""
    if trains:
        return stops_after_step(sets_up=environment.world_size == 1)
    return stop_signals_go_to(raise_at_once, (signal.SIGTERM,))


def _stopped_in_set_up() -> PreemptedError:
    by = f" by {stopped_by.name}" if (stopped_by := received_stop_signal()) else ""
    return PreemptedError(
        f"stopped during set-up as asked{by}, before a step was trained: start it again with resume=auto"
    )


def _torch_settings(*, deterministic: bool) -> AbstractContextManager[None]:
    """Return a block in which torch computes as the configuration says, and after which its settings are as before."""
    if not deterministic and not rounded_products():
        return nullcontext()
    from finetune.distributed.torch_settings import torch_settings_of_run

    return torch_settings_of_run(deterministic=deterministic)


def _folder_of_kernels(config: Config) -> Path:
    """Return the folder of compiled kernels, which are code. A file, perhaps of others, does not choose it."""
    is_own = config.origin("data.cache_dir") in ("default", *OVERRIDES)
    cache_dir = config.data.cache_dir if is_own else DataSection().cache_dir
    return Path(absolute(cache_dir), "kernels")


def _join(config: Config, fallbacks: Fallbacks) -> ProcessContext:
    wish = wished_device(config)
    context = initialize_ddp(
        timedelta(minutes=config.parallel.timeout_minutes),
        master_addr=config.parallel.master_addr,
        master_port=config.parallel.master_port,
        backend=config.parallel.backend,
        device=wish,
        flag=config.ddp,
        shares_gpus=config.parallel.share_gpus,
        fallbacks=fallbacks,
    )
    return context or current_context(wish, shares_gpus=config.parallel.share_gpus)


def wished_device(config: Config) -> str | None:
    """Return the configured device, or the CPU of `accelerate launch --cpu`; None: this rank's own."""
    if config.training.device != "auto":
        return config.training.device
    if not has_accelerate_settings(os.environ):
        return None
    from finetune.distributed.accelerate_settings import is_cpu_requested

    return "cpu" if is_cpu_requested(os.environ) else None


def _check_world(config: Config, runtime: Runtime, *, trains: bool) -> None:
    """Check the run's folder, compare the ranks with each other, and this one with the configuration. Collective."""
    _log.info("Process %d/%d started", runtime.environment.rank, runtime.environment.world_size)
    if trains:
        # Only now: rank 0 may train alone, and may have begun its run before a rank that leaves had come this far.
        output_dir, is_reserved = _choose_folder(config, runtime)
        folder = RunFolder(output_dir)
        if not is_reserved:
            folder.refuse_living_holder()
        folder.check(config.resume)
    must_be_equal = config.model_dump(
        mode="json", exclude={"parallel": {"rank", "output_device"}, "data": {"cache_dir"}}
    )
    digest = hashlib.sha256(json.dumps(must_be_equal, sort_keys=True).encode()).hexdigest()
    runtime.collectives.refuse_differences("the configuration", digest)
    runtime.collectives.refuse_differences(
        "the precision that training.precision=auto means on the device",
        runtime.precision,
        remedy="Set training.precision=fp32, or start all ranks on GPUs that compute in bf16.",
    )
    _record_other_device(wished_device(config), runtime)
    _record_output_device(config, runtime)
    _check_sharding(config, runtime)
    if trains and runtime.is_main_process and config.training.report_to:
        from finetune.config.trackers import refuse_missing_trackers

        refuse_missing_trackers(config)


def _choose_folder(config: Config, runtime: Runtime) -> tuple[str, bool]:
    """Return the run's folder, and whether rank 0 holds its lock already.

    Rank 0 chooses the folder, and reserves a new one, if the configuration names none. Collective.
    """
    if config.origin("output_dir") != "default":
        return config.output_dir, False
    from finetune.runs.default_folder import reserved_folder

    chosen, is_reserved = "", False
    with runtime.collectives.failing_together("choosing the run's folder"):
        if runtime.is_main_process:
            chosen, is_reserved = reserved_folder(config)
            folder = RunFolder(chosen)
            runtime.liveness.on_close(lambda error: folder.end_reservation())
    chosen, is_reserved = runtime.collectives.broadcast_from_main((chosen, is_reserved))
    runtime.set_folder(chosen)
    return chosen, is_reserved


def _check_sharding(config: Config, runtime: Runtime) -> None:
    """Record that one process keeps all weights, or refuse a shard size that does not divide the world."""
    if config.parallel.sharding != "none" and not runtime.context.distributed:
        why = "one process has no other to shard the weights with; start several, or drop the key"
        runtime.fallbacks.take(Fallback(what="parallel.sharding", wanted="fsdp2", used="none", why=why))
    elif runtime.placement.shard_size is not None:
        from finetune.distributed.sharding import refuse_uneven_shards

        refuse_uneven_shards(config, runtime.world_size)


def _record_other_device(wish: str | None, runtime: Runtime) -> None:
    """Record that the run computes on another type of device than it should, or than the best one of this machine."""
    preferred = wish or accelerator_type()
    if preferred is None or torch.device(preferred).type == runtime.device.type:
        return
    if wish is not None:
        visible_devices = f"this process sees {torch.cuda.device_count()} CUDA devices"
        why = "torch sees no Apple GPU" if wish == "mps" else visible_devices
    elif preferred == "mps":
        why = "an Apple GPU computes for one process alone; with training.device=cpu, the CPU is what you ask for"
    else:
        why = f"finetune does not compute on {preferred}; with training.device=cpu, the CPU is what you ask for"
    runtime.fallbacks.take(Fallback(what="training.device", wanted=preferred, used=str(runtime.device), why=why))


def _refuse_what_mps_lacks(config: Config, device: torch.device) -> None:
    """Raise ConfigError for what would fail in a step, or what torch does not promise, on an Apple GPU."""
    if device.type != "mps":
        return
    training, key = config.training, "training.precision"
    if training.deterministic:
        key, why = "training.deterministic", "torch does not promise equal results. Set training.device=cpu"
    elif training.precision == "fp16":
        why = "finetune does not compute in it. Set training.precision=bf16 (macOS 14 or newer), or fp32"
    elif training.precision == "bf16" and not torch.backends.mps.is_macos_or_newer(14, 0):
        why = "that needs macOS 14 or newer. Set training.precision=fp32"
    else:
        return
    value = str(getattr(training, key.partition(".")[2])).lower()
    raise ConfigError(f"{key} is {value} ({config.origin(key)}), but this run is on an Apple GPU (mps): {why}.")


def _record_output_device(config: Config, runtime: Runtime) -> None:
    """Check `parallel.output_device`, which only torch's reducer on GPUs can use."""
    index = config.parallel.output_device
    if index is None:
        return
    if runtime.device.type != "cuda" or not runtime.placement.uses_reducer:
        why = "only parallel.gradient_sync=ddp with several processes on GPUs uses it; drop the key"
        used = str(runtime.device)
        runtime.fallbacks.take(Fallback(what="parallel.output_device", wanted=str(index), used=used, why=why))
    elif index >= torch.cuda.device_count():
        raise LaunchError(
            f"parallel.output_device is {index} ({config.origin('parallel.output_device')}) but rank {runtime.rank} "
            f"sees {torch.cuda.device_count()} GPUs, counted from 0. Drop the key: the default is the rank's own."
        )


def refuse_another_launch(config: Config, environment: LaunchEnvironment) -> None:
    """Raise LaunchError if the launch contradicts the configuration."""
    started = {"world_size": environment.world_size, "rank": environment.rank}
    place = f"RANK={environment.rank}, WORLD_SIZE={environment.world_size}"
    if environment.launcher == "none":
        actual_launch = f"this process was started without a launcher, as {place}"
    else:
        actual_launch = f"{environment.launcher} started this process with {place}"
    if not environment.may_spawn:
        started["num_processes"] = environment.world_size
    for key, actual in started.items():
        configured = getattr(config.parallel, key)
        if configured is not None and configured != actual:
            raise LaunchError(
                f"parallel.{key} is {configured} ({config.origin(f'parallel.{key}')}) but {actual_launch}. "
                "Remove the key, or launch to match it."
            )
    _refuse_another_address(config, environment)
    if config.ddp is False and (config.parallel.num_processes or 1) > 1:
        raise LaunchError(
            f"ddp is false ({config.origin('ddp')}) but parallel.num_processes is {config.parallel.num_processes} "
            f"({config.origin('parallel.num_processes')}). Drop one of them."
        )


def _refuse_another_address(config: Config, environment: LaunchEnvironment) -> None:
    """Refuse another address than the launcher's: its agent may hold the store there already."""
    given_addr, given_port = given_address(os.environ)
    for key, value in {"master_addr": given_addr, "master_port": given_port}.items():
        configured = getattr(config.parallel, key)
        if None not in (configured, value) and environment.world_size > 1 and configured != value:
            raise LaunchError(
                f"parallel.{key} is {configured} ({config.origin(f'parallel.{key}')}) but {environment.launcher} set "
                f"{key.upper()}={value}. Remove the key, or tell the launcher."
            )
    if environment.is_address_missing and config.parallel.master_addr is None:
        raise LaunchError(
            f"{environment.launcher} started {environment.world_size} processes on several nodes, and nothing says "
            "where rank 0 is. Set MASTER_ADDR (or parallel.master_addr) to the name of its machine."
        )
