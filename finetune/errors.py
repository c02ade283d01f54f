"""What can go wrong, typed by whose mistake it is.

Every message says what, where, got, expected and what to do next. A `FinetuneError` ends a command with its exit code
and no traceback; any other exception is a bug of ours and keeps its traceback (exit code 1).
"""

from __future__ import annotations

from typing import ClassVar


class FinetuneError(Exception):
    """The root of every error that we raise on purpose. Never raised itself."""

    exit_code: ClassVar[int] = 2
    is_said_by_another: bool = False
    """Another rank ends with the same words: once on the screen is enough."""


class ConfigError(FinetuneError):
    """The configuration is wrong: unknown key, wrong type, contradiction. Lists every problem found."""


class LaunchError(FinetuneError):
    """The way the processes were started contradicts itself, the configuration or the machine."""


class DataError(FinetuneError):
    """A file, a row or a split of the data cannot be used."""


class ModelError(FinetuneError):
    """A model folder, an architecture or a set of LoRA targets cannot be used."""


class CheckpointError(FinetuneError):
    """A checkpoint or a run folder is damaged, holds another run, or cannot be written."""


class RunFailedError(FinetuneError):
    """The run itself failed: a loss that is not finite, memory or disk exhausted, a rank lost."""

    exit_code = 3


class PreemptedError(FinetuneError):
    """The run was told to stop (SIGTERM, SIGUSR1, Ctrl-C); all that was trained is in a checkpoint, on all ranks."""

    exit_code = 75


class PeerFailedError(FinetuneError):
    """Another rank failed; this one ends with it. Carries the other's exit code."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.peer_exit_code = exit_code


class LeftToMain(SystemExit):
    """Rank 0 has confirmed that it trains alone: this rank has nothing to do. Leaves the process with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)
