"""Two nodes with addresses of their own: one world across them, one curve, and nobody left when the cable is cut."""

import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.curves import REFERENCE_BATCH_SIZE, Case, assert_one_curve, curve_alone, read_run, recipe_words
from tests.launches import REPOSITORY, reports_in, wait_until
from tests.two_nodes import reason_against, torchrun, two_nodes
from tests.warm import with_interpreter

pytestmark = pytest.mark.slow
SCRIPT = REPOSITORY / "tests" / "slurm" / "report_place.py"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]


def made(own_name):
    reason = reason_against()
    if reason is not None:
        pytest.skip(reason)
    return two_nodes(own_name)


def run_on_both(nodes, words, **variables):
    ended = nodes.run(words, **variables)
    assert [code for code, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    return [output for _, output in ended]


@pytest.mark.warm
def test_two_nodes_train_like_one_process(tmp_path):
    """Nodes whose own name is a loopback address are one world all the same; the other tests' name their address."""
    with made(own_name="loopback") as nodes:
        run_on_both(nodes, [*torchrun(1), *recipe_words(tmp_path / "run")])
    trained = read_run(tmp_path / "run")
    assert (trained.record["world_size"], trained.record["launcher"]) == (2, "torchrun")
    assert_one_curve(trained, curve_alone(), Case(REFERENCE_BATCH_SIZE).row("torchrun on two nodes", 2))


@pytest.mark.warm
def test_the_shipped_accelerate_file_for_several_nodes(tmp_path):
    file = REPOSITORY / "recipes" / "launch" / "accelerate_several_nodes.yaml"
    with made(own_name="address") as nodes:
        place = ["--machine_rank", "%n", "--main_process_ip", nodes.nodes[0].address, "--num_processes", "4"]
        run_on_both(nodes, [*with_interpreter(ACCELERATE), file, *place, SCRIPT, tmp_path])
    reports = reports_in(tmp_path)
    assert [(each["rank"], each["world_size"], each["ranks_met"]) for each in reports] == [
        (rank, 4, 15) for rank in range(4)
    ]
    assert {each["launcher"] for each in reports} == {"accelerate"}
    assert [each["local_rank"] for each in reports] == [0, 1, 0, 1]


def test_a_cut_cable_ends_every_worker_on_both_nodes(tmp_path):
    with made(own_name="address") as nodes:
        words = [*torchrun(1), *recipe_words(tmp_path / "run", "training.max_steps=100000")]
        agents = [nodes.start(index, words) for index in (0, 1)]
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: has_step(metrics, 3) or any(agent.poll() is not None for agent in agents), "step 3")
        assert has_step(metrics, 3), [nodes.end_all() or agent.communicate()[0] for agent in agents]
        assert all(workers_on(nodes, index) for index in (0, 1))
        time.sleep(3)  # ranks tell each other once a second where they are
        nodes.cut_cable()
        with suppress(TimeoutError):
            wait_until(lambda: not any(workers_on(nodes, index) for index in (0, 1)), "the end of all", 15)
        left = [workers_on(nodes, index) for index in (0, 1)]
        nodes.end_all()  # torchrun's own agents may wait for minutes
        outputs = [agent.communicate()[0] for agent in agents]
    assert left == [[], []], "\n".join(outputs)
    for index, output in enumerate(outputs):
        assert re.search(rf"rank {1 - index} .* during \w+, step \d+", output), output


def has_step(metrics, step):
    return metrics.exists() and f'"step": {step},' in metrics.read_text()


def workers_on(nodes, index):
    """The command lines of all processes on a node, but torchrun's agent."""
    lines = []
    for pid in nodes.pids(index):
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended
    return [line for line in lines if line and "torch.distributed.run" not in line]
