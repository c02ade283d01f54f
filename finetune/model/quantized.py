"""QLoRA: a frozen base in 4 bits (Dettmers et al., 2023, arXiv:2305.14314), by bitsandbytes on CUDA.

The base is read and quantized layer by layer on the GPU, in NF4 with double quantization; products are in bf16. The
adapter and its gradients are the same as without quantization.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import ConfigError
from finetune.model.base import load_base

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

    from finetune.config.schema import LoraSection, ModelSection


def refuse_where_quantizing_is_impossible(section: LoraSection, model: ModelSection, device: torch.device) -> None:
    """Refuse at once what would fail after minutes of loading.

    Raises:
        ConfigError: `lora.quantize` is not set, or this device, installation or base has no 4-bit weights.
    """
    if section.quantize == "none":
        raise ConfigError("lora.quantize is none, but a quantized base was asked for. Set lora.quantize=nf4.")
    instead = "Set lora.quantize=none, which trains the same adapter on the base in bf16 or fp32."
    if device.type != "cuda":
        raise ConfigError(
            f"lora.quantize={section.quantize} needs a CUDA device, and this run is on {device}. {instead}"
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"lora.quantize={section.quantize} needs bitsandbytes, which is not installed: pip install bitsandbytes. "
            f"{instead}"
        )
    if model.init == "random":
        raise ConfigError(
            f"lora.quantize={section.quantize} needs weights to quantize, but model.init=random has none on disk. "
            f"{instead}"
        )


def build_quantized_base(model: ModelSection, section: LoraSection, device: torch.device) -> PreTrainedModel:
    """Load the base in 4 bits onto a CUDA device.

    Args:
        model: where the base is.
        section: `quantize` names the 4-bit type.
        device: this process's GPU.

    Raises:
        ConfigError: see `refuse_where_quantizing_is_impossible`; nothing was read.
        ModelError: no such model, or not a causal language model.
    """
    refuse_where_quantizing_is_impossible(section, model, device)
    return load_in_4_bits(model, device)


def load_in_4_bits(model: ModelSection, device: torch.device) -> PreTrainedModel:
    """Load the base in 4 bits onto any device: bitsandbytes has slow products for CPUs too.

    Raises:
        ModelError: no such model, not a causal language model, or weights that do not belong to it.
    """
    return load_base(model, quantization_config=quantization(), device_map={"": device})


def quantization() -> BitsAndBytesConfig:
    """The settings of the paper: NF4, the scales quantized too, products in bf16."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def refuse_unquantized(model: Any, section: LoraSection) -> None:
    """Refuse to train on an unquantized base if 4 bits were asked for.

    Raises:
        ConfigError: names the recipe that quantizes.
    """
    if section.quantize != "none" and not getattr(model, "is_loaded_in_4bit", False):
        raise ConfigError(
            f"lora.quantize is {section.quantize}, but this recipe builds its base without quantizing it. Use "
            "recipes/finetune_qlora.py, or set lora.quantize=none."
        )
