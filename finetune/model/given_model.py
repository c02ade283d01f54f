"""Take a model that a script has loaded or built, and describe it as the configuration does."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from finetune.engine.decoder import bare_model
from finetune.errors import ModelError
from finetune.model.base import prepare_base
from finetune.model.lora import add_lora, trained_in_fp32

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config

_KEYS = {
    "r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.target_modules",
    "layers_to_transform": "lora.layers",
    "rank_pattern": "lora.rank_pattern",
    "alpha_pattern": "lora.alpha_pattern",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
    "modules_to_save": "lora.modules_to_save",
}
"""The keys that describe an adapter, by PEFT's names."""
_SAY_NOTHING = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "fan_in_fan_out", "ensure_weight_tying", "init_lora_weights"),
}
"""Fields of PEFT that change neither the adapter's shape nor its updates. The start of the weights is in the model."""


def describe_given_model(model: Any) -> dict[str, object]:
    """Return the keys of the configuration that describe a model, with their values.

    The model is a transformers causal language model, or a PEFT model around one with one LoRA adapter that trains.

    Raises:
        ModelError: the configuration cannot describe the model.
    """
    if getattr(model, "config", None) is None or not callable(getattr(model, "get_input_embeddings", None)):
        raise ModelError(
            f"model is {type(model).__name__}; expected a name or a path, a transformers model, or a PEFT model."
        )
    base = bare_model(model)
    name = getattr(base.config, "_name_or_path", None)
    if not name:
        raise ModelError(
            "the given model was not loaded from a folder or the hub, so later commands could not find it. Save it "
            "with model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER), and give "
            "AutoModelForCausalLM.from_pretrained(FOLDER)."
        )
    if getattr(base, "hf_quantizer", None) is not None:
        raise ModelError("the given model is quantized. Give its name in model, and set lora.quantize=nf4.")
    if len(set(getattr(base, "hf_device_map", {}).values())) > 1:
        raise ModelError("the given model is spread over several devices (device_map). Load it without device_map.")
    return {"model.path": str(name)} | (_describe_adapter(model) if hasattr(model, "peft_config") else {})


def adopt_given_model(model: Any, config: Config, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Prepare a given model for training. Without an adapter of its own, it gets one if the run trains an adapter.

    Raises:
        ModelError: see `add_lora`.
    """
    prepare_base(bare_model(model))
    if hasattr(model, "peft_config"):
        trained_in_fp32(model)
        return model
    return add_lora(model, config.lora, tokenizer) if config.training.method == "lora" else model


def _describe_adapter(model: Any) -> dict[str, object]:
    from peft import LoraConfig

    adapters = model.peft_config
    if list(adapters) != ["default"] or not isinstance(adapters["default"], LoraConfig):
        kinds = ", ".join(f"{name} ({type(config).__name__})" for name, config in adapters.items())
        raise ModelError(f"the given model has the adapters {kinds}; expected one LoRA adapter named default.")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ModelError(
            "the adapter of the given model is frozen. Load it with PeftModel.from_pretrained(…, is_trainable=True)."
        )
    adapter = adapters["default"]
    unknown = [field.name for field in fields(LoraConfig) if field.name not in _SAY_NOTHING | _KEYS.keys()]
    plain = LoraConfig()
    others = [name for name in unknown if getattr(adapter, name, None) != getattr(plain, name, None)]
    if adapter.init_lora_weights not in (True, False, "gaussian"):
        others.append("init_lora_weights")
    if others:
        shown = ", ".join(f"{name}={getattr(adapter, name)!r}" for name in others)
        raise ModelError(
            f"the adapter of the given model has {shown}, which no key of the configuration describes. Leave it out, "
            "or describe the adapter with lora.* keys and give only the base."
        )
    return {key: _value(adapter, name) for name, key in _KEYS.items()}


def _value(adapter: LoraConfig, name: str) -> object:
    value = getattr(adapter, name)
    if name in ("target_modules", "modules_to_save"):
        return sorted([value] if isinstance(value, str) else value or [])
    if name == "layers_to_transform":
        return [value] if isinstance(value, int) else value
    return float(value) if name in ("lora_alpha", "lora_dropout") else value
