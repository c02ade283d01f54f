"""Check whether the engine's forward pass computes the same as a model's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from finetune.engine.adapted import hook_reason, reason_to_call, unknown_linear
from finetune.engine.decoder import FAMILIES, FULL, SLIDING, bare_model, family_of
from finetune.engine.mlp import ACTIVATIONS

_PLAIN_TYPES = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ModuleList)
_SETTINGS = {"TrainableTokensWrapper": " (lora.new_tokens)", "ModulesToSaveWrapper": " (lora.modules_to_save)"}
_OWN = "finetune.engine.host_embedding"
_OF_TRANSFORMERS = "transformers.models."
_LACKING = {
    "attn_logit_softcapping": "its attention scores are capped",
    "final_logit_softcapping": "its logits are capped",
    "use_bidirectional_attention": "its tokens see later tokens",
    "num_experts": "its layers choose among experts",
    "num_local_experts": "its layers choose among experts",
    "n_routed_experts": "its layers choose among experts",
    "vision_config": "it also reads images",
    "qk_layernorm": "it normalizes queries and keys by LayerNorm",
    "use_qk_norm": "it normalizes queries and keys by LayerNorm",
}
"""What no model may do that the engine computes, by the key of the configuration that says so."""


def unsupported_reason(model: nn.Module) -> str | None:
    """Return the reason why `Decoder` cannot replace the model's own forward; None if it can.

    Every module must be of a known type, so that replaced, wrapped and hooked modules are found. The linear layers of
    `called_layers` are supported by calling them. The model is transformers' own, or a PEFT model around one.
    """
    return next(_reasons(model), None)


def lacking_reasons(config: Any) -> Iterator[str]:
    """Yield what the engine lacks for any model with this configuration."""
    for key, reason in _LACKING.items():
        if value := getattr(config, key, None):
            yield f"{reason} ({key}{f' {value}' if type(value) in (int, float) else ''})"


def _reasons(model: Any) -> Iterator[str]:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        yield "its adapter is a prompt"
    bare = bare_model(model)
    model_type = getattr(getattr(bare, "config", None), "model_type", None)
    yield from lacking_reasons(getattr(bare, "config", None))
    if not family_of(model_type).is_computed:
        yield from _layer_reasons(bare)
        if (why_not := family_of(model_type).why_not) is not None:
            yield why_not
        computed = sorted(name for name, family in FAMILIES.items() if family.is_computed)
        yield f"its model type is {model_type}; the engine supports {', '.join(computed)}"
        return
    yield from _config_reasons(bare.config)
    names = frozenset(name for name, _ in _linears(bare))
    decoder = bare.get_decoder()
    package = type(decoder).__module__.rpartition(".")[0] + "."
    if not package.startswith(_OF_TRANSFORMERS):
        yield f"its decoder is a {type(decoder).__name__} that is not transformers' own"
    yield from _module_reasons("", decoder, package, names)
    head = bare.get_output_embeddings()
    if type(head) is not nn.Linear:
        yield f"its head is a {type(head).__name__}"
    elif hook_reason(head):
        yield f"its head has {hook_reason(head)}"


def _layer_reasons(bare: Any) -> Iterator[str]:
    """Yield what the layers of a model have that the engine lacks."""
    if unknown := sorted(set(getattr(bare.config, "layer_types", None) or ()) - {FULL, SLIDING}):
        yield f"it has layers of the type {', '.join(unknown)} (layer_types)"
    sinks = [name for name, _ in bare.named_parameters() if name.endswith(".sinks")]
    if sinks:
        yield f"its attention has sinks ({sinks[0]})"


def _config_reasons(config: Any) -> Iterator[str]:
    if getattr(config, "attention_dropout", 0):
        yield f"it applies dropout to attention weights (attention_dropout {config.attention_dropout})"
    family = FAMILIES[config.model_type]
    if family.window == "by layer":
        yield from _window_reasons(config)
    if not family.is_gated:
        return
    for key in ("resid_pdrop", "residual_dropout"):
        if getattr(config, key, 0):
            yield f"it applies dropout to residuals ({key} {getattr(config, key)})"
    if (activation := getattr(config, family.activation)) not in ACTIVATIONS:
        yield f"its feed-forward part is gated by {activation}, not by {', '.join(ACTIVATIONS)}"


def _window_reasons(config: Any) -> Iterator[str]:
    if unknown := sorted(set(config.layer_types) - {FULL, SLIDING}):
        yield f"its layers attend in ways that the engine lacks (layer_types: {', '.join(unknown)})"
    if SLIDING in config.layer_types and config.sliding_window is None:
        yield "some of its layers have a sliding window (layer_types) whose size is not set (sliding_window)"


def called_layers(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of linear layers that the engine must call, by reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name, module in _linears(bare_model(model)):
        if (reason := reason_to_call(module)) is not None:
            names_by_reason.setdefault(reason, []).append(name)
    return names_by_reason


def _linears(bare: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers of a decoder with their names."""
    names = FAMILIES[bare.config.model_type].linears
    for index, layer in enumerate(bare.get_decoder().layers):
        for name in names:
            yield f"layers.{index}.{name}", layer.get_submodule(name)


def _module_reasons(name: str, module: nn.Module, of_model: str, linears: frozenset[str]) -> Iterator[str]:
    """Yield the reasons why a module, or one inside it, is not supported."""
    if name in linears:
        unknown = unknown_linear(module)
        if unknown:
            yield f"{name} is {unknown}"
        return
    if hooks := hook_reason(module):
        yield f"{name or 'its decoder'} has {hooks}"
    if type(module) in _PLAIN_TYPES or type(module).__module__.startswith((of_model, "transformers.activations", _OWN)):
        for child_name, child in module.named_children():
            yield from _module_reasons(f"{name}.{child_name}".lstrip("."), child, of_model, linears)
    else:
        yield f"{name} is a {type(module).__name__}{_SETTINGS.get(type(module).__name__, '')}"
