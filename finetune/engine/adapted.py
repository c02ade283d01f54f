"""Read the tensors of linear layers made by transformers, PEFT or quantisation, or give the reason to call a layer.

`Fp8Linear` is the frozen layer that keeps its weight in fp8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from finetune.engine.linear import Linear, draw_keep, linear

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GRADIENT_HOOK = "make_inputs_require_grads"
"""The hook of transformers' `enable_input_require_grads`. Only transformers' gradient checkpointing needs it."""
_DORA = "DoraLinearVariant"
_PACKAGES = ("torch.", "transformers.")


def holds_nf4(module: Any) -> bool:
    """Return whether a linear layer's weight is in a 4-bit format that `widened` can dequantize."""
    if type(module).__name__ != "Linear4bit" or not type(module).__module__.startswith("bitsandbytes.nn"):
        return False
    state = getattr(module.weight, "quant_state", None)
    # On some CPUs an evaluation packs the weights anew, for products of its own.
    return getattr(state, "quant_type", None) == "nf4" and not getattr(state, "packing_format_for_cpu", False)


def read_linear(module: Any, like: Any, *, num_padding: int = 0) -> Linear | nn.Module:
    """Read the tensors of a linear layer, with a new mask if its adapter has dropout, or return a module to be called.

    Args:
        module: a layer for which `unknown_linear` returns None.
        like: a tensor with the rows, the type and the device of the module's input.
        num_padding: the number of its last rows that are padding.
    """
    if reason_to_call(module) is not None:
        called: nn.Module = module
        return called
    base = getattr(module, "base_layer", module)
    row_scale = getattr(base, "row_scale", None)
    if base is module or module.disable_adapters or module.merged:
        return Linear(base.weight, base.bias, row_scale=row_scale)
    (adapter,) = module.active_adapters
    p = getattr(module.lora_dropout[adapter], "p", 0.0) if module.training else 0.0
    # Dropout keeps a value with probability 1 - p. Dividing the scale by 1 - p keeps the expectation.
    keep = draw_keep(like, base.in_features, p, num_padding=num_padding) if p else None
    a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    return Linear(base.weight, base.bias, a, b, keep, row_scale, module.scaling[adapter] / (1 - p))


def reason_to_call(module: Any) -> str | None:
    """Return why a linear layer's own forward must be called; None if its tensors are enough."""
    if _holds_readable_weight(module):
        return hook_reason(module)
    if not hasattr(module, "lora_A"):
        return f"a {type(module).__name__}"
    variants = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
    inner = next(filter(None, map(hook_reason, module.modules())), None)
    if type(module).__name__ not in ("Linear", "Linear4bit") or not _holds_readable_weight(module.base_layer):
        return f"LoRA on a {type(module.base_layer).__name__}"
    if variants:
        return "DoRA" if variants == [_DORA] else ", ".join(variants)
    if len(module.lora_A) > 1 or list(module.active_adapters) != list(module.lora_A):
        return "several adapters, or one that is not active"
    if any(module.lora_bias.values()):
        return "an adapter with a bias (lora_bias)"
    if module.fan_in_fan_out:
        return "a weight that is kept transposed (fan_in_fan_out)"
    if module.merged and module.disable_adapters:
        return "an adapter merged and disabled at once"
    return inner


def _holds_readable_weight(module: Any) -> bool:
    return type(module) in (nn.Linear, Fp8Linear) or holds_nf4(module)


def unknown_linear(module: Any) -> str | None:
    """Return why the result of calling a module may differ from the model's own forward; None if it cannot."""
    if hasattr(module, "lora_A"):
        unknown = {type(variant).__name__ for variant in module.lora_variant.values()} - {_DORA}
        return f"a LoRA layer with {', '.join(sorted(unknown))}" if unknown else None
    is_known = type(module) in (nn.Linear, Fp8Linear) or type(module).__module__.startswith("bitsandbytes.nn")
    return None if is_known else f"a {type(module).__name__}"


def hook_reason(module: nn.Module) -> str | None:
    """Name hooks or a replaced forward, which only a call of the module would run; None if there are none."""
    hooks = [hook for kind in _HOOKS for hook in getattr(module, kind, {}).values()]
    if others := [hook for hook in hooks if _GRADIENT_HOOK not in getattr(hook, "__qualname__", "")]:
        return str(getattr(others[0], "setting", "hooks"))
    forward: Any = type(module).forward  # another library may have put its own into the class, as Liger does
    written_in = str(getattr(forward, "__globals__", {}).get("__name__"))
    is_patched = type(module).__module__.startswith(_PACKAGES) and not written_in.startswith(_PACKAGES)
    return "a forward that was replaced" if is_patched or "forward" in vars(module) else None


class Fp8Linear(torch.nn.Module):
    """A linear layer with the weight of another one, rounded to fp8 with a scale for each output.

    Args:
        layer: frozen; on any device, also on the meta device.

    Attributes:
        weight: (out_features, in_features), e4m3.
        row_scale: (out_features,), fp32.
        bias: the layer's, or None.
    """

    row_scale: torch.Tensor

    def __init__(self, layer: torch.nn.Linear) -> None:
        from finetune.engine.quantized import rounded_to_fp8  # only for a base in fp8

        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        values, scale = rounded_to_fp8(layer.weight.detach(), None)
        self.weight = torch.nn.Parameter(values, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("row_scale", scale[:, 0], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer, as transformers' own forward does when it generates: (..., in_features)."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            y = linear(x.flatten(0, -2), Linear(self.weight, self.bias, row_scale=self.row_scale))
        return y.view(*x.shape[:-1], self.out_features)
