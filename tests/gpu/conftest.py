"""Tests of a GPU. They run when they alone are named, `pytest tests/gpu`: beside any other test, GPUs are hidden.

`FINETUNE_TEST_DEVICE=cpu pytest tests/gpu` runs them on the CPU, all but those that say that they are about CUDA: so a
test that has never met a GPU has at least met what it tests (`tests/test_gpu_tests.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A GPU's machine may have other versions of torch and transformers, whose warnings are not what is tested."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device to test."""
    wish = torch.device(os.environ.get("FINETUNE_TEST_DEVICE", "cuda:0"))
    if wish.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return wish


@pytest.fixture(autouse=True, scope="session")
def _torch_compiles_in_this_process(device: torch.device) -> Iterator[None]:
    """The threads of torch's pool of processes never end, and a test would seem to leave them behind."""
    if device.type != "cuda":
        yield
        return
    from torch._inductor import config as inductor

    with inductor.patch(compile_threads=1):
        yield


@pytest.fixture
def only_on_cuda(device: torch.device) -> None:
    """For what no other device has."""
    if device.type != "cuda":
        pytest.skip(f"only CUDA has it, and FINETUNE_TEST_DEVICE is {device}")
