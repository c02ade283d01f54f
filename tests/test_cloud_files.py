"""The files in recipes/launch/ for clusters and clouds: their fields, and their commands as two nodes on one host.

No cloud runs them here. The shell text of each file runs as it is, with the variables that the platform would set.
"""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from finetune.errors import FinetuneError, PreemptedError
from tests.curves import assert_one_curve, curve_alone, read_run, run_words
from tests.launches import REPOSITORY, free_port
from tests.warm import programs

FOLDER = REPOSITORY / "recipes" / "launch"
LIMIT_SECONDS = 240

SKYPILOT_TASK = {
    *("name", "workdir", "num_nodes", "resources", "file_mounts", "volumes", "envs", "secrets", "setup", "run")
}
SKYPILOT_RESOURCES = {
    *("infra", "accelerators", "cpus", "memory", "instance_type", "use_spot", "disk_size", "disk_tier"),
    *("network_tier", "image_id", "ports", "labels", "any_of", "ordered", "autostop", "job_recovery"),
}
SKYPILOT_RECOVERY = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
"""Fields of https://docs.skypilot.co/en/latest/reference/yaml-spec.html. SkyPilot checks a task with the functions
`get_task_schema` and `get_resources_schema` of sky/utils/schemas.py, but it installs too much for a test."""


AZUREML = "FINETUNE_AZUREML"
LOAD_AZUREML = """
import sys
from azure.ai.ml import load_job
validated = load_job(sys.argv[1])._validate()
sys.exit(None if validated.passed else str(validated.error_messages))
"""


def objects():
    found = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    return {each["kind"]: each for each in found}


def job_and_container():
    job = objects()["Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return job, container


def variables_of(container):
    return {each["name"]: each["value"] for each in container["env"]}


def task():
    return yaml.safe_load((FOLDER / "skypilot.yaml").read_text())


@pytest.mark.needs("kubernetes_validate")
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_objects_fit_the_schemas_of_kubernetes(version):
    import kubernetes_validate

    found = objects()
    assert found.keys() == {"PersistentVolumeClaim", "Service", "Job"}
    for each in found.values():
        assert kubernetes_validate.validate(each, version, strict=True) == version
    found["Job"]["spec"]["podFailurePolicies"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="podFailurePolicies"):
        kubernetes_validate.validate(found["Job"], version, strict=True)


def test_the_objects_of_kubernetes_name_each_other():
    found, (job, container) = objects(), job_and_container()
    pod, variables, name = job["spec"]["template"]["spec"], variables_of(container), job["metadata"]["name"]
    service = found["Service"]["metadata"]["name"]
    assert pod["subdomain"] == service
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert found["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert variables["MASTER_ADDR"] == f"{name}-0.{service}"
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(variables["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(variables["GPUS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [found["PersistentVolumeClaim"]["metadata"]["name"]]
    assert [each["name"] for each in container["volumeMounts"]] == [each["name"] for each in pod["volumes"]]


def test_kubernetes_restarts_a_preempted_pod_and_gives_up_after_a_mistake():
    job, container = job_and_container()
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {FinetuneError.exit_code: "FailJob", PreemptedError.exit_code: "Ignore"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {container["name"]}
    assert [rule["action"] for rule in rules if "onPodConditions" in rule] == ["Ignore"]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "a Job with podFailurePolicy allows no other"
    assert pod["terminationGracePeriodSeconds"] > 30, "the default, in which a large checkpoint is not written"


def test_the_task_of_skypilot_has_documented_fields_only():
    found = task()
    resources = found["resources"]
    assert found.keys() <= SKYPILOT_TASK
    assert resources.keys() <= SKYPILOT_RESOURCES
    assert resources["job_recovery"].keys() <= SKYPILOT_RECOVERY
    assert resources["job_recovery"]["recover_on_exit_codes"] == [PreemptedError.exit_code]
    assert (type(found["num_nodes"]), resources["use_spot"]) == (int, True)
    assert all(isinstance(value, str) for value in found["envs"].values())
    (mounted,) = found["volumes"]
    assert f"output_dir={mounted}/" in found["envs"]["ARGUMENTS"]


def azureml_job():
    return yaml.safe_load((FOLDER / "azureml.yaml").read_text())


@pytest.mark.slow
@pytest.mark.skipif(AZUREML not in os.environ, reason=f"azure-ai-ml: not installed; {AZUREML} names its Python")
def test_the_loader_of_azure_ai_ml_accepts_the_job_and_refuses_a_wrong_one(tmp_path):
    def load(text):
        file = tmp_path / "job.yaml"
        file.write_text(text)
        words = [os.environ[AZUREML], "-c", LOAD_AZUREML, file]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)

    text = (FOLDER / "azureml.yaml").read_text()
    done = load(text)
    assert done.returncode == 0, done.stderr
    assert load(text.replace("instance_count: 2", "instance_count: two")).returncode != 0


def test_the_job_of_azureml_names_its_parts():
    job = azureml_job()
    assert (job["type"], job["distribution"]) == ("command", {"type": "pytorch", "process_count_per_instance": 1})
    assert int(job["environment_variables"]["NODES"]) == job["resources"]["instance_count"]
    assert all(isinstance(value, str) for value in job["environment_variables"].values())
    assert all(f"${{{{inputs.{name}}}}}" in job["command"] for name in job["inputs"])
    assert all(f"${{{{outputs.{name}}}}}" in job["command"] for name in job["outputs"])


def pod_command(index, words, port):
    """The command of a pod and the variables that it has on a cluster; GPUs and addresses are those of this machine."""
    _, container = job_and_container()
    here = {"NODES": "2", "GPUS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [*container["command"], *words], {**variables_of(container), **here, "JOB_COMPLETION_INDEX": str(index)}


def node_command(index, words, port):
    """What SkyPilot runs on a node, and the variables that it sets."""
    activate = Path.home() / "finetune/bin/activate"  # the test's own environment stands for the one of `setup`
    activate.parent.mkdir(parents=True, exist_ok=True)
    activate.touch()
    own = {"ARGUMENTS": shlex.join(words), "MASTER_PORT": port}
    place = {"SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    addresses = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    return ["bash", "-c", task()["run"]], {**task()["envs"], **own, **place, **addresses}


def azureml_command(index, words, port):
    """The command of a node, with AzureML's variables, and with the paths of this run for its input and output."""
    given = dict(word.partition("=")[::2] for word in words)
    text = azureml_job()["command"].replace("${{inputs.rows}}", given.get("data.path", "shipped:orders"))
    text = text.replace("${{outputs.runs}}/chats", given.get("output_dir", "runs/none"))
    own = {"ARGUMENTS": shlex.join(words), "GPUS_PER_NODE": "1"}
    place = {"NODE_RANK": str(index), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    of_node = {"RANK": str(index), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return ["bash", "-c", text], {**azureml_job()["environment_variables"], **own, **place, **of_node}


class TwoNodes:
    """The command of a file, started once for each of two nodes. Their output goes to a file each."""

    def __init__(self, command_of, words, folder):
        port = str(free_port())
        self.logs = [folder / f"node-{index}.log" for index in (0, 1)]
        self.processes = []
        for index, log in enumerate(self.logs):
            command, variables = command_of(index, list(map(str, words)), port)
            variables.pop("HF_HOME", None)  # a place on the cluster's volume
            path = f"{programs()}:{os.environ['PATH']}"
            own = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", **variables}
            with log.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=REPOSITORY, env={**os.environ, **own}, stdout=output, stderr=subprocess.STDOUT
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()  # its workers end with it
            process.wait()

    def text(self):
        return "\n".join(log.read_text() for log in self.logs)

    def wait_until(self, is_so):
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, self.text()
            assert all(process.poll() is None for process in self.processes), self.text()
            time.sleep(0.1)

    def exit_codes(self):
        return [process.wait(LIMIT_SECONDS) for process in self.processes]


FILES = pytest.mark.parametrize(
    "command_of", [pod_command, node_command, azureml_command], ids=["kubernetes", "skypilot", "azureml"]
)


@pytest.mark.slow
@pytest.mark.warm
@FILES
def test_two_nodes_train_like_one_process(tmp_path, command_of):
    with TwoNodes(command_of, ["task=finetune_lora", *run_words(tmp_path / "run")], tmp_path) as nodes:
        assert nodes.exit_codes() == [0, 0], nodes.text()
    trained = read_run(tmp_path / "run")
    assert (trained.record["world_size"], trained.record["launcher"]) == (2, "torchrun")
    assert_one_curve(trained, curve_alone())


@pytest.mark.slow
@pytest.mark.warm
def test_when_one_node_is_preempted_both_exit_with_75_and_go_on(tmp_path):
    words = ["task=finetune_lora", *run_words(tmp_path / "run", "training.max_steps=100000")]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with TwoNodes(pod_command, words, tmp_path) as nodes:
        nodes.wait_until(lambda: metrics.exists() and '"step": 2,' in metrics.read_text())
        nodes.processes[1].send_signal(signal.SIGTERM)
        assert nodes.exit_codes() == [75, 75], nodes.text()
        assert "as asked by SIGTERM on rank 1; checkpoint committed" in nodes.text()
    with TwoNodes(pod_command, words, tmp_path) as nodes:
        nodes.wait_until(lambda: "resumed from step=" in nodes.text())
        nodes.processes[0].send_signal(signal.SIGTERM)
        assert nodes.exit_codes() == [75, 75], nodes.text()


@pytest.mark.slow
@pytest.mark.warm
def test_a_mistake_of_the_user_keeps_its_exit_code(tmp_path):
    with TwoNodes(pod_command, ["task=finetune_lora", "no.such_key=1"], tmp_path) as nodes:
        assert nodes.exit_codes() == [2, 2], nodes.text()
    assert "no.such_key" in nodes.text()
