"""What finetune sees of the device: its identity, the second one of two, what `doctor` and `plan` say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from finetune import load_config
from finetune.diagnose.plan_devices import find_device
from finetune.distributed.rank_devices import device_identity, refuse_shared_devices
from finetune.errors import LaunchError
from finetune.training.train import train
from tests.gpu.models import write_inputs
from tests.in_process import run_finetune
from tests.tiny_training import events, words_for


def test_a_real_gpu_has_an_identity(device: torch.device, only_on_cuda: None) -> None:
    index = torch.cuda.device_count() - 1
    identity = device_identity(torch.device("cuda", index))
    assert identity is not None
    assert str(torch.cuda.get_device_properties(index).uuid) in identity
    with pytest.raises(LaunchError, match="ranks 0, 1"):
        refuse_shared_devices([identity, identity])


def test_the_second_gpu_trains(device: torch.device, only_on_cuda: None, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("only one CUDA device")
    first = torch.cuda.memory_allocated(0)
    run = tmp_path / "run"
    own = ["training.device=cuda:1", "training.precision=auto"]
    train(load_config([*words_for(write_inputs(tmp_path), run), *own]))
    assert "device cuda:1" in (run / "log.txt").read_text()
    assert torch.cuda.memory_allocated(0) == first
    assert len(events(run, "step")) == 4


def test_doctor_finds_the_device_and_its_precision(device: torch.device, tmp_path: Path) -> None:
    words = [f"training.device={device}", f"output_dir={tmp_path / 'run'}"]
    findings = json.loads(run_finetune("doctor", "--json", *words).answer)["findings"]
    texts = [finding["what"] for finding in findings if finding["area"] == "Devices" and finding["level"] == "ok"]
    for beginning in (f"training uses {device.type}", "precision "):
        assert any(text.startswith(beginning) for text in texts), findings


def test_plan_finds_the_device_and_measures_the_time_of_a_step(device: torch.device, tmp_path: Path) -> None:
    found = find_device(str(device))
    assert (found.type, found.is_here, found.memory > 2**30) == (device.type, True, True)
    words = [*words_for(write_inputs(tmp_path), tmp_path / "run"), f"training.device={device}"]
    done = run_finetune("plan", "--json", "--probe", *words, "training.precision=auto")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.answer)["seconds_per_step"] > 0
