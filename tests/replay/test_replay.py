"""Recorded steps are computed again from the start and from kept checkpoints, with the losses that were recorded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from finetune.errors import CheckpointError
from finetune.replay.steps import LOSS_BOUNDS, Replay, ReplayedStep, replay_config, replay_losses
from finetune.runs.recorded_run import RecordedRun
from finetune.training.loss_scale import LossScale
from finetune.training.step import train_step
from tests.export.finished_runs import words_to_train
from tests.in_process import run_finetune
from tests.launches import run_command
from tests.replay.scene import change_losses, edit_json
from tests.tiny_training import events

SAVES = ("training.max_steps=9", "training.batch_size=2", "checkpoint.save_every=3", "checkpoint.save_total_limit=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine steps, with dropout. Only the checkpoint of step 6 is left."""
    place = tmp_path_factory.mktemp("replay")
    words = words_to_train(place, *SAVES, "checkpoint.save_total_limit=2", "lora.dropout=0.1")
    done = run_finetune("train", *words, "validation.validate_every=6")
    assert done.returncode == 0, done.stdout
    shutil.rmtree(place / "run" / "checkpoints" / "step-000009")  # of which no step follows
    return place / "run"


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_record(run: Path, copy: Path, **values: object) -> Path:
    """A copy of a run whose record says something else."""
    shutil.copytree(run, copy)
    edit_json(copy / "run.json", **values)
    return copy


def test_losses_come_out_again_to_the_last_bit_and_the_run_stays_as_it_is(trained, capsys):
    before = content(trained)
    replay = replay_losses(trained, 4)
    assert content(trained) == before
    assert [step.step for step in replay.steps] == [1, 2, 7, 8]
    assert all(step.computed == step.recorded for step in replay.steps), replay
    assert (replay.mismatches, replay.bound) == ([], 1e-6)
    assert "Written to" not in capsys.readouterr().out


def test_without_checkpoints_the_first_steps_are_computed(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    replay = replay_losses(copy, 10)
    assert [step.step for step in replay.steps] == [*range(1, 10)]
    assert replay.mismatches == []
    assert replay.notes == ("10 steps asked for, but only 9 are recorded",)


@pytest.mark.process
def test_a_loss_that_was_written_otherwise_is_named_and_ends_with_exit_code_3(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    change_losses(copy, since=1, by=1e-4)
    done = run_finetune("verify", copy, "--replay", "1")
    assert done.returncode == 3, done.stdout
    assert "step 1: the loss is" in done.errors
    written = json.loads((copy / "adapter" / "certificate.json").read_text())
    assert written["verdict"] == "differs"
    assert [step["step"] for step in written["replay"]["steps"]] == [1]


@pytest.mark.slow
def test_steps_in_fp16_are_computed_again_with_the_loss_scale_of_the_run(tmp_path, monkeypatch):
    """The scale is at first so large that step 1 overflows. Step 3 begins with the scale of the checkpoint."""
    monkeypatch.setattr(LossScale.__new__, "__defaults__", (2**34, 0, 0))
    short = ("training.max_steps=4", "checkpoint.save_every=2", "checkpoint.save_total_limit=2")
    done = run_finetune("train", *words_to_train(tmp_path, *SAVES, *short, "training.precision=fp16"))
    assert done.returncode == 0, done.stdout
    scales: dict[int, list[int]] = {}

    def noted(*arguments, **keys):
        scales.setdefault(arguments[4].step, []).append(arguments[4].loss_scale)
        return train_step(*arguments, **keys)

    monkeypatch.setattr("finetune.replay.steps.train_step", noted)
    replay = replay_losses(tmp_path / "run", 4)
    assert all(step.computed == step.recorded for step in replay.steps), replay
    recorded = events(tmp_path / "run", "step")
    assert [scales[event["step"]][-1] for event in recorded] == [event["loss_scale"] for event in recorded]
    assert [len(scales[event["step"]]) - 1 for event in recorded] == [event.get("overflows", 0) for event in recorded]
    assert len(scales[1]) > 1


def test_functions_of_ones_own_that_validations_measured_are_not_needed(trained, tmp_path):
    shutil.copytree(trained, copy := tmp_path / "copy")
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["validation"] |= {"metrics": ["not_here.score"], "metrics_from": ["not_here"]}
    config["checkpoint"]["best_metric"] = config["early_stopping"]["metric"] = "not_here.score"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    assert replay_losses(copy, 1).mismatches == []


def test_runs_that_no_longer_fit_and_other_folders_are_refused(trained, tmp_path):
    fingerprints = json.loads((trained / "run.json").read_text())["fingerprints"]
    other_rows = {"fingerprints": {**fingerprints, "data.train": "0" * 64}}
    rate = {"at": "2026-01-01", "key": "optim.learning_rate", "before": "1", "now": "2"}
    for name, change, message in (
        ("rows", other_rows, "its training rows are not those"),
        ("earlier", {"resume_changes": [rate]}, r"of optim\.learning_rate.*does not say after which step"),
        ("late", {"resume_changes": [{**rate, "step": 9}]}, r"after step 9 with other values.*No checkpoint is kept"),
    ):
        with pytest.raises(CheckpointError, match=message):
            replay_losses(with_record(trained, tmp_path / name, **change), 1)
    done = run_finetune("verify", with_record(trained, tmp_path / "copy", device="cuda"), "--replay", "1")
    assert done.returncode == 2
    assert "drops tokens by random masks, which cuda draws differently from cpu" in done.errors
    shutil.rmtree(tmp_path / "earlier/adapter")
    done = run_finetune("verify", tmp_path / "earlier", "--replay", "1")
    assert "run.json does not say after which step" in done.errors, "before the weights are looked at"


def test_only_steps_after_the_last_change_that_a_step_reads_are_computed(trained, tmp_path):
    rate = {"step": 6, "key": "optim.learning_rate", "before": "1", "now": "2"}
    code = {"step": 8, "key": "reward.functions", "before": "mine.py 1234", "now": "mine.py 5678"}
    copy = with_record(trained, tmp_path / "code", resume_changes=[code])
    assert [step.step for step in replay_losses(copy, 2).steps] == [1, 7]
    copy = with_record(trained, tmp_path / "rate", resume_changes=[rate, code])
    replay = replay_losses(copy, 9)
    assert [step.step for step in replay.steps] == [7, 8, 9]
    assert replay.notes == (
        "it was resumed after step 6 with other values of optim.learning_rate: only later steps can be computed again, "
        "from a kept checkpoint on",
        "9 steps asked for, but only 3 can be computed",
    )
    with pytest.raises(CheckpointError, match=r"finetune verify \S+rate --replay N computes later steps"):
        replay_config(RecordedRun(copy))


@pytest.mark.slow
@pytest.mark.warm
def test_what_two_processes_recorded_comes_out_again_in_one(tmp_path):
    words = words_to_train(tmp_path, *SAVES, "parallel.num_processes=2", "training.global_batch_size=4")
    done = run_command([sys.executable, "-m", "finetune", "train", *words])
    assert done.returncode == 0, done.stdout
    found = replay_losses(tmp_path / "run", 4)
    assert found.mismatches == []


def test_the_bound_is_promise_1_and_a_loss_that_is_no_number_is_a_mismatch():
    losses = [(1, 4.0, 4.0 + 3e-6), (2, 0.5, 0.5), (3, 0.5, 0.5 + 3e-6), (4, 1.0, float("nan"))]
    steps = tuple(ReplayedStep(*values) for values in losses)
    found = Replay(steps=steps, bound=LOSS_BOUNDS["fp32"], precision="fp32", device="cpu", notes=())
    assert [line.partition(":")[0] for line in found.mismatches] == ["step 3", "step 4"]
