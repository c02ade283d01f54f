"""Commands on finished runs take the name of a run in `runs`, and choose a folder to write if none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.in_process import run_finetune


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/csv").mkdir(parents=True)
    Path("runs/csv/config.yaml").write_text("no_such_key: 1\n")


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [
        *("generate csv Hi", "chat csv", "evaluate csv", "merge csv out"),
        *("verify csv", "push csv me/it --dry-run", "bisect csv csv", "diff csv csv"),
        *("checkpoints csv", "report csv --no-data"),
    ],
)
def test_a_run_is_named_as_in_runs(command):
    assert "runs/csv" in run_finetune(*command.split()).stdout
    Path("csv").mkdir()  # a folder of this name wins
    assert "runs/csv" not in run_finetune(*command.split()).stdout


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("merge csv", "runs/csv-merged"),
        ("export ollama csv", "runs/csv-ollama"),
        ("export gguf csv", "runs/csv-gguf"),
        ("export lora csv", "runs/csv-lora"),
        ("export onnx csv", "runs/csv-onnx"),
        ("export vllm csv --type w8a8", "runs/csv-w8a8"),
        ("export smallest csv", "runs/csv-smallest"),
        ("export gguf .", "{}-gguf"),
    ],
)
def test_the_default_folder_to_write_is_beside_the_run_and_is_not_overwritten(command, out):
    taken = Path(out.format(Path.cwd()))
    taken.mkdir()
    (taken / "file").touch()
    assert f"{taken} already exists and is not an empty folder" in run_finetune(*command.split(), code=2).stdout
