"""What torch's reducer makes of two ranks' gradients, beside the flat sum; started by the tests through torchrun."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist

from finetune.config.schema import Config, LoraSection
from finetune.data.batches import pad
from finetune.distributed.gradients import Reducer, sum_flat
from finetune.distributed.launch import launch
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.microbatch import Microbatch
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.model.base import checkpoint_gradients
from finetune.model.lora import add_lora
from finetune.training.optim import trainable_parameters
from tests.launches import write_report
from tests.tiny_models import build_tiny, tiny_examples, tiny_gemma2_config, tiny_phi3_config, tiny_phi_config

CPU = torch.device("cpu")
CONFIGS = {"phi": tiny_phi_config(), "phi3": tiny_phi3_config(), "gemma2": tiny_gemma2_config()}
METHODS = ("lora", "full", "lora_checkpointed")
SHARES = {"uneven": (2, 1), "one_has_none": (2, 0)}
"""Micro-batches of each rank."""
NUM_STEPS = 3
"""torch rebuilds its buckets after the first."""


class OneOfTwo(torch.nn.Module):
    """Two weights, of which a backward pass reaches as many as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(2))
        self.second = torch.nn.Parameter(torch.ones(2))
        self.nobodys = torch.nn.Parameter(torch.ones(2))


def loss_of_some(model: Any, factors: tuple[float, float]) -> torch.Tensor:
    """A weight with a factor of zero is left out of the graph."""
    weights = zip(factors, (model.first, model.second), strict=True)
    return torch.stack([factor * weight.sum() for factor, weight in weights if factor]).sum()


def tiny(kind: str, method: str) -> torch.nn.Module:
    model: Any = build_tiny(CONFIGS[kind])
    if method.startswith("lora"):
        model = add_lora(model, LoraSection(r=2, alpha=4.0))
        torch.manual_seed(1)
        for parameter in trainable_parameters(model):
            parameter.data.normal_(std=0.2)
    if method.endswith("checkpointed"):
        checkpoint_gradients(model)
    return model.train()


def shares_of(rank: int, shares: tuple[int, int]) -> list[Microbatch]:
    """This rank's micro-batches, of 2 rows of their own each."""
    rows = list(tiny_examples(2 * sum(shares), seed=5))
    begin = 2 * sum(shares[:rank])
    return [pad(rows[begin + 2 * n : begin + 2 * n + 2]) for n in range(shares[rank])]


def gradients_flat(model: torch.nn.Module, microbatches: list[Microbatch]) -> list[torch.Tensor]:
    parameters = trainable_parameters(model)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for microbatch in microbatches:
        summed_cross_entropy(model, microbatch).backward()
    sum_flat(parameters)
    return [parameter.grad.clone() for parameter in parameters]


def gradients_reduced(model: torch.nn.Module, microbatches: list[Microbatch], rounds: int) -> list[list[torch.Tensor]]:
    """The gradients of each of `NUM_STEPS` equal steps; nothing is updated in between."""
    reducer = Reducer(model, summed_cross_entropy, device=CPU)
    padded = microbatches + [EMPTY_MICROBATCH] * (rounds - len(microbatches))
    steps = []
    for _ in range(NUM_STEPS):
        model.zero_grad()
        for position, microbatch in enumerate(padded):
            reducer.loss(microbatch, is_last=position == rounds - 1).backward()
        steps.append([parameter.grad.clone() for parameter in trainable_parameters(model)])
    return steps


def difference(kind: str, method: str, shares: tuple[int, int]) -> float:
    """The largest relative difference of the reducer's gradients from the flat ones."""
    microbatches = shares_of(dist.get_rank(), shares)
    expected = joined(gradients_flat(tiny(kind, method), microbatches))
    found = map(joined, gradients_reduced(tiny(kind, method), microbatches, max(shares)))
    return max(float(torch.linalg.norm(each - expected) / torch.linalg.norm(expected)) for each in found)


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def unused_parameters() -> list[list[float] | None]:
    """Rank 0 reaches the first weight, rank 1 the second; three times, since torch complains in the next step only."""
    model = OneOfTwo()
    reducer = Reducer(model, loss_of_some, device=CPU, find_unused_parameters=True)
    for _ in range(NUM_STEPS):
        model.zero_grad()
        reducer.loss((2.0, 0.0) if dist.get_rank() == 0 else (0.0, 3.0), is_last=True).backward()
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def two_models(runtime: Runtime) -> list[list[float]]:
    """The loss of each of two models by themselves, and by a runtime that uses the reducer."""
    models = [tiny("phi3", "lora"), tiny("phi", "lora")]
    (microbatch,) = shares_of(0, (1, 0))
    with torch.no_grad():
        expected = [summed_cross_entropy(model, microbatch).item() for model in models]
    return [
        expected,
        [runtime.placement.loss(summed_cross_entropy, model, microbatch, is_last=True).item() for model in models],
    ]


def main(folder: str) -> None:
    config = Config.model_validate(
        {"training": {"device": "cpu", "precision": "fp32"}, "parallel": {"gradient_sync": "ddp"}}
    )
    with launch(config, trains=False) as runtime:
        seen: dict[str, Any] = {
            f"{kind} {method} {name}": difference(kind, method, shares)
            for kind in CONFIGS
            for method in METHODS
            for name, shares in SHARES.items()
        }
        report = {"differences": seen, "unused": unused_parameters(), "two": two_models(runtime)}
        reducer = weakref.ref(runtime.placement._reducer)
    write_report(folder, runtime.rank, {**report, "is_reducer_gone": reducer() is None})


if __name__ == "__main__":
    main(sys.argv[1])
