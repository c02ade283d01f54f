"""Something goes wrong on one rank of a real training run: all processes are gone in time, and say where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from finetune.runs.folder import RunFolder
from finetune.runs.verification import newest_valid
from tests.launches import LAUNCHERS, REPOSITORY, alive_with, free_port, place_variables, wait_until
from tests.scenes import Scenes
from tests.tiny_runs import random_model_words, write_base, write_rows
from tests.tiny_training import events
from tests.warm import with_interpreter

SCRIPT = REPOSITORY / "tests" / "faulty_run.py"
PROMISED_SECONDS = 15.0
START_SECONDS = 300.0
"""Until the fault, on a busy machine: two processes import everything."""
QUIET_SECONDS = 2.0
NUM_STEPS = 5
KILLED = -signal.SIGKILL

pytestmark = [pytest.mark.slow, pytest.mark.warm]


class Play:
    """A launch of two ranks, one of which has a fault before it."""

    def __init__(self, inputs, folder):
        self.inputs = inputs
        self.folder = folder
        self.run_folder = folder / "run"
        self.processes = []
        self.fault_at = 0.0

    def start(self, launcher, fault, *words):
        """Start the ranks; `fault` is kind:rank:step of `faulty_run`."""
        self.logs = []
        (self.folder / "fault").unlink(missing_ok=True)
        self.processes.clear()
        command = [SCRIPT, *self.words(), *words]
        if launcher == "plain":
            port = free_port()
            for rank in (0, 1):
                self.start_process([sys.executable, *command], FAULT=fault, **place_variables(rank, 2, port))
        elif launcher == "spawn":
            self.start_process([sys.executable, *command, "parallel.num_processes=2"], FAULT=fault)
        else:
            self.start_process([*LAUNCHERS[launcher], *command], FAULT=fault)
        return self

    def words(self):
        return [
            *random_model_words(self.inputs / "tokenizer"),
            *(f"data.path={self.inputs / 'rows'}", f"data.cache_dir={self.inputs / 'cache'}"),
            *(f"output_dir={self.run_folder}", "training.device=cpu", "lora.r=4", "optim.learning_rate=1e-2"),
            *("training.batch_size=2", "training.global_batch_size=4", f"training.max_steps={NUM_STEPS}"),
            *("checkpoint.save_every=1", "validation.batch_size=2", "validation.validate_every=2"),
            "testing.num_samples=0",
        ]

    def start_process(self, command, **variables):
        environment = {
            **os.environ,
            **{"PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore"},
            "FAULT_AT": str(self.folder / "fault"),
            # Inherited by all that is started, guardians too: by it they are found.
            "FAULTY_PLAY": str(self.folder),
            **variables,
        }
        # One that is named by its number is the one that was started, and no fork that stands for it.
        is_itself = variables["FAULT"].startswith("wait")
        command = [str(word) for word in command] if is_itself else with_interpreter(command)
        self.logs.append(self.folder / f"log-{len(self.logs)}")
        with self.logs[-1].open("w") as log:
            # A process group of its own, as a terminal gives one to what stands in the foreground.
            group = self.processes[0].pid if self.processes else 0
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=group
            )
        self.processes.append(process)

    def wait_for_fault(self):
        fault = self.folder / "fault"

        def is_over():
            return fault.exists() or any(process.poll() is not None for process in self.processes)

        wait_until(is_over, "the fault", START_SECONDS, self.text)
        assert fault.exists(), self.text()
        self.fault_at = float(fault.read_text())

    def end(self, extra_seconds=0.0):
        """The exit codes, once all are gone in the time that is promised; the run's folder is at rest from then on."""
        self.wait_for_fault()
        while left := self.left():
            seconds = time.time() - self.fault_at
            assert seconds < PROMISED_SECONDS + extra_seconds, (left, self.text())
            time.sleep(0.05)
        print(f"gone {time.time() - self.fault_at:.1f} s after the fault")
        before = self.snapshot()
        codes = [process.wait(1) for process in self.processes]
        time.sleep(QUIET_SECONDS)
        assert self.snapshot() == before
        return codes

    def left(self):
        """What is still there of this play: launcher, workers, guardians and their children."""
        return alive_with("FAULTY_PLAY", str(self.folder))

    def snapshot(self):
        files = [path for path in self.run_folder.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    def text(self, *ranks):
        return "".join(log.read_text() for rank, log in enumerate(self.logs) if not ranks or rank in ranks)

    def last_lines(self):
        """Our last line in each log; torchrun and accelerate add a traceback of their own."""
        logs = [log.read_text().splitlines() for log in self.logs]
        return [[line for line in lines if line.startswith(("finetune", "[rank"))][-1] for lines in logs]

    def says(self, rank, place, *words):
        """Every last line of ours names the rank and where it was."""
        for line in self.last_lines():
            for word in (f"rank {rank}", place, *words):
                assert word in line, self.text()

    def has_failed(self, *words, newest=2):
        """run.json says so, and the newest checkpoint is whole."""
        record = json.loads((self.run_folder / "run.json").read_text())
        assert record["status"] == "failed", record
        for word in words:
            assert word in record["result"]["error"]
        folder = RunFolder(self.run_folder)
        assert newest_valid(folder) == folder.checkpoint(newest)

    def losses(self):
        return {event["step"]: event["loss"] for event in events(self.run_folder, "step")}

    def stop(self):
        """End what a failed test left; after a good one there is nothing."""
        for process in self.left():
            process.kill()
        for process in self.processes:
            process.wait()


SCENES = Scenes(at_a_time=3)


@SCENES.add
def an_exception_while_data_is_read(play):
    play.start("plain", "data:1:3")
    assert play.end() == [3, 2], "a user's mistake on its own rank is 2, on the others the run failed"
    play.says(1, "data, step 3", "DataError: orders.jsonl:7 is no conversation. Mend the row.")
    play.has_failed("rank 1 failed during data, step 3: DataError")
    assert "Traceback" not in play.text()


@SCENES.add
def an_exception_in_a_data_worker(play):
    play.start("accelerate", "worker:1:3", "training.num_workers=1")
    assert play.end() == [1]
    play.says(1, "data, step 3")
    play.has_failed("rank 1 failed during data, step 3: ValueError", "a row of three columns")


@SCENES.add
def an_exception_in_the_forward_pass(play):
    play.start("plain", "forward:1:3")
    assert play.end() == [3, 1]
    play.says(1, "training, step 3")
    play.has_failed("rank 1 failed during training, step 3: ValueError: a row of three columns")
    assert "[rank1]: Traceback" in play.text(1), "a bug keeps its traceback on its own rank"
    assert "Traceback" not in play.text(0), "and the others say in a line whose it is"
    assert "finetune: RunFailedError: rank 1 failed during training, step 3: ValueError" in play.text(0)


@SCENES.add
def a_mistake_that_one_worker_of_a_local_spawn_meets(play):
    play.start("spawn", "mistake:1:3")
    assert play.end() == [2], "the cause's code, and not that of the rank that ends with it"
    play.says(1, "training, step 3", "DataError: orders.jsonl:7 is no conversation. Mend the row.")
    play.has_failed("rank 1 failed during training, step 3: DataError")
    assert "Traceback" not in play.text()


@SCENES.add
def a_killed_rank_and_the_run_goes_on_later(play):
    one_way = "training.kernels=reference"  # the fault is a hook, and with it a model goes that way anyhow
    play.start("torchrun", "kill:1:3", one_way)
    assert play.end() == [1]
    play.says(1, "training, step 3", "was killed")
    play.has_failed("rank 1 was killed during training, step 3")
    play.start("torchrun", "none:1:3", one_way, "resume=auto")
    assert play.processes[0].wait(START_SECONDS) == 0, play.text()
    assert "resumed from step=2" in play.text()
    whole = Play(play.inputs, play.folder / "whole")
    whole.folder.mkdir()
    try:
        assert whole.start("torchrun", "none:1:3", one_way).processes[0].wait(START_SECONDS) == 0, whole.text()
    finally:
        whole.stop()
    assert play.losses() == whole.losses()
    assert len(play.losses()) == NUM_STEPS
    adapter = "adapter/adapter_model.safetensors"
    assert (play.run_folder / adapter).read_bytes() == (whole.run_folder / adapter).read_bytes()


@SCENES.add
def a_hung_rank(play):
    play.start("torchrun", "hang:1:3", "parallel.step_timeout_minutes=0.05")
    assert play.end(extra_seconds=3.0) == [1]
    play.says(1, "training, step 3", "rank 0 waits for it in", "the step timeout is 3 s")
    play.has_failed("rank 1 has been in training, step 3")


@SCENES.add
def a_killed_rank_whose_weights_are_waited_for_in_an_evaluation(play):
    play.start("torchrun", "kill-in-evaluation:1:2", "parallel.sharding=fsdp2", "validation.validate_every=2")
    assert play.end() == [1]
    play.says(1, "evaluation, step 2", "was killed")
    play.has_failed("rank 1 was killed during evaluation, step 2", newest=1)


@SCENES.add
def a_killed_rank_whose_part_is_waited_for_in_a_save(play):
    words = ("parallel.sharding=fsdp2", "training.method=full", "checkpoint.save_every=2")
    play.start("torchrun", "saving:1:2", *words)
    assert play.end() == [1]
    play.says(1, "saving, step 4", "was killed")
    play.has_failed("rank 1 was killed during saving, step 4")


@SCENES.add
def a_killed_launcher(play):
    play.start("torchrun", "wait:1:3").wait_for_fault()
    time.sleep(1.5)  # both ranks have said where they are
    play.fault_at = time.time()
    (play.folder / "fault").write_text(repr(play.fault_at))
    play.processes[0].kill()
    assert play.end() == [KILLED]
    line = play.last_lines()[0]
    assert f"lost its launcher, process {play.processes[0].pid}, during training, step 3" in line
    play.has_failed("lost its launcher")


@SCENES.add
def ctrl_c_for_a_local_spawn(play):
    """Twice, as someone does who will not wait for the step."""
    play.start("spawn", "wait:1:3").wait_for_fault()
    time.sleep(1.0)
    os.killpg(play.processes[0].pid, signal.SIGINT)
    time.sleep(1.5)
    (play.folder / "fault").write_text(repr(time.time()))
    os.killpg(play.processes[0].pid, signal.SIGINT)
    assert play.end() == [130]
    assert json.loads((play.run_folder / "run.json").read_text())["status"] in ("stopped", "failed")
    assert "Traceback" not in play.text()
    assert "resume=auto" in play.text()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "tokenizer")
    write_rows(folder / "rows", train=20, validation=8, test=2)
    return folder


@pytest.fixture(scope="module")
def scenes(request, inputs, tmp_path_factory):
    with SCENES.running(request, tmp_path_factory, lambda folder, _: Play(inputs, folder)) as started:
        yield started


@pytest.mark.parametrize("act", SCENES.params)
def test_scene(scenes, act):
    scenes[act].result()
