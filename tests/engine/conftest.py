"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from finetune.engine import attention_cuda
from tests.engine.fake_device import FakeDevice, use_there


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The device, with attention as on CUDA in 16 bits."""
    if not {"window_size", "scale"} <= attention_cuda._varlen_options():
        pytest.skip("this torch's varlen_attn has no window or no scale")
    use_there(monkeypatch, "varlen")
    # torch starts a thread for each kind of device at its first backward pass, which may have been.
    with torch.autograd.set_multithreading_enabled(False), FakeDevice() as device:
        yield device
