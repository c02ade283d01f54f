"""Answers on the device are those of the CPU: greedy ones and sampled ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks.gpu.decoding_graph import GraphedDecoder
from finetune.distributed.device import deterministic_algorithms
from finetune.inference import decoding
from finetune.inference.decoding import Decoding, Sampling, generate_answers
from tests.gpu.models import placed
from tests.tiny_models import tiny_examples

PROMPTS = [row.input_ids.tolist() for row in tiny_examples(6, shortest=2, longest=30)]
WAYS = {"greedy": None, "sampled": Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=5)}


@pytest.mark.parametrize("by", ["transformers", "engine", "graph"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["phi-3", "phi-4-mini"])
def test_answers(
    family: str, way: str, is_deterministic: bool, by: str, device: torch.device, monkeypatch: Any
) -> None:
    """Also by the engine, alone or with a CUDA graph, which answers on no GPU before its speed has been measured."""
    monkeypatch.setattr(decoding, "_engine_continues", lambda model: by != "transformers" or model.device.type == "cpu")
    if by == "graph":
        monkeypatch.setattr(decoding, "CachedDecoder", GraphedDecoder)
    asked = Decoding(stop_ids=[63], max_new_tokens=12, sampling=WAYS[way])
    with deterministic_algorithms() if is_deterministic else nullcontext():
        here = generate_answers(placed(family, "fp32", device).eval(), PROMPTS, asked, batch_size=3)
    there = generate_answers(placed(family, "fp32", torch.device("cpu")).eval(), PROMPTS, asked, batch_size=2)
    assert here == there
    assert any(len(answer) == 12 for answer in here)


def test_answers_in_bf16(device: torch.device) -> None:
    model = placed("phi-4", "bf16", device).eval()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        answers = generate_answers(model, PROMPTS, Decoding(stop_ids=[63], max_new_tokens=4), batch_size=6)
    assert all(token < 64 for answer in answers for token in answer)
    assert any(answers)
