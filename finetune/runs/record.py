"""Write and read run.json, the record of a run."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import finetune
from finetune.runs.durable import disk_failures_end_the_run, replace_file
from finetune.runs.metrics import as_json

Status = Literal["running", "completed", "failed", "stopped", "preempted"]

_PACKAGES = ("torch", "transformers", "accelerate", "peft")
_GIT_SECONDS = 5.0
_log = logging.getLogger(__name__)


class RunRecord:
    """The file, replaced as a whole at each change; docs/watching.md describes its fields.

    It holds only what is passed in by name: no environment, no command line, nothing that could be a secret.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}

    def start(
        self,
        *,
        world_size: int,
        processes_started: int,
        launcher: str,
        backend: str | None,
        threads: Mapping[str, Any],
        global_batch: Mapping[str, Any],
        fallbacks: list[dict[str, str]],
        fingerprints: Mapping[str, str],
        sharding: str = "none",
        shard_size: int | None = None,
        device: str | None = None,
        precision: str | None = None,
        started_with: Mapping[str, Any] | None = None,
        resume_changes: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Write the record of a run that starts or resumes. The times and changes of earlier starts are kept.

        Args:
            world_size: processes that train together.
            processes_started: processes of the launch; more than world_size if one of them trains alone.
            launcher: the launcher that started them.
            backend: the backend of the process group; None for a single process.
            threads: `Runtime.threads` of the main process.
            global_batch: the parts of the global batch, by name.
            fallbacks: the result of `Fallbacks.as_records`.
            fingerprints: digests by name, for example of the data and the configuration.
            sharding: how frozen weights are shared out among the processes, `none` or `fsdp2`.
            shard_size: processes that share one copy of them; None: each has its own.
            device: the kind of device that computes: `cpu`, `cuda`.
            precision: `fp32` or `bf16`.
            started_with: the values with which `training.resume` compares the next start.
            resume_changes: changes that `resume.allow` let through; added to those of earlier starts.

        Raises:
            RunFailedError: the disk refused.
        """
        earlier = read_run_record(self.path)
        if earlier is None and self.path.exists():
            _log.warning("%s cannot be read and is replaced", self.path)
        earlier = earlier or {}
        starts, changes = (_list(earlier.get(name)) for name in ("starts", "resume_changes"))
        now = _now()
        self._values = {
            "status": "running",
            "world_size": world_size,
            "processes_started": processes_started,
            "launcher": launcher,
            "backend": backend,
            "threads": dict(threads),
            "sharding": sharding,
            "shard_size": shard_size,
            "device": device,
            "precision": precision,
            "global_batch": dict(global_batch),
            "fallbacks": fallbacks,
            "versions": read_versions(),
            "git_commit": read_git_commit(Path.cwd()),
            "fingerprints": dict(fingerprints),
            "starts": [*starts, now],
            "num_steps": None,
            "memory": earlier.get("memory"),
            "profile": earlier.get("profile"),
            "started_with": dict(started_with) if started_with is not None else None,
            "resume_changes": [*changes, *({"at": now, **change} for change in resume_changes)],
            "finished": None,
            "result": None,
        }
        self._save()

    def update(self, **values: Any) -> None:
        """Change fields that `start` wrote.

        Raises:
            KeyError: there is no such field.
            RunFailedError: the disk refused.
        """
        unknown = values.keys() - self._values.keys()
        if unknown:
            raise KeyError(f"run.json has no field {sorted(unknown)}")
        self._values |= values
        self._save()

    def finish(self, status: Status, result: Mapping[str, Any] | None = None) -> None:
        """Record how and when the run ended, and its result.

        Raises:
            RunFailedError: the disk refused.
        """
        self.update(status=status, finished=_now(), result=dict(result) if result is not None else None)

    def _save(self) -> None:
        data = json.dumps(as_json(self._values), indent=2, allow_nan=False) + "\n"
        with disk_failures_end_the_run("Writing", self.path):
            replace_file(self.path, data.encode())


def read_run_record(path: Path) -> dict[str, Any] | None:
    """Read run.json; None if it is missing, empty or torn."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of its main dependencies, without importing them."""
    found = {"python": platform.python_version(), "finetune": finetune.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def read_git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, with `-dirty` appended if tracked files were changed.

    Returns None outside of a repository, before its first commit, and if git is not installed or does not answer.
    """
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.run(
            ["git", "--no-optional-locks", *describe],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_SECONDS,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
