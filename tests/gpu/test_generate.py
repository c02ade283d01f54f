"""Answers on the device are those of the CPU: greedy ones and sampled ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from finetune.distributed.torch_settings import deterministic_algorithms
from finetune.engine import replayed as replayed_steps
from finetune.engine.fused import replayed_or_not
from finetune.inference import decoding
from finetune.inference.decoding import Decoding, generate_answers
from finetune.inference.sampling import Sampling
from tests.gpu.models import placed
from tests.tiny_models import tiny_examples

PROMPTS = [row.input_ids.tolist() for row in tiny_examples(6, shortest=2, longest=30)]
WAYS = {"greedy": None, "sampled": Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=5)}


@pytest.mark.parametrize("by", ["transformers", "engine"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["phi-3", "phi-4-mini"])
def test_answers(
    family: str, way: str, is_deterministic: bool, by: str, device: torch.device, monkeypatch: Any
) -> None:
    """Also by the engine, which answers on a GPU only with `training.graphs=true`."""
    monkeypatch.setattr(decoding, "engine_continues", lambda model: by != "transformers" or model.device.type == "cpu")
    asked = Decoding(stop_ids=[63], max_new_tokens=12, sampling=WAYS[way])
    with deterministic_algorithms() if is_deterministic else nullcontext():
        here = generate_answers(placed(family, "fp32", device).eval(), PROMPTS, asked, batch_size=3)
    there = generate_answers(placed(family, "fp32", torch.device("cpu")).eval(), PROMPTS, asked, batch_size=2)
    assert here == there
    assert any(len(answer) == 12 for answer in here)


@pytest.mark.parametrize(
    ("family", "precision"),
    [("phi-3", "fp32"), ("phi-4-mini", "fp32"), *((family, "bf16") for family in ("phi-4", "phi-4-mini", "qwen3"))],
)
@pytest.mark.parametrize("way", WAYS)
def test_answers_that_are_replayed_are_those_of_the_engine(
    family: str, way: str, precision: Any, device: torch.device, monkeypatch: Any
) -> None:
    """Also of rows that leave, across several graphs, and across the boundary of LongRoPE.

    In bf16, near ties are common, and other shapes round differently: most tokens are equal.
    """
    monkeypatch.setattr(replayed_steps, "COLUMNS_OF_STEP", 16)
    monkeypatch.setattr(decoding, "engine_continues", lambda _: True)
    model = placed(family, precision, device).eval()
    asked = Decoding(stop_ids=[5, 6, 63], max_new_tokens=40, sampling=WAYS[way], keeps_stop=True)
    allocated = torch.cuda.memory_allocated if device.type == "cuda" else lambda: 0
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        with replayed_or_not(True):
            replayed = generate_answers(model, PROMPTS, asked, batch_size=6)
            held = allocated()  # libraries keep memory after their first use
            assert generate_answers(model, PROMPTS, asked, batch_size=6) == replayed
            assert allocated() == held, "a graph or a cache is still there"
        with replayed_or_not(False):
            eager = generate_answers(model, PROMPTS, asked, batch_size=6)
    if precision == "fp32":
        assert replayed == eager
    else:
        firsts = [mine[0] == other[0] for mine, other in zip(replayed, eager, strict=True)]
        assert sum(firsts) >= len(firsts) - 1


def test_answers_in_bf16(device: torch.device) -> None:
    model = placed("phi-4", "bf16", device).eval()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        answers = generate_answers(model, PROMPTS, Decoding(stop_ids=[63], max_new_tokens=4), batch_size=6)
    assert all(token < 64 for answer in answers for token in answer)
    assert any(answers)
