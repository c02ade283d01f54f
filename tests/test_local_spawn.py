"""`parallel.num_processes` starts the same command line that many times, and ends with its exit code."""

from __future__ import annotations

import json
import socket

import pytest

from tests.launches import REPOSITORY, free_port, run_launched
from tests.tiny_runs import random_model_words, write_base, write_rows

RECIPE = REPOSITORY / "recipes" / "finetune_lora.py"
SESSION = """
from finetune import launch, load_config
with launch(load_config({words!r})):
    pass
"""

pytestmark = [pytest.mark.slow, pytest.mark.warm]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "tokenizer")
    write_rows(folder / "rows")
    return folder


@pytest.fixture
def words(inputs, tmp_path):
    return [
        "task=finetune_lora",
        *random_model_words(inputs / "tokenizer"),
        *(f"data.path={inputs / 'rows'}", f"data.cache_dir={inputs / 'cache'}", f"output_dir={tmp_path / 'run'}"),
        *("training.device=cpu", "training.batch_size=4", "training.max_steps=2", "testing.num_samples=0"),
    ]


def test_a_recipe_as_two_processes(words, tmp_path):
    """tests/test_one_curve.py has the command line."""
    done = run_launched("python", [RECIPE, *words, "parallel.num_processes=2"])
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["status"], record["world_size"], record["launcher"]) == ("completed", 2, "spawn")
    assert record["backend"] == "gloo"
    assert record["global_batch"]["global_batch_size"] == 8
    assert done.stdout.count("Training and testing completed successfully!") == 1


def test_a_mistake_that_all_workers_meet_is_said_once(words, tmp_path):
    words = [*words, f"data.path={tmp_path / 'no-such-rows.jsonl'}", "parallel.num_processes=2"]
    done = run_launched("python", ["-m", "finetune", "train", *words])
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("finetune: DataError: ") == 1, done.stdout
    assert "no-such-rows.jsonl" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_session_without_a_command_line_is_refused(words, tmp_path):
    """As a notebook is."""
    done = run_launched("python", ["-c", SESSION.format(words=[*words, "parallel.num_processes=2"])], cwd=tmp_path)
    assert done.returncode != 0
    assert "LaunchError: parallel.num_processes runs the command line again, and this session has none" in done.stdout
    assert "torchrun" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_the_launcher_s_own_number_is_no_contradiction(words, tmp_path):
    done = run_launched("torchrun", [RECIPE, *words, "parallel.num_processes=2", "training.max_steps=1"])
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["world_size"], record["launcher"]) == (2, "torchrun")


WHERE = """
import os, sys
from finetune import command, launch, load_config
def main(overrides):
    with launch(load_config(overrides)) as runtime:
        print("rank", runtime.rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
command(main)
"""


def test_the_workers_meet_at_the_address_of_the_configuration(words, tmp_path):
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    port = free_port()
    asked = ["parallel.num_processes=2", "parallel.master_addr=127.0.0.1", f"parallel.master_port={port}"]
    done = run_launched("python", [script, *words, *asked])
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"rank {rank} 127.0.0.1 {port}\n" in done.stdout
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_launched("python", [script, *words, asked[0], f"parallel.master_port={port}"])
    assert done.returncode == 2, done.stdout
    assert f"LaunchError: the processes cannot meet at 127.0.0.1:{port}: " in done.stdout
    assert "Set parallel.master_port to a free port, or remove it" in done.stdout


def test_an_address_that_others_reach_is_refused(words):
    asked = ["parallel.num_processes=2", "parallel.master_addr=203.0.113.1"]  # of no machine: RFC 5737
    done = run_launched("python", ["-m", "finetune", "train", *words, *asked])
    assert done.returncode == 2, done.stdout
    assert "LaunchError: parallel.master_addr is 203.0.113.1, but parallel.num_processes is 2" in done.stdout
    assert "Remove parallel.master_addr" in done.stdout
