import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from finetune.distributed.accelerate_settings import (
    launch_options,
    read_accelerate_command,
)
from finetune.distributed.environment import (
    is_cpu_requested,
    refused_settings,
    requested_accumulation,
    requested_precision,
)
from finetune.errors import LaunchError
from tests.distributed.launcher_variables import ACCELERATE, ACCELERATE_DEFAULTS, TORCHRUN
from tests.launches import REPOSITORY


def test_wishes_of_accelerate_are_read():
    assert is_cpu_requested({"ACCELERATE_USE_CPU": "True"})
    assert not is_cpu_requested({"ACCELERATE_USE_CPU": "False"})
    assert requested_precision({"ACCELERATE_MIXED_PRECISION": "bf16"}) == "bf16"
    assert requested_precision(ACCELERATE) is None
    assert requested_accumulation({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}) == 4
    assert requested_accumulation({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}) is None
    assert requested_accumulation(ACCELERATE) is None
    with pytest.raises(LaunchError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 'auto'"):
        requested_accumulation({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"})


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("ACCELERATE_USE_FSDP=true", "set parallel.sharding=fsdp2"),
        ("ACCELERATE_USE_DEEPSPEED=true", "set parallel.sharding=fsdp2"),
        ("ACCELERATE_USE_MEGATRON_LM=true", "set parallel.sharding=fsdp2"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG=true", "parallelism_config is not supported"),
        ("ACCELERATE_USE_SAGEMAKER=true", "SageMaker's data parallelism"),
        ("ACCELERATE_USE_NEWEST=true", "NEWEST is not supported"),
        ("ACCELERATE_DYNAMO_BACKEND=INDUCTOR", "does not compile models"),
        ("ACCELERATE_MIXED_PRECISION=fp16", "fp32 and bf16"),
        ("ACCELERATE_MIXED_PRECISION=fp8", "fp32 and bf16"),
        ("ACCELERATE_TORCH_DEVICE=cuda:1", "training.device"),
        ("ACCELERATE_IN_TPU_POD=1", "TPUs"),
        ("XLA_USE_BF16=1", "TPUs"),
        ("PJRT_DEVICE=TPU", "TPUs"),
    ],
)
def test_a_setting_of_accelerate_that_would_be_passed_over_is_refused_by_name(setting, reason):
    name, value = setting.split("=")
    ((found, why),) = refused_settings({**ACCELERATE_DEFAULTS, **TORCHRUN, name: value})
    assert found == setting
    assert reason in why


@pytest.mark.parametrize(
    "harmless",
    [
        {"ACCELERATE_USE_CPU": "True", "KMP_AFFINITY": "granularity=fine,compact,1,0"},
        {"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2"},
        {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO"},
        {"ACCELERATE_DEBUG_MODE": "true", "ACCELERATE_CPU_AFFINITY": "1", "ACCELERATE_LOG_LEVEL": "INFO"},
        {"ACCELERATE_CONFIG_FILE": "lab.yaml", "ACCELERATE_DYNAMO_MODE": "max-autotune"},
        {"ACCELERATE_MIXED_PRECISION": "bf16", "PJRT_DEVICE": "CUDA"},
    ],
)
def test_what_accelerate_exports_by_default_or_changes_nothing_is_no_reason_to_refuse(harmless):
    assert refused_settings({**ACCELERATE_DEFAULTS, **TORCHRUN, **harmless}) == []


# Every variable that the installed accelerate knows was looked at, and is compared, refused or without effect here.
JUDGED = {
    "ACCELERATE_USE_": "CPU DEEPSPEED FSDP MEGATRON_LM PARALLELISM_CONFIG SAGEMAKER",
    "ACCELERATE_DYNAMO_": "BACKEND MODE USE_DYNAMIC USE_FULLGRAPH USE_REGIONAL_COMPILATION",
    "ACCELERATE_FP8_": "BACKEND OPT_LEVEL OVERRIDE_FPROP OVERRIDE_DGRAD OVERRIDE_WGRAD",
    "ACCELERATE_": "MIXED_PRECISION GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING TORCH_DEVICE IN_TPU_POD "
    "DOWNCAST_BF16 SAGEMAKER_DISTRIBUTED_TYPE CONFIG_DS_FIELDS DEBUG_MODE CPU_AFFINITY LOG_LEVEL ENABLE_RICH "
    "ALLOW_CP_STANDALONE BYPASS_DEVICE_MAP INIT_INCLUDE_BUFFERS NUM_PROCESSES DEBUG_RDV_FILE",
}


def test_no_variable_of_the_installed_accelerate_is_unknown_here():
    judged = {prefix + name for prefix, names in JUDGED.items() for name in names.split()}
    sources = Path(find_spec("accelerate").origin).parent.rglob("*.py")
    quoted = re.compile(r"""["'](ACCELERATE_[A-Z0-9_]*[A-Z0-9])(?:=|["'])""")
    known = {name for source in sources for name in quoted.findall(source.read_text())}
    assert "ACCELERATE_MIXED_PRECISION" in known
    assert {name for name in known if not name.startswith("ACCELERATE_DEEPSPEED_")} <= judged


@pytest.mark.parametrize(
    "launch", [["/v/bin/accelerate", "launch"], ["/v/bin/accelerate-launch"], ["-m", "accelerate.commands.launch"]]
)
def test_the_options_of_a_launch_end_before_the_script(launch):
    command = ["/v/bin/python3", *launch, "--cpu", "--num_processes", "2", "train.py", "--num_processes", "7"]
    child = ["/v/bin/python3", "train.py", "--num_processes", "7"]
    assert launch_options(command, child) == ("--cpu", "--num_processes", "2")


@pytest.mark.parametrize(
    "command",
    [
        ["bash"],
        [],
        ["python", "train.py", "launch"],
        ["accelerate", "config"],
        ["accelerate"],
        ["bash", "-c", "accelerate launch"],
    ],
)
def test_other_commands_are_no_launch(command):
    assert launch_options(command, ["python", "train.py"]) is None


@pytest.mark.parametrize("environ", [{}, ACCELERATE, ACCELERATE_DEFAULTS])
def test_no_number_is_known_where_accelerate_did_not_start_this_process_alone(environ):
    # The last has the variables of a launch, but no `accelerate launch` among the ancestors: nobody can be asked.
    assert read_accelerate_command(environ) is None


REPORT = """
import json, os, sys
from finetune.distributed import environment as settings
from finetune.distributed.accelerate_settings import read_accelerate_command
command = read_accelerate_command(os.environ)
sharding = settings.requested_sharding(os.environ)
report = json.dumps({
    "world_size": settings.read_environment(os.environ).world_size,
    "refused": [setting for setting, why in settings.refused_settings(os.environ)],
    "precision": settings.requested_precision(os.environ),
    "accumulation": settings.requested_accumulation(os.environ),
    "cpu": settings.is_cpu_requested(os.environ),
    "asked": command and command.num_processes,
    "engine": command and command.engine,
    "sharding": [f"{key}={asked.value}" for key, asked in sharding.keys.items()] if sharding else None,
})
sys.stdout.write(f"REPORT {report}\\n")  # in one piece, whoever else writes, PYTHONUNBUFFERED or not
"""
NOTHING = {
    "world_size": 1,
    "refused": [],
    "precision": None,
    "accumulation": None,
    "cpu": False,
    "asked": None,
    "engine": None,
    "sharding": None,
}
FSDP = """
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: bf16
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_activation_checkpointing: true}
parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 2}
use_cpu: true
"""
COMPILED = (
    "{num_processes: 3, distributed_type: 'NO', dynamo_config: {dynamo_backend: INDUCTOR}, mixed_precision: bf16}"
)
PLAIN = "{num_processes: 4, num_machines: 1, distributed_type: MULTI_CPU, use_cpu: true}"
LAUNCHES = {
    "by default": ([], None, [NOTHING]),
    "the script's own words": (["report.py", "--num_processes", "9"], None, [NOTHING]),
    "on the CPU": (["--cpu", "--num_processes", "2"], None, [{**NOTHING, "asked": 2, "cpu": True}]),
    "a file for the CPU": (["--config_file", "c.yaml"], PLAIN, [{**NOTHING, "asked": 4, "cpu": True}]),
    "a file and an option": (
        ["--config_file=c.yaml", "--num-processes", "2", "-m", "report"],
        PLAIN,
        [{**NOTHING, "asked": 2, "cpu": True}],
    ),
    "compiled": (
        ["--config_file", "c.yaml"],
        COMPILED,
        [{**NOTHING, "asked": 3, "precision": "bf16", "refused": ["ACCELERATE_DYNAMO_BACKEND=INDUCTOR"]}],
    ),
    "an engine": (
        ["--config_file", "c.yaml", "--main_process_port", "0"],
        FSDP,
        [
            {
                **NOTHING,
                "world_size": 2,
                "precision": "bf16",
                "refused": ["PARALLELISM_CONFIG_TP_SIZE=2"],
                "sharding": [
                    "parallel.sharding=fsdp2",
                    "parallel.reshard_after_forward=False",
                    "training.gradient_checkpointing=True",
                    "parallel.shard_size=2",
                ],
            }
        ]
        * 2,
    ),
    "an engine by options": (
        ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--main_process_port", "0"],
        None,
        [{**NOTHING, "world_size": 2, "sharding": ["parallel.sharding=fsdp2"]}] * 2,
    ),
    "the first version of an engine": (
        ["--use_fsdp", "--num_processes", "2", "--main_process_port", "0"],
        None,
        [{**NOTHING, "world_size": 2, "refused": ["ACCELERATE_USE_FSDP=true"]}] * 2,
    ),
    "an engine that --cpu passes over": (
        ["--cpu", "--config_file", "c.yaml"],
        FSDP,
        [{**NOTHING, "asked": 2, "cpu": True, "precision": "bf16", "engine": "FSDP"}],
    ),
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


@pytest.mark.launch
@pytest.mark.parametrize("launch", LAUNCHES)
def test_what_a_real_accelerate_launch_was_asked_for_is_known(launch, tmp_path, monkeypatch):
    options, config, expected = LAUNCHES[launch]
    assert reports_of_accelerate(options, config, tmp_path, monkeypatch) == expected


@pytest.mark.launch
@pytest.mark.parametrize(("options", "asked"), [([], 4), (["--cpu"], None)])
def test_the_default_config_file_counts_unless_accelerate_passes_over_it(options, asked, tmp_path, monkeypatch):
    default = tmp_path / "hub" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text(PLAIN)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (report,) = reports_of_accelerate(options, None, tmp_path, monkeypatch)
    assert (report["world_size"], report["asked"], report["cpu"]) == (1, asked, True)
