"""Check the place of a file that a command is asked to write, and say why the file cannot be written."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import ConfigError, RunFailedError
from finetune.runs.durable import describe_os_error


def refuse_unwritable(option: str, file: Path) -> None:
    """Refuse a file to write that is in no folder, or in a folder that takes no new file. `option` names the file.

    Raises:
        ConfigError: names the file or the folder, and the option.
        RunFailedError: the disk is full.
    """
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} is {file}, but there is no folder {folder}. Make it first.")
    with writes(file, f"Name another file with {option}."), tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def writes(file: Path, advice: str) -> Iterator[None]:
    """Say why a file cannot be written. `advice` is what to do, except on a full disk.

    Raises:
        ConfigError: the block raised an OSError.
        RunFailedError: the block raised the OSError of a full disk.
    """
    try:
        yield
    except OSError as error:
        problem = f"{file} cannot be written: {describe_os_error(error)}."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailedError(f"{problem} Make room there, then run the command again.") from error
        raise ConfigError(f"{problem} {advice}") from error
