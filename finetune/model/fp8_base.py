"""Keep the frozen linear layers of a base in fp8 (`model.frozen_precision=fp8`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from finetune.engine.decoder import FAMILIES, Family, bare_model
from finetune.engine.quantized import MULTIPLE, why_not_fp8
from finetune.engine.adapted import Fp8Linear
from finetune.errors import ConfigError

if TYPE_CHECKING:
    from finetune.config.schema import Config


class RoundedLayers(NamedTuple):
    """What `round_frozen_layers` did."""

    rounded: list[str]
    """The names of the layers in fp8."""
    kept: list[str]
    """The names of the layers that stay in bf16, because torch has no fp8 products of their sizes."""


def wants_fp8(config: Config) -> bool:
    """Return whether a run asks for a base in fp8."""
    return config.model.frozen_precision == "fp8"


def refuse_where_fp8_is_impossible(
    config: Config, *, precision: str, device: torch.device | None, why_not_device: str | None = None
) -> None:
    """Refuse a run with a base in fp8 that could not compute with it, before anything is read.

    Args:
        config: the whole run.
        precision: the precision of the run.
        device: the device of the run; None if it is not in this machine.
        why_not_device: with a device of None: the reason why it cannot multiply in fp8, if that is known.

    Raises:
        ConfigError: names all reasons.
    """
    if not wants_fp8(config):
        return
    reasons = list(_reasons(config, precision))
    why_not_device = why_not_device if device is None else why_not_fp8(device)
    if why_not_device is not None:
        reasons.append(why_not_device)
    if reasons:
        raise ConfigError(
            f"model.frozen_precision=fp8 ({config.origin('model.frozen_precision')}) is not possible here: "
            f"{'; '.join(reasons)}. Change this, or set model.frozen_precision=auto."
        )


def _reasons(config: Config, precision: str) -> Iterator[str]:
    if config.training.method == "full":
        yield "training.method=full has no frozen weights"
    if config.lora.quantize != "none":
        yield f"lora.quantize={config.lora.quantize} keeps the base in 4 bits"
    if config.lora.dora:
        yield "lora.dora=true computes with the base's weights themselves"
    if config.parallel.sharding != "none":
        yield f"parallel.sharding={config.parallel.sharding} does not shard weights in fp8"
    if config.training.kernels == "reference":
        yield "training.kernels=reference has no products in fp8"
    if precision != "bf16":
        yield f"the run computes in {precision}, and a base in fp8 needs training.precision=bf16"


def refuse_fp8_without_engine(config: Config, why_not_engine: str | None) -> None:
    """Refuse a base in fp8 if the model's own forward computes the steps.

    Raises:
        ConfigError: with the reason why the engine does not.
    """
    if why_not_engine is not None:
        raise ConfigError(
            f"model.frozen_precision=fp8 ({config.origin('model.frozen_precision')}) needs the engine, which does not "
            f"compute this model: {why_not_engine}. Set model.frozen_precision=auto."
        )


def round_frozen_layers(model: Any, layers: Literal["all", "upper_half"] = "all") -> RoundedLayers:
    """Round the frozen linear layers of the decoder to fp8, in place. Embedding, head and norms keep their type.

    The model must be of a family that the engine supports. It may be on any device, also on the meta device. The upper
    half of n decoder layers starts at layer n // 2.
    """
    bare = bare_model(model)
    family = FAMILIES[bare.config.model_type]
    result = RoundedLayers([], [])
    decoder_layers = bare.get_decoder().layers
    first = len(decoder_layers) // 2 if layers == "upper_half" else 0
    for index, layer in list(enumerate(decoder_layers))[first:]:
        for name in family.linears:
            module = layer.get_submodule(name)
            base = getattr(module, "base_layer", module)
            if type(base) is not torch.nn.Linear or base.weight.requires_grad:
                continue
            if not _fits(base, name, family, bare.config):
                result.kept.append(f"layers.{index}.{name}")
                continue
            result.rounded.append(f"layers.{index}.{name}")
            above, _, own = name.rpartition(".")
            place = (layer.get_submodule(above), own) if base is module else (module, "base_layer")
            setattr(*place, Fp8Linear(base))
    return result


def _fits(layer: torch.nn.Linear, name: str, family: Family, config: Any) -> bool:
    """Return whether torch's kernels take the sizes of a layer. The engine also divides projections at whole heads."""
    sizes = [layer.in_features, layer.out_features]
    if name in family.projections:
        sizes.append(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return not any(size % MULTIPLE for size in sizes)
