"""A real sweep: each trial is a run like any other, one fails, a weak one ends early, and the best is found."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.in_process import Ended, run_finetune
from tests.sweep.conftest import losses_of, noted, status_of, words_of

pytestmark = [pytest.mark.process, pytest.mark.warm, pytest.mark.slow]

RATES = "optim.learning_rate=8e-3,1e30,4e-3,1e-5"


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[Path, Ended]:
    """The folder of a sweep in which the second trial fails and the fourth is weak."""
    folder = tmp_path_factory.mktemp("sweep") / "rates"
    return folder, run_finetune("sweep", *words_of(folder, RATES), "--metric", "validation.loss")


def test_it_survives_a_failure_ends_a_weak_trial_and_finds_the_best(swept):
    folder, ended = swept
    assert ended.returncode == 0, ended.stdout
    assert status_of(folder / "trial-001") == status_of(folder / "trial-003") == "completed"
    failed = noted(folder / "trial-002")
    assert (failed["state"], failed["exit_code"]) == ("failed", 3)
    assert re.search("trial-002: failed with exit code 3: .*not finite|is nan|is inf", ended.stdout), ended.stdout
    weak = noted(folder / "trial-004")
    assert (weak["state"], weak["validation"], weak["step"], weak["better"]) == ("ended early", 1, 2, 2)
    assert status_of(folder / "trial-004") == "preempted"
    states = {run["name"][-9:]: run["state"] for run in json.loads(run_finetune("runs", folder, "--json").answer)}
    assert (states["trial-002"], states["trial-004"]) == ("failed", "ended early")
    assert "ended early" in run_finetune("watch", folder / "trial-004").stdout
    logs = [(folder / f"trial-00{number}.log").read_text() for number in range(1, 5)]
    assert ["encoded before, read from" in log for log in logs] == [False, True, True, True]
    best = min(("trial-001", "trial-003"), key=lambda name: min(loss for _, loss in losses_of(folder / name)[-1:]))
    assert f"best: {folder / best}" in ended.stdout
    rows = [line for line in ended.stdout.splitlines() if line.startswith("│")]
    assert [re.findall("failed|completed|ended early", row) for row in rows] == [
        [state] for state in ("completed", "failed", "completed", "ended early")
    ]
    assert "(best)" in rows[int(best[-1]) - 1]
    pytest.importorskip("vl_convert", reason="the extra [report] is not installed")
    page = (folder / "report.html").read_text()
    charts = {
        chart["name"]: chart
        for chart in json.loads(re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    }
    assert {curve["run"] for curve in charts["loss"]["curves"]} == {0, 1, 2, 3}
    lines = [point for point in charts["parallel"]["points"] if "label" not in point]
    assert {(point["run"], point["axis"]) for point in lines} == {
        *((run, "optim.learning_rate") for run in range(4)),
        *((run, "validation loss") for run in (0, 2, 3)),
    }


def test_trials_find_a_metric_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text("def length(answer, expected): return float(len(answer))\n")
    monkeypatch.chdir(tmp_path)
    more = ["optim.learning_rate=0.04,1e-3", "validation.metrics=./scores.py:length", "validation.num_samples=1"]
    more += ["validation.max_new_tokens=2", "--metric", "scores.length"]
    ended = run_finetune("sweep", *words_of(tmp_path / "sweep", *more, steps=2))
    assert ended.returncode == 0, ended.stdout
    assert f"metrics_from: [{tmp_path / 'scores.py'}]" in (tmp_path / "sweep/trial-002/config.yaml").read_text()
    assert re.search("best: .*sweep/trial-00[12]", ended.stdout)


def test_a_trial_that_is_judged_by_a_step_without_a_checkpoint_is_named(tmp_path):
    more = ["optim.learning_rate=0.04,1e-3", "optim.schedule=constant", "validation.validate_every=1"]
    more += ["checkpoint.save_every=4", "--halving", "0"]
    ended = run_finetune("sweep", *words_of(tmp_path / "saved", *more, steps=4))
    assert ended.returncode == 0, ended.stdout
    assert "trial-001: adapter/ holds step 4, because step 1 has no checkpoint" in ended.stdout
    assert "trial-002: adapter/" not in ended.stdout


def test_a_trial_is_the_run_of_the_printed_command(swept, tmp_path):
    folder, ended = swept
    printed = re.search("^trial-001: finetune (train .*)$", ended.stdout, re.MULTILINE)
    assert printed
    words = shlex.split(printed[1])
    assert words[-3:] == ["optim.learning_rate=8e-3", f"output_dir={folder / 'trial-001'}", "resume=auto"]
    again = run_finetune(*words[:-2], f"output_dir={tmp_path / 'alone'}")
    assert again.returncode == 0, again.stdout
    assert losses_of(tmp_path / "alone") == losses_of(folder / "trial-001")


def test_the_same_command_starts_nothing_that_is_finished_and_a_failed_trial_only_if_asked(swept):
    folder, _ = swept
    before = {path: path.stat().st_mtime_ns for path in folder.glob("trial-*/*")}
    words = ("sweep", *words_of(folder, RATES), "--metric", "validation.loss")
    again = run_finetune(*words)
    assert again.returncode == 0
    assert ": finetune train" not in again.stdout
    assert "The same command does not try failed trials again; with --retry-failed it does." in again.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.glob("trial-*/*")} == before
    log = folder / "trial-002.log"
    first = log.read_text()
    again = run_finetune(*words, "--retry-failed", "--only=2")
    assert re.findall("(trial-...): finetune train", again.stdout) == ["trial-002"]
    assert again.returncode == 3
    assert noted(folder / "trial-002")["state"] == "failed"
    assert log.read_text().startswith(first)
    assert noted(folder / "trial-002")["why"] in log.read_text()[len(first) :]


def test_everything_is_refused_before_the_first_trial(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 4)
    for words, texts in (
        (("lora.r=4,-1", "optim.learning_rate=1e-3,fast"), ("lora.r: expected a whole", "got 'fast'", "(trial-002)")),
        (("lora.r=4,8", "--metric", "validation.accuracy"), ("this run does not measure; it measures loss",)),
        (("lora.r=4,8", f"data={rows}"), ("there is no validation split",)),
    ):
        ended = run_finetune("sweep", *words_of(tmp_path / "sweep", *words))
        assert ended.returncode == 2, ended.stdout
        assert [text for text in texts if text not in ended.errors] == []
        assert not (tmp_path / "sweep").exists()
