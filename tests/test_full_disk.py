"""A disk that is filled while two ranks train: they stop together, or go on and say so, as the configuration has it."""

import json
import os
import subprocess
import sys
import time

import pytest

from finetune.runs.folder import RunFolder
from finetune.runs.verification import newest_valid
from tests.launches import run_command
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import events
from tests.warm import with_interpreter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.warm,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount the small disk that is to be filled"),
]
LIMIT_SECONDS = 300


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def command(tmp_path, disk):
    """A run of 30 steps with a checkpoint after every second one."""
    return [
        *(sys.executable, "-m", "finetune", "train", "task=finetune_lora", f"model.path={write_base(tmp_path / 'b')}"),
        *(f"data.path={write_rows(tmp_path / 'rows', validation=0, test=0)}", f"data.cache_dir={tmp_path / 'cache'}"),
        *(f"output_dir={disk / 'run'}", "training.global_batch_size=4", "training.batch_size=2", "lora.r=2"),
        *("training.max_steps=30", "training.log_every=1", "checkpoint.save_every=2"),
        *("checkpoint.save_total_limit=2", "checkpoint.save_every_epochs=null"),
    ]


def said(screen, words):
    """Wait until a run has said something."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while words not in screen.read_text():
        assert time.monotonic() < deadline, screen.read_text()
        time.sleep(0.01)


def fill(disk):
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):  # the last bytes of the last page too
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def steps_in(run):
    return [event["step"] for event in events(run, "step")]


def start(command, screen, *words):
    with screen.open("w") as file:
        return subprocess.Popen(with_interpreter([*command, *words]), stdout=file, stderr=subprocess.STDOUT)


def test_two_ranks_stop_together_and_go_on_once_there_is_room(command, disk, tmp_path):
    folder, screen = RunFolder(disk / "run"), tmp_path / "screen"
    process = start(command, screen, "parallel.num_processes=2", "resume=auto")
    said(screen, "committed step=4")
    fill(disk)
    assert process.wait(LIMIT_SECONDS) == 3, screen.read_text()
    text = screen.read_text()
    assert "Traceback" not in text, text
    assert text.count("finetune: RunFailedError") == 1, text
    assert "No space left on device (ENOSPC)" in text
    assert "bytes are free there" in text
    committed = max(step for step in range(30) if f"committed step={step}\n" in text)
    assert newest_valid(folder) == folder.checkpoint(committed)

    (disk / "filler").unlink()
    done = run_command([*command, "parallel.num_processes=2", "resume=auto"], limit_seconds=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout
    assert f"resumed from step={committed}" in done.stdout
    assert steps_in(folder.path) == list(range(1, 31))


def test_by_configuration_they_go_on_and_the_run_says_what_is_missing(command, disk, tmp_path):
    folder, screen = RunFolder(disk / "run"), tmp_path / "screen"
    words = ["parallel.num_processes=2", "checkpoint.on_disk_failure=continue", "training.max_steps=60"]
    process = start(command, screen, *words)
    said(screen, "committed step=4")
    fill(disk)
    said(screen, "training goes on (checkpoint.on_disk_failure=continue)")
    said(screen, "lines are kept in memory meanwhile")
    (disk / "filler").unlink()
    assert process.wait(LIMIT_SECONDS) == 0, screen.read_text()
    assert steps_in(folder.path) == list(range(1, 61))
    assert newest_valid(folder) == folder.checkpoint(60)
    record = json.loads(folder.record_file.read_text())
    assert record["status"] == "completed"
    assert [taken["used"] for taken in record["fallbacks"]], record["fallbacks"]
    assert all("No space left on device" in taken["why"] for taken in record["fallbacks"]), record["fallbacks"]
    assert record["result"]["saving"]["checkpoints"] + len(record["fallbacks"]) == 30
