"""What tests/test_gpu_session.py has a session measure: tasks that import no torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.session import Session


def count(session: Session, folder: str) -> dict[str, Any]:
    """A figure that says how often it was taken."""
    with Path(folder, "times").open("a") as file:
        file.write("x")
    return {"times": Path(folder, "times").stat().st_size, "process": os.getpid()}


def fail(session: Session) -> dict[str, Any]:
    raise ValueError("no such kernel")


def crash(session: Session) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def be_wrong(session: Session) -> dict[str, Any]:
    return {"error_of_out": 1.0, "is_right": False}


def hang(session: Session, folder: str) -> dict[str, Any]:
    Path(folder, "hangs").write_text(str(os.getpid()))
    time.sleep(600)
    return {}
