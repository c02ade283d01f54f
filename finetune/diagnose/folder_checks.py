"""Check the folders and files of a run: output_dir, the cache of encoded rows, the rows and the model."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config.hub import find_fault, what_to_do
from finetune.data.examples import check_local_rows
from finetune.errors import CheckpointError, FinetuneError
from finetune.findings import Finding, ok, problem, warning, what_and_fix
from finetune.runs.default_folder import with_chosen_folder
from finetune.runs.durable import describe_os_error
from finetune.runs.file_lock import file_lock, try_file_lock
from finetune.runs.folder import RunFolder, existing_folder
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config, DataSection

AREA = "Folders"
_LEAST_BYTES = 100 * 2**20
_ENOUGH_BYTES = 2 * 2**30
_SECONDS_TO_SEE = 5.0
_PREFIX = ".finetune-doctor-"


def check_folders(config: Config) -> Iterator[Finding]:
    """Check output_dir, the cache of encoded rows, the files of rows and the model. No file is left behind."""
    yield from _check_output_dir(config)
    yield check_cache(config.data.cache_dir)
    yield from _check_rows(config.data)
    yield from _check_model(config)


def check_cache(cache_dir: str) -> Finding:
    """Check that encoded rows can be written and locked in a folder. No file is left behind."""
    folder = Path(cache_dir).expanduser().absolute()
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
        return problem(AREA, f"data.cache_dir={folder} cannot be used: {describe_os_error(error)} in {place}", fix)
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


def _check_rows(section: DataSection) -> Iterator[Finding]:
    """Look for the files of rows. An address may need a package that is missing. The hub is not asked."""
    if not (section.path or section.mixture or section.train):
        return
    try:
        check_local_rows(section)
    except FinetuneError as error:
        yield problem(AREA, *what_and_fix(str(error), page="docs/data.md"))


def _check_model(config: Config) -> Iterator[Finding]:
    """Check whether the model is on this machine, or can be downloaded from the hub."""
    from huggingface_hub import constants

    from finetune.model.from_hub import locate_model, missing_from_cache, repository_of

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
