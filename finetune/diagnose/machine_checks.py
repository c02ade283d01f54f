"""Check this machine and this installation: versions, devices, processors, memory for workers, open files."""

from __future__ import annotations

import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
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

_VERSIONS, _DEVICES, _LIMITS = "Versions", "Devices", "Limits"
_LEAST_OPEN_FILES = 1024
_LEAST_SHARED_BYTES = 512 * 2**20


def check_versions() -> Iterator[Finding]:
    """Compare the installed versions with those that finetune's own metadata requires."""
    try:
        asked = requires("finetune") or []
        python = metadata("finetune")["Requires-Python"] or ""
    except PackageNotFoundError:
        what = "finetune is not installed, so the versions it needs are not known"
        yield warning(_VERSIONS, what, "run `pip install -e .` in its folder")
        return
    yield judge_python(python)
    yield from judge_packages(asked)


def judge_python(required: str) -> Finding:
    """Compare the version of Python with a requirement, for example ``>=3.11``."""
    from packaging.specifiers import SpecifierSet

    found = platform.python_version()
    if SpecifierSet(required).contains(found, prereleases=True):
        return ok(_VERSIONS, f"Python {found} ({sys.executable})")
    return problem(_VERSIONS, f"Python {found}, but finetune needs {required}", "install one of these versions")


def judge_packages(requirements: Sequence[str]) -> Iterator[Finding]:
    """Compare the installed packages with requirements such as ``torch>=2.8``. Requirements of extras are ignored."""
    from packaging.requirements import Requirement

    right = []
    for each in map(Requirement, requirements):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        found = _installed(each.name)
        if found is not None and each.specifier.contains(found, prereleases=True):
            right.append(f"{each.name} {found}")
        else:
            what = f"{each.name} {found or 'is not installed'}, but finetune needs {each.name}{each.specifier}"
            yield problem(_VERSIONS, what, f"pip install '{each.name}{each.specifier}'")
    yield ok(_VERSIONS, ", ".join(right))


def check_devices(config: Config, local_world_size: int) -> Iterator[Finding]:
    """Report GPUs and processor cores, and whether they suffice for the processes on this machine."""
    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus):
        yield ok(_DEVICES, _describe_gpu(index))
    yield from judge_gpus(
        num_gpus,
        has_driver=Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None,
        cuda=torch.version.cuda,
        wish=config.training.device,
        accelerator=accelerator_type(),
        processes=1 if config.parallel.share_gpus else local_world_size,
    )
    on_gpu = num_gpus > 0 and _wants_gpu(config)
    yield judge_cores(num_cores(), torch.get_num_threads(), local_world_size, on_gpu=on_gpu)


def judge_gpus(
    count: int, *, has_driver: bool, cuda: str | None, wish: str, accelerator: str | None = None, processes: int = 1
) -> Iterator[Finding]:
    """Check that the run will use the GPUs of this machine.

    Args:
        count: GPUs that torch sees.
        has_driver: whether this machine shows an NVIDIA GPU or its driver's tools.
        cuda: the CUDA version torch was built for; None: built for the CPU.
        wish: `training.device`.
        accelerator: see `accelerator_type`.
        processes: processes of this run on this machine.
    """
    if wish == "mps" or (wish == "auto" and count == 0 and accelerator not in (None, "cuda")):
        yield _judge_other_accelerator(wish, accelerator, processes)
        return
    number = int(wish.removeprefix("cuda:")) if wish.startswith("cuda:") else 0
    if wish.startswith("cuda") and number >= count:
        judge, what = problem, f"training.device={wish}, but torch sees {count} GPU(s)"
    elif has_driver and count == 0 and wish == "auto":
        judge, what = warning, "this machine has an NVIDIA driver, but torch sees no GPU: training will use the CPU"
    else:
        if count == 0:
            yield ok(_DEVICES, f"{'' if accelerator else 'no GPU: '}training uses the CPU")
        return
    if cuda is None:
        build, fix = "the CPU", "install torch's build for CUDA"
    else:
        build = f"CUDA {cuda}"
        fix = "look at nvidia-smi: the driver may be too old for this CUDA, or CUDA_VISIBLE_DEVICES may hide the GPUs"
    what = f"{what} (torch {torch.__version__} is built for {build})"
    yield judge(_DEVICES, what, f"{fix}; or set training.device=cpu")


def _judge_other_accelerator(wish: str, accelerator: str | None, processes: int) -> Finding:
    if accelerator == "mps":
        what = "Apple GPU (mps): one process trains on it, in fp32 if training.precision is auto"
        if processes == 1:
            return ok(_DEVICES, what)
        judge = problem if wish == "mps" else warning
        return judge(_DEVICES, f"{what}, and this run has {processes}", "start one process, or set training.device=cpu")
    if wish == "mps":
        return problem(_DEVICES, "training.device=mps, but torch sees no Apple GPU", "set training.device=auto or cpu")
    what = f"torch sees an accelerator of type {accelerator}, which finetune does not use: training uses the CPU"
    return warning(_DEVICES, what, "set training.device=cpu if that is what you want")


def judge_cores(cores: float, threads: int, processes: int, *, on_gpu: bool) -> Finding:
    """Check that there are enough cores, of those that this process may use, for the processes on this machine.

    Each process has `threads` threads of torch, which matter only if it does not compute on a GPU.
    """
    counts = f"processor cores: {cores:g}; processes of this run on them: {processes}; threads in each: {threads}"
    if processes > cores:
        fix = "start fewer processes, or ask the scheduler or container for more cores (srun --cpus-per-task)"
        return warning(_DEVICES, f"{counts}. The processes wait for each other", fix)
    if processes * threads > cores and not on_gpu:
        fix = f"set OMP_NUM_THREADS={max(1, int(cores // processes))}"
        return warning(_DEVICES, f"{counts}. More threads than cores are slow", fix)
    return ok(_DEVICES, counts)


def check_backend(config: Config) -> Iterator[Finding]:
    """Check that this torch has the backend that the run will use."""
    area, wish = "Backend", config.parallel.backend
    on_gpu = torch.cuda.is_available() and _wants_gpu(config)
    uses_nccl = on_gpu and (wish == "nccl" or (wish == "auto" and not config.parallel.share_gpus))
    if not dist.is_available() or not dist.is_gloo_available():
        yield problem(area, f"torch {torch.__version__} has no gloo", "install one of torch's own builds")
    elif wish == "nccl" and not on_gpu:
        fix = "use parallel.backend=auto or gloo, or a machine with GPUs"
        yield problem(area, "parallel.backend=nccl needs GPUs, and this process computes on the CPU", fix)
    elif uses_nccl and not dist.is_nccl_available():
        yield warning(area, "there are GPUs, but torch has no nccl: gloo is slower", "install torch's CUDA build")
    else:
        yield ok(area, f"{'nccl' if uses_nccl else 'gloo'} (parallel.backend={wish})")


def check_limits(config: Config) -> Iterator[Finding]:
    """Check the limit of open files, and the shared memory through which data workers pass their batches."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _LEAST_OPEN_FILES:
        what = f"at most {files} open files: workers and sockets need more"
        yield warning(_LIMITS, what, "run `ulimit -n 4096`")
    else:
        yield ok(_LIMITS, f"up to {files} open files")
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir():
        device_type = "cuda" if torch.cuda.is_available() and _wants_gpu(config) else "cpu"
        sections = (config.training, config.validation, config.testing)
        workers = max(loader_keys_on(device_type, section).num_workers or 0 for section in sections)
        yield judge_shared_memory(shutil.disk_usage(shared_memory).total, workers)


def judge_shared_memory(num_bytes: int, num_workers: int) -> Finding:
    """Check that /dev/shm is large enough for data workers; containers give it 64 MB by default."""
    size = f"{format_bytes(num_bytes)} of shared memory in /dev/shm"
    if num_workers and num_bytes < _LEAST_SHARED_BYTES:
        fix = "start the container with --shm-size=2g or --ipc=host, or set training.num_workers=0"
        return warning(_LIMITS, f"{size} for {num_workers} data workers: a worker may die of a bus error", fix)
    return ok(_LIMITS, size)


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
    return config.training.device not in ("cpu", "mps")
