"""Check this machine and this installation: versions, devices, processors, memory for workers, open files."""

from __future__ import annotations

import platform
import re
import resource
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from finetune.data.batches import loader_keys_on
from finetune.distributed.device import accelerator_type
from finetune.distributed.precision import has_bf16
from finetune.findings import Finding, ok, problem, warning
from finetune.threads import num_cores
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config

_LEAST_OPEN_FILES = 1024
_LEAST_SHARED_BYTES = 512 * 2**20


def check_versions() -> list[Finding]:
    """Compare the installed versions with those that finetune's own metadata requires."""
    from packaging.specifiers import SpecifierSet

    area = "Versions"
    try:
        asked = requires("finetune") or []
        python = SpecifierSet(metadata("finetune")["Requires-Python"] or "")
    except PackageNotFoundError:
        what = "finetune is not installed, so the versions it needs are not known"
        return [warning(area, what, "run `pip install -e .` in its folder")]
    found = [ok(area, f"Python {platform.python_version()} ({sys.executable})")]
    if not python.contains(platform.python_version(), prereleases=True):
        what = f"Python {platform.python_version()}, but finetune needs {python}"
        found = [problem(area, what, "install one of these versions of Python")]
    return [*found, *judge_packages(asked)]


def judge_packages(requirements: Sequence[str]) -> list[Finding]:
    """Compare the installed packages with requirements.

    Args:
        requirements: as in a package's metadata, for example ``torch>=2.8``; those of extras are ignored.
    """
    from packaging.requirements import Requirement

    area = "Versions"
    found, right = [], []
    for each in map(Requirement, requirements):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        have = _installed(each.name)
        if have is not None and each.specifier.contains(have, prereleases=True):
            right.append(f"{each.name} {have}")
        else:
            what = f"{each.name} {have or 'is not installed'}, but finetune needs {each.name}{each.specifier}"
            found.append(problem(area, what, f"pip install '{each.name}{each.specifier}'"))
    return [*found, ok(area, ", ".join(right))]


def check_devices(config: Config, local_world_size: int) -> list[Finding]:
    """Report GPUs and processor cores, and whether they suffice for the processes on this machine."""
    devices = [_describe_gpu(index) for index in range(torch.cuda.device_count())]
    has_driver = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    found = [ok("Devices", device) for device in devices]
    found += judge_gpus(
        len(devices),
        has_driver=has_driver,
        cuda=torch.version.cuda,
        wish=config.training.device,
        accelerator=accelerator_type(),
        processes=local_world_size,
    )
    return [
        *found,
        *judge_cores(
            num_cores(), torch.get_num_threads(), local_world_size, on_gpu=bool(devices) and _wants_gpu(config)
        ),
    ]


def judge_gpus(
    count: int, *, has_driver: bool, cuda: str | None, wish: str, accelerator: str | None = None, processes: int = 1
) -> list[Finding]:
    """Check that the run will use the GPUs of this machine.

    Args:
        count: GPUs that torch sees.
        has_driver: whether this machine shows an NVIDIA GPU or its driver's tools.
        cuda: the CUDA version torch was built for; None: built for the CPU.
        wish: `training.device`.
        accelerator: see `accelerator_type`.
        processes: processes of this run on this machine.
    """
    area = "Devices"
    if wish == "mps" or (wish == "auto" and count == 0 and accelerator not in (None, "cuda")):
        return [_judge_other_accelerator(wish, accelerator, processes)]
    number = int(wish.removeprefix("cuda:")) if wish.startswith("cuda:") else 0
    if wish.startswith("cuda") and number >= count:
        what = f"training.device={wish}, but torch sees {count} GPU(s)"
    elif has_driver and count == 0 and wish == "auto":
        what = "this machine has an NVIDIA driver, but torch sees no GPU: training will use the CPU"
    else:
        no_gpu = "" if accelerator else "no GPU: "
        return [] if count else [ok(area, f"{no_gpu}training uses the CPU")]
    if cuda is None:
        what, fix = f"{what} (torch {torch.__version__} is built for the CPU)", "install torch's build for CUDA"
    else:
        what = f"{what} (torch {torch.__version__} is built for CUDA {cuda})"
        fix = "look at nvidia-smi: the driver may be too old for this CUDA, or CUDA_VISIBLE_DEVICES may hide the GPUs"
    judge = problem if wish.startswith("cuda") else warning
    return [judge(area, what, f"{fix}; or set training.device=cpu")]


def _judge_other_accelerator(wish: str, accelerator: str | None, processes: int) -> Finding:
    area = "Devices"
    if accelerator == "mps":
        what = "Apple GPU (mps): one process trains on it, in fp32 if training.precision is auto"
        if processes == 1:
            return ok(area, what)
        judge = problem if wish == "mps" else warning
        return judge(area, f"{what}, and this run has {processes}", "start one process, or set training.device=cpu")
    if wish == "mps":
        return problem(area, "training.device=mps, but torch sees no Apple GPU", "set training.device=auto or cpu")
    what = f"torch sees an accelerator of type {accelerator}, which finetune does not use: training uses the CPU"
    return warning(area, what, "set training.device=cpu if that is what you want")


def judge_cores(cores: float, threads: int, processes: int, *, on_gpu: bool) -> list[Finding]:
    """Check that there are enough processor cores for the processes on this machine.

    Args:
        cores: the number that this process may use.
        threads: torch's threads in each process.
        processes: processes of this run on this machine.
        on_gpu: whether they compute on GPUs.
    """
    area = "Devices"
    shown = f"processor cores: {cores:g}; processes of this run on them: {processes}; threads in each: {threads}"
    if processes > cores:
        what = f"{shown}. The processes wait for each other"
        fix = "start fewer processes, or ask the scheduler or container for more cores (srun --cpus-per-task)"
        return [warning(area, what, fix)]
    if processes * threads > cores and not on_gpu:
        what = f"{shown}. More threads than cores are slow"
        return [warning(area, what, f"set OMP_NUM_THREADS={max(1, int(cores // processes))}")]
    return [ok(area, shown)]


def check_backend(config: Config) -> list[Finding]:
    """Check that this torch has the backend that the run will use."""
    area, wish = "Backend", config.parallel.backend
    on_gpu = torch.cuda.is_available() and _wants_gpu(config)
    if not dist.is_available() or not dist.is_gloo_available():
        return [problem(area, f"torch {torch.__version__} has no gloo", "install one of torch's own builds")]
    if wish == "nccl" and not on_gpu:
        fix = "use parallel.backend=auto or gloo, or a machine with GPUs"
        return [problem(area, "parallel.backend=nccl needs GPUs, and this process computes on the CPU", fix)]
    if on_gpu and wish != "gloo" and not dist.is_nccl_available():
        return [warning(area, "there are GPUs, but torch has no nccl: gloo is slower", "install torch's CUDA build")]
    return [ok(area, f"{'nccl' if on_gpu and wish != 'gloo' else 'gloo'} (parallel.backend={wish})")]


def check_limits(config: Config) -> list[Finding]:
    """Check the limit of open files, and the shared memory in which data workers pass on their batches."""
    area = "Limits"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [ok(area, f"up to {files} open files")]
    if 0 <= files < _LEAST_OPEN_FILES:
        found = [warning(area, f"at most {files} open files: workers and sockets need more", "run `ulimit -n 4096`")]
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return found
    kind = "cuda" if torch.cuda.is_available() and _wants_gpu(config) else "cpu"
    sections = (config.training, config.validation, config.testing)
    workers = max(loader_keys_on(kind, section).num_workers or 0 for section in sections)
    return [*found, judge_shared_memory(shutil.disk_usage(shared).total, workers)]


def judge_shared_memory(num_bytes: int, num_workers: int) -> Finding:
    """Check that /dev/shm is large enough for data workers; containers give it 64 MB by default."""
    shown = f"{format_bytes(num_bytes)} of shared memory in /dev/shm"
    if num_workers and num_bytes < _LEAST_SHARED_BYTES:
        fix = "start the container with --shm-size=2g or --ipc=host, or set training.num_workers=0"
        return warning("Limits", f"{shown} for {num_workers} data workers: a worker may die of a bus error", fix)
    return ok("Limits", shown)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _describe_gpu(index: int) -> str:
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    bf16 = "bf16" if has_bf16(torch.device("cuda", index)) else "no bf16"
    return f"GPU {index}: {name}, {total / 2**30:.0f} GiB memory ({free / 2**30:.0f} free), {bf16}"


def _wants_gpu(config: Config) -> bool:
    return not re.fullmatch("cpu|mps", config.training.device)
