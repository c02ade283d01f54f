"""Run one forward and backward pass on tensors without data, and count the memory that real tensors would take.

The run's own loss is computed on fake tensors (`torch._subclasses.fake_tensor`), which have shapes and types but no
data. Each tensor counts from its creation until nothing refers to it.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from finetune.engine import products
from finetune.engine.attention import prepare_blocks
from finetune.engine.decoder import bare_model, layer_windows
from finetune.engine.fused import fused_or_not
from finetune.engine.layout import PackedMicrobatch
from finetune.engine.microbatch import Microbatch, WithRows, rows_of
from finetune.engine.products import unchanged_weights
from finetune.engine.quantized import weight_without_data
from finetune.model.base import evaluation_mode
from finetune.training.forward import Computation

Part = Literal["weights", "adapter", "gradients", "optimizer", "activations", "logits", "workspace", "gathered"]
"""The purposes of memory."""
Phases = dict[str, dict[Part, int]]
"""The peak in each part of a computation, in bytes by purpose."""

FORWARD, ABOVE, BETWEEN, BELOW = "forward", "backward, last layer", "backward", "backward, first layers"
"""Parts of a pass. The second ends with the first gradient of the second-to-last layer. The fourth begins with the
first gradient of the first layer."""

_LISTS_OF_LAYERS = ("layers", "h", "blocks")
"""The names that models of transformers give to the list of their layers."""
IN_A_LAYER = re.compile(rf"\.(?:{'|'.join(_LISTS_OF_LAYERS)})\.(\d+)\.(.*)")
"""Matches the number of a weight's layer, and its name there."""


def name_of_layers(decoder: torch.nn.Module) -> str:
    """Return the name of the list of a decoder's layers.

    Raises:
        AttributeError: there is none.
    """
    for name in _LISTS_OF_LAYERS:
        if isinstance(getattr(decoder, name, None), torch.nn.ModuleList):
            return name
    raise AttributeError(f"a {type(decoder).__name__} has no list of layers")


def trace(model: torch.nn.Module, microbatch: Microbatch | WithRows, how: Computation) -> Phases:
    """Return the peak of memory in each phase of a pass, by purpose. Memory in use before the pass does not count.

    As in a step, A and B of an adapter are cast to the type of the run once, and the copies are kept (`cast`). Without
    a backward pass, nothing keeps them.

    The model is on the meta device, in training mode, and the micro-batch is on the CPU.
    """
    # Most runs on a CPU fit without a trace.
    from finetune.engine.attention_cuda import prepare_varlen
    from finetune.training.memory.engine_choices import choices_on

    rows = rows_of(microbatch)
    if isinstance(rows, PackedMicrobatch):  # on real data; the layout keeps the result for the layers
        prepare = prepare_blocks if how.device_type == "cpu" else prepare_varlen
        rows.prepare_attention(prepare, layer_windows(model))
    masked = _choices_of_masks(rows)
    loss = how.loss_of(choices_on(how.device_type, how.dtype))
    compute = torch.autocast("cpu", dtype=how.dtype, enabled=how.dtype != torch.float32)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        fused_or_not(how.is_fused),
        unchanged_weights() if how.learns else nullcontext(),
        _native_products() if how.device_type != "cpu" else nullcontext(),
        nullcontext() if how.learns else evaluation_mode(model),
        one_rotation(model),
        rows_of_one_document(),
        fake_weights(model) as weights,
    ):
        vocabulary = bare_model(model).get_output_embeddings().weight.shape[0]
        allocations = Allocations(vocabulary, masked)
        allocations.ignore(*weights, *model.buffers(), *_tensors_of(rows))
        with _watched(model, allocations, accumulates=how.accumulates and how.learns), allocations:
            allocations.enter(FORWARD)
            with compute:
                computed = loss(model, microbatch)
            if how.learns:
                summed = computed.reshape(-1)[0]
                allocations.keep("activations")
                allocations.enter(ABOVE)
                summed.backward()  # type: ignore[no-untyped-call]
    peaks = {when: allocations.peak(when) for when in allocations.phases}
    for parts in peaks.values():
        parts["workspace"] = parts.get("workspace", 0) + sum(tensor.nbytes for tensor in _tensors_of(rows))
    return peaks


@dataclass(slots=True, eq=False)
class _Block:
    label: str
    num_bytes: int


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of every tensor that is created inside, for as long as something refers to it.

    Args:
        vocabulary: the number of logits at a position.
        choices: the number of positions that a mask of a given shape chooses, where it is known.
        read: answers code that reads a number from a tensor; None: this fails, because there is no data.

    Attributes:
        in_use: bytes now.
        phases: for each part of a pass, the most bytes in use and the blocks that made them up.
    """

    def __init__(
        self,
        vocabulary: int = -1,
        choices: Mapping[tuple[int, ...], int] | None = None,
        read: Callable[[torch.Tensor], int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_use = 0
        self.phases: dict[str, tuple[int, list[_Block]]] = {}
        self._vocabulary = vocabulary
        self._choices = choices or {}
        self._read = read
        self._phase = ""
        self._live: dict[int, _Block] = {}
        self._references: dict[int, Any] = {}

    def enter(self, phase: str) -> None:
        """Begin a part of the step."""
        self._phase = phase
        self._look()

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Do not count tensors that existed before."""
        for tensor in tensors:
            self._references[tensor.untyped_storage()._cdata] = tensor

    def keep(self, label: str) -> None:
        """Label all memory in use that has no purpose yet."""
        for block in self._live.values():
            if block.label == "workspace":
                block.label = label

    def name(self, tensor: torch.Tensor, label: str) -> None:
        """Label one tensor."""
        block = self._live.get(tensor.untyped_storage()._cdata)
        if block is not None:
            block.label = label

    def peak(self, phase: str) -> dict[Part, int]:
        """Return the bytes in use at the peak of a part of the step, by purpose."""
        totals: Counter[str] = Counter()
        for block in self.phases[phase][1]:
            totals[block.label] += block.num_bytes
        return cast(dict[Part, int], dict(totals))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls ask only for this
        if self._read is not None and function is torch.ops.aten._local_scalar_dense.default:
            return self._read(args[0])
        result = _stand_in(function, args, kwargs or {}, self._choices)
        if result is None:
            result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            return
        is_logits = tensor.ndim == 2 and tensor.shape[1] == self._vocabulary
        block = _Block("logits" if is_logits else "workspace", storage.nbytes())
        self._live[key] = block
        # A storage lives as long as any view of it; the callback comes when the last is gone.
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key, block))
        self.in_use += block.num_bytes
        self._look()

    def _forget(self, key: int, block: _Block) -> None:
        if self._live.get(key) is block:
            del self._live[key], self._references[key]
            self.in_use -= block.num_bytes

    def _look(self) -> None:
        if self.in_use >= self.phases.get(self._phase, (0, []))[0]:
            self.phases[self._phase] = self.in_use, list(self._live.values())


def _choices_of_masks(microbatch: Microbatch) -> dict[tuple[int, ...], int]:
    """Count the positions that each mask of `finetune.engine.reference` selects, by shape; fake tensors cannot."""
    if isinstance(microbatch, PackedMicrobatch):
        return {}
    predicts = microbatch.is_target[:, 1:]
    at_any_row = predicts.any(dim=0)
    num_positions = int(at_any_row.sum())
    by_shape = {tuple(predicts.shape): microbatch.num_targets, (len(predicts), num_positions): microbatch.num_targets}
    return {**by_shape, tuple(at_any_row.shape): num_positions}


def _stand_in(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], choices: Mapping[tuple[int, ...], int]
) -> torch.Tensor | None:
    """Make the result of an operation that fake tensors do not run as real ones do.

    They cannot run oneDNN's products, the products of experts in fp32, a generator of random numbers, and the choice of
    a mask. And the gradient of a choice is copied, where real tensors add to new zeros in place.
    """
    name = str(function)
    result: torch.Tensor | None = None
    if name.startswith("mkldnn._linear_pointwise"):
        x, weight = args[0], args[2] if "binary" in name else args[1]
        result = x.new_empty(*x.shape[:-1], weight.shape[0])
    elif name == "aten.rand.generator":
        result = torch.empty(args[0], dtype=kwargs.get("dtype"))
    elif name == "aten._grouped_mm.default":
        # Products of experts: of (rows, in) with (experts, in, out), or as gradients (in, rows) with (rows, out). A
        # token has a row for each of its experts, so memory is the same whichever experts the tokens take.
        x, weights, ends = args[:3]
        shape = (len(x), weights.shape[2]) if weights.ndim == 3 else (len(ends), len(x), weights.shape[1])
        result = x.new_empty(shape)
    elif name == "aten.index_put.default" and args[3:] == (True,):
        result = args[0]
    elif name == "aten.nonzero.default" and tuple(args[0].shape) in choices:
        result = args[0].new_empty(choices[tuple(args[0].shape)], args[0].ndim, dtype=torch.int64)
    elif name == "aten.index.Tensor" and len(args[1]) == 1 and args[1][0] is not None:
        (mask,) = args[1]
        if mask.dtype == torch.bool and tuple(mask.shape) in choices:
            result = args[0].new_empty(choices[tuple(mask.shape)], *args[0].shape[mask.ndim :])
    return result


@contextmanager
def fake_weights(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Replace weights and buffers on the meta device by fake tensors of the CPU inside; tied ones stay tied."""
    fakes: dict[int, Any] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    empty = partial(torch.empty_like, device="cpu")
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                before.append((tensors, name, tensor))
                if id(tensor) not in fakes:
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    fakes[id(tensor)] = weight_without_data(tensor, empty) if is_weight else empty(tensor)
                cast(dict[str, Any], tensors)[name] = fakes[id(tensor)]
    try:
        yield list(fakes.values())
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor


@contextmanager
def one_rotation(model: torch.nn.Module) -> Iterator[None]:
    """Within the block, LongRoPE does not choose its factors by the positions. Both choices take the same memory."""
    modules: list[Any] = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
    parameters = [module.config.rope_parameters for module in modules]  # Phi-3.5-MoE looks there
    for module in modules:
        module.rope_type = "default"
        module.config.rope_parameters = {**module.config.rope_parameters, "rope_type": "default"}
    try:
        yield
    finally:
        for module, own in zip(modules, parameters, strict=True):
            module.rope_type = "longrope"
            module.config.rope_parameters = own


@contextmanager
def rows_of_one_document() -> Iterator[None]:
    """Tell transformers that no row is packed. It cannot see this in fake positions, and would create a mask."""
    find, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, lambda *_: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


@contextmanager
def _native_products() -> Iterator[None]:
    """Compute products in 16 bits as they come within the block: other devices do, whatever this CPU does."""
    before, products.WIDENED = products.WIDENED, frozenset()
    try:
        yield
    finally:
        products.WIDENED = before


@contextmanager
def _watched(model: torch.nn.Module, allocations: Allocations, *, accumulates: bool) -> Iterator[None]:
    """Within the block, label gradients and distinguish the parts of the backward pass."""
    decoder = bare_model(model).get_decoder()
    depth = len(getattr(decoder, name_of_layers(decoder)))
    begun: set[int] = set()

    def arrived(layer: int | None, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        allocations.name(weight.grad, "gradients")
        if layer is not None and layer not in begun:
            begun.add(layer)
            if layer == 0:
                allocations.enter(BELOW)
            elif layer == depth - 2:
                allocations.enter(BETWEEN)

    handles = []
    with allocations:
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            match = IN_A_LAYER.search(name)
            layer = int(match[1]) if match else None
            hook = partial(arrived, layer)
            handles.append(weight.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            if accumulates:
                weight.grad = torch.empty_like(weight)
                allocations.name(weight.grad, "gradients")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors_of(microbatch: Microbatch) -> list[torch.Tensor]:
    """Return the tensors of a micro-batch and of its prepared attention. Of tensors that share memory, return one."""
    if not isinstance(microbatch, PackedMicrobatch):
        return [microbatch.input_ids, microbatch.is_target]
    prepared = [known.value for known in microbatch.layout._prepared]
    values = [*vars(microbatch).values(), *vars(microbatch.layout).values()]
    # A prepared value is a tuple of tensors, or of tuples of tensors.
    values += [
        value for fields in prepared for part in fields for value in (part if isinstance(part, tuple) else (part,))
    ]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return list({tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values())
