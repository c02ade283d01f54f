"""A real Slurm starts the processes: one world of all tasks of a step, and of nothing else."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.curves import (
    FULL,
    PLAIN_CASES,
    REFERENCE_BATCH_SIZE,
    Case,
    assert_cases,
    assert_one_curve,
    curve_alone,
    read_run,
    reference_of,
    reporting_words,
    run_words,
)
from tests.in_process import run_finetune
from tests.launches import REPOSITORY, alive_with, reports_in, wait_until
from tests.sweep.conftest import words_of
from tests.warm import programs

pytestmark = [pytest.mark.slow]
SCRIPT = Path(__file__).with_name("report_place.py")
COLD = sys.executable
LAUNCH_FILES = REPOSITORY / "recipes" / "launch"
_MARK = "FINETUNE_TEST_MARK"


def environment_of(cluster, **variables):
    path = f"{Path(COLD).parent if sys.executable == COLD else programs()}:{os.environ['PATH']}"
    named = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **cluster.variables, **named, **variables}


def run(cluster, *command, **variables):
    """Run srun or sbatch; output and errors come back together."""
    done = subprocess.run(
        list(map(str, command)),
        env=environment_of(cluster, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def submit(cluster, folder, *command, **variables):
    """Run sbatch and wait until the job has ended; the job's own output."""
    log = folder / "job.log"
    job = run(cluster, "sbatch", "--parsable", f"--output={log}", *command, **variables).strip()
    # `sbatch --wait` would look every ten seconds only.
    try:
        wait_until(
            lambda: run(cluster, "squeue", "--noheader", "--jobs", job) == "",
            "the end of the job",
            told=lambda: show(cluster, job),
        )
        state = show(cluster, job)
    finally:
        run(cluster, "scancel", "--quiet", job)  # one that has not ended would slow down all that follows
    output = log.read_text() if log.exists() else ""
    assert "JobState=COMPLETED" in state, f"{state}\n{output}"
    return output


def column(reports, name):
    return [report[name] for report in reports]


def assert_one_world(reports, size):
    assert column(reports, "rank") == list(range(size))
    assert column(reports, "world_size") == [size] * size
    assert column(reports, "ranks_met") == [2**size - 1] * size
    assert len({(report["address"], report["port"]) for report in reports}) == 1
    assert column(reports, "visible_gpus") == [""] * size, (
        "tests hide this host's GPUs, from a job that asks for some too"
    )


@pytest.mark.warm
def test_all_tasks_of_a_step_are_one_world(cluster, tmp_path):
    """Two tasks on one node and one on another, dealt in turn."""
    run(cluster, "srun", "-N", "2", "-n", "3", "-m", "cyclic", "-w", "n1,n3", sys.executable, SCRIPT, tmp_path)
    reports = reports_in(tmp_path)
    assert_one_world(reports, 3)
    assert column(reports, "slurm_node") == ["n1", "n3", "n1"]
    assert column(reports, "local_rank") == [0, 0, 1]
    assert column(reports, "local_world_size") == [2, 1, 2]
    assert {(each["launcher"], each["backend"], each["address"]) for each in reports} == {("slurm", "gloo", "n1")}
    assert 20000 <= reports[0]["port"] < 32000


@pytest.mark.warm
def test_the_body_of_a_batch_script_is_one_process_and_is_told_of_srun(cluster, tmp_path):
    output = submit(cluster, tmp_path, "--ntasks=2", "--wrap", f"{sys.executable} {SCRIPT} {tmp_path}")
    assert column(reports_in(tmp_path), "world_size") == [1]
    assert "Prefix the command with srun" in output


@pytest.mark.warm
def test_torchrun_under_srun_has_ranks_of_its_own(cluster, tmp_path):
    """On one node; the shipped batch file has one torchrun on each of two."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run(cluster, "srun", "-n", "1", "--cpus-per-task=2", *torchrun, SCRIPT, tmp_path)
    reports = reports_in(tmp_path)
    assert_one_world(reports, 2)
    assert set(column(reports, "launcher")) == {"torchrun"}
    assert column(reports, "slurm_rank") == ["0", "0"]


@pytest.mark.warm
def test_two_steps_of_one_job_are_two_worlds(cluster, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    # Each world stays until the other one has reported, so that both are there at one time.
    step = f"srun --exact --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 {sys.executable} {SCRIPT}"
    body = f"{step} {first} {second} & {step} {second} {first} & wait"
    output = submit(cluster, tmp_path, "--nodes=2", "--ntasks-per-node=2", "--wrap", body)
    one, other = reports_in(first), reports_in(second)
    assert (len(one), len(other)) == (2, 2), output
    assert_one_world(one, 2)
    assert_one_world(other, 2)
    assert one[0]["port"] != other[0]["port"]


def test_a_cancelled_step_leaves_no_process(cluster, tmp_path):
    """In interpreters that Slurm itself starts; the other tests' processes are forked off a warm one."""
    mark = f"finetune-test-{tmp_path.name}"
    command = ["srun", "--job-name", mark, "-N", "2", "-n", "2", sys.executable, SCRIPT, tmp_path, tmp_path / "never"]
    step = subprocess.Popen(
        list(map(str, command)),
        env=environment_of(cluster, **{_MARK: mark}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: len(reports_in(tmp_path)) == 2 or step.poll() is not None, "two reports", 60)
        assert step.poll() is None, step.communicate()[0]
        assert len(alive_with(_MARK, mark)) >= 3, "srun and two tasks"
        run(cluster, "scancel", "--name", mark)
        wait_until(lambda: not alive_with(_MARK, mark), "the end of all", 15)
    finally:
        step.kill()
        step.communicate()


@pytest.mark.warm
def test_recipes_under_srun_train_like_one_process(cluster, tmp_path):
    run(cluster, "srun", "-n", "2", sys.executable, *reporting_words(tmp_path, PLAIN_CASES))
    assert_cases("srun", tmp_path, PLAIN_CASES, world_size=2, launcher="slurm")


@pytest.mark.warm
def test_torchrun_from_the_shipped_batch_file_trains_like_one_process(cluster, tmp_path):
    here = ["--partition=tests", "--gpus-per-node=2", "--cpus-per-task=1", "--time=5", "--nodes=2"]
    words = [LAUNCH_FILES / "slurm_torchrun.sbatch", "task=finetune_lora", *run_words(tmp_path / "run")]
    output = submit(cluster, tmp_path, *here, *words, PROCESSES_PER_NODE="1")
    trained = read_run(tmp_path / "run")
    assert (trained.record["world_size"], trained.record["launcher"]) == (2, "torchrun"), output
    assert_one_curve(trained, curve_alone(), Case(REFERENCE_BATCH_SIZE).row("sbatch, torchrun on two nodes", 2))


SHARDED = Case(REFERENCE_BATCH_SIZE, words=("parallel=sharded",), note="sharding=fsdp2")
BY_NODE = ("parallel=sharded_by_node", "parallel.shard_size=2")
SHARDED_BY_NODE = Case(REFERENCE_BATCH_SIZE, recipe=FULL, words=BY_NODE, note="sharding=fsdp2, shard_size=2")


@pytest.mark.warm
@pytest.mark.parametrize(
    ("case", "file", "num_nodes", "form"),
    [
        (SHARDED, "slurm_one_node", 1, "sbatch, srun on one node"),
        (SHARDED_BY_NODE, "slurm_several_nodes", 2, "sbatch, srun on two nodes"),
    ],
    ids=["lora on two cards", "full on two nodes"],
)
def test_a_model_larger_than_a_gpu_trains_like_one_process(cluster, tmp_path, case, file, num_nodes, form):
    """The commands of docs/tasks/larger-than-a-gpu.md, at tiny size."""
    here = ["--partition=tests", "--gpus-per-node=2", "--cpus-per-task=1", "--time=5"]
    options = [f"--nodes={num_nodes}", "--ntasks-per-node=2", LAUNCH_FILES / f"{file}.sbatch"]
    words = ["task=finetune_full", "optim.learning_rate=1e-3"] if case.recipe == FULL else ["task=finetune_lora"]
    output = submit(cluster, tmp_path, *here, *options, *case.words, *run_words(tmp_path / "run"), *words)
    trained = read_run(tmp_path / "run")
    assert (trained.record["sharding"], trained.record["shard_size"]) == ("fsdp2", 2), output
    assert trained.record["world_size"] == 2 * num_nodes
    assert_one_curve(trained, reference_of(case), case.row(form, 2 * num_nodes))


def start_on_one_node(cluster, folder):
    """Submit a job of two tasks, and wait until it trains. Return its id, and functions that read its log and state."""
    log = folder / "job.log"
    here = ["--partition=tests", "--gpus-per-node=2", "--cpus-per-task=1", "--time=5", "--ntasks-per-node=2"]
    words = [LAUNCH_FILES / "slurm_one_node.sbatch", "task=finetune_lora", *run_words(folder / "run")]
    job = run(cluster, "sbatch", "--parsable", f"--output={log}", *here, *words).strip()

    def output():
        return log.read_text() if log.exists() else ""

    def told():
        return f"{show(cluster, job)}\n{output()}"

    wait_until(lambda: "Process 0/2 started" in output(), "the start", told=told)
    return job, output, told


@pytest.mark.warm
def test_a_job_that_is_told_to_stop_is_queued_again_and_goes_on_as_if_nothing_had_been(cluster, tmp_path):
    job, output, told = start_on_one_node(cluster, tmp_path)
    run(cluster, "scancel", "--signal=USR1", job)
    wait_until(lambda: "Restarts=1" in show(cluster, job), "the requeue", told=told)
    stopped = re.search(
        r"stopped at step (\d+) as asked by SIGUSR1 on ranks .*; checkpoint committed: go on with", output()
    )
    assert stopped, output()
    # Slurm itself would let it wait for two minutes, and refuses to hurry while its nodes are still cleaning up. A node
    # takes a start within the second of the requeue for one of the job that was ended ("Job credential revoked").
    time.sleep(2)
    is_resumed = f"resumed from step={stopped[1]}"
    wait_until(lambda: hurries(cluster, job) and is_resumed in output(), "the second start", told=told)
    wait_until(lambda: "JobState=COMPLETED" in show(cluster, job), "the end of the job", told=told)
    row = Case(REFERENCE_BATCH_SIZE).row("sbatch, srun on one node", 2)
    assert_one_curve(read_run(tmp_path / "run"), curve_alone(), row)


@pytest.mark.warm
def test_a_job_that_its_user_cancels_is_not_queued_again(cluster, tmp_path):
    job, output, told = start_on_one_node(cluster, tmp_path)
    run(cluster, "scancel", job)
    ended = re.compile("JobState=(CANCELLED|PENDING)")
    wait_until(lambda: ended.search(show(cluster, job)), "the end of the job", told=told)
    assert "checkpoint committed: go on with resume=auto" in output()
    assert "JobState=CANCELLED" in show(cluster, job), told()


@pytest.mark.warm
def test_a_sweep_as_an_array_trains_a_trial_in_each_task(cluster, tmp_path):
    here = ["--partition=tests", "--array=1-2", "--gpus-per-node=1", "--cpus-per-task=1", "--time=5"]
    words = words_of(tmp_path / "sweep", "seed=1,2")
    output = submit(cluster, tmp_path, *here, LAUNCH_FILES / "slurm_sweep.sbatch", *words)
    for number in (1, 2):
        assert f"trial-00{number} is completed" in output
        assert read_run(tmp_path / f"sweep/trial-00{number}").record["world_size"] == 1
    shown = run_finetune("sweep", *words, "--report")
    assert shown.stdout.count("completed") == 2, shown.stdout
    assert "(best)" in shown.stdout


def show(cluster, job):
    return run(cluster, "scontrol", "show", "job", "--oneliner", job)


def hurries(cluster, job):
    """Ask that a waiting job start now; true once it no longer waits."""
    if "JobState=PENDING" not in show(cluster, job):
        return True
    command = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
    subprocess.run(command, env=environment_of(cluster), capture_output=True, timeout=120)
    return False
