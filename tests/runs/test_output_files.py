"""A file that cannot be written is refused before the work, with the option that names it."""

import errno
import os
from unittest.mock import patch

import pytest

from finetune.cli.evaluate import evaluate_command as evaluate
from finetune.cli.verify import verify
from finetune.errors import ConfigError, RunFailedError
from finetune.runs.output_files import refuse_unwritable


def disk_that_says(number):
    return patch("tempfile.TemporaryFile", side_effect=OSError(number, os.strerror(number)))


@pytest.mark.parametrize("command", [evaluate, verify])
def test_no_command_works_for_a_file_that_it_cannot_write(tmp_path, command):
    """Each command has read nothing by then: there is no run."""
    with disk_that_says(errno.EROFS), pytest.raises(ConfigError, match=r"x\.json cannot be written: Read-only .*EROFS"):
        command(tmp_path / "run", **{"output" if command is evaluate else "out": tmp_path / "x.json"})


def test_the_folder_of_a_file_takes_files_and_keeps_none(tmp_path):
    refuse_unwritable("--out", tmp_path / "x.json")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ConfigError, match=r"--out is .*, but there is no folder .*/gone\. Make it first."):
        refuse_unwritable("--out", tmp_path / "gone" / "x.json")
    with disk_that_says(errno.EACCES), pytest.raises(ConfigError, match=r"Name another file with --out\."):
        refuse_unwritable("--out", tmp_path / "x.json")
    with disk_that_says(errno.ENOSPC), pytest.raises(RunFailedError, match="Make room there"):
        refuse_unwritable("--out", tmp_path / "x.json")
