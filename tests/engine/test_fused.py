"""Fused functions as torch.compile makes them for the CPU: against the formulas, against float64, for any rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from finetune.config.schema import Config
from finetune.distributed.launch import launch
from finetune.engine import fused
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.loss_head import _loss_and_gradient
from finetune.engine.mlp import _gated
from finetune.errors import ConfigError
from finetune.training.forward import agree_on_forward
from tests.engine.test_fake_device import ROWS, TARGETS, adapted, loss_and_gradients
from tests.engine.test_loss_head import assert_every_probability_counts
from tests.engine.test_rounding import CASES, test_results_and_gradients_differ_by_rounding_alone
from tests.launches import run_command
from tests.tiny_models import build_tiny, tiny_phi3_config


@pytest.fixture(autouse=True)
def _no_threads() -> Iterator[None]:
    """Compile in this thread: Inductor keeps its threads until the process ends."""
    with inductor_config.patch(compile_threads=1):
        yield


@pytest.fixture
def _fused() -> Iterator[None]:
    torch._dynamo.reset()
    fused.switch_fused(True)
    yield
    fused.switch_fused(False)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_fused")
def test_a_function_is_compiled_once_for_any_number_of_rows() -> None:
    def differs(rows: int) -> float:
        x = torch.randn(rows, 64, requires_grad=rows % 2 == 0)
        with torch.no_grad():
            return float((_gated(x) - fused.FORMULAS["finetune::gated"](x)).abs().sum())

    assert differs(5) < 1e-4
    with torch.compiler.set_stance("fail_on_recompile"):
        assert [differs(rows) < 1e-3 for rows in (64, 7, 200, 2)] == [True] * 4
        assert [differs(rows) for rows in (0, 1)] == [0, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("_fused")
def test_every_kind_of_rows_is_compiled_however_many_there_are() -> None:
    """By default, torch.compile computes the ninth without kernels of its own, and no run would know."""
    before = counters["stats"]["unique_graphs"]
    for number, width in enumerate((64, 32, 16), start=1):
        with torch._dynamo.config.patch(recompile_limit=1):
            _gated(torch.randn(5, width))
        assert counters["stats"]["unique_graphs"] == before + number


@pytest.mark.slow
@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["rms_norm", "normed_linear", "gated_mlp", "split_heads"])
def test_fused_functions_differ_from_float64_by_rounding_alone(name: str, dtype: Any, tolerance: float) -> None:
    assert name in CASES
    test_results_and_gradients_differ_by_rounding_alone(name, dtype, tolerance)


@pytest.mark.slow
@pytest.mark.usefixtures("_fused")
def test_small_probabilities_count_in_a_large_vocabulary() -> None:
    logits = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(0)) * 4
    labels = logits.argmax(1)
    losses, gradient = _loss_and_gradient(logits, labels[:, None])
    assert_every_probability_counts(losses.double().mean(), gradient / len(labels), logits, labels)


@pytest.mark.slow
@pytest.mark.usefixtures("_fused")
def test_a_whole_model_computes_the_same_every_time() -> None:
    family = "phi"
    settings = TARGETS.get(family, {})
    run = partial(loss_and_gradients, loss=summed_cross_entropy, microbatch=pack(ROWS))
    (loss, gradients), (again, gradients_again) = (run(adapted(family, **settings)) for _ in range(2))
    fused.switch_fused(False)
    exact_loss, exact = run(adapted(family, **settings))
    assert loss == again
    assert loss == pytest.approx(exact_loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name
        assert (gradient - exact[name]).norm() <= 1e-5 * exact[name].norm() + 1e-6, name


@pytest.mark.few(1)
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_machine_without_a_compiler_falls_back(is_strict: bool) -> None:
    config = Config.model_validate({"strict": is_strict, "training": {"device": "cpu", "fused": True}})
    fused.why_not_fused.cache_clear()
    torch._dynamo.reset()
    missing = {"cpp.cxx": ("/no/such/g++",), "fx_graph_cache": False}
    try:
        with inductor_config.patch(missing), launch(config) as runtime:
            model = build_tiny(tiny_phi3_config())
            if is_strict:
                with pytest.raises(ConfigError, match=r"training\.fused: wanted fused functions.*strict"):
                    agree_on_forward(runtime, config.training, model)
                return
            agree_on_forward(runtime, config.training, model)
            [taken] = runtime.fallbacks.as_records()
            assert taken["what"] == "training.fused"
            assert "torch.compile fails" in taken["why"]
            assert not fused._is_on
    finally:
        fused.why_not_fused.cache_clear()
        torch._dynamo.reset()


@pytest.mark.parametrize("wish", ["auto", False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cpu_fuses_for_one_run_and_only_if_asked(wish: Any) -> None:
    config = Config.model_validate({"training": {"device": "cpu", "fused": wish}})
    with launch(config) as runtime:
        agree_on_forward(runtime, config.training, build_tiny(tiny_phi3_config()))
        assert fused._is_on is (wish is True)
        assert runtime.fallbacks.as_records() == []
    assert not fused._is_on


_GATE = """
import sys, torch
from pathlib import Path
from torch._dynamo.utils import counters
from finetune.engine import fused
from finetune.engine.mlp import _gated
with fused.kernels_kept_in(Path(sys.argv[1])), fused.fused_or_not(True):
    _gated(torch.randn(5, 64))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
@pytest.mark.warm
def test_a_later_process_finds_the_kernels_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    script = tmp_path / "gate.py"
    script.write_text(_GATE)
    found = [run_command([sys.executable, script, tmp_path / "kernels"]) for _ in range(2)]
    assert [done.stdout.split() for done in found] == [["0", "1"], ["1", "0"]]


def test_torch_keeps_its_own_folder_of_kernels_where_the_other_one_cannot_be_written(tmp_path, monkeypatch) -> None:
    """With a home that cannot be written, as of a user without one in a container, no model could be loaded."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with fused.kernels_kept_in(tmp_path / "file/kernels"):
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setattr(os, "access", lambda *_: False)  # these tests may run as root, who may write anywhere
    with fused.kernels_kept_in(tmp_path / "kernels"):
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_the_folder_of_kernels_is_the_users_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    with fused.kernels_kept_in(tmp_path / "kernels"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    with fused.kernels_kept_in(tmp_path / "kernels"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kernels")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
