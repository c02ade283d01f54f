import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from finetune.config.schema import Config
from finetune.distributed.accelerate_library import AccelerateCommand, read_launch_arguments
from finetune.distributed.accelerate_settings import compare_accelerate_command, launch_arguments, refused_settings
from finetune.distributed.environment import read_environment
from finetune.errors import LaunchError
from tests.distributed.launcher_variables import ACCELERATE_DEFAULTS, TORCHRUN
from tests.launches import REPOSITORY


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("ACCELERATE_USE_FSDP=true", "set parallel.sharding=fsdp2"),
        ("ACCELERATE_USE_DEEPSPEED=true", "set parallel.sharding=fsdp2"),
        ("ACCELERATE_NEWEST=3", "does not support it"),
        ("ACCELERATE_MIXED_PRECISION=fp8", "fp32, bf16 and fp16 only"),
        ("ACCELERATE_TORCH_DEVICE=cuda:1", "training.device"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=auto", "training.global_batch_size"),
    ],
)
def test_a_setting_of_accelerate_that_is_not_on_the_list_is_refused_by_name(setting, reason):
    name, value = setting.split("=")
    ((found, why),) = refused_settings({**ACCELERATE_DEFAULTS, **TORCHRUN, name: value})
    assert found == setting
    assert reason in why


@pytest.mark.parametrize(
    "harmless",
    [
        {"ACCELERATE_USE_CPU": "True", "KMP_AFFINITY": "granularity=fine,compact,1,0"},
        {"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
        {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO"},
        {"ACCELERATE_DEBUG_MODE": "true", "ACCELERATE_CPU_AFFINITY": "1", "ACCELERATE_NEWEST": "false"},
        {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_MODE": "max-autotune"},
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"},
    ],
)
def test_what_accelerate_exports_by_default_or_changes_nothing_is_not_refused(harmless):
    assert refused_settings({**ACCELERATE_DEFAULTS, **TORCHRUN, **harmless}) == []


def test_every_variable_of_the_installed_accelerate_was_looked_at():
    """A new one would be refused with a value of its own; here it shows before a user meets it."""
    sources = Path(find_spec("accelerate").origin).parent.rglob("*.py")
    quoted = re.compile(r"""["'](ACCELERATE_[A-Z0-9_]*[A-Z0-9])(?:=|["'])""")
    known = {name for source in sources for name in quoted.findall(source.read_text())}
    assert "ACCELERATE_MIXED_PRECISION" in known
    refused = {setting.split("=")[0] for setting, _ in refused_settings(dict.fromkeys(known, "some"))}
    names = "USE_DEEPSPEED USE_FSDP USE_MEGATRON_LM USE_PARALLELISM_CONFIG IN_TPU_POD DOWNCAST_BF16 DYNAMO_BACKEND "
    names += "GRADIENT_ACCUMULATION_STEPS MIXED_PRECISION TORCH_DEVICE SAGEMAKER_DISTRIBUTED_TYPE"
    assert refused <= {f"ACCELERATE_{name}" for name in names.split()}


@pytest.mark.parametrize(
    "launch", [["/v/bin/accelerate", "launch"], ["/v/bin/accelerate-launch"], ["-m", "accelerate.commands.launch"]]
)
def test_the_options_of_a_launch_end_before_the_script(launch, tmp_path):
    command = ["/v/bin/python3", *launch, "--cpu", "--num-processes=2", "train.py", "--num_processes", "7"]
    arguments = launch_arguments(command)
    assert arguments == command[1 + len(launch) :]
    assert read_launch_arguments(arguments, tmp_path) == AccelerateCommand(2, None)


def test_only_a_launch_on_cpus_contradicts_a_run_on_a_gpu(monkeypatch):
    def compare(device):
        config = Config.model_validate({"training": {"device": device}})
        return compare_accelerate_command(config, read_environment({}))

    assert compare("cuda") is None
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert compare("cpu") is compare("auto") is None
    with pytest.raises(LaunchError, match=r"--cpu was asked for, but training\.device is cuda"):
        compare("cuda")


def test_other_commands_and_unknown_options_are_no_launch(tmp_path):
    for command in ("bash", "", "python train.py launch", "accelerate config", "accelerate"):
        assert launch_arguments(command.split()) is None
    assert launch_arguments(["bash", "-c", "accelerate launch"]) is None
    assert read_launch_arguments(["--no-such-option", "train.py"], tmp_path) is None


REPORT = """
import os, sys
from finetune.distributed.accelerate_settings import is_cpu_requested, read_accelerate_command
sys.stdout.write(f"{read_accelerate_command(os.environ).num_processes} {is_cpu_requested(os.environ)}")
"""


@pytest.mark.slow
def test_the_default_config_file_of_a_real_accelerate_launch_counts(tmp_path, monkeypatch):
    (tmp_path / "report.py").write_text(REPORT)
    default = tmp_path / "hub" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("{num_processes: 4, num_machines: 1, distributed_type: MULTI_CPU, use_cpu: true}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    command = [sys.executable, "-m", "accelerate.commands.launch", "report.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "4 True", done.stderr
