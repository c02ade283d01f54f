"""Which forward a run uses, and what is recorded of it."""

from __future__ import annotations

import pytest
import torch

from finetune.config.schema import Config
from finetune.distributed.launch import launch
from finetune.engine import attention_cuda
from finetune.errors import ConfigError
from finetune.training.forward import agree_on_forward
from tests.tiny_models import build_tiny, tiny_phi3_config


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
