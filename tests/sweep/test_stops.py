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

from tests.in_process import run_finetune
from tests.launches import alive_with, run_command, start_command
from tests.sweep.conftest import losses_of, status_of, words_of
from tests.warm import warm_interpreter

pytestmark = [pytest.mark.slow]

_SECONDS = 240.0
_MARK = "FINETUNE_TEST_SWEEP"
WORDS = ("optim.learning_rate=8e-3", "checkpoint.save_every=5", "validation.validate_every=15")
WITH_LITTLE_PATIENCE = """
import sys
from finetune.cli import main
from finetune.sweep import running
running._STOP_SECONDS = 3.0
main(sys.argv[1:])
"""


def sweep(folder: Path, *words: str, steps: int | str = 30) -> list[str]:
    return [sys.executable, "-m", "finetune", "sweep", *words_of(folder, *words, steps=steps)]


def wait_until(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def holder_of(folder: Path) -> psutil.Process:
    """The process that trains in a folder."""

    def holds_it(process: psutil.Process) -> bool:
        try:
            return str(folder / ".lock") in {file.path for file in process.open_files()}
        except psutil.Error:
            return False

    return next(filter(holds_it, psutil.process_iter()))


def is_training(trial: Path) -> Callable[[], bool]:
    """Whether a trial has taken steps beyond its first checkpoint."""
    return lambda: (trial / "metrics.jsonl").exists() and any(step > 7 for step, _ in losses_of(trial))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The run that is the longer trial."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run_finetune("train", *words_of(folder, *WORDS, steps=30))
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize(
    ("number", "steps", "name"),
    [
        pytest.param(signal.SIGKILL, "30,2", "trial-001", id="killed"),
        pytest.param(signal.SIGTERM, "2,30", "trial-002", marks=pytest.mark.warm, id="stopped"),
    ],
)
def test_a_sweep_that_was_stopped_goes_on_to_the_same_bytes(number, steps, name, undisturbed, tmp_path):
    folder = tmp_path / "sweep"
    trial = folder / name
    started = start_command(sweep(folder, *WORDS, steps=steps), variables={_MARK: str(tmp_path)})
    wait_until(is_training(trial), started)
    started.send_signal(number)
    output, _ = started.communicate(timeout=_SECONDS)
    if number == signal.SIGKILL:
        assert started.returncode == -signal.SIGKILL
        psutil.wait_procs(alive_with(_MARK, str(tmp_path)), timeout=_SECONDS)
    else:
        assert started.returncode == 75, output
        assert f"the sweep was stopped by {number.name}: 1 of 2 trials are finished" in output
    assert not alive_with(_MARK, str(tmp_path)), "no trial outlives its sweep"
    assert status_of(trial) == "preempted", "it saved a checkpoint"
    finished = [other.name for other in folder.glob("trial-*/") if status_of(other) == "completed"]
    assert finished == ([] if name == "trial-001" else ["trial-001"])

    with warm_interpreter():
        again = run_finetune("sweep", *words_of(folder, *WORDS, steps=steps))
    assert again.returncode == 0, again.stdout
    assert not any(f"{each}: finetune" in again.stdout for each in finished)
    assert "resumed from step=" in (folder / f"{name}.log").read_text()
    trained, whole = (run / "adapter/adapter_model.safetensors" for run in (trial, undisturbed))
    assert trained.read_bytes() == whole.read_bytes()
    assert losses_of(trial) == losses_of(undisturbed)
    assert {status_of(each) for each in folder.glob("trial-*/")} == {"completed"}


def test_a_second_ctrl_c_ends_the_trial_at_once(tmp_path):
    folder = tmp_path / "sweep"
    started = start_command(
        [sys.executable, "-c", WITH_LITTLE_PATIENCE, *sweep(folder, "seed=1,2", steps=100_000)[3:]],
        variables={_MARK: str(tmp_path)},
    )
    trials: list[psutil.Process] = []

    def has_begun() -> bool:
        trials[:] = [each for each in alive_with(_MARK, str(tmp_path)) if "train" in each.cmdline()]
        return bool(trials)

    wait_until(has_begun, started)
    trials[0].suspend()  # it ends by no signal but SIGKILL, wherever it is
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
    logs = [(folder / f"trial-00{number}.log").read_text() for number in (1, 2)]
    encoded = [re.search(r"orders/train\.jsonl.*encoded before, read from", log) is not None for log in logs]
    assert sorted(encoded) == [False, True], "the second process waits for the first one's rows"
    shown = run_command([*words, "--report"])
    assert shown.returncode == 0, shown.stdout
    assert len(re.findall("completed", shown.stdout)) == 2
    assert "(best)" in shown.stdout


@pytest.mark.warm
def test_a_trial_that_another_process_runs_is_left_to_it(tmp_path):
    folder = tmp_path / "sweep"
    words = sweep(folder, steps="100000,2")
    first = start_command([*words, "--only", "1"])
    wait_until(is_training(folder / "trial-001"), first)
    trial = holder_of(folder / "trial-001")
    trial.suspend()  # it still runs, and takes no time
    second = run_command(words)
    trial.resume()
    assert status_of(folder / "trial-001") == "running"
    first.terminate()
    output, _ = first.communicate(timeout=_SECONDS)
    assert (first.returncode, second.returncode) == (75, 0), output + second.stdout
    assert "trial-001 is left to the process that runs it" in second.stdout
