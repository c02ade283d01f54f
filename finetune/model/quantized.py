"""Load a frozen base in 4 bits with bitsandbytes, for QLoRA (Dettmers et al., 2023, arXiv:2305.14314).

The base is read and quantized layer by layer on the GPU, in NF4 with double quantization; products are in bf16. The
adapter and its gradients are the same as without quantization.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.four_bits import in_4_bits_without_data
from finetune.errors import ConfigError
from finetune.model.base import build_base_model

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

    from finetune.config.schema import LoraSection, ModelSection


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
    return build_base_model(model, quantization_config=quantization(), device_map={"": device})


def quantize_without_data(model: Any) -> None:
    """Quantize the base of a model on the meta device as `load_in_4_bits` would: all linear layers but the head.

    The weights must still have the types in which they are loaded.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is torch.nn.Linear and module is not head and not module.weight.requires_grad:
            module.weight = in_4_bits_without_data(module.weight)


def quantization() -> BitsAndBytesConfig:
    """Return the settings of the paper: NF4, with quantized scales and products in bf16."""
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
