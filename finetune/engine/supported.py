"""Whether the engine's own forward pass computes what a model's own forward would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from finetune.engine.decoder import FAMILIES, bare_model

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GRADIENT_HOOK = "make_inputs_require_grads"
"""Of transformers' `enable_input_require_grads`, which its gradient checkpointing needs and ours does not."""
_PLAIN_TYPES = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ModuleList)


def unsupported_reason(model: nn.Module) -> str | None:
    """Why `Decoder` cannot stand in for the model's own forward, in words, or None where it can.

    Every module on the way must be of a known type: what was replaced, wrapped, quantized or hooked is found by that.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
    """
    return next(_reasons(model), None)


def _reasons(model: Any) -> Iterator[str]:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        yield "its adapter is a prompt"
    bare = bare_model(model)
    kind = getattr(getattr(bare, "config", None), "model_type", None)
    if kind not in FAMILIES:
        yield f"its model type is {kind}; the engine knows {', '.join(sorted(FAMILIES))}"
        return
    yield from _config_reasons(bare.config)
    yield from _module_reasons("", bare.get_decoder(), of_model=f"transformers.models.{kind}.")
    head = bare.get_output_embeddings()
    if type(head) is not nn.Linear:
        yield f"its head is a {_type_name(head)}"
    yield from _hook_reasons("its head", head)


def _config_reasons(config: Any) -> Iterator[str]:
    if getattr(config, "attention_dropout", 0):
        yield f"it drops attention weights (attention_dropout {config.attention_dropout})"
    if getattr(config, "qk_layernorm", False):
        yield "it normalizes queries and keys (qk_layernorm)"
    if FAMILIES[config.model_type].is_parallel:
        return
    if getattr(config, "resid_pdrop", 0):
        yield f"it drops residuals (resid_pdrop {config.resid_pdrop})"
    if config.hidden_act != "silu":
        yield f"its feed-forward part is gated by {config.hidden_act}, not by silu"


def _module_reasons(name: str, module: nn.Module, of_model: str) -> Iterator[str]:
    """What is unknown about a module or those inside it."""
    yield from _hook_reasons(name or "its decoder", module)
    if hasattr(module, "lora_A"):
        yield from _adapter_reasons(name, module)
    elif type(module) in _PLAIN_TYPES or type(module).__module__.startswith((of_model, "transformers.activations")):
        for child_name, child in module.named_children():
            yield from _module_reasons(f"{name}.{child_name}".lstrip("."), child, of_model)
    else:
        yield f"{name} is a {_type_name(module)}"


def _adapter_reasons(name: str, module: Any) -> Iterator[str]:
    from peft.tuners.lora import Linear  # imported already, where a layer has an adapter

    if type(module) is not Linear:
        yield f"{name} is a {_type_name(module)}"
        return
    if type(module.base_layer) is not nn.Linear:
        yield f"{name} adapts a {_type_name(module.base_layer)}"
    if module.lora_variant:
        yield f"{name} is not a plain LoRA layer but {', '.join(map(_type_name, module.lora_variant.values()))}"
    if list(module.active_adapters) != list(module.lora_A):
        there, active = (", ".join(names) for names in (module.lora_A, module.active_adapters))
        yield f"{name} has the adapters {there}, and the active ones are {active}"
    if len(module.lora_A) > 1:
        yield f"{name} has {len(module.lora_A)} adapters"
    if any(module.lora_bias.values()):
        yield f"{name} has an adapter with a bias (lora_bias)"
    if module.fan_in_fan_out:
        yield f"{name} keeps its weight transposed (fan_in_fan_out)"
    if module.merged and module.disable_adapters:
        yield f"{name} has its adapter merged and disabled at once"
    for child_name, child in module.named_modules():
        yield from _hook_reasons(f"{name}.{child_name}", child)


def _hook_reasons(name: str, module: nn.Module) -> Iterator[str]:
    hooks = [hook for kind in _HOOKS for hook in getattr(module, kind, {}).values()]
    if any(_GRADIENT_HOOK not in getattr(hook, "__qualname__", "") for hook in hooks):
        yield f"{name} has hooks"
    if "forward" in vars(module):
        yield f"{name} has its forward replaced"


def _type_name(module: object) -> str:
    return type(module).__name__
