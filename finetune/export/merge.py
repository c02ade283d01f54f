"""An adapter into its base: each layer in fp32, rounded once to the type in which it is stored."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from finetune.errors import ModelError, RunFailedError

_log = logging.getLogger(__name__)


def merge_adapter(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Merge a PeftModel's adapter, layer by layer, with PEFT's own arithmetic on weights widened to fp32.

    No copy of the whole model is made: a layer is widened, merged and rounded back before the next one. The arithmetic
    is that of LoRA, rsLoRA, DoRA and trained embeddings, whichever the adapter has.

    Args:
        model: a PeftModel with one active adapter, on the CPU. It is used up.
        dtype: the type to store all weights in; None: each layer's own.

    Returns:
        The transformers model. Where an adapter changed the input embeddings and the output head differently, they
        are no longer tied and its configuration says so.

    Raises:
        ModelError: the adapter is of a kind that cannot be merged.
        RunFailedError: a merged weight is not finite in the type it is stored in.
    """
    base = model.get_base_model()
    was_tied = _untie_where_adapted(base)
    with warnings.catch_warnings():
        # Each layer was merged below already; that PEFT has nothing left to do is what is wanted.
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")  # taken care of here
        try:
            for name, layer in _adapted_layers(model):
                _merge_layer(name, layer, dtype)
            merged = model.merge_and_unload(safe_merge=False)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise ModelError(f"the adapter cannot be merged: {error}. Use it as an adapter, through peft.") from error
    if was_tied:
        _tie_again(merged)
    if dtype is not None:
        convert_weights(merged, dtype)
    for name, parameter in merged.named_parameters():
        _refuse_not_finite(name, parameter)
    return merged


def convert_weights(model: Any, dtype: torch.dtype) -> None:
    """Round or widen every weight to a type, in place, one at a time; tied weights stay tied.

    Raises:
        RunFailedError: a weight is out of the type's range.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
            _refuse_not_finite(name, parameter)
    model.config.dtype = dtype


def is_tied(model: Any) -> bool:
    """Whether input embeddings and output head are one tensor."""
    head = model.get_output_embeddings()
    return head is not None and bool(head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr())


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            yield name, layer


def _merge_layer(name: str, layer: Any, dtype: torch.dtype | None) -> None:
    """In fp32, then back: one rounding in place of one for the update and one for the sum."""
    base_layer = layer.get_base_layer()
    stored = {key: parameter.dtype for key, parameter in base_layer.named_parameters(recurse=False)}
    if not all(dtype.is_floating_point for dtype in stored.values()):
        raise ModelError(f"{name} is quantised ({stored}). Merge into the base in its own precision.")
    base_layer.to(torch.float32)
    layer.merge(safe_merge=True)
    for key, parameter in base_layer.named_parameters(recurse=False):
        parameter.data = parameter.data.to(dtype or stored[key])


def _untie_where_adapted(base: Any) -> bool:
    """Give tied embeddings a tensor each while they are merged, where an adapter touches one of them.

    An update of the one would otherwise change the other, and one of both would be added twice.

    Returns:
        Whether they were tied and no longer are.
    """
    ends: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    if None in ends:
        return False
    inner = [_inside(end) for end in ends]
    if inner[0].weight is not inner[1].weight or all(a is b for a, b in zip(ends, inner, strict=True)):
        return False
    inner[1].weight = torch.nn.Parameter(inner[1].weight.detach().clone(), requires_grad=False)
    return True


def _inside(layer: Any) -> Any:
    """The base's own layer within the wrapper of an adapter, or the layer itself."""
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
        "the adapter changed the input embeddings and the head differently, which the base has as one: the merged "
        "model keeps both, and is larger by %s values",
        f"{last.numel():,}",
    )


def _refuse_not_finite(name: str, parameter: torch.Tensor) -> None:
    if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
        raise RunFailedError(
            f"{name} is not finite as {str(parameter.dtype).removeprefix('torch.')} after the merge. Merge with "
            "--dtype float32, which has the range for it; if it is not finite there either, the run has diverged."
        )
