"""Which forward a run uses, and what is recorded of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from finetune.config.schema import Config, LoraSection
from finetune.distributed.launch import launch
from finetune.engine import attention_cuda, products
from finetune.engine.attention_cuda import prepare_varlen
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.products import Processor
from finetune.errors import ConfigError
from finetune.model.lora import add_lora
from finetune.model.shrunken import random_model, shrunken_config
from finetune.training import captures, forward
from finetune.training.captures import captured_microbatches, why_not_captured
from finetune.training.forward import agree_on_forward
from tests.tiny_models import build_tiny, tiny_gemma2_config, tiny_phi3_config, tiny_phi_config


@pytest.mark.parametrize("is_strict", [False, True])
def test_attention_that_a_gpu_lacks_is_a_fallback(is_strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attention_cuda.why_not_varlen.cache_clear()
    monkeypatch.setattr(attention_cuda, "_varlen_options", lambda: frozenset({"is_causal"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    config = Config.model_validate(
        {"strict": is_strict, "training": {"device": "cpu", "precision": "bf16", "fused": False}}
    )
    with launch(config) as runtime:
        here = runtime.context
        model = build_tiny(tiny_phi3_config())
        assert agree_on_forward(runtime, config.training, model).why_not_engine is None
        assert runtime.fallbacks.as_records() == []
        runtime.context = here._replace(device=torch.device("cuda", 0))
        try:
            if is_strict:
                with pytest.raises(ConfigError, match=r"no varlen_attn with scale and window_size.*strict"):
                    agree_on_forward(runtime, config.training, model)
                return
            agree_on_forward(runtime, config.training, model)
        finally:
            runtime.context = here
            attention_cuda.why_not_varlen.cache_clear()
        [taken] = runtime.fallbacks.as_records()
        assert (taken["what"], taken["used"]) == ("training.kernels", "memory-efficient attention")
        assert "varlen_attn" in taken["why"]


@pytest.mark.parametrize(("model_type", "is_known"), [("gpt2", False), ("phimoe", True)])
def test_a_family_that_is_not_known_is_told_how_to_prove_it(
    model_type: str, is_known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate({"training": {"device": "cpu", "precision": "fp32", "fused": False}})
    model = random_model(shrunken_config(AutoConfig.for_model(model_type)))
    with launch(config) as runtime:
        assert agree_on_forward(runtime, config.training, model).why_not_engine is not None
        (taken,) = runtime.fallbacks.as_records()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if taken["why"] in line]
    assert (f"`finetune doctor --model '{model_type}'` proves" in line) is not is_known


@pytest.mark.parametrize(
    ("precision", "widened", "is_told"),
    [("bf16", {torch.bfloat16}, True), ("bf16", set(), False), ("fp32", {torch.bfloat16}, False)],
)
def test_a_run_that_this_cpu_computes_slowly_in_16_bits_is_told_so(
    precision: str,
    widened: set[torch.dtype],
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The engine converts to fp32 there; transformers' own forward multiplies one number at a time."""
    monkeypatch.setattr(products, "WIDENED", frozenset(widened))
    config = Config.model_validate({"training": {"device": "cpu", "precision": precision, "fused": False}})
    with launch(config) as runtime:
        assert agree_on_forward(runtime, config.training, build_tiny(tiny_gemma2_config())).why_not_engine is not None
    assert ("much faster with training.precision=fp32" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("flags", "precision", "width", "expected"),
    [
        ("avx512_bf16", "auto", 512, "AVX512-BF16"),
        ("amx_bf16 avx512_bf16", "fp32", 512, "AMX"),
        ("avx512_bf16", "bf16", 512, None),
        ("avx512_bf16", "fp32", 64, None),
        ("avx512f", "fp32", 512, None),
    ],
)
def test_an_fp32_run_says_what_bf16_would_change(
    flags: str,
    precision: str,
    width: int,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(forward, "PROCESSOR", Processor("GenuineIntel", frozenset(flags.split())))
    config = Config.model_validate({"training": {"device": "cpu", "precision": precision, "fused": False}})
    model = build_tiny(tiny_phi3_config(hidden_size=width, intermediate_size=64, num_hidden_layers=1))
    with launch(config) as runtime:
        forward.mention_bf16(runtime, model)
        assert runtime.fallbacks.as_records() == []
    said = [line for line in capsys.readouterr().err.splitlines() if "training.precision=bf16" in line]
    assert [f"({expected})" in line for line in said] == [True] * (expected is not None)


def test_why_a_run_captures_no_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2))

    def setup(runtime: Any, model: Any = adapted, *, strict: bool = False, **given: Any) -> Any:
        """The parts of a run that matter here."""
        own = {name: given.pop(name) for name in ("loss", "gradient_checkpointing", "is_packed") if name in given}
        return SimpleNamespace(
            runtime=runtime,
            config=Config.model_validate({"strict": strict, "training": {"graphs": True, **given}}),
            model=model,
            loss=summed_cross_entropy,
            hooks=SimpleNamespace(loss=own.get("loss")),
            memory=SimpleNamespace(gradient_checkpointing=own.get("gradient_checkpointing", False)),
            is_packed=own.get("is_packed", True),
        )

    config = Config.model_validate({"training": {"device": "cpu", "precision": "bf16", "fused": False}})
    with launch(config) as runtime:
        assert captured_microbatches(setup(runtime)) is None
        [taken] = runtime.fallbacks.as_records()
        assert (taken["used"], taken["why"]) == (
            "one launch for each kernel",
            "the device is cpu, and only CUDA has graphs",
        )
        monkeypatch.setattr(captures, "prepared_by_the_host", lambda *_: prepare_varlen)
        here, runtime.context = runtime.context, runtime.context._replace(device=torch.device("cuda", 0))
        try:
            assert why_not_captured(setup(runtime)) is None
            for key, value, name in (
                ("objective", "dpo", "dpo"),
                ("deterministic", True, "deterministic"),
                ("profile", 2, "profile"),
                ("neftune_alpha", 5.0, "neftune"),
                ("loss", print, "script's own"),
                ("gradient_checkpointing", True, "checkpointed"),
                ("is_packed", False, "all layers"),
            ):
                assert name in (why_not_captured(setup(runtime, **{key: value})) or "")
            for name in ("resid_pdrop", "embd_pdrop"):
                noisy = add_lora(build_tiny(tiny_phi_config(**{name: 0.1})), LoraSection(r=2))
                assert why_not_captured(setup(runtime, noisy)) == "the base has dropout of its own"
            dora = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2, dora=True))
            assert why_not_captured(setup(runtime, dora)) == "the engine does not compute all layers"
            for owner, name, value, reason in (
                (captures, "has_rounded_weights", lambda _: True, "the base is in 4 bits or in fp8"),
                (type(runtime.placement), "needs_equal_microbatches", True, "several processes shard the weights or "),
                (runtime, "precision", "fp32", "the run does not compute in 16 bits"),
            ):
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, value)
                    assert (why_not_captured(setup(runtime)) or "").startswith(reason)
            whole = build_tiny(tiny_phi3_config())
            assert why_not_captured(setup(runtime, whole)) == "other weights than LoRA's are trained"
            monkeypatch.setattr(captures, "prepared_by_the_host", lambda *_: None)
            assert "flash attention" in (why_not_captured(setup(runtime)) or "")
        finally:
            runtime.context = here
    strict = Config.model_validate({"strict": True, "training": {"device": "cpu", "precision": "bf16", "fused": False}})
    with launch(strict) as runtime, pytest.raises(ConfigError, match=r"one launch for each kernel.*strict=true"):
        captured_microbatches(setup(runtime))
