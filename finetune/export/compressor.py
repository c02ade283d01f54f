"""Compress a model folder with llm-compressor. `finetune export vllm` starts this file as a process of its own.

llm-compressor usually has an environment of its own, in which finetune is not installed.
Usage: `python compressor.py REQUEST.json`, see `_main`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GROUP_SIZES = (128, 64, 32)
"""Weights of w4a16 that share a scale. vLLM knows these sizes; each layer's inputs must be a multiple."""


def _main(request_file: str) -> None:
    """Answer a request: an object with `model` and `out` (folders), `scheme` and `rows` (token ids).

    Without rows, nothing is calibrated. The names of the linear layers that stay as they are go to `report`.
    """
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        request["model"], dtype="auto", local_files_only=True, trust_remote_code=False
    )
    calibration: dict[str, Any] = {}
    if rows := request["rows"]:
        tokens = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        calibration = {"dataset": Dataset.from_dict(tokens), "num_calibration_samples": len(rows)}
        calibration |= {"max_seq_length": max(map(len, rows)), "shuffle_calibration_samples": False}
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    uncompressed = [name for name, layer in linear.items() if layer is model.get_output_embeddings()]
    widths = {layer.in_features for name, layer in linear.items() if name not in uncompressed}
    oneshot(
        model=model, recipe=_recipe(request["scheme"], uncompressed, widths), output_dir=request["out"], **calibration
    )
    Path(request["report"]).write_text(json.dumps(uncompressed), encoding="utf-8")


def _recipe(scheme: str, uncompressed: list[str], widths: set[int]) -> Any:
    """Return llm-compressor's own recipe of a scheme: rounding for fp8, GPTQ for the others."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if scheme == "fp8":
        return QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=uncompressed)
    if scheme == "w8a8":
        return GPTQModifier(targets="Linear", scheme="W8A8", ignore=uncompressed)
    sizes = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    if not sizes:
        raise ValueError(f"linear layers have {sorted(widths)} inputs, and w4a16 needs multiples of {GROUP_SIZES[-1]}")
    preset = preset_name_to_scheme("W4A16", ["Linear"])
    preset.weights.group_size = sizes[0]
    return GPTQModifier(config_groups={"linear layers": preset}, ignore=uncompressed)


if __name__ == "__main__":
    _main(sys.argv[1])
