"""Let the engine compute models of a type that it has no record of, if a tiny one agrees with transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias

import torch

from finetune.engine.decoder import FAMILIES, FULL, SLIDING, Family
from finetune.engine.layout import pack
from finetune.engine.loss import cross_entropy_per_target, summed_cross_entropy
from finetune.engine.supported import lacking_reasons, unsupported_reason
from finetune.errors import first_line
from finetune.model.shrunken import VOCABULARY, random_model, shrunken_config
from finetune.units import name_first

_log = logging.getLogger(__name__)
tried_families: dict[str, str] = {}
"""The configuration of the last trial, by type of model."""
_MOST_DIFFERENCE = 1e-5
"""Relative, in fp32: a tiny model amplifies roundings, and a part that is missing changes far more."""
_LENGTHS = (31, 9, 23)
"""Tokens of the rows: longer and shorter than the window and the context of a shrunken model."""
_Forms: TypeAlias = tuple[tuple[str, ...], ...]
_PROJECTIONS: _Forms = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.qkv_proj",)
_OUTPUTS: _Forms = ("self_attn.o_proj",), ("self_attn.dense",)
_WIDEN: _Forms = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.gate_up_proj",)
_HEAD_NORMS: _Forms = ("self_attn.q_norm", "self_attn.k_norm"), ("self_attn.q_layernorm", "self_attn.k_layernorm"), ()
_PLAIN = "self_attn", "mlp", "mlp.act_fn", "mlp.activation_fn"
_ORDERS: tuple[dict[str, Any], ...] = (
    {"is_interleaved": False},
    {"is_interleaved": True},
    {"is_interleaved": True, "has_interleaved_angles": True},
)
_NORMS = (
    (("input_layernorm", None), ("post_attention_layernorm", None)),
    (("input_layernorm", None), (None, None)),  # beside each other
    ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    (("input_layernorm", "post_attention_layernorm"), ("pre_feedforward_layernorm", "post_feedforward_layernorm")),
    (("input_layernorm", "post_self_attn_layernorm"), ("post_attention_layernorm", "post_mlp_layernorm")),
)
"""The norms before and after attention and feed-forward part, as transformers names them."""
_KNOWN = {*_PLAIN, "mlp.down_proj"}.union(
    *(form for forms in (_PROJECTIONS, _OUTPUTS, _WIDEN, _HEAD_NORMS) for form in forms),
    *(filter(None, part) for norms in _NORMS for part in norms),
)
"""All names of modules that a reading may use."""


def learn_family(model: Any) -> None:
    """Add the type of a model to `FAMILIES`, as computed if its layers fit and a trial agrees.

    The trial takes about a second. It computes a random model of the same class, with small sizes, in both ways. It is
    made again for another configuration, because that may choose other parts.
    """
    model_type, text = model.config.model_type, model.config.to_json_string()
    if tried_families.get(model_type) == text or not type(model).__module__.startswith("transformers.models."):
        return
    tried_families[model_type] = text
    FAMILIES.pop(model_type, None)
    if any(lacking_reasons(model.config)):
        return
    try:
        families = list(_readings(model))
    except AttributeError:  # its modules have other names
        return
    why_not: str | None
    if not families:
        if unknown := sorted(_parts_of_layer(model) - _KNOWN):
            why_not = f"the engine does not know these parts of its layers: {name_first(unknown, 4)}"
            FAMILIES[model_type] = Family(is_computed=False, why_not=why_not)
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        try:
            why_not = _try(model_type, shrunken_config(model.config), families)
        except Exception as error:  # of transformers: this type cannot be made small
            why_not = f"a tiny model of its type cannot be tried ({type(error).__name__}: {first_line(error)})"
    if why_not is None:
        _log.info("the engine computes %s: a tiny random model of it agrees with transformers", model_type)
    else:
        FAMILIES[model_type] = Family(is_computed=False, why_not=why_not)


def _readings(model: Any) -> Iterator[Family]:
    """Yield what the names of modules and the configuration may mean; nothing if the engine lacks a part."""
    config, decoder = model.config, model.get_decoder()
    attention, names = decoder.layers[0].self_attn, _parts_of_layer(model)
    parts = {name for name in names if "." not in name} - {"self_attn", "mlp"}
    norms = next((each for each in _NORMS if set(each[0] + each[1]) - {None} == parts), None)
    projections, output, widen, head_norms = (
        next((each for each in forms if set(each) <= names), None)
        for forms in (_PROJECTIONS, _OUTPUTS, _WIDEN, _HEAD_NORMS)
    )
    if norms is None or projections is None or output is None or widen is None or head_norms is None:
        return
    known = {*projections, *output, *widen, *head_norms, "mlp.down_proj", *_PLAIN, *parts}
    if names - known or not isinstance(attention.scaling, float | int):
        return
    is_norm_of_mean = "LayerNorm" in type(decoder.norm).__name__
    family = Family(
        projections=projections,
        output=output[0],
        widen=widen,
        attention_norms=norms[0],
        mlp_norms=norms[1],
        norm="mean and variance" if is_norm_of_mean else "root mean square",
        head_norms=head_norms,
        is_parallel=norms[1] == (None, None),
        activation="hidden_activation" if getattr(config, "hidden_activation", None) else "hidden_act",
        embedding_scale=_key_of(config, "embedding_multiplier"),
        residual_scale=_key_of(config, "residual_multiplier"),
        logit_scale=_key_of(config, "logit_scale"),
        logit_divisor=_key_of(config, "logits_scaling"),
        has_rotary_by_type=set(getattr(config, "rope_parameters", None) or ["none"]) <= {FULL, SLIDING},
    )
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    windows: tuple[Any, ...] = ("by layer",) if kinds else ("all layers", "no layer") if window else ("no layer",)
    rotaries: tuple[Any, ...] = ("all layers", "sliding layers") if SLIDING in kinds else ("all layers",)
    rotaries = ("by module",) if hasattr(attention, "use_rope") else rotaries
    for window, rotary, offset, orders in product(windows, rotaries, (0.0, 1.0), _ORDERS):
        yield replace(family, window=window, rotary=rotary, norm_offset=offset, **orders)


def _parts_of_layer(model: Any) -> set[str]:
    """Return the names of the modules of the first layer."""
    modules = model.get_decoder().layers[0].named_modules()
    return {name for name, module in modules if name and not isinstance(module, torch.nn.Dropout)}


def _key_of(config: Any, key: str) -> str | None:
    return key if getattr(config, key, None) else None


def _try(model_type: str, config: Any, families: list[Family]) -> str | None:
    """Keep the first record that computes what transformers does. Return why there is none; None if there is one."""
    model = random_model(config).train()  # dropout that no key of the configuration announces is then a difference
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in _LENGTHS]
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits[0, :-1] for row in rows])
    labels = torch.cat([row[1:] for row in rows])
    nats = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    theirs = _gradients(model, nats.double().sum())
    # The longest row of a micro-batch chooses the factors of LongRoPE, so such rows are computed one by one.
    groups = [[row] for row in rows] if "longrope" in config.to_json_string() else [rows]
    packs = [pack([(row, torch.arange(len(row)) > 0) for row in group]) for group in groups]
    least = float("inf")
    for family in families:
        FAMILIES[model_type] = family
        reason = unsupported_reason(model)
        if reason is not None:
            return reason
        with torch.no_grad():
            own_nats = torch.cat([cross_entropy_per_target(model, packed) for packed in packs])
            difference = _difference(own_nats, nats.detach())
        if difference <= _MOST_DIFFERENCE:
            ours = _gradients(model, torch.stack([summed_cross_entropy(model, packed) for packed in packs]).sum())
            if ours.keys() != theirs.keys():
                return "a tiny model of its type has other gradients in the engine"
            difference = max(_difference(ours[name], gradient) for name, gradient in theirs.items())
        least = min(least, difference)
        if difference <= _MOST_DIFFERENCE:
            return None
    return f"its layers look known, but a tiny model of its type differs from transformers' forward by {least:.1e}"


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))
