"""Greedy decoding with the right stop ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from finetune.model.base import evaluation_mode


def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """The most likely continuation of each prompt, token by token, up to a stop id.

    Args:
        model: a causal language model or a PEFT model around one, on its device.
        prompts: token ids, none empty.
        stop_ids: generation of a row ends at any of these; they are not part of the answer.
        max_new_tokens: the longest answer.
        batch_size: prompts decoded together. Prompts of like length are, so that little is padded.

    Returns:
        Answer token ids in the order of the prompts.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    with evaluation_mode(model):
        for start in range(0, len(by_length), batch_size):
            rows = by_length[start : start + batch_size]
            decoded = _decode(model, [prompts[row] for row in rows], stop_ids, max_new_tokens)
            for row, answer in zip(rows, decoded, strict=True):
                answers[row] = answer
    return answers


def _decode(model: Any, prompts: list[Sequence[int]], stop_ids: Sequence[int], max_new_tokens: int) -> list[list[int]]:
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):  # padded on the left: every answer starts in the same column
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
        use_cache=True,
    )
    device = next(model.parameters()).device
    generated = model.generate(
        input_ids=input_ids.to(device), attention_mask=mask.to(device), generation_config=settings
    )
    return [_until_stop(row, stop_ids) for row in generated[:, longest:].tolist()]


def _until_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:position]
    return tokens
