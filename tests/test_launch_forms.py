"""Launches that are not what was meant: one process says so and trains, or all of them are refused; never two runs.

How each launch that works gives one curve is in tests/test_one_curve.py.
"""

import json
import shutil

import pytest

from finetune.config.config_files import resolve_shipped
from tests.curve_table import Row
from tests.curves import (
    REFERENCE_BATCH_SIZE,
    Case,
    assert_one_curve,
    assert_one_world,
    curve_alone,
    read_run,
    reporting_words,
    reports_of_run,
)
from tests.launches import LAUNCHERS, free_port, place_variables, start_command
from tests.replay.scene import change_tensor

pytestmark = pytest.mark.slow
CASE = Case(REFERENCE_BATCH_SIZE)
_LIMIT_SECONDS = 300


def start(launcher, folder, *words, variables=None, cwd=None):
    """The reporting recipe in a folder of its own."""
    folder.mkdir(exist_ok=True)
    command = [*LAUNCHERS[launcher], *reporting_words(folder, [CASE], *words)]
    return start_command(command, variables=variables, cwd=cwd)


def ends(*processes):
    """Exit codes and outputs."""
    try:
        outputs = [process.communicate(timeout=_LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()
    return [process.returncode for process in processes], outputs


def assert_one_trained_alone(folder, row=None):
    """One process wrote, with the curve of a plain one; what it recorded in place of the wish."""
    assert_one_world(reports_of_run(folder, CASE.name), 1)
    run = read_run(folder / CASE.name)
    assert (run.record["status"], run.record["world_size"], run.record["backend"]) == ("completed", 1, "none")
    assert_one_curve(run, curve_alone(), row)
    (fallback,) = run.record["fallbacks"]
    return fallback


def assert_nothing_was_written(folder):
    assert reports_of_run(folder, CASE.name) == []
    assert not (folder / CASE.name / "run.json").exists()


def test_accelerate_launch_cpu_starts_one_process_and_the_run_says_so(tmp_path):
    """A strict run refuses it: see tests/distributed/test_runtime.py."""
    codes, (said,) = ends(start("accelerate_cpu", tmp_path))
    assert codes == [0], said
    fallback = assert_one_trained_alone(tmp_path)
    assert (fallback["what"], fallback["wanted"], fallback["used"]) == (
        "accelerate launch",
        "2 processes",
        "one process",
    )
    assert "accelerate launch was asked for 2 processes on the CPU and started one" in said
    last_lines = said.partition("\nNot as asked:\n")[2]
    assert last_lines.startswith(
        "  accelerate launch: wanted 2 processes, using one process: accelerate launch was asked"
    )
    assert "\nNext: finetune generate" in last_lines
    assert "--multi_gpu --num_processes 2" in said


@pytest.mark.warm
def test_ddp_that_was_asked_for_and_is_not_there(tmp_path):
    plain, strict = tmp_path / "plain", tmp_path / "strict"
    processes = (start("python", plain, "ddp=True"), start("python", strict, "ddp=True", "strict=true"))
    codes, (said, refused) = ends(*processes)
    assert codes == [0, 2], (said, refused)
    assert "[Trainer] Warning: DDP was requested but WORLD_SIZE is 1" in said
    fallback = assert_one_trained_alone(plain)
    assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("ddp", "several processes", "one process")
    assert "Traceback" not in refused
    assert "The run is strict" in refused
    assert_nothing_was_written(strict)


@pytest.mark.warm
def test_ddp_false_lets_one_of_two_processes_train(tmp_path):
    codes, (said,) = ends(start("torchrun", tmp_path, "ddp=False"))
    assert codes == [0], said  # torchrun ends with 0 only where every process did
    fallback = assert_one_trained_alone(tmp_path, Row("torchrun, ddp=False", 1, CASE.split, "0"))
    assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("ddp", "2 processes", "one process")
    assert "ddp=False refuses it: torchrun started 2 processes" in fallback["why"]
    assert "[Distributed] rank 0 trains alone: rank 1 of 2 leaves" in said


@pytest.mark.warm
def test_a_rank_that_leaves_does_not_look_at_the_folder_that_rank_0_writes_by_then(tmp_path):
    """Rank 1 is given another folder, which holds a run before rank 0 has begun its own."""
    held = tmp_path / "held"
    held.mkdir()
    (held / "log.txt").touch()
    port, words = free_port(), {0: [], 1: [f"output_dir={held}"]}
    processes = [
        start("python", tmp_path, "ddp=False", *words[rank], variables=place_variables(rank, 2, port)) for rank in words
    ]
    codes, outputs = ends(*processes)
    assert codes == [0, 0], outputs
    assert "[Distributed] rank 0 trains alone: rank 1 of 2 leaves" in outputs[1]


@pytest.mark.warm
def test_if_the_other_rank_never_comes_the_curve_stays_the_same(tmp_path):
    variables = place_variables(0, 2, free_port())
    codes, (said,) = ends(start("python", tmp_path, "parallel.timeout_minutes=0.05", variables=variables))
    assert codes == [0], said
    fallback = assert_one_trained_alone(tmp_path, Row("rank 1 of 2 never comes", 1, CASE.split, "0"))
    assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("ddp", "2 processes", "one process")
    assert "rank 1 of 2 did not join" in fallback["why"]
    assert "[Trainer] Warning: DDP was requested but rank 1 of 2 did not join" in said


@pytest.mark.warm
def test_ranks_that_were_given_different_words_are_refused_on_all_of_them(tmp_path):
    port = free_port()
    words = {0: [], 1: ["optim.learning_rate=1e-3"]}
    processes = [start("python", tmp_path, *words[rank], variables=place_variables(rank, 2, port)) for rank in words]
    assert_both_are_refused(tmp_path, processes, "LaunchError: the configuration of rank 1 differs from rank 0's")


def assert_both_are_refused(folder, processes, said_once):
    codes, outputs = ends(*processes)
    assert codes == [2, 2], outputs
    said = "".join(outputs)
    assert said.count(said_once) == 1, said
    assert "Traceback" not in said
    assert_nothing_was_written(folder)


@pytest.mark.promise
def test_a_report_counts_processes_and_not_ranks(tmp_path):
    """Two processes that both believe that they are alone must not look like one world."""
    alone = {"rank": 0, "world_size": 1, "ranks_met": 1.0, "writes": True}
    for process in (7, 8):
        (tmp_path / f"{CASE.name}.{process}.json").write_text(json.dumps(alone))
    reports = reports_of_run(tmp_path, CASE.name)
    assert len(reports) == 2
    for world_size in (1, 2):
        with pytest.raises(AssertionError):
            assert_one_world(reports, world_size)


@pytest.mark.warm
def test_ranks_whose_bases_have_other_weights_are_refused_on_all_of_them(tmp_path):
    """The same words name other files on each node."""
    port = free_port()
    for node in ("0", "1"):
        shutil.copytree(resolve_shipped("shipped:phi_tiny"), tmp_path / node / "base")
    change_tensor(tmp_path / "1" / "base" / "model.safetensors", "model.norm.weight")
    words = ["model.path=base", "model.init=pretrained", "model.config=null", "model.tokenizer=null"]
    processes = [
        start("python", tmp_path, *words, cwd=tmp_path / str(rank), variables=place_variables(rank, 2, port))
        for rank in (0, 1)
    ]
    assert_both_are_refused(tmp_path, processes, "the base model of rank 1 differs from rank 0's. Give every node the")
