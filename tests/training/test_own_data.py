"""Runs on one file of rows for which no validation split is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.cli.train import train_from_overrides
from finetune.config import load_config
from finetune.report import sentences
from finetune.runs.recorded_run import RecordedRun
from tests.in_process import run_finetune
from tests.methods.tiny_training import events, record
from tests.tiny_runs import write_rows

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """A file of 48 rows, enough for 8 validation rows."""
    return write_rows(tmp_path_factory.mktemp("own") / "rows", train=48, validation=0, test=0) / "train.jsonl"


def words(rows: Path, folder: Path, *more: str) -> list[str]:
    short = ["training.max_steps=2", "optim.warmup_steps=0", "testing.num_samples=0"]
    return ["model=phi_tiny", f"data={rows}", f"data.cache_dir={rows.parent}", f"output_dir={folder}", *short, *more]


def test_the_run_is_validated_and_compared_with_its_base_and_says_so(rows, tmp_path):
    folder = tmp_path / "run"
    done = run_finetune("train", *words(rows, folder, "validation.validate_every=1", "checkpoint.save_every=1"))
    assert done.returncode == 0, done.stdout
    assert "Validation split, 8 rows" in done.stdout
    held_out = (
        "8 rows are held out to validate, so adapter/ will hold the best step, not the last; data.validation=null"
    )
    assert held_out in (folder / "log.txt").read_text()
    result = record(folder)["result"]
    assert (result["test_split"], result["test_rows"]) == ("validation", 8)
    validated = {event["step"]: event["loss"] for event in events(folder, "validation")}
    assert result["test_tuned"]["loss"] == pytest.approx(validated[result["best_step"]], rel=1e-6)
    assert result["test_base"]["loss"] != result["test_tuned"]["loss"]
    assert sentences.headline([RecordedRun(folder)]).startswith("Loss on the validation split ")
    report = run_finetune("report", str(folder), "--output", str(tmp_path / "report.html"))
    assert report.returncode == 0, report.stdout
    page = (tmp_path / "report.html").read_text()
    assert "<th>validation split</th>" in page
    assert "test split" not in page
    refused = run_finetune("evaluate", str(folder))
    assert refused.returncode == 2
    assert "this run has no test split. Give one with data.test=FILE_OR_SPLIT. Or measure --split validation." in (
        refused.errors
    )


def test_a_test_split_is_measured_in_its_place(rows, tmp_path):
    train_from_overrides(words(rows, tmp_path / "run", "data.test=4"))
    result = record(tmp_path / "run")["result"]
    assert (result["test_split"], result["test_rows"]) == ("test", 4)
    assert events(tmp_path / "run", "validation")


def test_pairs_are_validated_but_have_no_test_phase(tmp_path):
    rows = tmp_path / "pairs.jsonl"
    pairs = ({"prompt": f"Hi {number}", "chosen": "yes", "rejected": "no"} for number in range(40))
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    folder = tmp_path / "run"
    train_from_overrides(words(rows, folder, "training.objective=dpo"))
    assert [event["num_targets"] for event in events(folder, "validation")] == [8]
    assert "test_split" not in record(folder)["result"]


def test_a_run_that_began_without_validation_resumes_without_it(rows, tmp_path):
    folder = tmp_path / "run"
    train_from_overrides(words(rows, folder, "data.validation=null", "training.max_steps=1", "optim.schedule=constant"))
    again = words(rows, folder, "resume=auto", "optim.schedule=constant")
    config = load_config(again)
    assert (config.data.validation, config.origin("data.validation").partition(":")[0]) == (
        None,
        str(folder / "config.yaml"),
    )
    train_from_overrides(again)
    assert [event["step"] for event in events(folder, "step")] == [1, 2]
    assert not events(folder, "validation")
    refused = run_finetune("train", *again, "data.validation=auto")
    assert refused.returncode == 2
    assert "data.validation: started with null, now auto (command line)" in refused.errors


@pytest.mark.parametrize("command", ["train", "plan"])
def test_early_stopping_needs_validation_rows(command, rows, tmp_path):
    given = words(rows, tmp_path / "run", "early_stopping.patience=2")
    few = run_finetune(command, *given, "data.max_rows=39")
    assert few.returncode == 2, few.stdout
    assert "early_stopping.patience is 2 (command line), but the run has no validation split that could stop it" in (
        few.errors
    )
    assert "data.validation is auto. Set data.validation=5%, or name a file or a split; or remove" in few.errors
    assert not (tmp_path / "run").exists()
    assert run_finetune(command, *given).returncode == 0
