"""Choose the error that ends a run, and describe it for its own rank, the other ranks and run.json."""

from __future__ import annotations

import errno
import re
import signal

import torch
import torch.distributed as dist

from finetune.distributed.watchdog import Watchdog
from finetune.errors import PeerFailedError, PreemptedError, RunFailedError
from finetune.signals import Terminated, received_stop_signal

_FAULT_SECONDS = 2.0
"""torchrun ends a rank by SIGTERM as soon as another is gone, perhaps before this one learns which and why."""
LATE_FAULT_SECONDS = 5.0
"""A broken collective is noticed before this rank learns why."""
_SIGNS_OF_NO_MEMORY = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc"),
    "CUBLAS_STATUS_ALLOC_FAILED",
)

_PLACE_IN_TORCH = re.compile(r"^\[enforce fail at \S+\] ((data|err == 0)\. )?")


def explain(error: BaseException, watchdog: Watchdog | None) -> BaseException:
    """Return the error to end with: its cause if that is known, with a note of rank and phase."""
    if any(isinstance(one, Terminated) for one in (error, error.__cause__)) and watchdog is not None:
        fault = watchdog.first_fault(_FAULT_SECONDS)
        if fault is not None:
            return RunFailedError(str(fault), fault=fault)
    if isinstance(error, PreemptedError):
        return error
    fault = error.fault if isinstance(error, RunFailedError) else None
    if fault is not None and fault.error == KeyboardInterrupt.__name__ and received_stop_signal() == signal.SIGINT:
        return KeyboardInterrupt()  # the second Ctrl-C was for this rank too, which waited in a collective
    named = as_out_of_memory(error) or error
    if watchdog is not None and fault is None and not isinstance(named, PeerFailedError):
        named.add_note(watchdog.whereabouts)
    return named


def in_a_line(error: BaseException) -> str:
    """Return type and text of an error. Keep only the end of a data loader worker's traceback."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        lines = text.strip().splitlines()
        text = f"{lines[0]} {lines[-1]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. On the CPU torch has no error type for that."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_NO_MEMORY)


def as_out_of_memory(error: BaseException) -> RunFailedError | None:
    """Return the error to report if memory ran out, without the tensors that a traceback keeps; None otherwise."""
    if not _is_out_of_memory(error):
        return None
    cause = _PLACE_IN_TORCH.sub("", str(error).strip().split("\n", 1)[0]).rstrip(".") or type(error).__name__
    return RunFailedError(
        f"out of memory: {cause}. Lower training.batch_size and keep training.global_batch_size (gradients are then "
        "accumulated and the curve stays), set training.max_tokens_per_microbatch for long rows, or "
        "training.gradient_checkpointing=true; in an evaluation lower its own batch_size. Committed checkpoints are "
        "intact: resume=auto"
    )


def as_lost_rank(error: RuntimeError, during: str, watchdog: Watchdog | None) -> RunFailedError | None:
    """Return the error to report if a collective failed because of another rank; None if this rank caused it."""
    fault = None if watchdog is None else watchdog.first_fault(LATE_FAULT_SECONDS)
    if fault is not None:
        return RunFailedError(str(fault), fault=fault)
    return RunFailedError(f"another rank left during {during}: {error}") if _is_lost_contact(error) else None


def _is_lost_contact(error: Exception) -> bool:
    """Return whether a collective failed because of another rank. The backends have no error type for that."""
    text = str(error)
    signs = ("closed by peer", "Connection reset", "Broken pipe", "Timed out", "timed out", "NCCL", "Socket")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)
