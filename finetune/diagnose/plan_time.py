"""Predict the time of a step: a lower bound from its matrix products, or measured on a shallow random model.

The time to generate the answers that a step learns from is only measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from finetune.config.schema import Config, OptimSection
from finetune.engine.decoder import bare_model
from finetune.engine.fused import fused_or_not
from finetune.engine.kv_cache import CachedDecoder
from finetune.engine.loss import BY_DEVICE
from finetune.engine.products import full_shape, unchanged_weights
from finetune.inference.decoding import group_prompts, room_for_answer
from finetune.inference.sampling import Draw, Sampling
from finetune.model.base import evaluation_mode
from finetune.training.forward import Computation
from finetune.training.memory.tracing import IN_A_LAYER, name_of_layers
from finetune.training.optim import build_optimizer
from finetune.units import ceil_div

if TYPE_CHECKING:
    from finetune.diagnose.plan_batches import AssumedAnswers

_FLOPS = 2
"""A multiplication and an addition."""

_FEW, _MORE = 1, 3
"""Layers of the two models that are measured. Their difference gives the time of every further layer."""
_REPETITIONS = 3
_FILLER_TOKEN = 1


def operations_of_step(
    model: Any, *, num_computed: float, num_targets: float, is_checkpointing: bool, has_reference: bool = False
) -> float:
    """Count the floating-point operations of the products with weights, forward and backward.

    Attention, norms, the optimizer, and experts, whose weights are not matrices, are not counted.

    Args:
        model: on any device; only which of its weights train matters.
        num_computed: tokens that go through the layers.
        num_targets: tokens that go through the last layer and the head, see docs/engine.md.
        is_checkpointing: the layers' forward is computed twice.
        has_reference: the frozen weights also compute the reference of preference training.
    """
    bare = bare_model(model)
    matches = [(IN_A_LAYER.search(name), weight) for name, weight in model.named_parameters()]
    last = max((int(match[1]) for match, _ in matches if match), default=0)
    head = bare.get_output_embeddings().weight
    total = num_targets * _products_with(head, more=has_reference)
    for match, weight in matches:
        if match and len(full_shape(weight)) == 2:
            tokens = num_targets if int(match[1]) == last else num_computed
            in_reference = has_reference and not weight.requires_grad
            total += tokens * _products_with(weight, more=is_checkpointing + in_reference)
    return total


def _products_with(weight: Any, *, more: int) -> int:
    """Count operations per token: forward, gradient of the input, gradient of a trained weight, `more` forwards."""
    return _FLOPS * full_shape(weight).numel() * (2 + bool(weight.requires_grad) + more)


def measure_seconds(model: Any, microbatch: Any, how: Computation, section: OptimSection) -> float:
    """Measure forward, backward and optimizer for one micro-batch, in seconds, on the device at hand."""
    device = torch.device(how.device_type)
    microbatch = microbatch.to(device)
    loss = how.loss_of(BY_DEVICE)

    def measure() -> float:
        optimizer = build_optimizer(model, section)
        seconds = []
        for _ in range(1 + _REPETITIONS):
            begun = time.perf_counter()
            with torch.autocast(device.type, dtype=how.dtype, enabled=how.dtype != torch.float32):
                summed = loss(model, microbatch).reshape(-1)[0]
            (summed / max(1, microbatch.num_targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begun)
        return median(seconds[1:])  # the first step also allocates memory

    with fused_or_not(how.is_fused):
        return _at_full_depth(model, device, measure)


def sampling_of(config: Config) -> Sampling:
    """Return how a run samples the answers that it learns from."""
    rollout = config.rollout
    top_p = None if rollout.top_p == 1 else rollout.top_p
    return Sampling(temperature=rollout.temperature, top_k=rollout.top_k or None, top_p=top_p)


def measure_generating(
    config: Config, model: Any, answers: AssumedAnswers, *, order: Sequence[int], world_size: int
) -> float:
    """Measure how many seconds a process generates for an optimizer step, by the engine on the CPU.

    `order` has the prompts of the rollout to measure.
    """
    rollout = config.rollout
    prompts = [answers.prompts[prompt] for prompt in order for _ in range(answers.per_prompt)]
    limit = rollout.max_completion_length
    batches = group_prompts(model, prompts, batch_size=rollout.batch_size, max_new_tokens=limit)
    batch = [prompts[row] for row in batches[len(batches) // 2]]
    room = room_for_answer(model, batch[-1], limit)
    # At half the length, a token takes as long as on average.
    halves = [[*prompt, *[_FILLER_TOKEN] * (room // 2)] for prompt in batch]

    def measure() -> float:
        draw = Draw(sampling_of(config), range(len(batch)))
        seconds = []
        with evaluation_mode(model), unchanged_weights():
            CachedDecoder(model, batch, most_tokens=len(batch[-1]) + room).start()  # allocates memory
            begun = time.perf_counter()
            CachedDecoder(model, batch, most_tokens=len(batch[-1]) + room).start()
            started = time.perf_counter() - begun
            decoder = CachedDecoder(model, halves, most_tokens=len(batch[-1]) + room + _REPETITIONS)
            logits = decoder.start()
            for _ in range(1 + _REPETITIONS):
                begun = time.perf_counter()
                logits = decoder.go_on(draw(None, logits).argmax(-1))
                seconds.append(time.perf_counter() - begun)
        return started + room * median(seconds[1:])

    rounds = ceil_div(len(batches), world_size)
    return rounds * _at_full_depth(model, torch.device("cpu"), measure) / config.grpo.num_iterations


def _at_full_depth(model: Any, device: torch.device, measure: Callable[[], float]) -> float:
    """Measure a model of one layer and of three, and return the seconds for its whole depth.

    Weights on the meta device that are measured get random values.
    """
    decoder = bare_model(model).get_decoder()
    layers = name_of_layers(decoder)
    every = getattr(decoder, layers)
    depth = len(every)
    few, more = min(_FEW, depth), min(_MORE, depth)
    seconds = {}
    try:
        setattr(decoder, layers, every[:more])
        _give_weights(model, device)
        for number in {more, few}:
            setattr(decoder, layers, every[:number])
            seconds[number] = measure()
    finally:
        setattr(decoder, layers, every)
    if few == more:
        return seconds[few]
    # Linear in the depth: t(depth) = t(few) + (depth - few) * (t(more) - t(few)) / (more - few).
    return seconds[few] + (depth - few) * max(0.0, seconds[more] - seconds[few]) / (more - few)


def _give_weights(model: Any, device: torch.device) -> None:
    """Fill what is on the meta device with small random numbers; tied weights stay tied."""
    filled: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None or not weight.is_meta:
                continue
            if id(weight) not in filled:
                values = torch.empty(weight.shape, dtype=weight.dtype, device=device).normal_(0, 0.02)
                filled[id(weight)] = torch.nn.Parameter(values, weight.requires_grad)
            module._parameters[name] = filled[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.ones(buffer.shape, dtype=buffer.dtype, device=device)
