"""Write and read run.json, the record of a run."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

import finetune
from finetune.errors import CheckpointError
from finetune.limits import read_regular
from finetune.main_memory import memory_kills
from finetune.runs.durable import describe_os_error, disk_failures_end_the_run, replace_file
from finetune.runs.metrics import as_json

if TYPE_CHECKING:
    from finetune.config.schema import Config

Status = Literal["running", "completed", "failed", "stopped", "preempted"]

_PACKAGES = ("torch", "transformers", "accelerate", "peft")
_GIT_SECONDS = 5.0
_MOST_SHOWN = 60
_log = logging.getLogger(__name__)


SPLITS = ("data.train", "data.validation")
"""The fingerprints of the rows that decide a curve."""


def record_of_start(config: Config, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """Make the record of a start for run.json. Its own digest reveals an edited or incomplete record."""
    rows = {split: fingerprints[split] for split in SPLITS if split in fingerprints}
    values = {"config": config.model_dump(mode="json"), "rows": rows}
    return {**values, "sha256": digest_of(values)}


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of values as JSON, with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What run.json records about a run that starts or resumes."""

    world_size: int
    """Processes that train together."""
    processes_started: int
    """Processes of the launch; more than `world_size` if one of them trains alone."""
    launcher: str
    """The launcher that started them."""
    backend: str | None
    """The backend of the process group; None for a single process."""
    threads: Mapping[str, Any]
    """`Runtime.threads` of the main process."""
    sharding: str = "none"
    """How weights are sharded over the processes: `none` or `fsdp2`."""
    shard_size: int | None = None
    """Processes that share one copy of the weights; None if each process has its own."""
    device: str | None = None
    """The type of the device that computes: `cpu`, `cuda`."""
    precision: str | None = None
    """`fp32`, `bf16` or `fp16`."""
    global_batch: Mapping[str, Any]
    """The factors of the global batch size, by name."""
    fallbacks: Sequence[Mapping[str, str]]
    """The result of `Fallbacks.as_records`."""
    fingerprints: Mapping[str, str]
    """Digests by name, for example of the data and the configuration."""
    rows_read_as: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For each split: the format of its rows, the columns that are read and not read, and the rows left out."""
    resolved_paths: Mapping[str, str] = field(default_factory=dict)
    """The result of `resolved_paths`."""
    started_with: Mapping[str, Any] | None = None
    """The values with which `training.resume` compares the next start."""
    resume_changes: Sequence[Mapping[str, Any]] = ()
    """Changes that `resume.allow` accepted. They are added to those of earlier starts."""


class RunRecord:
    """The file run.json, replaced as a whole at each change. docs/watching.md describes its fields.

    The file holds only what is passed in by name: no environment and no command line, which may contain secrets.
    `before` is called right before the file is replaced.
    """

    def __init__(self, path: Path, *, before: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._before = before
        self._values: dict[str, Any] = {}

    def start(self, run: RunStart) -> None:
        """Write the record of a run that starts or resumes. The times and changes of earlier starts are kept.

        Raises:
            RunFailedError: the file cannot be written.
        """
        earlier = read_run_record(self.path)
        if earlier is None and self.path.exists():
            _log.warning("%s cannot be read and is replaced", self.path)
        earlier = earlier or {}
        if earlier.get("status") == "running":
            from finetune.runs.killed import why_killed

            _log.warning("the last start of this run recorded no end: %s", why_killed(earlier))
        now = _now()
        self._values = {
            "status": "running",
            **vars(run),
            "resume_changes": [
                *(earlier.get("resume_changes") or []),
                *({"at": now, **change} for change in run.resume_changes),
            ],
            "versions": read_versions(),
            "git_commit": read_git_commit(Path.cwd()),
            "starts": [*(earlier.get("starts") or []), now],
            "num_steps": None,
            "parameters": None,
            "memory": earlier.get("memory"),
            "row_counts": None,
            **{name: earlier[name] for name in ("base_answers",) if name in earlier},
            "low_precision": None,
            "script": None,
            "opening": earlier.get("opening"),
            "profile": earlier.get("profile"),
            "memory_kills": memory_kills(),
            "finished": None,
            "result": None,
        }
        self._save()

    def update(self, **values: Any) -> None:
        """Change fields that `start` wrote.

        Raises:
            RunFailedError: the file cannot be written.
        """
        self._values |= values
        self._save()

    def finish(self, status: Status, result: Mapping[str, Any] | None = None) -> None:
        """Record how and when the run ended, and its result.

        Raises:
            RunFailedError: the file cannot be written.
        """
        self.update(status=status, finished=_now(), result=dict(result) if result is not None else None)

    def fail(self, reason: str) -> None:
        """Record a failed run after its process has ended without doing so. Raises the errors of `finish`."""
        self._values = read_run_record(self.path) or {}
        self.finish("failed", {"error": reason})

    def _save(self) -> None:
        data = json.dumps(as_json(self._values), indent=2, allow_nan=False) + "\n"
        self._before()
        with disk_failures_end_the_run("Writing", self.path):
            replace_file(self.path, data.encode())


class _Opening(BaseModel, strict=True):
    system: str | None
    tools: str
    num_with_system: int
    num_with_tools: int
    num_rows: int


_TYPES: dict[str, Any] = {
    **get_type_hints(RunStart),
    **dict.fromkeys(("memory", "base_answers", "low_precision", "parameters"), Mapping[str, Any]),
    **dict.fromkeys(("script", "profile", "result"), Mapping[str, Any]),
    **dict.fromkeys(("status", "git_commit", "finished"), str),
    **{"memory_kills": Mapping[str, int]},
    **{"row_counts": Mapping[str, Sequence[Mapping[str, Any]]]},
    **{"versions": Mapping[str, str], "starts": Sequence[str], "num_steps": int, "opening": _Opening},
}
_ReadRecord = create_model(  # type: ignore[call-overload]
    "run.json", __config__=ConfigDict(strict=True), **{name: (kind | None, None) for name, kind in _TYPES.items()}
)


def read_run_record(path: Path) -> dict[str, Any] | None:
    """Read run.json; None if it is missing, empty or half-written. Fields that are not known are not checked.

    Raises:
        CheckpointError: the file cannot be read, or a field is of another type than the one that a run writes.
    """
    try:
        record = json.loads(read_regular(path))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:
        reason = describe_os_error(error)
        raise CheckpointError(f"{path} cannot be read: {reason}. Restore the file, or use another run.") from None
    if not isinstance(record, dict):
        return None
    try:
        _ReadRecord.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, value = ".".join(map(str, first["loc"])), repr(first["input"])
        value = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]} ..."
        raise CheckpointError(
            f"{path}: {name} is {value}, which no run writes ({first['msg']}). Restore the file, or use another run."
        ) from None
    return record


def read_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of its main dependencies, without importing them."""
    versions = {"python": platform.python_version(), "finetune": finetune.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def read_git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, with `-dirty` appended if tracked files were changed.

    Returns None outside of a repository, before its first commit, and if git is not installed or does not answer.
    """
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return commit.strip() or None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
