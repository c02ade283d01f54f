"""Choose the folder of a run if its configuration does not set `output_dir`."""

from __future__ import annotations

import logging
import os
from itertools import chain, count
from pathlib import Path

from finetune.config.keys import on_resume, values
from finetune.config.run_paths import recorded_paths
from finetune.config.saved import is_same_path
from finetune.config.schema import SCRIPT_PREFIX, Config
from finetune.errors import CheckpointError
from finetune.runs.comparison import differing, effects_that_count, is_allowed
from finetune.runs.durable import describe_os_error
from finetune.runs.file_lock import is_held
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import RecordedRun
from finetune.terminal import visible

_log = logging.getLogger(__name__)


def with_chosen_folder(config: Config) -> Config:
    """Return the configuration with the folder to use in `output_dir`. Nothing is written.

    If the configuration does not set it, this is the newest run of the same configuration with `resume=auto`, and
    otherwise the first free one of `runs/NAME`, `runs/NAME-2`, `runs/NAME-3` and so on. Only the main process of a
    launch calls this, because another run may begin between two calls.
    """
    if config.origin("output_dir") != "default":
        return config
    default = Path(config.output_dir)
    newest = _newest_run_of(config, default.parent) if config.resume == "auto" else None
    if newest is not None:
        state = "complete" if newest.state == "completed" else newest.state
        _log.info("resume=auto: %s is the newest run of this configuration (%s)", visible(newest.name), state)
        return config.model_copy(update={"output_dir": newest.name})
    numbered = (default.with_name(f"{default.name}-{number}") for number in count(2))
    folder = next(path for path in chain([default], numbered) if _is_free(path))
    if config.resume == "auto" and folder != default:
        where = f"{default} is another run. A new run begins in {folder}"
        _log.warning(
            "resume=auto: no run has this configuration; %s. output_dir names a run to resume.", visible(where)
        )
    return config.model_copy(update={"output_dir": str(folder)})


def reserved_folder(config: Config) -> tuple[str, bool]:
    """Choose a folder as `with_chosen_folder` does. Return it, and whether it is new and reserved for this process."""
    while True:
        chosen = with_chosen_folder(config).output_dir
        folder = RunFolder(chosen)
        try:
            if folder.holds_run() or folder.reserve():
                return chosen, not folder.holds_run()
        except OSError:  # a later check says why it cannot be written
            return chosen, False


def _is_free(folder: Path) -> bool:
    try:
        names = {path.name for path in folder.iterdir()}
        lock = RunFolder(folder).lock_file
        return not names or (names == {lock.name} and not is_held(lock))  # reserved by a run that was killed
    except FileNotFoundError:
        return not os.path.lexists(folder)
    except OSError:  # a file, or a folder of another user
        return False


def _newest_run_of(config: Config, parent: Path) -> RecordedRun | None:
    """Return the run of this configuration that was started last: its curve would be the same, or is allowed to change.

    A run whose optimizer a script made counts if no other run does: the script that starts now may give the optimizer
    only later, to its trainer. The trainer compares it then.
    """
    try:
        folders = [] if not parent.is_dir() else sorted(folder for folder in parent.iterdir() if folder.is_dir())
    except OSError as error:
        raise CheckpointError(
            f"{parent} cannot be read: {describe_os_error(error)}. resume=auto looks there for the run to go on with. "
            "Name its folder with output_dir=."
        ) from error
    runs = [run for run in map(RecordedRun, folders) if run.folder.holds_run()]
    of_script = None
    for run in sorted(runs, key=lambda run: run.started or "", reverse=True):  # reads no run older than the answer
        before = run.config
        keys = None if before is None else _other_keys(run, before, config)
        if keys == []:
            return run
        if keys == ["optim.optimizer"] and before and before.optim.optimizer.startswith(SCRIPT_PREFIX):
            of_script = of_script or run
    return None if config.optim.optimizer.startswith(SCRIPT_PREFIX) else of_script


def _other_keys(run: RecordedRun, before: Config, config: Config) -> list[str]:
    """Return the keys that make a configuration another one than the run's."""
    recorded = recorded_paths(run.folder.path)
    counting = effects_that_count(before, config, has_same_rows=False)
    # A run sets this key itself, from its tools. Their names and code are compared instead.
    is_filled_in = {"rollout.tool_schemas": config.rollout.tool_schemas is None}
    return [
        key
        for key, both in differing([values(before), values(config)])
        if on_resume(key).matters in counting
        and not (is_allowed(key, config.resume_allow) or is_filled_in.get(key) or is_same_path(key, both, recorded))
    ]
