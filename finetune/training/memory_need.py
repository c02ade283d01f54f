"""Predict how much memory a training step takes, by running the real step on tensors without data (`memory_trace`).

The tensors that autograd keeps are counted, not listed here, so the prediction follows every change of the engine.

The layers of a decoder are alike: in each part of a step the peak grows by the same amount with every layer. So models
of two and of three layers are enough to predict one of forty.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from finetune.data.encoded import EncodedExamples
from finetune.data.preferences import EncodedPairs
from finetune.engine.decoder import bare_model
from finetune.engine.four_bits import is_in_4_bits, weight_without_data
from finetune.engine.microbatch import Microbatch
from finetune.training.memory_trace import (
    ABOVE,
    BELOW,
    FORWARD,
    IN_A_LAYER,
    Allocations,
    DeviceKind,
    LossOf,
    Part,
    trace,
)
from finetune.training.preference import PreferenceMicrobatch

PARTS: tuple[Part, ...] = ("weights", "adapter", "gradients", "optimizer", "activations", "logits", "workspace")

_FEW, _MORE = 2, 3
"""Layers of the two models that are run."""
_FILLER_TOKEN = 1
_EXTRAPOLATED = (FORWARD, ABOVE, BELOW)
"""The parts of a step in which the peak can lie, at any depth of the model."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of a step at which the most memory is in use."""

    when: str
    """The part of the step."""
    parts: Mapping[Part, int]
    """Bytes in use at that moment, by purpose."""

    @property
    def total(self) -> int:
        """All bytes in use."""
        return sum(self.parts.values())


class OptimizerNeed(NamedTuple):
    """The memory of an optimizer, in bytes."""

    state: int
    workspace: int
    """Needed in addition during its step."""


def predict_peak(
    model: torch.nn.Module,
    microbatch: Microbatch | PreferenceMicrobatch,
    optimizer: OptimizerNeed,
    loss_of: LossOf,
    *,
    kind: DeviceKind,
    is_bf16: bool,
    accumulates: bool,
    is_fused: bool = False,
    world_size: int = 1,
) -> Peak:
    """Predict the peak of the second training step or a later one.

    Args:
        model: on the meta device, its weights in the types of the run, in training mode. Most of its layers are taken
            out and put back.
        microbatch: the largest of the run, on the CPU.
        optimizer: see `optimizer_need`.
        loss_of: the loss of the run.
        kind: the kind of device to predict for.
        is_bf16: the run computes in bf16.
        accumulates: a step has several micro-batches on a rank.
        is_fused: the engine's functions are fused (`training.fused`).
        world_size: the number of processes.

    Raises:
        RuntimeError: the model cannot run without data.
    """
    weights, adapter, gradients = _bytes_of_weights(model)
    held: dict[Part, int] = {"weights": weights, "adapter": adapter, "optimizer": optimizer.state}
    how = {"kind": kind, "is_bf16": is_bf16, "accumulates": accumulates, "is_fused": is_fused}
    moments = _trace_deep(model, microbatch, loss_of, **how)
    peaks = [Peak(when=when, parts={**held, **parts}) for when, parts in moments.items()]
    at_its_end: dict[Part, int] = {**held, "gradients": gradients}
    peaks.append(Peak(when="optimizer", parts={**at_its_end, "workspace": optimizer.workspace}))
    if world_size > 1:  # one flat copy, see `finetune.distributed.gradients.sum_flat`
        peaks.append(Peak(when="sum of gradients", parts={**at_its_end, "workspace": gradients}))
    highest = max(peaks, key=lambda peak: peak.total)
    return Peak(when=highest.when, parts={part: highest.parts.get(part, 0) for part in PARTS})


def optimizer_need(optimizer: torch.optim.Optimizer, *, kind: DeviceKind) -> OptimizerNeed | None:
    """Measure an optimizer over weights on the meta device: a copy of it takes two steps.

    None for an optimizer that cannot step without data.
    """
    groups = [
        {**group, "params": [torch.empty_like(weight, device="meta") for weight in group["params"]]}
        for group in optimizer.param_groups
    ]
    for group in groups:
        if kind == "cuda" and "foreach" in group and not group.get("fused"):
            group["foreach"] = True if group["foreach"] is None else group["foreach"]  # torch's choice there
    allocations = Allocations()
    try:
        twin = type(optimizer)(groups)  # type: ignore[call-arg]
        for group in groups:
            for weight in group["params"]:
                weight.grad = torch.empty_like(weight)
                allocations.ignore(weight, weight.grad)
        with allocations:
            twin.step()
            state = allocations.in_use
            allocations.enter("step")
            twin.step()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return OptimizerNeed(state, sum(allocations.peak("step").values()) - state)


def copy_without_data(model: Any) -> Any:
    """Copy a model to the meta device, in training mode: its weights have their types and sizes, and no data."""
    empty = partial(torch.empty_like, device="meta")
    made: dict[int, Any] = {id(tensor): empty(tensor) for tensor in model.buffers()}
    for weight in model.parameters():
        made[id(weight)] = twin = weight_without_data(weight, empty)
        if is_in_4_bits(weight):
            made[id(weight.quant_state)] = twin.quant_state  # its layer has it too
    return copy.deepcopy(model, made).train()


def longest_rows(objective: str, number: int, length: int) -> EncodedExamples | EncodedPairs:
    """Make rows, or pairs, of this length that carry loss throughout and have nothing in common."""

    def side(first: int) -> EncodedExamples:
        ids = [_FILLER_TOKEN] * (length - 1)
        rows = [([first + row, *ids], [False] + [True] * (length - 1)) for row in range(max(1, number))]
        return EncodedExamples.from_rows(rows, end_id=_FILLER_TOKEN)

    return side(0) if objective == "sft" else EncodedPairs(side(0), side(number), "train")


def _bytes_of_weights(model: torch.nn.Module) -> tuple[int, int, int]:
    """Return the bytes of weights outside the adapter and of buffers, of the adapter, and of all gradients."""
    is_adapted = hasattr(model, "peft_config")
    adapter = gradients = others = 0
    for parameter in model.parameters():
        gradients += parameter.nbytes if parameter.requires_grad else 0
        adapter += parameter.nbytes if parameter.requires_grad and is_adapted else 0
        others += 0 if parameter.requires_grad and is_adapted else parameter.nbytes
    return others + sum(buffer.nbytes for buffer in model.buffers()), adapter, gradients


def _trace_deep(model: torch.nn.Module, *args: Any, **how: Any) -> dict[str, dict[Part, int]]:
    """Trace a model of any depth with few of its layers."""
    decoder = bare_model(model).get_decoder()
    every: torch.nn.ModuleList = decoder.layers
    depth = len(every)
    if depth <= _MORE or not _are_layers_alike(model):
        return trace(model, *args, **how)
    traced: dict[int, dict[str, dict[Part, int]]] = {}
    try:
        for number in (_FEW, _MORE):
            decoder.layers = torch.nn.ModuleList([*every[: number - 1], every[-1]])
            traced[number] = trace(model, *args, **how)
    finally:
        decoder.layers = every
    few, more = traced[_FEW], traced[_MORE]
    return {
        when: {
            part: few[when].get(part, 0) + (depth - _FEW) * (more[when].get(part, 0) - few[when].get(part, 0))
            for part in PARTS
            if part in few[when] or part in more[when]
        }
        for when in _EXTRAPOLATED
        if when in few and when in more
    }


def _are_layers_alike(model: torch.nn.Module) -> bool:
    """Check that all layers have the same weights, and train the same ones."""
    layers: dict[str, list[tuple[Any, ...]]] = {}
    for name, weight in model.named_parameters():
        if match := IN_A_LAYER.search(name):
            layers.setdefault(match[1], []).append((match[2], weight.shape, weight.dtype, weight.requires_grad))
    return len({tuple(layer) for layer in layers.values()}) == 1
