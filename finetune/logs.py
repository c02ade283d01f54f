"""Configure the package's logger: INFO and above on rank 0, WARNING and above on other ranks. Never the root logger.

On an interactive terminal, only warnings and errors are shown. log.txt has all lines. `waiting` breaks the silence of
slow tasks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TextIO

from finetune.terminal import as_one_message, fold, prepare_streams, visible
from finetune.units import format_duration

PACKAGE = "finetune"
_HANDLER_NAME = "finetune-stderr"
_LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "transformers")
_handlers_of_libraries: dict[str, list[logging.Handler]] = {}
_COLOURS = {"warning": "1;35", "error": "1;31", "critical": "1;31"}
"""Magenta and red are readable on light and on dark backgrounds; yellow is not."""
SILENCE_SECONDS = 10.0
"""The log has a line at least this often while a slow task runs."""
_one_line = threading.Lock()
"""The outermost `waiting` holds this lock. Its line shows the innermost task."""
_tasks: list[list[str]] = []
"""Slow tasks, the innermost last: what each does, and how far it has come."""
_last_line = 0.0
"""When the log had its last line, by the monotonic clock."""
_is_main = False
"""The log is configured, and this is rank 0."""
_is_command = False  # True in a command, False in a script that calls functions of the package
_log_of_script: tuple[int, bool, list[logging.Handler]] | None = None  # before the log was configured


class _Innermost:
    """The text of the innermost slow task, at any moment."""

    def __str__(self) -> str:
        return visible(", ".join(filter(None, _tasks[-1])))


class _Early(logging.Handler):
    """Keep the records from before the run's folder is open, so that log.txt has them too."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.set_name(_HANDLER_NAME)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _RankFormatter(logging.Formatter):
    """``[RANK 0] 2025-01-15 14:23:47 INFO finetune.training.loop: …``."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"[RANK {rank}] %(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return as_one_message(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file. If the disk is full, it reports this once instead of printing a traceback for each line."""

    _is_broken = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Report a failed write once."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_broken:
            self._is_broken = True
            sys.stderr.write(f"finetune: {self.baseFilename} lacks all lines from here on: {error.strerror}\n")

    def close(self) -> None:
        """Close the file, even if it cannot be flushed."""
        with suppress(OSError):
            super().close()


class _Forwarder(logging.Handler):
    """Hand the records of another library to the handlers of the package."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_configured():
            logging.getLogger(PACKAGE).handle(record)
        else:
            sys.stderr.write(f"{as_one_message(self.format(record))}\n")


class _PersonHandler(logging.StreamHandler[TextIO]):
    """Show warnings and errors briefly on an interactive terminal, wrapped to its width."""

    def __init__(self) -> None:
        super().__init__(screen())
        self.setLevel(logging.WARNING)

    def format(self, record: logging.LogRecord) -> str:
        name = record.levelname.lower()
        message = getattr(record, "short", None) or super().format(record)
        text = fold(as_one_message(f"{name}: {message}"), self.stream, indent="  ")
        colour = _COLOURS.get(name, _COLOURS["warning"])  # a library may name a level of its own, or rename one
        return text if os.environ.get("NO_COLOR") else f"\x1b[{colour}m{name}:\x1b[0m{text[len(name) + 1 :]}"


def is_notebook() -> bool:
    """Return whether this process computes the cells of a notebook. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def screen() -> TextIO:
    """Return the stream for messages to a person: stderr, but stdout in a notebook, which shows stderr in red."""
    return sys.stdout if is_notebook() else sys.stderr


def is_for_a_person(stream: TextIO) -> bool:
    """Return whether a stream is an interactive terminal: it can redraw its lines and does not belong to a CI."""
    is_terminal = getattr(stream, "isatty", bool)()  # a script's own stream may only write
    return is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and not os.environ.get("CI")


def configure_logs(rank: int, *, level: int = logging.INFO, num_processes: int = 1) -> None:
    """Send the package's log to stderr. Call it again once the rank is known: the last call counts.

    A single process on an interactive terminal or in a notebook shows only warnings and errors, unless told to DEBUG.
    """
    global _is_main, _log_of_script
    prepare_streams()  # also in a script without `command`: its run must not fail when it prints a row
    logger = logging.getLogger(PACKAGE)
    _log_of_script = _log_of_script or (logger.level, logger.propagate, list(logger.handlers))
    early = next((h for h in logger.handlers if isinstance(h, _Early)), _Early())
    logger.handlers = [h for h in logger.handlers if h.get_name() != _HANDLER_NAME]
    if num_processes == 1 and level > logging.DEBUG and (is_for_a_person(sys.stderr) or is_notebook()):
        handler: logging.Handler = _PersonHandler()
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_RankFormatter(rank))
    handler.set_name(_HANDLER_NAME)
    handler.addFilter(_note_time)
    _is_main = rank == 0
    logger.handlers += [handler, early]
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.propagate = False
    # When PEFT imports bitsandbytes on a CPU with bf16, it warns of a missing kernel for products in 4 bits. Runs in
    # 4 bits need CUDA.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def is_configured() -> bool:
    """Check whether the package's log has a handler."""
    return bool(logging.getLogger(PACKAGE).handlers)


def speaks_to_a_person() -> bool:
    """Return whether stderr shows only warnings and errors, for an interactive terminal."""
    return any(isinstance(handler, _PersonHandler) for handler in logging.getLogger(PACKAGE).handlers)


def log_python_warnings() -> None:
    """Send a command's Python warnings through the package's log, for log.txt. A terminal shows no file and line."""
    global _is_command
    _is_command = True
    logger = logging.getLogger("py.warnings")
    logger.handlers = [_Forwarder()]

    def show(
        message: object, category: type[Warning], filename: str, lineno: int, file: object = None, line: object = None
    ) -> None:
        logger.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno, extra={"short": str(message)})

    warnings.showwarning = show


@cache
def warn_once(logger: logging.Logger, text: str) -> None:
    """Log a warning, unless it was logged before."""
    logger.warning("%s", text)


@contextmanager
def warnings_only(name: str) -> Iterator[None]:
    """Within the block, let a logger only warn, because it has said everything else before."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def hear_libraries() -> None:
    """Send the log lines of other libraries through the package's log: they quote models and data."""
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        _handlers_of_libraries.setdefault(name, logger.handlers)
        logger.handlers = [_Forwarder()]


def give_back_logs() -> None:
    """Give a script the package's logger back as it was, and the loggers of other libraries their handlers."""
    global _log_of_script
    if not _is_command and _log_of_script is not None:
        logger, (level, propagate, former) = logging.getLogger(PACKAGE), _log_of_script
        added = [each for each in logger.handlers if each not in former and each.get_name() != _HANDLER_NAME]
        logger.handlers, logger.propagate, _log_of_script = former + added, propagate, None
        logger.setLevel(level)
    for name in list(_handlers_of_libraries):
        former, logger = _handlers_of_libraries.pop(name), logging.getLogger(name)
        added = [each for each in logger.handlers if each not in former and not isinstance(each, _Forwarder)]
        logger.handlers = former + added  # a library adds its own when it is imported


def _note_time(_: logging.LogRecord) -> bool:
    global _last_line
    _last_line = time.monotonic()
    return True


@contextmanager
def waiting(name: str, *, is_on_view: bool = False) -> Iterator[None]:
    """Within the block, show that a slow task is running, and how far it has come (`report_progress`).

    On an interactive terminal, this is a line with the time so far, which disappears at the end. Elsewhere, rank 0 logs
    a line when nothing else was logged for 10 seconds. Inside another `waiting`, the line of that one tells of both.
    With `is_on_view`, a live view shows the task, see `task_on_view`.
    """
    task = [name, ""]
    _tasks.append(task)
    is_outermost = _is_main and _one_line.acquire(blocking=False)
    if is_on_view or is_notebook():
        shown: Callable[[], AbstractContextManager[None]] = nullcontext
    else:
        shown = _waiting_line if speaks_to_a_person() else _lines_in_silence
    try:
        with shown() if is_outermost else nullcontext():
            yield
    finally:
        if is_outermost:
            _one_line.release()
        _tasks.remove(task)


def importing() -> AbstractContextManager[None]:
    """Show within the block, see `waiting`, that imports take seconds."""
    return waiting("loading PyTorch and Transformers")


def report_progress(progress: str) -> None:
    """Say how far the innermost task of `waiting` has come, for example `64 answers`."""
    if _tasks:
        _tasks[-1][1] = progress


def task_on_view() -> str:
    """Describe for a live view how far its task has come, or what is running inside its task."""
    parts = _tasks[-1] if len(_tasks) > 1 else [task[1] for task in _tasks]
    return visible(", ".join(filter(None, parts)))


@contextmanager
def _lines_in_silence() -> Iterator[None]:
    """Log the innermost slow task whenever the log was silent for 10 seconds, whatever the level of the log."""
    global _last_line
    logger, is_over, start = logging.getLogger(PACKAGE), threading.Event(), time.monotonic()
    _last_line = start

    def log() -> None:
        while not is_over.wait(_last_line + SILENCE_SECONDS - time.monotonic()):
            if time.monotonic() >= _last_line + SILENCE_SECONDS:
                text = f"{_Innermost()} ({format_duration(time.monotonic() - start)} so far)"
                logger.handle(logger.makeRecord(__name__, logging.INFO, "", 0, "%s", (text,), None))

    thread = threading.Thread(target=log, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _waiting_line() -> AbstractContextManager[None]:
    from finetune.live_log import waiting_line

    return waiting_line(_Innermost())


def log_to_file(path: Path) -> logging.Handler:
    """Append rank 0's log to a file, earlier records included. Give the result to `stop_logging_to`."""
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_RankFormatter(0))
    logger = logging.getLogger(PACKAGE)
    for early in [h for h in logger.handlers if isinstance(h, _Early)]:
        logger.removeHandler(early)
        for record in early.records:
            handler.handle(record)
    logger.addHandler(handler)
    return handler


def log_only_to(handler: logging.Handler, name: str, message: str) -> None:
    """Write an error to this handler alone, because the user sees it elsewhere."""
    handler.handle(logging.getLogger(name).makeRecord(name, logging.ERROR, "", 0, message, (), None))


def stop_logging_to(handler: logging.Handler) -> None:
    """Remove and close a handler of `log_to_file`."""
    logging.getLogger(PACKAGE).removeHandler(handler)
    handler.close()
