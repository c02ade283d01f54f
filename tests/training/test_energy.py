"""Energy is read from the counters of the drivers, and is in no event where one cannot be read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.training.reporting.energy import EnergyMeter, cpu_counters, nvml_counters
from finetune.training.reporting.events import energy_reader
from tests.in_process import run_finetune
from tests.tiny_training import events, words_for

ZONES = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:1": "psys"}
NVML = """
#include <string.h>
static int calls;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = !strcmp(uuid, "GPU-old") ? (void *)1 : !strcmp(uuid, "GPU-1") ? (void *)2 : (void *)0;
    return *handle ? 0 : 6; /* NVML_ERROR_NOT_FOUND */
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *energy) {
    *energy = 5000000000 + 1500 * calls++;
    return handle == (void *)2 ? 0 : 3; /* NVML_ERROR_NOT_SUPPORTED */
}
"""
"""As NVML declares them; each call of the last one counts another 1.5 J."""
RUNS_WITH_COUNTERS = """
set -e
mount -t tmpfs none /sys/class
zone=/sys/class/powercap/intel-rapl:0
mkdir -p $zone
echo package-0 > $zone/name
echo 262143328850 > $zone/max_energy_range_uj
echo 0 > $zone/energy_uj
while :; do joules=$((joules + 1)); echo ${joules}000000 > $zone/energy_uj; sleep 0.02; done &
trap "kill $!" EXIT
"$@"
"""


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    for zone, name in ZONES.items():
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("9000000\n")
    count(tmp_path, 1_000_000)
    return tmp_path


def count(powercap: Path, microjoules: int) -> None:
    for zone in ZONES:
        (powercap / zone / "energy_uj").write_text(f"{microjoules}\n")


def test_packages_and_memory_are_counted_and_no_part_twice(powercap: Path) -> None:
    meter = EnergyMeter(0, powercap)
    count(powercap, 3_500_000)
    assert meter.spent() == {"cpu_joules": 5.0}
    assert meter.spent() == {"cpu_joules": 0.0}
    count(powercap, 500_000)
    assert meter.spent() == {"cpu_joules": 12.0}, "both counters began again after 9 J"


def test_a_counter_that_cannot_be_read_tells_nothing(powercap: Path) -> None:
    meter = EnergyMeter(0, powercap)
    (powercap / "intel-rapl:0:1" / "energy_uj").write_text("\n")
    assert meter.spent() == {}
    assert cpu_counters(powercap) == []
    assert EnergyMeter(1, powercap / "missing").spent() == {}, "no GPU is seen here either"


def test_a_run_on_several_nodes_has_no_energy() -> None:
    assert energy_reader("cuda", world_size=4, num_here=2) is dict


def test_gpus_are_counted_as_nvml_tells(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here to make a library with NVML's functions")
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=NVML, text=True, check=True)
    counters = nvml_counters(["GPU-1"], str(library))
    assert [counter.read() for counter in counters for _ in range(2)] == [5_000_001.5, 5_000_003.0]
    assert nvml_counters(["GPU-1", "GPU-old"], str(library)) == [], "one of them does not count"
    assert nvml_counters(["MIG-1"], str(library)) == []
    assert nvml_counters(["GPU-1"], str(tmp_path / "missing.so")) == []


@pytest.mark.slow
@pytest.mark.warm
def test_a_run_and_its_receipt_have_the_energy_of_its_steps(tmp_path: Path, inputs: Path) -> None:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root on Linux can lay counters over those of this machine")
    run = tmp_path / "run"
    words = [*words_for(inputs, run), "training.max_steps=4", "training.log_every=2", "testing.num_samples=0"]
    command = ["unshare", "--mount", "sh", "-c", RUNS_WITH_COUNTERS, "sh", sys.executable, "-m", "finetune", "train"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if "mount:" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    told = [event["cpu_joules"] for event in events(run, "resources")]
    assert len(told) == 2
    assert sum(told) > 0
    run_finetune("receipt", run, code=0)
    assert json.loads((run / "receipt.json").read_text())["energy"] == {"cpu_joules": pytest.approx(sum(told), abs=0.1)}
