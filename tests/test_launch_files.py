"""The files in recipes/launch/: those for accelerate on one node start as many ranks as they say.

Those for Slurm are run in tests/slurm/, the one for several nodes in tests/distributed/test_two_nodes.py. There is
no cloud here: the files for Kubernetes and SkyPilot are checked, and two shells run their commands as two nodes would.
"""

import json
import os
import signal
import time

import pytest
import yaml

from tests.launches import REPOSITORY, free_port, run_launched, start_command
from tests.tiny_runs import write_base, write_rows
from tests.warm import programs

FOLDER = REPOSITORY / "recipes" / "launch"
SCRIPT = REPOSITORY / "tests" / "slurm" / "report_place.py"


@pytest.mark.launch
@pytest.mark.warm
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("accelerate_cpu.yaml", []),
        ("accelerate_sharded.yaml", []),
        ("accelerate_one_node.yaml", ["--num_processes", "2"]),
    ],
)
def test_accelerate_starts_two_ranks_that_meet(tmp_path, file, options):
    words = ["-m", "accelerate.commands.launch", "--config_file", FOLDER / file, *options, SCRIPT, tmp_path]
    done = run_launched("python", words)
    assert done.returncode == 0, done.stdout
    reports = [json.loads(report.read_text()) for report in sorted(tmp_path.glob("rank-*.json"))]
    assert [(each["launcher"], each["rank"], each["ranks_met"]) for each in reports] == [
        ("accelerate", 0, 3),
        ("accelerate", 1, 3),
    ]


def test_the_table_names_every_file_and_no_other():
    table = (FOLDER / "README.md").read_text().splitlines()
    named = [line.split("`")[1] for line in table if line.startswith("| `")]
    assert sorted(named) == sorted(path.name for path in FOLDER.iterdir() if path.name != "README.md")


# --- clouds -----------------------------------------------------------------------------------------------------------

OF_A_TASK = {"name", "num_nodes", "resources", "workdir", "envs", "volumes", "setup", "run"}
OF_RESOURCES = {"accelerators", "use_spot", "job_recovery"}
"""Keys of SkyPilot 0.14 (`get_task_schema` and `get_resources_schema` in sky/utils/schemas.py)."""


def documents(file):
    return [*yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))]


@pytest.mark.needs("kubernetes_validate")
def test_the_kubernetes_file_has_the_fields_of_its_kinds():
    import kubernetes_validate

    found = documents("kubernetes.yaml")
    assert [each["kind"] for each in found] == ["Service", "PersistentVolumeClaim", "Job"]
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**found[0], "spec": {"clusterIp": "None"}}, "1.37", strict=True)


def test_the_kubernetes_pods_find_each_other_and_stop_like_one_run():
    service, claim, job = documents("kubernetes.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert given["FIRST_NODE"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert (pod["subdomain"], service["spec"]["clusterIP"]) == (service["metadata"]["name"], "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(given["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(given["PROCESSES_PER_NODE"])
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (by_code,) = (rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule)
    assert (by_code["containerName"], by_code["values"]) == (container["name"], [75])


def test_the_skypilot_file_has_known_keys_and_starts_again_after_a_stop():
    (task,) = documents("skypilot.yaml")
    assert set(task) == OF_A_TASK
    assert set(task["resources"]) == OF_RESOURCES
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}


def kubernetes_command(run_file, rank, port):
    job = documents("kubernetes.yaml")[-1]
    (script,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
    own = {"NODES": "2", "PROCESSES_PER_NODE": "1", "NODE_RANK": str(rank), "FIRST_NODE": "localhost"}
    return script.replace("/config/run.yaml", str(run_file)).replace("29400", str(port)), own


def skypilot_command(run_file, rank, port):
    (task,) = documents("skypilot.yaml")
    own = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_RANK": str(rank)}
    own["SKYPILOT_NODE_IPS"] = "localhost\nlocalhost"
    return task["run"].replace("run.yaml", str(run_file)).replace("29400", str(port)), own


@pytest.mark.launch
@pytest.mark.warm
@pytest.mark.parametrize("command", [kubernetes_command, skypilot_command])
def test_two_nodes_of_a_cloud_stop_together_and_go_on(tmp_path, command):
    base, rows, run, run_file = (tmp_path / name for name in ("base", "rows", "run", "run.yaml"))
    write_base(base)
    write_rows(rows)
    keys = {"task": "finetune_lora", "model.path": str(base), "data.path": str(rows), "training.device": "cpu"}
    keys |= {"data.cache_dir": str(tmp_path / "cache"), "optim.schedule": "constant", "testing.num_samples": 0}

    def start(max_steps):
        run_file.write_text(yaml.safe_dump({**keys, "training.max_steps": max_steps}))
        port = free_port()
        for rank in (0, 1):
            script, own = command(run_file, rank, port)
            own |= {"RUN": str(run), "PATH": f"{programs()}:{os.environ['PATH']}"}
            yield start_command(["bash", "-c", script], variables=own)

    def ends_of(nodes):
        said = [node.communicate(timeout=120)[0] for node in nodes]
        return [node.returncode for node in nodes], "".join(said)

    nodes = [*start(100_000)]
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").is_file() or '"step"' not in (run / "metrics.jsonl").read_text():
        assert time.monotonic() < until, [node.poll() for node in nodes]
        time.sleep(0.1)
    nodes[1].send_signal(signal.SIGTERM)  # as Kubernetes does to the first process of a pod
    codes, said = ends_of(nodes)
    assert codes == [75, 75], said
    stopped_at = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    codes, said = ends_of([*start(stopped_at + 2)])
    assert codes == [0, 0], said
    assert f"resumed from step={stopped_at}" in said
