"""A few measured steps of a shallow model with random weights: how long a step of the whole one will take here."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.decoder import bare_model
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.microbatch import Microbatch
from finetune.training.optim import build_optimizer

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.diagnose.plan_trace import DeviceKind

_FEW, _MORE = 1, 3
"""Layers of the two models that are measured; every further layer takes as long as those between them."""
_REPETITIONS = 3


def seconds_of(model: Any, microbatch: Microbatch, config: Config, *, kind: DeviceKind) -> float:
    """Seconds of a micro-batch through forward, backward and the optimizer, for the model's whole depth.

    Args:
        model: on the meta device, its weights in the types of the run; it is given random weights, and the layers
            beyond the few that are measured are taken out.
        microbatch: on the CPU.
        config: for the optimizer.
        kind: of the device at hand.
    """
    device = torch.device(kind)
    decoder = bare_model(model).get_decoder()
    every = list(decoder.layers)
    depth = len(every)
    few, more = min(_FEW, depth), min(_MORE, depth)
    decoder.layers = torch.nn.ModuleList(every[:more])
    _give_weights(model, device)
    there = microbatch.to(device)
    is_bf16 = any(weight.dtype == torch.bfloat16 for weight in model.parameters())
    taken = {}
    for number in {more, few}:
        decoder.layers = torch.nn.ModuleList(every[:number])
        taken[number] = _measure(model, there, config, is_bf16=is_bf16)
    if few == more:
        return taken[few]
    return taken[few] + (depth - few) * max(0.0, taken[more] - taken[few]) / (more - few)


def _measure(model: Any, microbatch: Microbatch, config: Config, *, is_bf16: bool) -> float:
    optimizer = build_optimizer(model, config.optim)
    device = next(model.parameters()).device
    seconds = []
    for _ in range(1 + _REPETITIONS):
        begun = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16):
            summed = summed_cross_entropy(model, microbatch)
        (summed / max(1, microbatch.num_targets)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return median(seconds[1:])  # the first makes what later ones find ready


def _give_weights(model: Any, device: torch.device) -> None:
    """Small random numbers in place of nothing; tied weights stay tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in made:
                values = torch.empty(weight.shape, dtype=weight.dtype, device=device).normal_(0, 0.02)
                made[id(weight)] = torch.nn.Parameter(values, weight.requires_grad)
            module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.ones(buffer.shape, dtype=buffer.dtype, device=device)
