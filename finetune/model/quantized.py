"""QLoRA: the frozen base in 4 bits (Dettmers et al., 2023, arXiv:2305.14314), by bitsandbytes on CUDA.

The base is read and quantized layer by layer on the GPU: the numbers are NF4 with double quantization, and products are
computed in bf16. The adapter and its gradients are as without it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

    from finetune.config.schema import LoraSection, ModelSection


def refuse_where_quantizing_is_impossible(section: LoraSection, model: ModelSection, device: torch.device) -> None:
    """Say what is missing before anything is read: this takes no time, and loading may take minutes.

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
        section: `quantize` says in which numbers.
        device: this process's own.

    Raises:
        ConfigError: see `refuse_where_quantizing_is_impossible`; nothing was read.
        ModelError: no such model, or not a causal language model.
    """
    refuse_where_quantizing_is_impossible(section, model, device)
    return load_in_4_bits(model, device)


def load_in_4_bits(model: ModelSection, device: torch.device) -> PreTrainedModel:
    """The same without looking whether the device is one to train on: bitsandbytes has slow products for CPUs too.

    Raises:
        ModelError: no such model, not a causal language model, or weights that do not belong to it.
    """
    from transformers import AutoModelForCausalLM

    from finetune.model.base import locate_model, read_model_config

    config, where = read_model_config(model), locate_model(model)
    auto: Any = AutoModelForCausalLM
    attention = {} if model.attention == "auto" else {"attn_implementation": model.attention}
    try:
        base, info = auto.from_pretrained(
            where,
            revision=model.revision,
            config=config,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,  # never a pickled checkpoint
            output_loading_info=True,
            quantization_config=quantization(),
            device_map={"": device},
            **attention,
        )
    except Exception as error:  # a damaged file alone has a dozen types, of as many libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"the model {model.path} cannot be loaded in 4 bits: {reason}") from error
    if info["missing_keys"]:  # transformers fills them with random numbers
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelError(f"the weights at {where} do not fit its config.json: {missing} and others are missing.")
    base.config.use_cache = False
    base.config._commit_hash = getattr(config, "_commit_hash", None) or model.revision
    loaded: PreTrainedModel = base
    return loaded


def quantization() -> BitsAndBytesConfig:
    """The numbers of the paper: NF4, the scales quantized too, products in bf16."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def refuse_unquantized(model: Any, section: LoraSection) -> None:
    """Refuse to train on a base in full numbers where 4 bits were asked for.

    Raises:
        ConfigError: names the recipe that quantizes.
    """
    if section.quantize != "none" and not getattr(model, "is_loaded_in_4bit", False):
        raise ConfigError(
            f"lora.quantize is {section.quantize}, but this recipe builds its base without quantizing it. Use "
            "recipes/finetune_qlora.py, or set lora.quantize=none."
        )
