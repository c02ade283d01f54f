"""Predict how much memory a training step takes, by running the real step on tensors without data (`tracing`).

The tensors that autograd keeps are counted, not listed here, so the prediction follows every change of the engine.

The layers of a decoder are alike: in each part of a step the peak grows by the same amount with every layer. So models
of two and of three layers are enough to predict one of forty.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.engine.decoder import bare_model
from finetune.engine.layout import TOKENS_WITHOUT_PADDING
from finetune.engine.microbatch import Microbatch, WithRows
from finetune.engine.products import is_in_4_bits
from finetune.engine.quantized import state_bytes, weight_without_data
from finetune.model.base import checkpoint_gradients
from finetune.training.forward import Computation, wants_padding
from finetune.training.memory.tracing import (
    BETWEEN,
    FORWARD,
    IN_A_LAYER,
    Allocations,
    Part,
    Phases,
    name_of_layers,
    trace,
)
from finetune.training.optim import build_optimizer
from finetune.units import ceil_div

if TYPE_CHECKING:
    from finetune.config.schema import Config, ParallelSection

PARTS: tuple[Part, ...] = (
    *("weights", "adapter", "gradients", "optimizer", "activations", "logits", "workspace"),
    "gathered",  # where weights are sharded
)
_IN_PASS: tuple[Part, ...] = ("activations", "logits", "workspace")
"""What a CUDA graph keeps of its pass."""
_AT_ONCE = 2
"""The number of layers that are gathered at the same time: the current layer, and the next one, gathered ahead."""

FEW_LAYERS, MORE_LAYERS = 2, 3
"""Layers of the two models that are run."""
CANNOT_TRACE = (RuntimeError, NotImplementedError, AttributeError, TypeError)
"""The errors of `forecast_step` if a model's own forward does not run on tensors without data."""


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


class Size(NamedTuple):
    """A micro-batch and the memory that its step needs in addition to the weights."""

    tokens: int
    num_bytes: int


class OptimizerNeed(NamedTuple):
    """The memory of an optimizer, in bytes."""

    state: int
    workspace: int
    """Needed in addition during its step."""


class Shards(NamedTuple):
    """How weights are sharded across processes (`parallel.sharding`)."""

    size: int
    """Processes that hold one copy together; 1: each holds all weights."""
    reshards: bool = True
    """`parallel.reshard_after_forward`."""


WHOLE = Shards(1)


class _Weight(NamedTuple):
    num_bytes: int
    num_rows: int
    is_trained: bool
    layer: int | None

    def part(self, size: int) -> int:
        """Return the bytes of a rank's part: FSDP2 cuts by rows, and pads the last part."""
        return self.num_bytes // self.num_rows * ceil_div(self.num_rows, size) if self.num_rows else self.num_bytes


class Weights:
    """The sizes of a model's weights, full and sharded.

    Attributes:
        adapter: bytes of the trained weights beside a frozen base. They are never sharded.
        is_adapted: there is an adapter; without one all weights are sharded, and gradients and optimizer with them.
        outside: bytes of what is sharded and belongs to no layer.
        largest_layer: bytes of the largest layer that is sharded.
        trained_head: bytes of a head that is sharded and trained; 0 if its weight is the embedding's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.is_adapted = hasattr(model, "peft_config")
        self._unsharded = sum(buffer.nbytes for buffer in model.buffers())
        self._unsharded += sum(state_bytes(weight) for weight in model.parameters())
        weights = []
        for name, parameter in model.named_parameters():
            match = IN_A_LAYER.search(name)
            num_rows, layer = len(parameter) if parameter.ndim else 0, int(match[1]) if match else None
            weights.append(_Weight(parameter.nbytes, num_rows, parameter.requires_grad, layer))
        self._trained = [weight for weight in weights if weight.is_trained]
        self._sharded = [weight for weight in weights if not (self.is_adapted and weight.is_trained)]
        self.adapter = sum(weight.num_bytes for weight in self._trained) if self.is_adapted else 0
        layers: Counter[int] = Counter()
        for weight in self._sharded:
            layers[-1 if weight.layer is None else weight.layer] += weight.num_bytes
        self.outside = layers.pop(-1, 0)
        self._layers = sorted(layers.values())
        self.largest_layer = self._layers[-1] if self._layers else 0
        bare = bare_model(model)
        head, embedding = bare.get_output_embeddings().weight, bare.get_input_embeddings().weight
        self._on_host = embedding.nbytes if getattr(bare.get_input_embeddings(), "is_on_host", False) else 0
        has_own_head = head.requires_grad and head is not embedding and not self.is_adapted
        self.trained_head = head.nbytes if has_own_head else 0

    def held(self, shards: Shards) -> int:
        """Return the bytes of a rank's shards of all weights except the adapter's, with buffers and 4-bit scales.

        An embedding in main memory counts only if the weights are sharded: then it is not kept there.
        """
        held = self._unsharded + sum(weight.part(shards.size) for weight in self._sharded)
        return held - self._on_host if shards.size == 1 else held

    def gradients(self, shards: Shards) -> int:
        """Return the bytes of the gradients that a rank keeps until the end of a step."""
        return sum(weight.part(self.trained_shards(shards)) for weight in self._trained)

    def trained_shards(self, shards: Shards) -> int:
        """Return the number of ranks across which gradients and the optimizer's state are sharded."""
        return 1 if self.is_adapted else shards.size

    def gathered(self, shards: Shards) -> int:
        """Return the bytes of the weights that are gathered at the same time, without the rank's own shards."""
        if shards.size == 1:
            return 0
        at_once = _AT_ONCE if shards.reshards else len(self._layers)
        return self.outside + sum(self._layers[-at_once:])


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """What a step allocates, from which its peak follows for any optimizer and any number of shards.

    Attributes:
        moments: the peak in each part of a pass, by purpose, without what was in use before.
        weights: of the model.
        device_type: of the device that computes.
        learns: see `Computation`.
        captured_share: the part of a pass for which CUDA graphs keep memory; 0 without graphs.
    """

    moments: Phases
    weights: Weights
    device_type: str
    learns: bool = True
    captured_share: float = 0.0

    def peak(self, optimizer: OptimizerNeed, *, world_size: int = 1, shards: Shards = WHOLE) -> Peak:
        """Predict the peak of the second training step or a later one, or of a validation after it, on one rank.

        `optimizer` is its need over unsharded weights.
        """
        weights, trained_shards = self.weights, self.weights.trained_shards(shards)
        resident: dict[Part, int] = {
            "weights": weights.held(shards),
            "adapter": weights.adapter,
            "optimizer": optimizer.state // trained_shards,
        }
        of_pass = max(sum(size for part, size in parts.items() if part in _IN_PASS) for parts in self.moments.values())
        graphs = round(self.captured_share * of_pass)
        peaks = [
            Peak(when=when, parts={**resident, **self._in_pass(when, parts, shards)})
            for when, parts in self.moments.items()
        ]
        gradients = weights.gradients(shards)
        at_its_end: dict[Part, int] = {**resident, "gradients": gradients}
        if self.learns:
            workspace = optimizer.workspace // trained_shards
            peaks.append(Peak(when="optimizer", parts={**at_its_end, "workspace": workspace}))
        # Summing gradients makes one flat copy, see `finetune.distributed.gradients.sum_flat`.
        if self.learns and world_size > 1 and trained_shards == 1:
            peaks.append(Peak(when="sum of gradients", parts={**at_its_end, "workspace": gradients}))
        highest = max(peaks, key=lambda peak: peak.total)
        sizes = {part: highest.parts.get(part, 0) for part in (PARTS if shards.size > 1 else PARTS[:-1])}
        return Peak(when=highest.when, parts={**sizes, "workspace": sizes["workspace"] + graphs})

    def _in_pass(self, when: str, parts: Mapping[Part, int], shards: Shards) -> dict[Part, int]:
        """Return the parts of a moment of a pass, with the gathered weights, and with the gradients that shards leave.

        The gradients of a layer are whole until they are summed. The gradient of the head is whole until the end; if
        the head is the embedding, the workspace has it already. On a CPU, no layer is gathered ahead. Instead of a
        second layer, there is a buffer that receives a layer while nothing computes.
        """
        sizes = dict(parts)
        weights, trained_shards = self.weights, self.weights.trained_shards(shards)
        if shards.size > 1:
            sizes["gathered"] = weights.gathered(shards)
            if self.device_type == "cpu" and shards.reshards:
                sizes["gathered"] -= min(weights.largest_layer, sizes.get("workspace", 0))
        if trained_shards > 1:
            full_gradients = 0 if when == FORWARD else weights.trained_head + weights.largest_layer
            sizes["gradients"] = sizes.get("gradients", 0) // trained_shards + full_gradients
        return sizes


def forecast_step(
    model: torch.nn.Module, microbatch: Microbatch | WithRows, how: Computation, *, captures: bool = False
) -> StepForecast:
    """Run a step without data.

    Args:
        model: on the meta device, its weights in the types of the run, in training mode. Most of its layers are taken
            out and put back.
        microbatch: the largest of the run, on the CPU.
        how: how the run computes a step.
        captures: see `wants_captures`.

    Raises:
        RuntimeError: the model cannot run without data; or one of `CANNOT_TRACE`.
    """
    moments = trace_deep(model, lambda: trace(model, microbatch, how))
    forecast = StepForecast(moments=moments, weights=Weights(model), device_type=how.device_type, learns=how.learns)
    if not captures or getattr(bare_model(model).get_decoder(), "gradient_checkpointing", False):
        return forecast
    return replace(forecast, captured_share=min(1.0, TOKENS_WITHOUT_PADDING / microbatch.num_computed))


def wants_captures(config: Config, how: Computation) -> bool:
    """Return whether CUDA graphs replay small micro-batches, if nothing else forbids it (`training/captures.py`)."""
    return config.objective.learns_answers and wants_padding(config.training, how.device_type, how.dtype)


def optimizer_need(optimizer: torch.optim.Optimizer, *, device_type: str) -> OptimizerNeed | None:
    """Measure an optimizer over unsharded weights: a copy of it takes two steps on the meta device.

    None for an optimizer that cannot step without data.
    """
    empty = partial(torch.empty, device="meta")  # not like the weight, which may be sharded
    groups = [
        {**group, "params": [empty(weight.shape, dtype=weight.dtype) for weight in group["params"]]}
        for group in optimizer.param_groups
    ]
    for group in groups:
        if device_type == "cuda" and "foreach" in group and not group.get("fused"):
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
    except Exception:  # of a class that is not torch's own, for example
        return None
    return OptimizerNeed(state, sum(allocations.peak("step").values()) - state)


def copy_without_data(model: Any) -> Any:
    """Copy a model to the meta device, in training mode: its weights have their types and sizes, and no data."""
    empty = partial(torch.empty_like, device="meta")
    copies: dict[int, Any] = {id(tensor): empty(tensor) for tensor in model.buffers()}
    for weight in model.parameters():
        copies[id(weight)] = twin = weight_without_data(weight, empty)
        if is_in_4_bits(weight):
            copies[id(weight.quant_state)] = twin.quant_state  # the layer refers to this object as well
    return copy.deepcopy(model, copies).train()


def shards_of(parallel: ParallelSection, world_size: int) -> Shards:
    """Return how the weights of a run are sharded in a world of this size."""
    if parallel.sharding == "none" or world_size == 1:
        return WHOLE
    return Shards(parallel.shard_size or world_size, parallel.reshard_after_forward)


def predict_sizes(
    config: Config,
    model: Any,
    how: Computation,
    *,
    longest: int,
    rows_of: Callable[[int, int], Any],
    collate: Callable[[Any], Any],
    world_size: int,
) -> Callable[[int, bool], Size]:
    """Return a function that predicts a step, given the rows of its micro-batches and whether it is checkpointed.

    Calls with checkpointing come last. For the arguments, see `finetune.training.memory.choice.choose`.
    """
    twin = copy_without_data(model)
    optimizer = optimizer_need(build_optimizer(twin, config.optim), device_type=how.device_type) or OptimizerNeed(0, 0)
    shards = shards_of(config.parallel, world_size)

    offloads = config.training.memory == "least" and how.device_type == "cuda"
    checkpoint_twin = cache(partial(checkpoint_gradients, twin, offloads=offloads))

    @cache
    def size(num_rows: int, is_checkpointing: bool) -> Size:
        if is_checkpointing:
            checkpoint_twin()
        rows = rows_of(num_rows, longest)
        microbatch = collate([rows[index] for index in range(num_rows)])
        forecast = forecast_step(twin, microbatch, how, captures=wants_captures(config, how))
        peak = forecast.peak(optimizer, world_size=world_size, shards=shards)
        weights = sum(peak.parts.get(part, 0) for part in ("weights", "adapter", "gathered"))
        return Size(microbatch.num_computed, peak.total - weights)

    return size


def trace_deep(model: torch.nn.Module, trace_layers: Callable[[], Phases]) -> Phases:
    """Trace a model of any depth with few of its layers, if they are alike."""
    decoder = bare_model(model).get_decoder()
    layers = name_of_layers(decoder)
    every: torch.nn.ModuleList = getattr(decoder, layers)
    depth = len(every)
    if depth <= MORE_LAYERS or not _are_layers_alike(model):
        return trace_layers()
    traced: list[Phases] = []
    try:
        for number in (FEW_LAYERS, MORE_LAYERS):
            setattr(decoder, layers, torch.nn.ModuleList([*every[: number - 1], every[-1]]))
            traced.append(trace_layers())
    finally:
        setattr(decoder, layers, every)
    few, more = traced
    return {
        when: {
            part: few[when].get(part, 0) + (depth - FEW_LAYERS) * (more[when].get(part, 0) - few[when].get(part, 0))
            for part in PARTS
            if part in few[when] or part in more[when]
        }
        for when in few
        if when in more and when != BETWEEN  # the peak is never there in a deep model
    }


def _are_layers_alike(model: torch.nn.Module) -> bool:
    """Check that all layers have the same weights, and train the same ones."""
    layers: dict[str, list[tuple[Any, ...]]] = {}
    for name, weight in model.named_parameters():
        if match := IN_A_LAYER.search(name):
            layers.setdefault(match[1], []).append((match[2], weight.shape, weight.dtype, weight.requires_grad))
    return len({tuple(layer) for layer in layers.values()}) == 1
