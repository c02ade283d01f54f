"""Commands in the process of the tests, but on a terminal of their own, which has a size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from rich.cells import cell_len

from finetune.cli import main

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COLOURS = re.compile(r"\x1b\[([0-9;]*)m")
_READABLE = {"0", "1", "3", "4", "7", "23", "31", "32", "35", "36"}
"""Reset, bold, italic, underlined, reversed, red, green, magenta, cyan: readable on black as on white."""
_OWN_BACKGROUND = {"30;42", "1;30;42"}
_NOT_A_PERSON = ("CI", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM")


class Shown(NamedTuple):
    """What a terminal received."""

    returncode: int
    raw: str
    columns: int

    @property
    def lines(self) -> list[str]:
        """Every line that was drawn, also one that was drawn over later."""
        return re.split(r"[\r\n]+", _CONTROL.sub("", self.raw))

    @property
    def words(self) -> str:
        """The text with single spaces and without the lines of tables and boxes."""
        return " ".join(re.sub(r"[│┃─━╭╮╰╯┏┓┗┛┡┩├┤└┘┴┬┼╇╈]", " ", " ".join(self.lines)).split())

    def assert_fits(self) -> None:
        """No line is wider than the terminal, unless it is one long word, which must not be broken."""
        too_wide = [line for line in self.lines if cell_len(line) > self.columns and len(line.split()) > 1]
        assert not too_wide, "\n".join(too_wide)

    def assert_readable(self) -> None:
        """Nothing is grey, yellow, blue or white, which a light or a dark background would hide."""
        used = {code for code in _COLOURS.findall(self.raw) if code not in _OWN_BACKGROUND}
        assert {part for code in used for part in code.split(";") if part} <= _READABLE, sorted(used)


def run_on_terminal(
    columns: int, *words: str | Path, keys: bytes = b"", encoding: str = "utf-8", **variables: str
) -> Shown:
    """`finetune WORDS…` on a pseudo-terminal: standard input, output and error of this process are its, meanwhile."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    written = bytearray()
    is_over = threading.Event()
    reader = threading.Thread(target=_read, args=(ours, written, is_over))
    reader.start()
    os.write(ours, keys)
    kept = [os.dup(number) for number in range(3)]
    for number in range(3):
        os.dup2(theirs, number)
    os.close(theirs)
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_A_PERSON}
    streams = [os.fdopen(os.dup(number), "w" if number else "r", encoding=encoding) for number in range(3)]
    try:
        with (
            patch.dict(os.environ, {**environment, "TERM": "xterm-256color", **variables}, clear=True),
            patch.multiple(sys, stdin=streams[0], stdout=streams[1], stderr=streams[2]),
        ):
            code = _run(words)
    finally:
        for stream in streams:
            stream.close()
        for number, before in enumerate(kept):
            os.dup2(before, number)
            os.close(before)
        is_over.set()
        reader.join()
        os.close(ours)
    return Shown(code, written.decode(), columns)


def _run(words: Sequence[str | Path]) -> int:
    try:
        main(list(map(str, words)))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _read(terminal: int, written: bytearray, is_over: threading.Event) -> None:
    """Read to the end of the command, though a process that it started may keep the terminal open."""
    while True:
        was_over = is_over.is_set()  # asked first: what is written until then is there when select looks
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                written += os.read(terminal, 65536)
            except OSError:  # nobody has it open any more
                return
        elif was_over:
            return
