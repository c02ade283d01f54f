"""The package's own logger, never the root logger: rank in front, INFO from rank 0, WARNING and above from all."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

PACKAGE = "finetune"
_HANDLER_NAME = "finetune-stderr"


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


class _LogFile(logging.FileHandler):
    """A log file that a full disk ends without ending the run; logging itself would print a traceback for each line."""

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


def configure_logs(rank: int, *, level: int = logging.INFO) -> None:
    """Send the package's log to stderr. Call it again once the rank is known: the last call counts."""
    logger = logging.getLogger(PACKAGE)
    early = next((h for h in logger.handlers if isinstance(h, _Early)), _Early())
    for handler in [h for h in logger.handlers if h.get_name() == _HANDLER_NAME]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(_RankFormatter(rank))
    logger.addHandler(handler)
    logger.addHandler(early)
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.propagate = False


def is_configured() -> bool:
    """Check whether the package's log has a handler."""
    return bool(logging.getLogger(PACKAGE).handlers)


def log_to_file(path: Path, rank: int) -> logging.Handler:
    """Append the package's log to a file, earlier records included. Give the result to `stop_logging_to`."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_RankFormatter(rank))
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
