"""Keep the frozen layers of a base in 4 bits (bitsandbytes) or in fp8 (`model.frozen_precision`).

QLoRA (Dettmers et al., 2023, arXiv:2305.14314): the base is read and quantized layer by layer on the GPU, in NF4 with
double quantization; products are in bf16. The adapter and its gradients are the same as without quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from finetune.engine.adapted import Fp8Linear
from finetune.engine.decoder import FAMILIES, Family, bare_model
from finetune.engine.quantized import MULTIPLE, in_4_bits_without_data, why_not_fp8
from finetune.errors import ConfigError, ModelError
from finetune.model.base import build_base_model
from finetune.model.from_hub import locate_model, repository_of
from finetune.model.local_files import stored_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.config.schema import Config, LoraSection, ModelSection


def refuse_where_quantizing_is_impossible(section: LoraSection, model: ModelSection, device: torch.device) -> None:
    """Refuse at once a base that would fail after minutes of loading.

    Raises:
        ConfigError: `lora.quantize` is not set, or this device, installation or base has no 4-bit weights.
    """
    if section.quantize == "none":
        raise ConfigError("lora.quantize is none, but a quantized base was asked for. Set lora.quantize=nf4.")
    missing = None
    if device.type != "cuda":
        missing = f"a CUDA device, and this run is on {device}"
    elif find_spec("bitsandbytes") is None:
        missing = "bitsandbytes, which is not installed: pip install bitsandbytes"
    elif model.init == "random":
        missing = "weights to quantize, but model.init=random has none on disk"
    if missing is not None:
        raise ConfigError(
            f"lora.quantize={section.quantize} needs {missing}. Set lora.quantize=none, which trains the same adapter "
            "on the base in bf16 or fp32."
        )


def build_quantized_base(model: ModelSection, section: LoraSection, device: torch.device) -> PreTrainedModel:
    """Load the base in 4 bits onto this process's GPU.

    Raises:
        ConfigError: see `refuse_where_quantizing_is_impossible`; nothing was read.
        ModelError: no such model, or not a causal language model.
    """
    refuse_where_quantizing_is_impossible(section, model, device)
    return load_in_4_bits(model, device)


def load_in_4_bits(model: ModelSection, device: torch.device) -> PreTrainedModel:
    """Load the base in 4 bits onto any device. On CPUs, bitsandbytes computes slowly; the tests use this.

    Raises:
        ModelError: no such model, not a causal language model, or weights that do not belong to it.
    """
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return build_base_model(model, quantization_config=settings, device_map={"": device})


def quantize_without_data(model: Any) -> None:
    """Quantize the base of a model on the meta device as `load_in_4_bits` would: all linear layers but the head.

    The weights must still have the types in which they are loaded.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is torch.nn.Linear and module is not head and not module.weight.requires_grad:
            module.weight = in_4_bits_without_data(module.weight)


@contextmanager
def weights_from_disk(section: ModelSection, states: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, let the engine read each weight from disk where it would dequantize it.

    For the states see `states_in_4_bits` in model/base.py.

    Raises:
        ModelError: the files hold no weights of these names and shapes.
    """
    where = locate_model(section)
    stored = stored_weights(where, repository_of(where, section.revision))
    for name, state in states.items():
        if name not in stored or stored[name].get_shape() != list(state.shape):
            raise ModelError(f"the files of {section.path} hold {name} under another name or in another shape")

    def read(name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return stored[name][:].to(device, dtype)  # type: ignore[no-any-return]

    try:
        for name, state in states.items():
            state.widened = partial(read, name, state.dtype)
        yield
    finally:
        for state in states.values():
            del state.widened


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

    A device of None is not in this machine; `why_not_device` then says why it cannot multiply in fp8, if that is known.

    Raises:
        ConfigError: names all reasons.
    """
    if not wants_fp8(config):
        return
    sharding = config.parallel.sharding
    obstacles = {
        "training.method=full has no frozen weights": config.training.method == "full",
        f"lora.quantize={config.lora.quantize} keeps the base in 4 bits": config.lora.quantize != "none",
        "lora.dora=true computes with the base's weights themselves": config.lora.dora,
        f"parallel.sharding={sharding} does not shard weights in fp8": sharding != "none",
        "training.kernels=reference has no products in fp8": config.training.kernels == "reference",
        f"the run computes in {precision}, and a base in fp8 needs training.precision=bf16": precision != "bf16",
        (why_not_device if device is None else why_not_fp8(device)) or "": True,
    }
    if reasons := [reason for reason, applies in obstacles.items() if reason and applies]:
        raise ConfigError(
            f"model.frozen_precision=fp8 ({config.origin('model.frozen_precision')}) is not possible here: "
            f"{'; '.join(reasons)}. Change this, or set model.frozen_precision=auto."
        )


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
