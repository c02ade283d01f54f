"""A sweep that is stopped or killed goes on; several processes share its trials."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launches import alive_with, run_command, start_command
from tests.sweep.conftest import losses_of, status_of, words_of

pytestmark = [pytest.mark.launch, pytest.mark.slow]

_SECONDS = 240.0
_MARK = "FINETUNE_TEST_SWEEP"
SEEDS = ("seed=1,2", "optim.learning_rate=8e-3", "checkpoint.save_every=5")
STEPS = 30


def sweep(folder: Path, *words: str, steps: int = STEPS) -> list[str]:
    return [sys.executable, "-m", "finetune", "sweep", *words_of(folder, *words, steps=steps)]


def adapters(folder: Path) -> dict[str, bytes]:
    return {file.parts[-3]: file.read_bytes() for file in folder.glob("trial-*/adapter/adapter_model.safetensors")}


def wait_until(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def is_training(trial: Path) -> Callable[[], bool]:
    """Whether a trial has taken steps beyond its first checkpoint."""
    return lambda: (trial / "metrics.jsonl").exists() and any(step > 7 for step, _ in losses_of(trial))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "sweep"
    done = run_command(sweep(folder, *SEEDS))
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_sweep_that_was_stopped_goes_on_to_the_same_bytes(number, undisturbed, tmp_path):
    folder = tmp_path / "sweep"
    started = start_command(sweep(folder, *SEEDS), variables={_MARK: str(tmp_path)})
    wait_until(is_training(folder / "trial-002"), started)
    started.send_signal(number)
    output, _ = started.communicate(timeout=_SECONDS)
    if number == signal.SIGKILL:
        assert started.returncode == -signal.SIGKILL
        psutil.wait_procs(alive_with(_MARK, str(tmp_path)), timeout=_SECONDS)
    else:
        assert started.returncode == 75, output
        assert f"the sweep was stopped by {number.name}: 1 of 2 trials are finished" in output
    assert not alive_with(_MARK, str(tmp_path)), "no trial outlives its sweep"
    assert status_of(folder / "trial-002") == "preempted", "it saved a checkpoint"

    again = run_command(sweep(folder, *SEEDS))
    assert again.returncode == 0, again.stdout
    assert "trial-001: finetune" not in again.stdout
    assert "resumed from step=" in (folder / "trial-002.log").read_text()
    assert adapters(folder) == adapters(undisturbed)
    assert losses_of(folder / "trial-002") == losses_of(undisturbed / "trial-002")


def test_a_second_ctrl_c_ends_the_trial_at_once(tmp_path):
    folder = tmp_path / "sweep"
    started = start_command(
        sweep(folder, "seed=1,2", steps=100_000), variables={_MARK: str(tmp_path), "OMP_NUM_THREADS": "1"}
    )
    wait_until(is_training(folder / "trial-001"), started)
    trial = next(each for each in alive_with(_MARK, str(tmp_path)) if "train" in each.cmdline())
    trial.suspend()  # it cannot finish its step
    started.send_signal(signal.SIGINT)
    time.sleep(1.5)
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=_SECONDS)
    assert started.returncode == 130, output
    assert not alive_with(_MARK, str(tmp_path))


@pytest.mark.warm
def test_processes_share_the_trials_of_an_array_and_the_same_command_shows_them(tmp_path):
    folder = tmp_path / "sweep"
    words = sweep(folder, "seed=1,2", steps=6)
    both = [start_command([*words, "--only", str(number)]) for number in (1, 2)]
    outputs = [process.communicate(timeout=_SECONDS)[0] for process in both]
    for number, (process, output) in enumerate(zip(both, outputs, strict=True), 1):
        assert process.returncode == 0, output
        assert f"trial-00{number} is completed" in output
        assert f"trial-00{3 - number}: finetune" not in output
    encoded = ["encoded before, read from" in (folder / f"trial-00{number}.log").read_text() for number in (1, 2)]
    assert sorted(encoded) == [False, True], "the second process waits for the first one's rows"
    before = adapters(folder)
    shown = run_command([*words, "--report"])
    assert shown.returncode == 0, shown.stdout
    assert len(re.findall("completed", shown.stdout)) == 2
    assert "(best)" in shown.stdout
    assert adapters(folder) == before


@pytest.mark.warm
def test_a_trial_that_another_process_runs_is_left_to_it(tmp_path):
    folder = tmp_path / "sweep"
    words = sweep(folder, "seed=1,2", steps=40)
    first = start_command([*words, "--only", "1"])
    wait_until(is_training(folder / "trial-001"), first)
    second = run_command(words)
    output, _ = first.communicate(timeout=_SECONDS)
    assert first.returncode == second.returncode == 0, output + second.stdout
    assert "trial-001 is left to the process that runs it" in second.stdout
    assert "trial-002: completed" in second.stdout
    assert status_of(folder / "trial-001") == "completed"


@pytest.mark.warm
def test_two_trials_at_once_of_two_processes_each_give_the_curves_of_one_after_the_other(tmp_path):
    words = ("seed=1,2", "parallel.num_processes=2", "training.global_batch_size=8", "training.batch_size=4")
    one = run_command(sweep(tmp_path / "one", *words, steps=6))
    two = run_command([*sweep(tmp_path / "two", *words, steps=6), "--at-once", "2"])
    assert one.returncode == two.returncode == 0, one.stdout + two.stdout
    assert "2 trials of 2 processes each on one device take up to" in two.stdout
    for name in ("trial-001", "trial-002"):
        mine, theirs = (dict(losses_of(tmp_path / folder / name)) for folder in ("two", "one"))
        assert mine == pytest.approx(theirs, rel=1e-6)
