import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.cli.runs import _summaries, runs, summary
from finetune.errors import CheckpointError
from finetune.runs.file_lock import file_lock
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import find_runs
from tests.runs.made_runs import change_record, write_run


def states(folder):
    return {run.name: run.state for run in find_runs(folder)}


def test_every_run_below_is_found_and_nothing_else(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "sweep" / "b" / "1")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("x")
    (tmp_path / "a" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert {run.name for run in find_runs(tmp_path)} == {"a", "sweep/b/1"}
    assert [run.name for run in find_runs(tmp_path / "a")] == [str(tmp_path / "a")]


def test_a_run_says_where_it_stands(tmp_path):
    folder = write_run(tmp_path / "a", losses=(3.0, 2.0), status="completed")
    (run,) = map(summary, find_runs(tmp_path))
    assert run.pop("started") <= run.pop("finished")
    assert run == {
        **{"name": "a", "path": str(folder.path), "state": "completed", "why": None, "step": 2, "num_steps": 2},
        **{"train_loss": 2.0, "validation_loss": 2.0, "best_loss": 2.0, "best_step": 2, "model": "owner/phi"},
        **{"data": "owner/rows", "world_size": 1, "train_reward": None, "validation_reward": None},
    }


def test_the_rows_of_a_run_are_named_also_where_only_train_is_set(tmp_path):
    write_run(tmp_path / "a", "data.path=null", "data.train=mine.jsonl")
    (run,) = map(summary, find_runs(tmp_path))
    assert run["data"] == "mine.jsonl"


@pytest.mark.parametrize("status", ["completed", "failed", "preempted", "stopped"])
def test_a_run_that_ended_says_how(tmp_path, status):
    write_run(tmp_path / "a", status=status, why="as asked")
    (run,) = find_runs(tmp_path)
    assert (run.state, run.why) == (status, "as asked")


@pytest.mark.parametrize(("status", "state"), [("stopped", "ended early"), ("completed", "completed")])
def test_a_trial_that_its_sweep_ended_may_have_been_continued(tmp_path, status, state):
    write_run(tmp_path / "a", status=status)
    (tmp_path / "a.ended.json").write_text(json.dumps({"state": "ended early"}))
    assert states(tmp_path) == {"a": state}


def test_a_configuration_that_was_cut_short_is_not_read(tmp_path):
    folder = write_run(tmp_path / "a")
    folder.config_file.write_text(folder.config_file.read_text().rstrip("\n"))
    (run,) = find_runs(tmp_path)
    assert run.why_no_config == "config.yaml is empty or cut short"


def test_a_run_is_running_while_a_living_process_holds_its_lock(tmp_path):
    folder = write_run(tmp_path / "a", status="running")
    with file_lock(folder.lock_file, waiting_for="the test"):
        assert states(tmp_path) == {"a": "running"}
        assert folder.lock_file.exists()
    assert states(tmp_path) == {"a": "stopped"}, "nobody is left to say that it ended"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lists the locks of all processes")
def test_a_run_of_another_user_is_unknown_if_its_lock_is_all_that_it_shows(tmp_path, monkeypatch):
    """Root may open every file, so the refusal of the system is played."""
    folder = write_run(tmp_path / "a", status="running")
    lock = file_lock(folder.lock_file, waiting_for="the test")

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for module in ("file_lock", "recorded_run"):
        monkeypatch.setattr(f"finetune.runs.{module}.open_regular", refuse)
    for file in (folder.lock_file, folder.metrics_file):
        os.utime(file, (1.0, 1.0))
    assert states(tmp_path) == {"a": "running"}, "the system's list shows who holds it"
    lock.forget()
    (run,) = find_runs(tmp_path)
    assert run.state == "unknown"
    assert run.why.startswith("its lock belongs to another user, and nothing was written for 10 minutes")
    os.utime(folder.metrics_file)
    assert states(tmp_path) == {"a": "running"}, "a process of another machine may hold it"


@pytest.mark.process
def test_a_killed_run_is_stopped_though_its_lock_file_is_left(tmp_path):
    folder = write_run(tmp_path / "a", status="running")
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom finetune.runs.file_lock import file_lock\n"
        "held = file_lock(Path(sys.argv[1]), waiting_for='the test')\nos.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, folder.lock_file], check=False)
    assert folder.lock_file.exists()
    assert states(tmp_path) == {"a": "stopped"}
    assert json.loads(folder.record_file.read_text())["status"] == "running", "watching changes nothing"


def test_what_is_torn_or_missing_is_left_out(tmp_path):
    folder = write_run(tmp_path / "a", losses=(float("nan"),))
    folder.record_file.write_text('{"status": "compl')
    folder.config_file.write_text("training: {no_such_key: 1}\n")
    with folder.metrics_file.open("a") as file:
        file.write('{"event": "step", "st')
    (run,) = map(summary, find_runs(tmp_path))
    figures = [run[name] for name in ("state", "step", "train_loss", "best_loss", "model")]
    assert figures == ["unknown", 1, None, None, None]
    change = write_run(tmp_path / "b")
    change_record(change, starts="x", result=[], num_steps="many", status=7)
    assert states(tmp_path)["b"] == "unknown"


def test_the_table_and_the_objects_say_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    write_run(tmp_path / "a [bold]", losses=(3.0, 2.25))
    runs(tmp_path)
    table = capsys.readouterr().out
    for part in ("a [bold]", "completed", "2/2", "2.2500", "phi", "rows"):
        assert part in table
    runs(tmp_path, as_json=True)
    (run,) = json.loads(capsys.readouterr().out)
    page = (Path(__file__).resolve().parents[2] / "docs/watching.md").read_text(encoding="utf-8")
    described = page.partition("`runs --json` prints")[2].partition("\n\n")[0]
    assert set(run) <= set(re.findall("`([a-z_]+)`", described))
    assert (run["name"], run["state"], run["train_loss"]) == ("a [bold]", "completed", 2.25)


def test_runs_that_learn_from_rewards_show_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    write_run(tmp_path / "plain")
    runs(tmp_path)
    assert "reward" not in capsys.readouterr().out
    folder = write_run(tmp_path / "grpo", "training.objective=grpo", "reward.functions=[exact_match]")
    with folder.metrics_file.open("a") as file:
        file.write('{"event": "step", "step": 4, "reward": 0.625}\n')
        file.write('{"event": "validation", "step": 4, "loss": 1.0, "reward": 0.75}\n')
    runs(tmp_path)
    table = capsys.readouterr().out
    assert all(part in table for part in ("reward", "0.6250", "validation reward", "0.7500"))


def test_a_name_with_a_line_break_makes_no_line_of_its_own(tmp_path, capsys):
    write_run(tmp_path / "a\nfinetune: forged")
    runs(tmp_path)
    assert "a<U+000A>finetune: forged" in capsys.readouterr().out.replace("\n", "")


def test_a_folder_that_may_not_be_looked_into_is_passed_over(tmp_path, monkeypatch):
    """As a root user meets no such folder, its first question is answered here."""
    write_run(tmp_path / "mine")
    write_run(tmp_path / "theirs")
    holds_run = RunFolder.holds_run

    def refuse_theirs(folder: RunFolder) -> bool:
        if folder.path.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied")
        return holds_run(folder)

    monkeypatch.setattr(RunFolder, "holds_run", refuse_theirs)
    assert [run.name for run in find_runs(tmp_path)] == ["mine"]


def test_a_run_is_read_again_once_it_may_be_read(tmp_path, monkeypatch):
    """Permissions are pretended, because tests may run as root."""
    write_run(tmp_path / "a")

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as closed:
        closed.setattr("finetune.runs.folder.open_regular", refuse)
        assert [run["state"] for run in _summaries(tmp_path)] == ["unreadable"]
    assert [run["state"] for run in _summaries(tmp_path)] == ["completed"]


def test_no_run_and_no_folder(tmp_path, capsys):
    runs(tmp_path)
    assert "no run in" in capsys.readouterr().out
    runs(tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out) == []
    with pytest.raises(CheckpointError, match="is not a folder"):
        runs(tmp_path / "none")
