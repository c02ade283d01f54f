import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from finetune.distributed.accelerate_library import AccelerateCommand, read_launch_arguments
from finetune.distributed.accelerate_settings import launch_arguments, refused_settings
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


def test_other_commands_and_unknown_options_are_no_launch(tmp_path):
    for command in ("bash", "", "python train.py launch", "accelerate config", "accelerate"):
        assert launch_arguments(command.split()) is None
    assert launch_arguments(["bash", "-c", "accelerate launch"]) is None
    assert read_launch_arguments(["--no-such-option", "train.py"], tmp_path) is None


REPORT = """
import json, os, sys
from finetune.config.schema import Config
from finetune.distributed.accelerate_settings import (
    is_cpu_requested, read_accelerate_command, refused_settings, settings_of_accelerate
)
from finetune.distributed.environment import read_environment
command, refused = read_accelerate_command(os.environ), [setting for setting, why in refused_settings(os.environ)]
world_size = read_environment(os.environ).world_size
sharding = settings_of_accelerate(Config(), os.environ, world_size=world_size, trains=True) if not refused else {}
report = json.dumps({
    "world_size": world_size,
    "refused": refused,
    "cpu": is_cpu_requested(os.environ),
    "asked": command and command.num_processes,
    "engine": command and command.engine,
    "sharding": [f"{key}={value}" for key, (value, _) in sharding.items()],
})
sys.stdout.write(f"REPORT {report}\\n")  # in one piece, whoever else writes, PYTHONUNBUFFERED or not
"""
NOTHING = {"world_size": 1, "refused": [], "cpu": False, "asked": None, "engine": None, "sharding": []}
FSDP = """
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: bf16
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_activation_checkpointing: true}
parallelism_config: {parallelism_config_dp_shard_size: 2}
use_cpu: true
"""
PLAIN = "{num_processes: 4, num_machines: 1, distributed_type: MULTI_CPU, use_cpu: true}"
ENGINE = {
    **NOTHING,
    "world_size": 2,
    "sharding": [
        "parallel.sharding=fsdp2",
        "parallel.reshard_after_forward=False",
        "training.gradient_checkpointing=True",
        "parallel.shard_size=2",
    ],
}


def reports_of_accelerate(options, config, folder, monkeypatch):
    (folder / "report.py").write_text(REPORT)
    if config is not None:
        (folder / "c.yaml").write_text(config)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    script = [] if any(word.startswith("report") for word in options) else ["report.py"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, *script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if "REPORT" in line]


@pytest.mark.slow
def test_what_a_real_accelerate_launch_was_asked_for_is_known(tmp_path, monkeypatch):
    options = ["--config_file", "c.yaml", "--main_process_port", "0"]
    assert reports_of_accelerate(options, FSDP, tmp_path, monkeypatch) == [ENGINE] * 2


@pytest.mark.slow
def test_the_default_config_file_counts(tmp_path, monkeypatch):
    default = tmp_path / "hub" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text(PLAIN)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (report,) = reports_of_accelerate([], None, tmp_path, monkeypatch)
    assert (report["world_size"], report["asked"], report["cpu"]) == (1, 4, True)
