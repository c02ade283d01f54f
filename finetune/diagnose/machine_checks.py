"""Check this machine and installation (versions, device, precision, processors) and the folders and files of a run."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import torch

from finetune.config.config_files import absolute
from finetune.config.hub import find_fault, what_to_do
from finetune.config.schema import Config
from finetune.data.batches import loader_keys_on
from finetune.data.examples import check_local_rows
from finetune.distributed.accelerate_settings import refuse_another_precision, refused_settings
from finetune.distributed.device import (
    _resolve_device,
    accelerator_type,
    best_precision,
    choose_precision,
    has_bf16,
)
from finetune.distributed.environment import LaunchEnvironment
from finetune.distributed.launch import wished_device
from finetune.distributed.rank_devices import device_of_rank
from finetune.errors import DISTRIBUTION, SUMMARY, CheckpointError, FinetuneError, LaunchError
from finetune.findings import Finding, ok, problem, warning, what_and_fix
from finetune.runs.default_folder import with_chosen_folder
from finetune.runs.durable import describe_os_error
from finetune.runs.file_lock import file_lock, try_file_lock
from finetune.runs.folder import RunFolder, existing_folder
from finetune.threads import num_cores
from finetune.units import format_bytes

_VERSIONS, _DEVICES = "Versions", "Devices"
LAUNCHING_PAGE = "docs/launching.md"
_LEAST_SHARED_BYTES = 512 * 2**20
AREA = "Folders"
_LEAST_BYTES = 100 * 2**20
_ENOUGH_BYTES = 2 * 2**30
_SECONDS_TO_SEE = 5.0
_PREFIX = ".finetune-doctor-"


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
        (free, total), name = torch.cuda.mem_get_info(index), torch.cuda.get_device_name(index)
        bf16 = "bf16" if has_bf16(torch.device("cuda", index)) else "no bf16"
        memory = f"{total / 2**30:.0f} GiB memory ({free / 2**30:.0f} free)"
        yield ok(_DEVICES, f"GPU {index}: {name}, {memory}, {bf16}")
    wish = wished_device(config)
    try:
        if environment.world_size > 1:
            device = device_of_rank(environment.local_rank, wish, shares_gpus=config.parallel.share_gpus)
        else:
            device = _resolve_device(wish)
    except LaunchError as error:
        yield problem(_DEVICES, *what_and_fix(str(error), page=LAUNCHING_PAGE))
        return
    yield _judge_device(device, wish)
    precision = choose_precision(config.training.precision, best=best_precision(device))
    try:
        if not refused_settings(environ):  # otherwise reported with the launch
            refuse_another_precision(precision, config.training.precision, environ)
        yield ok(_DEVICES, f"precision {precision} (training.precision={config.training.precision})")
    except LaunchError as error:
        yield problem(_DEVICES, *what_and_fix(str(error), page=LAUNCHING_PAGE))
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
    judge, why = (warning, "is here") if wish is None else (problem, "was asked for")
    return judge(_DEVICES, f"training uses {device}, but {best} {why}: {torch_sees}", fix)


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


def check_folders(config: Config) -> Iterator[Finding]:
    """Check output_dir, the cache of encoded rows, the files of rows and the model. No file is left behind."""
    yield from _check_output_dir(config)
    yield check_cache(config)
    if config.data.path or config.data.mixture or config.data.train:
        try:
            check_local_rows(config.data)  # an address may need a package that is missing; the hub is not asked
        except FinetuneError as error:
            yield problem(AREA, *what_and_fix(str(error), page="docs/data.md"))
    yield from _check_model(config)


def check_cache(config: Config) -> Finding:
    """Check that encoded rows can be written and locked in their folder. No file is left behind.

    A run without a cache encodes its rows at every start, so only a strict one is refused.
    """
    folder = Path(absolute(config.data.cache_dir))
    place = existing_folder(folder)
    fix = "name a folder on a disk of this machine with data.cache_dir="
    try:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as inside:
            path = Path(inside, "lock")
            with file_lock(path, timeout_seconds=0, waiting_for="a lock of the doctor's own"):
                second = try_file_lock(path)
                if second is not None:
                    second.forget()
                    return problem(AREA, f"data.cache_dir={folder}: locks have no effect there", fix)
    except OSError as error:
        what = f"data.cache_dir={folder} cannot be used: {describe_os_error(error)} in {place}"
        if config.strict:
            return problem(AREA, what, fix)
        return warning(AREA, f"{what}. Every process will encode the rows itself, at every start", fix)
    return ok(AREA, f"data.cache_dir={folder} can be written and locked")


def judge_space(free_bytes: int, folder: Path) -> Finding:
    """Judge whether checkpoints will fit into a folder. `finetune plan` computes their size."""
    free = f"{format_bytes(free_bytes)} free in {folder}"
    fix = "free space there, or name a folder on a larger disk with output_dir="
    if free_bytes < _LEAST_BYTES:
        return problem(AREA, f"{free}: no checkpoint will fit", fix)
    if free_bytes < _ENOUGH_BYTES:
        return warning(AREA, f"{free}: a checkpoint may not fit", fix)
    return ok(AREA, free)


def write_marker(output_dir: Path) -> Path | None:
    """Write an empty file where `output_dir` is or would be. Return its path, or None if it cannot be written.

    The caller removes the file.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=existing_folder(output_dir))
    except OSError:
        return None
    os.close(descriptor)
    return Path(name)


def sees_file(path: Path) -> bool:
    """Check whether this process sees a file, which a network file system may take seconds to show."""
    until = time.monotonic() + _SECONDS_TO_SEE
    while True:
        try:
            if path in path.parent.iterdir():  # reading the folder makes NFS look again
                return True
        except OSError:
            return False
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def _check_output_dir(config: Config) -> Iterator[Finding]:
    folder = RunFolder(with_chosen_folder(config).output_dir)
    try:
        folder.check(config.resume)
    except CheckpointError as error:
        yield warning(AREA, f"train would stop: {error}", "use resume=auto, or a new folder with output_dir=")
    try:
        folder.check_writable()
    except CheckpointError as error:
        yield problem(AREA, *what_and_fix(str(error), page="docs/checkpoints.md"))
        return
    yield ok(AREA, f"output_dir={folder.path} can be written")
    place = existing_folder(folder.path)
    yield judge_space(shutil.disk_usage(place).free, place)


def _check_model(config: Config) -> Iterator[Finding]:
    """Check whether the model is on this machine, or can be downloaded from the hub."""
    from huggingface_hub import constants

    from finetune.model.from_hub import locate_model, repository_of
    from finetune.model.local_files import missing_from_cache

    if config.model.path is None:
        return
    try:
        path = locate_model(config.model)
    except FinetuneError as error:
        yield problem(AREA, str(error).rstrip("."), "name a folder that holds a model, or a hub id, in model.path")
        return
    repository = repository_of(path, config.model.revision)
    if repository is None:
        yield ok(AREA, f"model.path={config.model.path} is here")
        return
    if missing_from_cache(repository, "config" if config.model.init == "random" else "weights") is None:
        yield ok(AREA, f"model.path={path} is in the hub's cache, {constants.HF_HUB_CACHE}")
        return
    message = f"model.path={path} is not in the hub's cache, {constants.HF_HUB_CACHE}"
    fault = find_fault(repository)
    if fault is None:
        yield warning(AREA, f"{message}: the run will download it first", f"run `hf download {path}` beforehand")
        return
    fix = what_to_do(fault, repository, "model.path").rstrip(".")
    yield problem(AREA, f"{message}, and {fault.text}", fix[0].lower() + fix[1:])
