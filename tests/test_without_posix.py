"""A run of one process, and the commands around it, use nothing that Windows lacks."""

from __future__ import annotations

import json
import sys

import pytest

from finetune.runs.file_lock import is_held
from tests.launches import run_command
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import events

pytestmark = [pytest.mark.process, pytest.mark.slow]


def run(folder, *words):
    done = run_command([sys.executable, "-m", "tests.without_posix", *map(str, words)], variables={"COLUMNS": "120"})
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_run_and_the_commands_around_it_do_without_posix(tmp_path):
    write_base(tmp_path / "base")
    write_rows(tmp_path / "rows")
    words = [
        *(f"model.path={tmp_path / 'base'}", f"data.path={tmp_path / 'rows'}", f"data.cache_dir={tmp_path / 'cache'}"),
        *("training.device=cpu", "training.batch_size=4", "testing.max_new_tokens=2", f"output_dir={tmp_path / 'run'}"),
    ]
    # One process for all of them, since each import takes seconds.
    out = run(
        tmp_path,
        "preview",
        *words,
        *("--then", "plan", *words),
        *("--then", "train", *words, "training.max_steps=4", "checkpoint.save_every=2", "validation.validate_every=2"),
        *("--then", "train", *words, "training.max_steps=5", "resume=auto", "resume.allow=training"),
        *("--then", "report", tmp_path / "run", "--output", tmp_path / "page.html"),
    )
    assert "resumed from step=4" in out
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["status"], record["result"]["step"]) == ("completed", 5)
    assert (tmp_path / "page.html").is_file()
    assert not is_held(tmp_path / "run/.lock")
    assert all(event["host_memory"] > 0 for event in events(tmp_path / "run", "resources"))
