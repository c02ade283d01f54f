"""The divergence of a tuned model from its base on answers of the base."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.batches import pad
from finetune.data.encoded import EncodedExample
from finetune.distributed.runtime import Runtime
from finetune.engine.products import in_float64
from finetune.engine.reference import logits_of_padded
from finetune.logs import waiting
from finetune.model.base import evaluation_mode

if TYPE_CHECKING:
    from finetune.runs.model_files import LoadedRun


def compare_answers(
    runtime: Runtime,
    tuned: LoadedRun,
    base: LoadedRun | None,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> Iterator[list[float]]:
    """Yield, for each prompt, the divergence and the log-probabilities of the base's answer, as means over its tokens.

    An answer includes the token that ends it. Without `base`, the adapter is switched off.
    """
    model = tuned.model if base is None else base.model
    as_base = tuned.model.disable_adapter if base is None else nullcontext
    rows = [torch.tensor([*both[0], *both[1]]) for both in zip(prompts, answers, strict=True)]
    targets = [torch.arange(len(row)) >= len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
    microbatch = pad([EncodedExample(*both) for both in zip(rows, targets, strict=True)])
    with evaluation_mode(model), as_base():
        before, labels = runtime.placement.forward(logits_of_padded, model, microbatch)
    with evaluation_mode(tuned.model):
        after, _ = runtime.placement.forward(logits_of_padded, tuned.model, microbatch)
    size = min(before.shape[1], after.shape[1])  # one embedding may have more rows of padding
    lengths = [len(answer) for answer in answers]
    for of_base, of_tuned, ids in zip(*(torch.split(each, lengths) for each in (before, after, labels)), strict=True):
        base_log, tuned_log = (in_float64(each[:, :size]).log_softmax(1) for each in (of_base, of_tuned))
        divergence = (base_log.exp() * (base_log - tuned_log)).sum(1)
        places = ids.unsqueeze(1).to(base_log.device)
        chosen = (each.gather(1, places) for each in (base_log, tuned_log))
        yield [float(values.mean()) for values in (divergence, *chosen)]


def least_seconds(runtime: Runtime, model: Any, prompts: Sequence[list[int]], num_batches: int) -> float:
    """Return a bound below the time of all batches, from one forward over the prompts of a batch.

    Each token of an answer takes at least a token's share of that forward, and two more forwards compare the models.
    """
    microbatch = pad([EncodedExample(torch.tensor(row), torch.ones(len(row), dtype=torch.bool)) for row in prompts])
    begun = time.monotonic()
    with evaluation_mode(model), waiting("timing a forward over general prompts"):
        runtime.placement.forward(logits_of_padded, model, microbatch)
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    return 3 * (time.monotonic() - begun) * num_batches
