"""Measure how far the types of numbers in llama.cpp move a model's own logits, on the prompts of its test vectors.

Source: ggml, src/ggml-cpu/ggml-cpu.c (`vec_dot_type`: inputs of a product are rounded to the type of its weights) and
src/ggml-quants.c (`quantize_row_q8_0_ref`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from finetune.engine.decoder import bare_model
from finetune.errors import RunFailedError
from finetune.export.plain_reload import load_plain_model, weights_in_fp32
from finetune.export.vectors import Vectors, relative_by_position


def _float16(values: torch.Tensor) -> torch.Tensor:
    return values.half().to(values.dtype)


def _q8_0(values: torch.Tensor) -> torch.Tensor:
    if values.shape[-1] % 32:
        return _float16(values)  # as the converter does
    blocks = values.reshape(-1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return blocks.div(scale.clamp_min(torch.finfo(values.dtype).tiny)).round_().mul_(_float16(scale)).view_as(values)


ROUNDED: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = {
    0: torch.clone,
    1: _float16,
    32: lambda values: values.bfloat16().to(values.dtype),
    7: _q8_0,
}
"""By `general.file_type` of a GGUF file: f32, f16, bf16 and q8_0."""


class _Rounded(TorchFunctionMode):
    """Within the block, round what a model multiplies in fp32: weights and inputs of linear layers, and embeddings.

    Queries, keys and values are rounded to f16. `exact` has the ids of weights that are stored in fp32.
    """

    def __init__(self, file_type: int, exact: set[int]) -> None:
        super().__init__()
        self._round, self._exact = ROUNDED[file_type], exact

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is linear and id(args[1]) not in self._exact:
            args = (self._round(args[0]), self._round(args[1]), *args[2:])
        elif func is scaled_dot_product_attention:
            args = (*map(_float16, args[:3]), *args[3:])
        result = func(*args, **(kwargs or {}))
        return self._round(result) if func is embedding else result


def measure_rounding(model: Any, vectors: Vectors, file_type: int) -> float:
    """Return the largest relative difference of a position's logits that rounding makes; see `relative_by_position`.

    Both logits come from this model, a transformers or PEFT model on the CPU, so damage to it does not widen a bound.
    LoRA weights are not rounded.

    Raises:
        RunFailedError: the rounded logits are not finite.
    """
    prompts = pad_sequence([torch.tensor(vector.token_ids) for vector in vectors.vectors], batch_first=True)
    places = [(row, place) for row, vector in enumerate(vectors.vectors) for place in vector.positions]
    exact = {id(weight) for name, weight in model.named_parameters() if "lora_" in name}
    bare_model(model).set_experts_implementation("eager")  # other implementations do not call `linear`
    model.eval()

    options: dict[str, Any] = {"input_ids": prompts, "use_cache": False}
    if "logits_to_keep" in inspect.signature(bare_model(model).forward).parameters:  # one list for all rows
        kept = sorted({place for _, place in places})
        places = [(row, kept.index(place)) for row, place in places]
        options["logits_to_keep"] = torch.tensor(kept)

    def logits() -> torch.Tensor:  # attention is causal, so the padding at the ends changes nothing
        computed: torch.Tensor = model(**options).logits
        return computed[tuple(zip(*places, strict=True))]

    with torch.no_grad(), weights_in_fp32(model):
        own = logits()
        with _Rounded(file_type, exact):
            relative = float(relative_by_position(logits(), own).max())
    if not math.isfinite(relative):
        raise RunFailedError(
            "numbers of this model are too large for f16, so llama.cpp computes no logits. Export with --type bf16; if "
            "that is refused too, its keys and values do not fit f16, and llama.cpp cannot serve it."
        )
    return relative


def measure_folder(folder: Path, vectors: Vectors, file_type: int) -> float:
    """Load a merged folder with transformers and call `measure_rounding`."""
    return measure_rounding(load_plain_model(folder, dtype="auto"), vectors, file_type)
