"""Run a command on its own terminal, read its output and press keys."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.launches import REPOSITORY

_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\r")
FINETUNE = [sys.executable, "-m", "finetune"]


class Screen:
    """A process whose terminal has 40 lines of 120 columns."""

    def __init__(self, command: Sequence[str | Path], cwd: Path, **variables: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.raw = b""
        # Its size is that of the terminal; pytest-xdist has one of its own in the environment.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "CI")}
        environment = {**inherited, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env={**environment, **variables},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    @property
    def text(self) -> str:
        """Return all output so far, with every state of the view."""
        return _CONTROL.sub(b"", self.raw).decode(errors="replace")

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Read until the text has been shown."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} is not in {self.text[-3000:]}"
            assert self._read(0.2) or self.process.poll() is None or text in self.text, self.text[-3000:]

    def press(self, keys: bytes) -> None:
        """Press keys: b"\\x03" is Ctrl-C."""
        os.write(self._master, keys)

    def wait(self, seconds: float = 60.0) -> int:
        """Read to the end, and return the exit code."""
        end = time.monotonic() + seconds
        while self._read(0.2) or self.process.poll() is None:
            assert time.monotonic() < end, self.text[-3000:]
        return self.process.wait()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the last process that had the terminal is gone
            return False
        self.raw += data
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
