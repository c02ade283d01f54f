"""Check that the folders of a run can be written and locked, have room, and are seen by all ranks."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from finetune.config.hub import find_fault, what_to_do
from finetune.data.examples import check_local_rows
from finetune.errors import CheckpointError, FinetuneError, ModelError
from finetune.findings import Finding, ok, problem, warning, what_and_fix
from finetune.runs.durable import describe_os_error
from finetune.runs.file_lock import file_lock, try_file_lock
from finetune.runs.folder import RunFolder, existing_folder
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config, DataSection

AREA = "Folders"
_LEAST_BYTES = 100 * 2**20
_ENOUGH_BYTES = 2 * 2**30
_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""
_SECONDS_TO_SEE = 5.0
_PREFIX = ".finetune-doctor-"


def check_folders(config: Config) -> list[Finding]:
    """Check output_dir, the cache of encoded data, the rows' own files and the hub's cache. Nothing is left in them."""
    return [
        *_check_output_dir(config),
        check_cache(config.data.cache_dir),
        *_check_rows(config.data),
        *_check_hub(config),
    ]


def file_system(path: Path) -> str:
    """Return the type of the file system of an absolute path without links, for example ``ext4``."""
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    if not mounts:
        return "a file system of unknown type"
    return max(reversed(mounts), key=lambda each: len(each.mountpoint)).fstype  # a later mount hides an earlier one


def judge_space(free_bytes: int, needed_bytes: int | None, folder: str) -> Finding:
    """Judge whether the checkpoints of a run will fit into a folder. Their size is None if it is not known."""
    free, needed = format_bytes(free_bytes), format_bytes(needed_bytes or 0)
    fix = (
        "free space there, or name a folder on a larger disk with output_dir=, "
        "or keep fewer with checkpoint.save_total_limit="
    )
    if needed_bytes is not None and free_bytes < needed_bytes:
        return problem(AREA, f"{free} free in {folder}, but the checkpoints of this run take about {needed}", fix)
    if free_bytes < _LEAST_BYTES:
        return problem(AREA, f"{free} free in {folder}: no checkpoint will fit", fix)
    if needed_bytes is None and free_bytes < _ENOUGH_BYTES:
        return warning(AREA, f"{free} free in {folder}: a checkpoint may not fit", fix)
    return ok(AREA, f"{free} free in {folder}" + (f"; this run takes about {needed}" if needed_bytes else ""))


def write_token(output_dir: Path) -> Path | None:
    """Write an empty file where `output_dir` is or would be, for other ranks to look for; None if that fails.

    The caller removes it.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=existing_folder(output_dir))
    except OSError:
        return None
    os.close(descriptor)
    return Path(name)


def sees_token(token: Path) -> bool:
    """Check whether this process sees the file, which a network file system may take seconds to show."""
    until = time.monotonic() + _SECONDS_TO_SEE
    while True:
        try:
            if token in token.parent.iterdir():  # reading the folder makes NFS look again
                return True
        except OSError:
            return False
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def _check_rows(section: DataSection) -> list[Finding]:
    """Look for the files of rows. An address may need a package that is missing. The hub is not asked."""
    if not (section.path or section.mixture or section.train):
        return []
    try:
        check_local_rows(section)
    except FinetuneError as error:
        return [problem(AREA, *what_and_fix(str(error), page="docs/data.md"))]
    return []


def _check_output_dir(config: Config) -> list[Finding]:
    folder = RunFolder(config.output_dir)
    found = []
    try:
        folder.check(config.resume)
    except CheckpointError as error:
        found.append(warning(AREA, f"train would stop: {error}", "use resume=auto, or a new folder with output_dir="))
    place = existing_folder(folder.path)
    try:
        with tempfile.TemporaryFile(prefix=_PREFIX, dir=place) as file:
            file.write(b"finetune")
            os.fsync(file.fileno())
    except OSError as error:
        what = f"output_dir={folder.path} cannot be written: {describe_os_error(error)} in {place}"
        return [*found, problem(AREA, what, "name a folder that you may write with output_dir=")]
    fs_type = file_system(place.resolve())
    if fs_type in ("tmpfs", "ramfs"):
        what = f"output_dir={folder.path} is in memory ({fs_type}): checkpoints are lost when this machine stops"
        found.append(warning(AREA, what, "name a folder on a disk with output_dir="))
    else:
        found.append(ok(AREA, f"output_dir={folder.path} can be written ({fs_type})"))
    try:
        needed = _needed_bytes(config)
    except ModelError as error:
        needed = None
        fix = "copy or download the model again, or name another one in model.path"
        found.append(problem(AREA, str(error), fix))
    return [*found, judge_space(shutil.disk_usage(place).free, needed, str(place))]


def _needed_bytes(config: Config) -> int | None:
    """Return the size of the checkpoints of full fine-tuning, if the weights are here to be counted.

    Raises:
        ModelError: a weight file is damaged; says which, without a full stop.
    """
    from safetensors import SafetensorError, safe_open

    from finetune.model.base import locate_model

    if config.training.method != "full" or config.model.path is None:
        return None
    try:
        files = sorted(Path(locate_model(config.model)).glob("*.safetensors"))
    except FinetuneError:
        return None
    num_parameters = 0
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                num_parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the weight file {file} cannot be read: {error}") from error
    # The checkpoints that are kept, the best one, and the one that is being written.
    return num_parameters * _BYTES_PER_PARAMETER * (config.checkpoint.save_total_limit + 2) or None


def check_cache(cache_dir: str) -> Finding:
    """Check that encoded data can be written and locked in a folder. Nothing is left in it."""
    folder = Path(cache_dir).expanduser().absolute()
    place = existing_folder(folder)
    fs_type = file_system(place.resolve())
    fix = "name a folder on a disk of this machine with data.cache_dir="
    try:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as inside:
            path = Path(inside, "lock")
            with file_lock(path, timeout_seconds=0, waiting_for="a lock of the doctor's own"):
                second = try_file_lock(path)
                if second is not None:
                    second.forget()
                    what = f"data.cache_dir={folder}: locks have no effect there ({fs_type})"
                    return problem(AREA, what, fix)
    except OSError as error:
        return problem(AREA, f"data.cache_dir={folder} cannot be used: {describe_os_error(error)} in {place}", fix)
    return ok(AREA, f"data.cache_dir={folder} can be written and locked ({fs_type})")


def _check_hub(config: Config) -> list[Finding]:
    """Check whether the model is here already, or can be downloaded from the hub."""
    from huggingface_hub import constants

    from finetune.model.base import locate_model
    from finetune.model.from_hub import missing_from_cache, repository_of

    if config.model.path is None:
        return []
    try:
        where = locate_model(config.model)
    except FinetuneError as error:
        return [problem(AREA, str(error).rstrip("."), "name a folder that holds a model, or a hub id, in model.path")]
    repository = repository_of(where, config.model.revision)
    if repository is None:
        return [ok(AREA, f"model.path={config.model.path} is here")]
    if missing_from_cache(repository, "config" if config.model.init == "random" else "weights") is None:
        return [ok(AREA, f"model.path={where} is in the hub's cache, {constants.HF_HUB_CACHE}")]
    what = f"model.path={where} is not in the hub's cache, {constants.HF_HUB_CACHE}"
    fault = find_fault(repository)
    if fault is None:
        return [warning(AREA, f"{what}: the run will download it first", f"run `hf download {where}` beforehand")]
    fix = what_to_do(fault, repository, "model.path").rstrip(".")
    return [problem(AREA, f"{what}, and {fault.text}", fix[0].lower() + fix[1:])]
