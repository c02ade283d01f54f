"""A run that is told to stop commits its step, leaves with 75, and goes on later to the bytes of one that was not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import psutil
import pytest

from tests.launches import LAUNCHERS, REPOSITORY, alive_with, wait_until
from tests.scenes import Scenes
from tests.tiny_runs import random_model_words, write_base, write_rows
from tests.warm import with_interpreter

START_SECONDS = 300.0
NUM_STEPS = 24
PREEMPTED = 75
BY_HAND = 130
_MARK = "FINETUNE_TEST_PLAY"
STEP = re.compile(r"stopped at step ([0-9]+) as asked by (\w+)(?: on ranks? ([0-9, ]+))?; checkpoint committed")

pytestmark = [pytest.mark.slow, pytest.mark.warm]


class Play:
    """A run that gets a signal, and the same run that does not."""

    def __init__(self, inputs, folder):
        self.inputs = inputs
        self.folder = folder
        self.run_folder = folder / "run"
        self.log = folder / "log"
        self.process = None

    def start(self, launcher, *words, is_itself=False):
        """Start it, forked off the warm process or with interpreters of its own."""
        command = [*LAUNCHERS.get(launcher, LAUNCHERS["python"]), "-m", "finetune", "train", *self.words(), *words]
        command += ["parallel.num_processes=2"] if launcher == "spawn" else []
        command = [str(word) for word in command] if is_itself else with_interpreter(command)
        own = {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", _MARK: str(self.folder)}
        environment = {**os.environ, **own}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        return self

    def words(self):
        return [
            *("task=finetune_lora", *random_model_words(self.inputs / "tokenizer")),
            *(f"data.path={self.inputs / 'rows'}", f"data.cache_dir={self.inputs / 'cache'}"),
            *(f"output_dir={self.run_folder}", "training.device=cpu", "lora.dropout=0.1"),
            *("training.batch_size=2", "training.global_batch_size=4", f"training.max_steps={NUM_STEPS}"),
            *("checkpoint.save_every=10", "checkpoint.save_total_limit=100"),
            *("validation.batch_size=1", "validation.validate_every=1"),
            *("training.num_workers=1", "testing.num_samples=0", "training.log_every=1"),
        ]

    def wait_for(self, is_so, what):
        wait_until(lambda: is_so() or self.process.poll() is not None, what, START_SECONDS, self.text)
        assert is_so(), (what, self.text())

    def wait_for_step(self, step):
        self.wait_for(lambda: any(event["step"] >= step for event in self.events("step")), f"step {step}")

    def wait_for_text(self, text):
        self.wait_for(lambda: text in self.text(), text)

    def workers(self):
        """What torchrun started, by rank; each passes a signal on to the process that trains."""
        ranks = {}
        for process in sorted(alive_with(_MARK, str(self.folder)), key=psutil.Process.create_time):
            if "train" in process.cmdline():  # not its guardian; and it is older than what loads its data
                ranks.setdefault(process.environ().get("RANK"), process)
        return [ranks[rank] for rank in ("0", "1")]

    def end(self):
        self.process.wait(START_SECONDS)
        return self.process.returncode

    def text(self):
        return self.log.read_text()

    def events(self, kind, folder=None):
        file = (folder or self.run_folder) / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [
            each for each in map(json.loads, (line for line in lines if line.endswith("\n"))) if each["event"] == kind
        ]

    def has_stopped(self, by):
        """The step after which it did, which is committed and said in the last line of ours."""
        found = STEP.findall(self.text())
        assert len(found) == 1, f"one rank says it\n{self.text()}"
        step, name, ranks = int(found[0][0]), found[0][1], found[0][2]
        assert name == by
        record = json.loads((self.run_folder / "run.json").read_text())
        assert record["status"] == "preempted", record
        assert self.events("step")[-1]["step"] == step, "no step is trained and thrown away"
        assert self.events("checkpoint")[-1]["step"] == step
        assert (self.run_folder / f"checkpoints/step-{step:06d}/manifest.json").exists()
        return step, ranks

    def goes_on(self, launcher, step):
        """To the end, which is that of the run that was not told to stop."""
        whole = self.undisturbed(launcher)
        self.start(launcher, "resume=auto")
        assert self.end() == 0, self.text()
        assert f"resumed from step={step}" in self.text()
        assert json.loads((self.run_folder / "run.json").read_text())["status"] == "completed"
        for name in ("adapter/adapter_model.safetensors", f"checkpoints/step-{NUM_STEPS:06d}/optimizer.safetensors"):
            assert (self.run_folder / name).read_bytes() == (whole / name).read_bytes(), name
        for kind in ("step", "validation"):
            mine, theirs = self.events(kind), self.events(kind, whole)
            assert [(each["step"], each["loss"]) for each in mine] == [(each["step"], each["loss"]) for each in theirs]

    def undisturbed(self, launcher):
        """The folder of the same run that got no signal."""
        (self.folder / "whole").mkdir()
        other = Play(self.inputs, self.folder / "whole")
        try:
            assert other.start(launcher).end() == 0, other.text()
        finally:
            other.stop()
        return other.run_folder

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            left = psutil.Process(self.process.pid).children(recursive=True)
            for process in [*left, *alive_with(_MARK, str(self.folder)), self.process]:
                process.kill()
            self.process.wait()


SCENES = Scenes(at_a_time=3)


def in_training(play, launcher, number, whom, **options):
    play.start(launcher, **options)
    play.wait_for_step(4)
    whom(play).send_signal(number)
    return play.end()


def the_process(play):
    return play.process


@SCENES.add
def sigterm(play):
    assert in_training(play, "alone", signal.SIGTERM, the_process) == PREEMPTED
    step, _ = play.has_stopped("SIGTERM")
    assert "resume=auto" in play.text().splitlines()[-1], play.text()[-2500:]
    play.goes_on("alone", step)


@SCENES.add
def one_worker_of_torchrun(play):
    assert in_training(play, "torchrun", signal.SIGUSR1, lambda play: play.workers()[1]) == 1, "torchrun's own"
    step, ranks = play.has_stopped("SIGUSR1")
    assert ranks == "1"
    assert "exitcode  : 75" in play.text()
    play.goes_on("torchrun", step)


@SCENES.add
def torchrun_itself(play):
    """It sends SIGTERM on to the whole group of each worker: to the processes that load data for it, too."""
    in_training(play, "torchrun", signal.SIGTERM, the_process, is_itself=True)
    play.has_stopped("SIGTERM")


@SCENES.add
def the_parent_of_a_local_spawn(play):
    assert in_training(play, "spawn", signal.SIGTERM, the_process) == PREEMPTED
    _, ranks = play.has_stopped("SIGTERM")
    assert ranks in ("0", "1", "0, 1")


@SCENES.add
def while_it_loads(play):
    play.start("alone")
    play.wait_for_text("Process 0/1 started")
    play.process.terminate()
    assert play.end() == PREEMPTED, play.text()
    assert "stopped during set-up as asked by SIGTERM, before a step was trained" in play.text()
    assert play.events("step") == []
    assert "Traceback" not in play.text()


@SCENES.add
def while_it_evaluates_with_a_sharded_base(play):
    """One rank is told, in an evaluation that would take a minute: the other must leave it before the same batch."""
    many = f"data.path={play.inputs / 'many'}"
    play.start("torchrun", many, "validation.validate_every=10", "parallel.sharding=fsdp2")
    play.wait_for_step(10)
    time.sleep(1.0)
    play.workers()[1].terminate()
    assert play.end() == 1
    step, ranks = play.has_stopped("SIGTERM")
    assert (step, ranks) == (10, "1"), "in the evaluation"
    assert play.events("validation") == []


@SCENES.add
def while_it_tests(play):
    """Training is complete and committed by then."""
    play.start("alone", f"data.path={play.inputs / 'long_test'}", "training.max_steps=1", "testing.batch_size=1")
    play.wait_for_text("Starting testing phase")
    play.process.terminate()
    assert play.end() == PREEMPTED, play.text()
    assert "finetune: stopped in the test phase as asked by SIGTERM; training is complete" in play.text()
    record = json.loads((play.run_folder / "run.json").read_text())
    assert (record["status"], record["result"]["step"]) == ("preempted", 1)
    assert (play.run_folder / "adapter/adapter_model.safetensors").exists()


@SCENES.add
def ctrl_c_twice_stops_at_once(play):
    """Its first step has so many micro-batches that both come in it. Three in a second count once."""
    rows = f"data.path={play.inputs / 'long_step'}"
    many = ("training.batch_size=1", "training.global_batch_size=2500", "training.num_workers=0")
    play.start("alone", rows, *many, is_itself=True)
    play.wait_for_text("Starting training...")
    time.sleep(1.0)
    for _ in range(3):
        play.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    play.wait_for_text("press Ctrl-C again")  # a busy machine hears the first one late
    time.sleep(1.2)
    assert play.process.poll() is None
    play.process.send_signal(signal.SIGINT)
    # Where the second comes while Python itself unwinds, it ends the process by the signal: a shell says 130 to both.
    assert play.end() in (BY_HAND, -signal.SIGINT), play.text()
    assert "finetune: stopped" in play.text()
    assert "Traceback" not in play.text()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "tokenizer")
    write_rows(folder / "rows", train=40, validation=4, test=0)
    write_rows(folder / "many", train=40, validation=3_000, test=0)
    write_rows(folder / "long_step", train=2500, validation=0, test=0)
    write_rows(folder / "long_test", train=8, validation=0, test=1_000)
    return folder


@pytest.fixture(scope="module")
def scenes(request, inputs, tmp_path_factory):
    with SCENES.running(request, tmp_path_factory, lambda folder, _: Play(inputs, folder)) as started:
        yield started


@pytest.mark.parametrize("act", SCENES.params)
def test_scene(scenes, act):
    scenes[act].result()
