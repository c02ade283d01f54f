"""The part of a GPU session on a real model's first layers, as far as a CPU computes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import real
from benchmarks.gpu.session import Session
from tests.real.conftest import HOME
from tools.real_model import CACHE

pytestmark = [pytest.mark.process, pytest.mark.warm]

TINY = Session(device="cpu", is_tiny=True)


def test_real_layers_are_measured_in_each_precision(
    real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers, whose values only show that what is compared is near."""
    monkeypatch.setattr(real, "CUT", tmp_path / "cut")
    real.cut(tmp_path / "cut", layers=2, whole=real_model, cache=HOME / CACHE.relative_to("~"))
    found = real.gradient(TINY)
    assert found["layers"] == 2
    assert found["bf16_loss"] == pytest.approx(found["fp32_loss"], rel=0.01)
    assert 0 < found["bf16_gradient_error"] < 0.1
    assert found["bf16_effect_kept"] == pytest.approx(1, abs=0.05)
    exact, rounded = (real.train(TINY, precision=precision) for precision in ("fp32", "fp8"))
    assert exact["loss_of_last_steps"] < exact["first_loss"]
    assert rounded["unseen_loss_on_fp32_base"] == pytest.approx(exact["unseen_loss_on_fp32_base"], rel=0.02)
    assert 0 < rounded["gradient_error"] < 0.5
