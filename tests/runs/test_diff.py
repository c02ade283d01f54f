import json

import pytest
import typer

from finetune.cli.bisect import diff
from finetune.errors import CheckpointError
from finetune.runs.comparison import compare_runs
from finetune.runs.recorded_run import RecordedRun
from tests.runs.made_runs import change_record, write_run


def differences(a, b):
    return [(one.part, one.name, *one.values) for one in compare_runs([RecordedRun(a.path), RecordedRun(b.path)])]


def exit_code(*folders, **options):
    with pytest.raises(typer.Exit) as caught:
        diff(*folders, **options)
    return caught.value.exit_code


def test_two_equal_runs_are_equal_wherever_they_lie(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert differences(a, b) == []
    assert exit_code(a.path, b.path) == 0
    assert "no differences except their folders and times" in capsys.readouterr().out


def test_keys_versions_data_world_and_results_are_compared(tmp_path):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", "optim.learning_rate=1e-5", "lora.target_modules=[qkv_proj]", losses=(3.0, 2.5, 2.25))
    record = json.loads(b.record_file.read_text())
    change_record(
        b, world_size=2, versions={**record["versions"], "torch": "0.1"}, fingerprints={"data.train": "b" * 64}
    )
    assert differences(a, b) == [
        ("config", "lora.target_modules", "auto", ["qkv_proj"]),
        ("config", "optim.learning_rate", 2e-4, 1e-5),
        ("versions", "torch", record["versions"]["torch"], "0.1"),
        ("data", "data.train", "a" * 64, "b" * 64),
        ("world", "world_size", 1, 2),
        ("result", "train_loss", 2.0, 2.25),
        ("result", "validation_loss", 2.0, 2.25),
        ("result", "best_loss", 2.0, 2.25),
    ]


def test_the_exit_code_is_that_of_diff(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", "seed=7")
    assert exit_code(a.path, b.path) == 1
    assert "seed" in capsys.readouterr().out
    assert exit_code(a.path, b.path, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["differences"] == [{"part": "config", "name": "seed", "a": 0, "b": 7}]
    assert said["not_compared"] == []
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        diff(a.path, tmp_path)


def test_a_config_that_cannot_be_read_is_said_and_not_guessed(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", "seed=7")
    b.config_file.write_text("no_such_key: 1\n")
    assert exit_code(a.path, b.path) == 0
    assert "the configurations were not compared" in capsys.readouterr().out
