"""A sweep's folder holds one sweep, whoever asks for it."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from finetune.cli import sweep as command
from finetune.errors import CheckpointError
from finetune.runs import recorded_run
from finetune.runs.best_validation import best_validation
from finetune.sweep import running
from finetune.sweep.trials import Sweep, Trial, open_sweep
from tests.in_process import run_finetune
from tests.report.runs import write_run

TRIALS = [{"seed": "1"}, {"seed": "2"}]
ASKED = Sweep(["quickstart"], {"seed": "1,2,3"}, 0, "loss", 3, 2, TRIALS)


def test_the_files_of_a_trial_are_read_once_for_table_and_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("vl_convert", reason="the extra [report] is not installed")
    monkeypatch.setattr("finetune.report.page.compile_charts", lambda charts: None)  # a process that takes seconds
    composed, looked_at = [], []
    compose, points = recorded_run.compose, recorded_run.RecordedRun.points
    monkeypatch.setattr(recorded_run, "compose", lambda *a, run, **b: composed.append(run) or compose(*a, run=run, **b))
    monkeypatch.setattr(
        recorded_run.RecordedRun, "points", lambda run, *name: looked_at.append((run.name, *name)) or points(run, *name)
    )
    trials = [Trial(tmp_path, number, ASKED) for number in (1, 2)]
    for trial in trials:
        write_run(trial.folder, [f"seed={trial.values['seed']}"])
    command._show(tmp_path, ASKED, trials)
    assert "report.html" in capsys.readouterr().out
    assert sorted(composed) == [str(trial.folder / "config.yaml") for trial in trials]
    assert looked_at.count(("trial-001", "step", "reward_margin")) < 4, "the objective of a run is found out once"


def test_another_sweep_is_refused_with_the_difference_and_more_trials_are_added(tmp_path):
    folder = tmp_path / "sweep"
    open_sweep(folder, ASKED)
    before = (folder / "sweep.json").read_bytes()
    open_sweep(folder, ASKED)
    with pytest.raises(CheckpointError) as refused:
        open_sweep(folder, replace(ASKED, seed=1, halving=2, trials=[{"seed": "3"}, {"seed": "1"}]))
    assert "seed was 0, now 1; halving was 3, now 2. Give the same" in str(refused.value)
    with pytest.raises(CheckpointError, match=r'arguments was \["quickstart"\], now \["quickstart", "lora.r=4"\]'):
        open_sweep(folder, replace(ASKED, arguments=["quickstart", "lora.r=4"]))
    with pytest.raises(CheckpointError, match="num_trials was 2, now 1"):
        open_sweep(folder, replace(ASKED, num_trials=1, trials=TRIALS[:1]))
    assert (folder / "sweep.json").read_bytes() == before
    open_sweep(folder, replace(ASKED, num_trials=3, trials=[*TRIALS, {"seed": "3"}]))
    assert len(json.loads((folder / "sweep.json").read_bytes())["trials"]) == 3


def test_the_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds a run and no sweep"):
        open_sweep(write_run(tmp_path / "run"), ASKED)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds other files \(notes.txt\) and no sweep"):
        open_sweep(tmp_path / "other", ASKED)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/sweep.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged or from another version"):
        open_sweep(tmp_path / "damaged", ASKED)


def test_a_report_makes_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="gone holds no sweep to report on"):
        open_sweep(tmp_path / "gone", ASKED, is_there=True)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("option", ["--only=1", "--retry-failed"])
def test_a_report_alone_is_refused_with_an_option_that_starts_trials(option, tmp_path):
    """`--report --only 1` wrote no report and said that the trial is complete."""
    done = run_finetune("sweep", "quickstart", "seed=1,2", f"output_dir={tmp_path}/sweep", "--report", option, code=2)
    name = option.partition("=")[0]
    assert f"--report and {name} cannot be given together: --report starts no trial." in done.errors
    assert not (tmp_path / "sweep").exists()


def test_a_trial_that_was_stopped_before_its_run_began_has_not_started(tmp_path, monkeypatch, capsys):
    ended = SimpleNamespace(returncode=-signal.SIGTERM, poll=lambda: -signal.SIGTERM, terminate=lambda: None)
    ended.wait = lambda seconds: None
    monkeypatch.setattr(running, "start_command", lambda *_: ended)
    monkeypatch.setattr(running, "received_stop_signal", lambda: signal.SIGINT)
    open_sweep(tmp_path / "sweep", ASKED)
    running._RunningTrial(Trial(tmp_path / "sweep", 1, ASKED), ASKED, []).wait()
    assert "trial-001: not started\n" in capsys.readouterr().out


def test_a_failed_trial_that_its_command_has_completed_is_completed(tmp_path):
    trial = Trial(tmp_path, 1, ASKED)
    write_run(trial.folder, status="failed")
    trial.end("failed", {"exit_code": 3, "why": "the disk is full"})
    assert (trial.state, trial.run.why) == ("failed", "the disk is full")
    record = trial.folder / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"status": "completed"}))
    assert (trial.state, trial.run.why) == ("completed", None)


def test_a_validation_that_forgot_too_much_is_not_the_best_of_a_trial(tmp_path):
    """Its weights are never in adapter/, though its loss may be the lowest."""
    trial = Trial(tmp_path, 1, ASKED)
    write_run(trial.folder, ["early_stopping.max_forgotten=0.1"])
    event = {"event": "validation", "step": 60, "loss": 0.01, "forgotten": 0.5}
    with (trial.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert [step for step, _ in trial.points()] == [20, 40, 60], "halving compares validations by their number"
    assert math.isnan(trial.points()[-1][1]), "and none of the others loses against it"
    best = best_validation(trial.run)
    assert best == trial.best_point()
    assert best is not None
    assert best[0] == 40


def test_a_trial_that_a_signal_ended_is_not_explained_by_its_last_line_alone(tmp_path, monkeypatch, capsys):
    def start(words, log, preexec):
        log.write_text("step 6\n")
        return SimpleNamespace(returncode=-signal.SIGKILL, poll=lambda: -9, terminate=lambda: None, wait=lambda _: None)

    monkeypatch.setattr(running, "start_command", start)
    open_sweep(tmp_path / "sweep", ASKED)
    running._RunningTrial(Trial(tmp_path / "sweep", 1, ASKED), ASKED, []).wait()
    assert "failed with exit code -9: SIGKILL ended it. The last line of its output: step 6" in capsys.readouterr().out
