"""Build a base model from a hub id, a local folder, or a configuration with random weights, and set its modes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from finetune.engine.adapted import holds_nf4
from finetune.engine.decoder import FAMILIES, OFFLOADS, bare_model, family_of
from finetune.engine.products import full_shape
from finetune.errors import ModelError
from finetune.model.from_hub import load_part, locate_model, repository_of
from finetune.model.unsupported import (
    describe_split_copy,
    estimate_parameters,
    memory_of_machine,
    refuse_oversized,
    refuse_unsupported,
)
from finetune.units import format_bytes, name_first

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from finetune.config.schema import ModelSection

_log = logging.getLogger(__name__)
_RECORDED = frozenset(FAMILIES)
"""The model types that have a record from the start. Those that `learn_family` adds are not among them."""


def build_base_model(section: ModelSection, **arguments: Any) -> PreTrainedModel:
    """Load the base model on the CPU in the dtype of its weights on disk; `Placement.place` moves it.

    Random weights come from torch's global generator, which `launch` seeds: every rank builds the same model. Further
    arguments are those of `from_pretrained`.

    Raises:
        ModelError: no such model, not a causal language model, or weights that do not belong to it.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = read_model_config(section)
    if "quantization_config" not in arguments:
        refuse_what_cannot_fit(section, config)
    # config.json may name a kernel of the hub, which is code.
    asks_for_kernel = "/" in str(getattr(config, "_attn_implementation", None))
    if section.attention != "auto" or asks_for_kernel:
        arguments["attn_implementation"] = "sdpa" if section.attention == "auto" else section.attention
    if section.init == "random":
        arguments["trust_remote_code"] = section.trust_remote_code  # None would ask on a terminal
        model = load_part(section, lambda: auto.from_config(config, **arguments))
    else:
        where = locate_model(section)
        arguments = {"dtype": _type_to_load(where, section.revision, config), **arguments}
        model, info = load_part(
            section,
            lambda: auto.from_pretrained(
                where,
                revision=section.revision,
                config=config,
                trust_remote_code=section.trust_remote_code,
                use_safetensors=True,  # never a pickled checkpoint
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **arguments,
            ),
            where=where,
            part="weights",
        )
        _refuse_missing_weights(where, info)
    prepare_base(model)
    # The commit that was read, for the adapter's config; transformers loses it here.
    model.config._commit_hash = getattr(config, "_commit_hash", None) or section.revision
    built: PreTrainedModel = model
    return built


def prepare_base(model: Any) -> None:
    """Give a model the settings that training needs: no cache, no padding index, and routing by score.

    If the engine has no record of its type, it may learn one, see `learn_family`.
    """
    model.config.use_cache = False
    # A padding index would stop the gradient of its row, which for Phi is a token that ends text.
    model.get_input_embeddings().padding_idx = None
    if route_by_score(model):
        _log.info("experts are chosen by score in training too: the curve does not depend on how batches are cut")
    if model.config.model_type not in _RECORDED:
        from finetune.model.unknown_family import learn_family  # only for types without a record

        learn_family(model)


def read_model_config(section: ModelSection, *, takes_text_model: bool = False) -> PretrainedConfig:
    """Read the architecture from `model.config` or the model itself. For argument and errors see `causal_config`."""
    from transformers import AutoModelForCausalLM

    config = read_whole_config(section)
    is_plain = type(config) in AutoModelForCausalLM._model_mapping and not config.sub_configs
    if not is_plain and not section.trust_remote_code:
        from finetune.model.text_models import causal_config

        config = causal_config(config, section, takes_text_model=takes_text_model)
    if getattr(config, "layer_types", None) and getattr(config, "sliding_window", 0) is None:
        from finetune.model.missing_window import refuse_missing_window

        refuse_missing_window(config, str(section.path or config.model_type))
    return config


def read_whole_config(section: ModelSection) -> PretrainedConfig:
    """Read the architecture of all parts, encoders included. Raises ModelError: the model is known not to work."""
    from transformers import AutoConfig

    if section.config is not None:
        keys = dict(section.config)
        refuse_unsupported(keys, str(section.path or keys.get("model_type")))
        refuse_oversized(keys, str(section.path or "model.config"))
        if (model_type := keys.pop("model_type", None)) is None:
            raise ModelError("model.config has no model_type. Add one, for example model_type: phi3.")
        return load_part(section, lambda: AutoConfig.for_model(model_type, **keys))
    where = locate_model(section)
    keys = read_config_json(section, where)
    refuse_unsupported(keys, section.path or where)
    if (copy := describe_split_copy(keys, section.path or where)) is not None:
        _log.warning("%s", copy)
    read: Callable[..., PretrainedConfig] = AutoConfig.from_pretrained
    trusts = section.trust_remote_code
    return load_part(section, lambda: read(where, revision=section.revision, trust_remote_code=trusts), where=where)


def count_parameters(model: Any) -> tuple[int, int]:
    """Count the trainable parameters and all parameters; tied weights count once."""
    sizes = [(full_shape(weight).numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off for a block, then restore the model's mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def checkpoint_gradients(model: Any, *, offloads: bool = False) -> None:
    """Recompute activations in the backward pass.

    The reentrant form leaves layers behind a frozen embedding untrained (peft#1142), so it is never used. `offloads`
    keeps the inputs of the layers in main memory meanwhile. Only the engine does so.
    """
    setattr(bare_model(model).get_decoder(), OFFLOADS, offloads)
    with warnings.catch_warnings():
        # transformers 5.23 deprecates this name, but the older versions that we allow have no other.
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable", category=FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()


def train_first_half(parameter: torch.nn.Parameter, r: int, dim: int) -> None:
    """Freeze what is behind the first `r` rows or columns of a matrix."""

    def without_frozen_half(gradient: torch.Tensor) -> torch.Tensor:
        masked = gradient.clone()
        masked.narrow(dim, r, gradient.shape[dim] - r).zero_()
        return masked

    parameter.register_hook(without_frozen_half)  # type: ignore[no-untyped-call]
    parameter._frozen_from = r  # type: ignore[attr-defined]


def is_half_frozen(parameter: torch.nn.Parameter) -> bool:
    """Return whether half of a parameter is frozen, so that weight decay must not change it."""
    return hasattr(parameter, "_frozen_from")


def states_in_4_bits(model: Any) -> dict[str, Any]:
    """Return what bitsandbytes keeps beside each weight in NF4, by the weight's name on disk.

    Sharding a model keeps these objects, but hides them.
    """
    modules = [(name.removesuffix(".base_layer"), module) for name, module in bare_model(model).named_modules()]
    return {f"{name}.weight": module.weight.quant_state for name, module in modules if holds_nf4(module)}


def max_context(model: Any) -> int | None:
    """Return how many positions a model computes correctly, given it or its configuration; None if it has no limit."""
    boundary, config = longrope_boundary(model), getattr(model, "config", model)
    if boundary is not None and not family_of(config.model_type).uses_long_factors:
        return boundary
    return getattr(config, "max_position_embeddings", None)


def longrope_boundary(model: Any) -> int | None:
    """Return the length up to which a LongRoPE model uses its short factors, given it or its configuration.

    Return None for other models. The factors of a batch depend on its longest row, so shorter rows must not be in a
    batch with longer ones. Raise ModelError for a model whose types of layers have different such lengths.
    """
    config = getattr(model, "config", model)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = [rope, *(of_type for of_type in rope.values() if isinstance(of_type, dict))]
    longropes = [each for each in ropes if each.get("rope_type", each.get("type")) == "longrope"]
    key = "original_max_position_embeddings"
    limits = {int(each.get(key) or getattr(config, key, None) or 0) for each in longropes}
    if len(limits) > 1:
        raise ModelError(
            f"this {config.model_type} model has LongRoPE with several limits ({key} {sorted(limits)}, by type of "
            "layer), and finetune groups rows by one. Set one limit in config.json, or use another model."
        )
    return max(limits, default=0) or None


def _type_to_load(where: str, revision: str | None, config: PretrainedConfig) -> torch.dtype | Literal["auto"]:
    """Return the dtype of the weights on disk if it is narrower than the dtype in config.json, else `auto`.

    With `auto`, transformers would convert all weights to the dtype in config.json at once. `Placement.place` converts
    them one by one later, with the same result. Return `auto` also if the files have several dtypes or are not
    downloaded yet.
    """
    if config.dtype is not torch.float32:
        return "auto"
    from finetune.model.local_files import stored_weights

    weights = stored_weights(where, repository_of(where, revision))
    names = {frozenset({"BF16"}): torch.bfloat16, frozenset({"F16"}): torch.float16}
    return names.get(frozenset(weight.get_dtype() for weight in weights.values()), "auto")


def refuse_what_cannot_fit(section: ModelSection, config: PretrainedConfig) -> None:
    """Refuse a model with more weights than this machine has memory for, by its sizes alone."""
    from transformers import AutoModelForCausalLM

    memory = memory_of_machine()
    if torch.get_default_device().type == "meta" or estimate_parameters(config.to_dict()) < memory // 8:
        return  # in fp32 and with twice as many parameters it would still fit
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = load_part(section, lambda: auto.from_config(config, trust_remote_code=section.trust_remote_code))
    if (needed := sum(weight.nbytes for weight in model.parameters())) > memory:
        raise ModelError(
            f"the weights of {section.path or config.model_type} take {format_bytes(needed)} "
            f"({count_parameters(model)[1]:,} parameters), but this machine has {format_bytes(memory)} of main memory, "
            "swap included. Use a machine with more memory or a smaller model. `finetune plan` says what a run needs."
        )


def _refuse_missing_weights(where: str, info: dict[str, Any]) -> None:
    """Refuse weights that transformers would replace with random numbers and only a warning."""
    wrong = {name: sorted(info.get(f"{name}_keys", ())) for name in ("missing", "mismatched")}
    problems = [f"{len(keys)} {name} ({name_first(list(map(str, keys)), 3)})" for name, keys in wrong.items() if keys]
    if problems:
        raise ModelError(
            f"the weights at {where} do not fit its config.json: {'; '.join(problems)}. Is the folder complete?"
        )
    if info.get("unexpected_keys"):
        _log.warning("%s holds %d weights that its architecture does not use", where, len(info["unexpected_keys"]))


def read_config_json(section: ModelSection, where: str) -> dict[str, Any]:
    """Return the content of config.json as a dict: transformers may have no class for it."""
    from transformers import PreTrainedConfig

    keys, _ = load_part(
        section, lambda: PreTrainedConfig.get_config_dict(where, revision=section.revision), where=where
    )
    refuse_oversized(keys, section.path or where)
    return keys


def route_by_score(model: nn.Module) -> int:
    """Make routers choose experts by score in training as in evaluation, and return the number of routers.

    transformers' Phi-3.5-MoE draws experts at random in training mode (SparseMixer-v2, arXiv:2409.12136) and adds noise
    to their inputs. The draw depends on the shape of the micro-batch, so a run's curve would depend on how its batches
    are split. With the choice by score, an adapter trains with the same experts that inference uses.
    """
    modules: list[Any] = list(model.modules())

    def choose_as_in_evaluation(router: nn.Module, _inputs: Any) -> None:
        router.training = False

    routers = [module for module in modules if hasattr(module, "router_jitter_noise")]
    for router in routers:
        router.register_forward_pre_hook(choose_as_in_evaluation)
    for module in modules:
        if hasattr(module, "input_jitter_noise"):
            module.input_jitter_noise = 0.0
    return len(routers)
