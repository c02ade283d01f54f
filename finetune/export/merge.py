"""Merge an adapter into its base: each layer in fp32, rounded once to the type in which it is stored."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.errors import ModelError, RunFailedError
from finetune.export.logits import LogitDifference

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A merged model on disk, and its difference from base and adapter."""

    folder: Path
    num_bytes: int
    """The size of its weights."""
    dtype: str
    """The type that the weights are stored in."""
    is_tied: bool
    """Whether input embeddings and output head are one tensor."""
    stop_ids: list[int]
    """The tokens at which generation ends."""
    difference: LogitDifference
    vectors_sha256: str
    """The digest of the test vectors beside the model."""
    system: str | None = None
    """The most frequent system turn of the training rows; None if they have none or cannot be read."""
    adds_system: bool = False
    """Whether the chat template adds it to conversations without a system turn."""


def merge_adapter(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Merge a PeftModel's adapter, layer by layer, with PEFT's own arithmetic on weights widened to fp32.

    The whole model is never copied: each layer is widened, merged and rounded back before the next one. PEFT's
    arithmetic covers LoRA, rsLoRA, DoRA and trained embeddings.

    Args:
        model: a PeftModel with one active adapter, on the CPU. Do not use it afterwards.
        dtype: the type to store all weights in; None keeps each layer's own.

    Returns:
        The transformers model. If the adapter changed the input embeddings and the output head differently, they are
        no longer tied, and the model's configuration says so.

    Raises:
        ModelError: PEFT cannot merge an adapter of this type.
        RunFailedError: a merged weight is not finite in the type it is stored in.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    was_tied = _untie_where_adapted(model.get_base_model())
    with warnings.catch_warnings():
        # Each layer is merged below, so PEFT finds nothing left to merge; ties are taken care of here.
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")
        try:
            for name, layer in list(model.named_modules()):
                if isinstance(layer, BaseTunerLayer):
                    _merge_layer(name, layer, dtype)
            merged = model.merge_and_unload(safe_merge=False)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise ModelError(f"the adapter cannot be merged: {error}. Use it as an adapter, through peft.") from error
    if was_tied:
        _tie_again(merged)
    if dtype is not None:
        cast_weights(merged, dtype)
    for name, parameter in merged.named_parameters():
        _refuse_not_finite(name, parameter)
    return merged


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Convert every weight to a type, in place, one at a time; tied weights stay tied.

    Raises:
        RunFailedError: a weight is out of the type's range.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
            _refuse_not_finite(name, parameter)
    model.config.dtype = dtype


def is_tied(model: Any) -> bool:
    """Tell whether input embeddings and output head are one tensor."""
    head = model.get_output_embeddings()
    return head is not None and bool(head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr())


def _merge_layer(name: str, layer: Any, dtype: torch.dtype | None) -> None:
    """Merge in fp32, then round back: once, instead of once for the update and once for the sum."""
    base_layer = layer.get_base_layer()
    stored = {key: parameter.dtype for key, parameter in base_layer.named_parameters(recurse=False)}
    if not all(dtype.is_floating_point for dtype in stored.values()):
        raise ModelError(f"{name} is quantised ({stored}). Merge into the base in its own precision.")
    base_layer.to(torch.float32)
    layer.merge(safe_merge=True)
    for key, parameter in base_layer.named_parameters(recurse=False):
        parameter.data = parameter.data.to(dtype or stored[key])


def _untie_where_adapted(base: Any) -> bool:
    """Give tied embeddings a tensor each while an adapter on one of them is merged.

    Otherwise an update of one would change the other as well, and updates of both would be added twice.

    Returns:
        Whether they were tied and no longer are.
    """
    ends: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    if None in ends:
        return False
    inner = [_without_wrapper(end) for end in ends]
    if inner[0].weight is not inner[1].weight or all(a is b for a, b in zip(ends, inner, strict=True)):
        return False
    inner[1].weight = torch.nn.Parameter(inner[1].weight.detach().clone(), requires_grad=False)
    return True


def _without_wrapper(layer: Any) -> Any:
    """Return the base's own layer inside an adapter's wrapper, or the layer itself."""
    if hasattr(layer, "get_base_layer"):
        return layer.get_base_layer()
    return getattr(layer, "original_module", layer)


def _tie_again(model: Any) -> None:
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if torch.equal(first, last):
        model.get_output_embeddings().weight = first
        model.config.tie_word_embeddings = True
        return
    model.config.tie_word_embeddings = False
    _log.warning(
        "the base ties its input embeddings and output head, but the adapter changed them differently: the merged "
        "model keeps both, and has %s more weights",
        f"{last.numel():,}",
    )


def _refuse_not_finite(name: str, parameter: torch.Tensor) -> None:
    if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
        raise RunFailedError(
            f"{name} is not finite as {str(parameter.dtype).removeprefix('torch.')} after the merge. Merge with "
            "--dtype float32, which has a wider range. If it is not finite there either, the run has diverged."
        )
