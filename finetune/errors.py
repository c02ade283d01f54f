"""The errors that finetune raises, with one type for each cause: configuration, launch, data, model, checkpoint, run.

Every message says what is wrong, where, what was found and expected, and what to do next. A `FinetuneError` ends a
command with its exit code and no traceback; any other exception is a bug and keeps its traceback (exit code 1).
"""

from __future__ import annotations

from dataclasses import dataclass

DISTRIBUTION = "phi-finetune"
"""The name that pip knows this package by. On PyPI, `finetune` is another product."""
SUMMARY = "Fine-tune Phi models with LoRA"
"""The first words of our distribution's summary. By them, a checkout that was installed as `finetune` is told from the
other product, whose metadata names neither an author nor a home page."""
LOST_IN_ROUNDING = "takes away most of what the adapter learned"
"""Words of the error that ends `finetune merge` if the type of the weights is too coarse; `rehearse` looks for them."""

NO_GRADIENT = "the gradient was zero"
"""Words of the errors about a run that learns nothing; `rehearse` looks for them."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first fault in a world of several ranks. All ranks end with it and name it."""

    rank: int | None
    """The rank at fault; None if it is several ranks or none."""
    summary: str
    """For people: the rank, where it was, and what a guardian found."""
    error: str = ""
    """A worker's error in one line, its type first."""
    is_second_hand: bool = False
    """The error was raised in a collective, so another rank may have caused it."""

    def __str__(self) -> str:
        return f"{self.summary}: {self.error}" if self.error else self.summary


def extra_command(extra: str) -> str:
    """Return the command that adds an extra to this installation, which may be a checkout or a wheel."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has no text. Other libraries write many lines."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def last_line(log: str) -> str:
    """Return the last line of a program's log that is not blank, where it says why it ended; empty without one."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")


class FinetuneError(Exception):
    """The base class of all errors that finetune raises on purpose. It is never raised itself."""

    exit_code: int = 2
    is_reported_elsewhere: bool = False
    """Another rank ends with the same error and prints it."""
    saves_first: bool = False
    """All ranks end between two steps, so the loop saves a checkpoint before it raises this error."""


class ConfigError(FinetuneError):
    """The configuration is wrong: unknown key, wrong type, contradiction. Lists every problem found."""


class LaunchError(FinetuneError):
    """The way the processes were started contradicts itself, the configuration or the machine."""


class DataError(FinetuneError):
    """A file, a row or a split of the data cannot be used."""


class ModelError(FinetuneError):
    """A model folder, an architecture or a set of target modules cannot be used."""


class CheckpointError(FinetuneError):
    """A checkpoint or a run folder is damaged, holds another run, or cannot be written."""


class RunFailedError(FinetuneError):
    """The run itself failed: a loss that is not finite, memory or disk exhausted, a rank lost (then with the fault)."""

    exit_code = 3

    def __init__(self, message: str, *, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class RequirementError(FinetuneError):
    """A requirement that the user stated does not hold: `evaluate --fail-if-worse`, `export smallest`."""

    exit_code = 3


class NoRowsError(RunFailedError):
    """The rows of the next step cannot be had, for a reason outside of the run."""

    saves_first = True

    def __init__(self, message: str, *, is_preempted: bool = False) -> None:
        super().__init__(message)
        self.is_preempted = is_preempted


class PreemptedError(FinetuneError):
    """SIGTERM, SIGUSR1, SIGHUP or Ctrl-C asked the run to stop. All its progress, if any, is in a checkpoint."""

    exit_code = 75


class PeerFailedError(FinetuneError):
    """Another rank failed and reports it; this rank ends with the exit code of the other."""

    is_reported_elsewhere = True

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LeftToMain(SystemExit):
    """Rank 0 has confirmed that it trains alone, so this rank ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)
