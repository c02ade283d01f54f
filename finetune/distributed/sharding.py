"""Shard the weights of a model over the ranks, with torch's FSDP2 (`fully_shard`).

Each rank keeps a shard of every sharded weight. The ranks all-gather a layer's weights before they compute the layer,
and reshard them afterwards. Next to an adapter only the frozen weights are sharded. The trained weights, their
gradients and the optimizer stay full on every rank, so that a run has the bytes of an unsharded one. In full
fine-tuning all weights are sharded, with their gradients, which the ranks sum after each micro-batch, and the
optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from finetune.distributed.device import Precision, convert_parameters, set_compute_dtype
from finetune.engine.adapted import holds_nf4
from finetune.engine.decoder import ENTER, bare_model
from finetune.errors import ConfigError, LaunchError, ModelError, RunFailedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from finetune.config.schema import Config, ParallelSection

Value = TypeVar("Value")

_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
"""Optimizers of torch that update each value by its own gradients alone, and so in any shard. Adafactor and Muon look
at whole matrices, those of bitsandbytes at the memory of a tensor, and Rprop fails on a DTensor."""


def refuse_what_is_not_sharded(config: Config, *, trains: bool) -> None:
    """Raise ConfigError for what `ShardedModel` does not support, before anything is loaded."""
    if config.parallel.sharding == "none":
        return
    if config.parallel.gradient_sync == "ddp":
        raise ConfigError(
            f"parallel.sharding is fsdp2 ({config.origin('parallel.sharding')}), but parallel.gradient_sync is ddp "
            f"({config.origin('parallel.gradient_sync')}), which needs all weights on each process. Set "
            "parallel.gradient_sync=flat, or parallel.sharding=none."
        )
    if (
        trains
        and config.training.method == "full"
        and config.optim.optimizer.removeprefix("torch.optim.") not in _ELEMENTWISE
    ):
        raise ConfigError(
            f"optim.optimizer is {config.optim.optimizer} ({config.origin('optim.optimizer')}), which cannot update "
            "weights that are sharded over several processes (parallel.sharding=fsdp2, training.method=full). "
            f"Choose one of these of torch.optim: {', '.join(_ELEMENTWISE)}."
        )


def refuse_uneven_shards(config: Config, world_size: int) -> None:
    """Raise LaunchError if the shard size does not divide the world."""
    size = config.parallel.shard_size
    if size is not None and world_size % size:
        raise LaunchError(
            f"parallel.shard_size is {size} ({config.origin('parallel.shard_size')}), which does not divide the world "
            f"of {world_size} processes. Leave the key out to shard the weights over all of them, or give a divisor."
        )


class ShardedModel:
    """A model with weights sharded over the ranks: the frozen ones, and in full fine-tuning also the trained ones.

    Its layers are cast, moved, copied from rank 0 where they train, and sharded, one after the other, so that a rank
    never holds all of them on its device. The forward is chosen before: FSDP2's hooks would make the engine refuse it.

    Collective: every rank makes one of the same model.

    Attributes:
        gathered_bytes: the most that all-gathered weights take on a rank, beside its own shards.
        shards_trained: whether the trained weights are sharded. Only full fine-tuning shards them.
        group: the ranks that share one copy of the weights, this one among them.

    Raises:
        ModelError: the model has no list of layers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parallel: ParallelSection,
        *,
        precision: Precision,
        device: torch.device,
        world_size: int,
        shards_trained: bool,
    ) -> None:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        set_compute_dtype(model, precision)
        layers = _layers(model)
        inside = {weight for layer in layers for weight in layer.parameters()}
        others = [weight for weight in model.parameters() if weight not in inside]
        del inside
        # FSDP2 leaves these weights full. A set of the weights that it shards would keep all of them in memory.
        unsharded = set() if shards_trained else {weight for weight in model.parameters() if weight.requires_grad}
        size = parallel.shard_size or world_size
        copies = world_size // size
        mesh = _mesh(device.type, copies, size)

        def shard(module: torch.nn.Module, weights: list[torch.nn.Parameter], *, reshards: bool) -> int:
            """Shard these weights of a module, and return their bytes. The full weights are freed on return."""
            convert_parameters(weights, precision, device)
            copy_trained_from_main(weights)
            num_full_bytes = sum(weight.nbytes for weight in weights if weight not in unsharded)
            fully_shard(module, mesh=mesh, ignored_params=unsharded, reshard_after_forward=reshards)
            return num_full_bytes

        num_bytes = []
        for layer in layers:
            scales = _scales_of_4_bits(layer)
            num_bytes.append(shard(layer, list(layer.parameters()), reshards=parallel.reshard_after_forward))
            layer.register_forward_pre_hook(partial(_put_back, scales))  # FSDP2's own goes before it
            setattr(layer, ENTER, partial(_call, scales))
            register_fsdp_forward_method(layer, ENTER)
            if device.type == "cpu":
                _gather_late(layer)
        root = _Root(model)
        # The backward pass begins with the root's weights, so that they stay until then.
        of_root = shard(root, others, reshards=False)
        del others  # the last reference to the full weights
        num_at_once = 2 if parallel.reshard_after_forward else len(layers)  # one layer is gathered ahead
        self.gathered_bytes = of_root + sum(sorted(num_bytes)[-num_at_once:])
        self.shards_trained = shards_trained
        self.group: dist.ProcessGroup = mesh.get_group("shards")
        self._root: Any = root
        self._units: list[Any] = [*layers, root]
        for unit in self._units:
            # A plain sum, the only one that gloo knows: the loss is divided by the targets of all ranks already.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if shards_trained:  # the ranks must sum the same weights, even if some have no gradient on one of them
                unit.set_reduce_scatter_unused_params(True, recurse=False)
        self._is_entered = self._gathers_late = False
        self._is_on_cpu = device.type == "cpu"
        bare_model(model).get_decoder().register_forward_pre_hook(self._refuse_outside)

    def apply(self, compute: Callable[[torch.nn.Module], Value]) -> Value:
        """Return `compute(model)`. During the call the model all-gathers its weights as it needs them.

        Collective: every rank calls this equally often, and `compute` runs the model equally often on every rank.
        """
        self._is_entered = True
        if self._gathers_late:
            self._root.unshard()
        try:
            result: Value = self._root(compute)
        finally:
            self._is_entered = False
            self._gathers_late = self._is_on_cpu  # FSDP2 is set up by now
        if not torch.is_grad_enabled():
            # Without a backward pass nothing reshards the weights. `state_dict` would, but only on the rank that saves,
            # and then the ranks no longer all-gather the same weights.
            for unit in self._units:
                unit.reshard()
        return result

    def _refuse_outside(self, *_: object) -> None:
        """Raise an error that says what to do, instead of failing on a shard or waiting for ranks that never come."""
        if not self._is_entered:
            raise RunFailedError(
                "the weights of this model are sharded over all ranks (parallel.sharding=fsdp2), so that it cannot be "
                "called outside of the run. Load the finished run instead: finetune evaluate, finetune generate."
            )


def copy_trained_from_main(weights: Iterable[torch.nn.Parameter]) -> None:
    """Copy rank 0's values of the trained weights among these to all ranks. Collective."""
    for weight in weights:
        if weight.requires_grad:
            dist.broadcast(weight.data, src=0)


class _Root(torch.nn.Module):
    """Hold the weights outside of the layers. Everything that a run computes is a forward pass of this module."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[torch.nn.Module], Any]) -> Any:
        return compute(self.model)


def _mesh(device_type: str, copies: int, size: int) -> DeviceMesh:
    """Arrange all ranks in copies of the model with `size` shards each. Collective."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if copies == 1:
        # Where torch sees GPUs and the group is gloo's, `init_device_mesh` would make another group, through nccl.
        world = dist.group.WORLD
        assert world is not None
        return DeviceMesh.from_group(world, device_type, mesh_dim_names=("shards",))
    return init_device_mesh(device_type, (copies, size), mesh_dim_names=("copies", "shards"))


Scales = Sequence[tuple[Any, Any]]
"""Linear layers in 4 bits with the scales of their weights, which bitsandbytes keeps as an attribute of each."""


def _scales_of_4_bits(layer: torch.nn.Module) -> Scales:
    modules: Iterable[Any] = layer.modules()
    return [(module, module.weight.quant_state) for module in modules if holds_nf4(module)]


def _put_back(scales: Scales, *_: object) -> None:
    """Set the scales of all-gathered weights in 4 bits: such a weight is a new parameter without attributes."""
    for module, scale in scales:
        module.weight.quant_state = scale


def _call(scales: Scales, compute: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    _put_back(scales)
    return compute(h)


def _gather_late(layer: Any) -> None:
    """All-gather a layer's weights right before they are used, and free the receive buffer at once.

    FSDP2 gathers a layer during the backward pass of another, and keeps what was received until the next is there. That
    is for GPUs: a CPU receives nothing while it computes, and would only hold more memory.
    """
    entered = getattr(layer, ENTER)

    def enter(compute: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor) -> torch.Tensor:
        layer.unshard()
        result: torch.Tensor = entered(compute, h)
        return result

    setattr(layer, ENTER, enter)
    layer.set_modules_to_backward_prefetch([layer])


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    decoder = bare_model(model).get_decoder()
    if not isinstance(getattr(decoder, "layers", None), torch.nn.ModuleList):
        raise ModelError(
            f"a {type(decoder).__name__} has no list of layers, by which parallel.sharding=fsdp2 shards a model. "
            "Set parallel.sharding=none."
        )
    return list(decoder.layers)
