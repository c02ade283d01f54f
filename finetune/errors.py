"""Everything that can go wrong, typed by whose mistake it is.

Every message says what, where, got, expected and what to do next. A `FinetuneError` ends a command with its exit code
and no traceback; any other exception is a bug of ours and keeps its traceback (exit code 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first thing that went wrong in a world of several ranks. All of them end with it and name it."""

    reporter: Literal["worker", "guardian"]
    """Whether the failing process reports its own error, or a guardian reports what it found."""
    rank: int | None
    """The rank that is at fault; None where it is several of them or none."""
    summary: str
    """For people: which rank, where it was, and what a guardian found."""
    error: str = ""
    """A worker's error in one line, its type first."""
    is_second_hand: bool = False
    """The error is one in a collective, so another rank may have caused it."""

    def __str__(self) -> str:
        return f"{self.summary}: {self.error}" if self.error else self.summary


class FinetuneError(Exception):
    """The root of every error that we raise on purpose. Never raised itself."""

    exit_code: ClassVar[int] = 2
    is_reported_elsewhere: bool = False
    """Another rank ends with the same error and prints it: once on the screen is enough."""


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
    """The run itself failed: a loss that is not finite, memory or disk exhausted, a rank lost.

    Args:
        message: for people.
        fault: the world's first fault, where this rank ends because of it.
    """

    exit_code = 3

    def __init__(self, message: str, *, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class PreemptedError(FinetuneError):
    """The run was told to stop (SIGTERM, SIGUSR1, Ctrl-C); all that was trained is in a checkpoint, on all ranks."""

    exit_code = 75


class PeerFailedError(FinetuneError):
    """Another rank failed and reports it; this one ends with it. Carries the other's exit code."""

    is_reported_elsewhere = True

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.peer_exit_code = exit_code


class LeftToMain(SystemExit):
    """Rank 0 has confirmed that it trains alone: this rank has nothing to do. Leaves the process with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)
