"""Check this machine and this installation: versions, device, precision, processors, memory for data workers."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.data.batches import loader_keys_on
from finetune.distributed.accelerate_settings import refuse_another_precision, refused_settings
from finetune.distributed.device import _resolve_device, accelerator_type, device_of_rank
from finetune.distributed.launch import wished_device
from finetune.distributed.device import best_precision, choose_precision, has_bf16
from finetune.errors import DISTRIBUTION, SUMMARY, LaunchError
from finetune.findings import Finding, ok, problem, warning, what_and_fix
from finetune.threads import num_cores
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.distributed.environment import LaunchEnvironment

_VERSIONS, _DEVICES = "Versions", "Devices"
_PAGE = "docs/launching.md"
_LEAST_SHARED_BYTES = 512 * 2**20


def check_versions() -> Iterator[Finding]:
    """Compare the installed versions with those that finetune's own metadata requires."""
    yield ok(_VERSIONS, f"Python {platform.python_version()} ({sys.executable})")
    for name in (DISTRIBUTION, "finetune"):  # the second name: a checkout that was installed before it changed
        with suppress(PackageNotFoundError):
            about = metadata(name)
            if SUMMARY in str(about["Summary"]):
                yield from judge_packages(about.get_all("Requires-Dist") or [])
                return
    message = f"{DISTRIBUTION} is not installed, so the versions it needs are not known"
    yield warning(_VERSIONS, message, "run `pip install -e .` in its folder")


def judge_packages(requirements: Sequence[str]) -> Iterator[Finding]:
    """Compare the installed packages with requirements such as ``torch>=2.8``. Requirements of extras are ignored."""
    from packaging.requirements import Requirement

    suitable = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = None
        if installed is not None and requirement.specifier.contains(installed, prereleases=True):
            suitable.append(f"{requirement.name} {installed}")
        else:
            needed = f"{requirement.name}{requirement.specifier}"
            message = f"{requirement.name} {installed or 'is not installed'}, but finetune needs {needed}"
            yield problem(_VERSIONS, message, f"pip install '{needed}'")
    yield ok(_VERSIONS, ", ".join(suitable))


def check_devices(config: Config, environment: LaunchEnvironment, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that training will use the device and precision that it should, and that the processors suffice."""
    for index in range(torch.cuda.device_count()):
        yield ok(_DEVICES, _describe_gpu(index))
    wish = wished_device(config)
    try:
        if environment.world_size > 1:
            device = device_of_rank(environment.local_rank, wish, shares_gpus=config.parallel.share_gpus)
        else:
            device = _resolve_device(wish)
    except LaunchError as error:
        yield problem(_DEVICES, *what_and_fix(str(error), page=_PAGE))
        return
    yield _judge_device(device, wish)
    precision = choose_precision(config.training.precision, best=best_precision(device))
    try:
        if not refused_settings(environ):  # otherwise reported with the launch
            refuse_another_precision(precision, config.training.precision, environ)
        yield ok(_DEVICES, f"precision {precision} (training.precision={config.training.precision})")
    except LaunchError as error:
        yield problem(_DEVICES, *what_and_fix(str(error), page=_PAGE))
    num_threads = 1 if device.type == "cuda" else torch.get_num_threads()
    yield judge_cores(num_cores(), num_threads, environment.local_world_size)
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir():
        sections = (config.training, config.validation, config.testing)
        num_workers = max(loader_keys_on(device.type, section).num_workers or 0 for section in sections)
        yield judge_shared_memory(shutil.disk_usage(shared_memory).total, num_workers)


def _judge_device(device: torch.device, wish: str | None) -> Finding:
    """Judge whether the device is of the wished type, or without a wish the best that this machine has."""
    has_driver = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    best = wish or accelerator_type() or ("cuda" if has_driver else "cpu")
    if torch.device(best).type == device.type:
        return ok(_DEVICES, f"training uses {device}")
    build = "the CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    torch_sees = f"torch {torch.__version__}, built for {build}, sees {torch.cuda.device_count()} GPU(s)"
    fix = "set training.device=cpu if that is what you want"
    if torch.device(best).type == "cuda":
        fix = (
            "install torch's build for CUDA; look at nvidia-smi, because the driver may be too old for this CUDA; "
            f"check CUDA_VISIBLE_DEVICES, which may hide the GPUs; or {fix}"
        )
    elif best == "mps":
        fix = f"start one process, because several cannot train on an Apple GPU; or {fix}"
    judge = warning if wish is None else problem
    return judge(
        _DEVICES,
        f"training uses {device}, but {best} {'is here' if wish is None else 'was asked for'}: {torch_sees}",
        fix,
    )


def judge_cores(cores: float, threads: int, processes: int) -> Finding:
    """Check that the processes on this machine, with this many busy threads each, have enough cores."""
    counts = f"processor cores: {cores:g}; processes of this run on them: {processes}; busy threads in each: {threads}"
    if processes > cores:
        fix = "start fewer processes, or ask the scheduler or container for more cores (srun --cpus-per-task)"
        return warning(_DEVICES, f"{counts}. The processes wait for each other", fix)
    if processes * threads > cores:
        fix = f"set OMP_NUM_THREADS={max(1, int(cores // processes))}"
        return warning(_DEVICES, f"{counts}. More threads than cores are slow", fix)
    return ok(_DEVICES, counts)


def judge_shared_memory(num_bytes: int, num_workers: int) -> Finding:
    """Check that /dev/shm is large enough for data workers. Containers give it 64 MB by default."""
    size = f"{format_bytes(num_bytes)} of shared memory in /dev/shm"
    if num_workers and num_bytes < _LEAST_SHARED_BYTES:
        fix = "start the container with --shm-size=2g or --ipc=host, or set training.num_workers=0"
        return warning(_DEVICES, f"{size} for {num_workers} data workers: a worker may die of a bus error", fix)
    return ok(_DEVICES, size)


def _describe_gpu(index: int) -> str:
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    bf16 = "bf16" if has_bf16(torch.device("cuda", index)) else "no bf16"
    return f"GPU {index}: {name}, {total / 2**30:.0f} GiB memory ({free / 2**30:.0f} free), {bf16}"
