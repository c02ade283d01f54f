"""Recognise and load folders that llm-compressor wrote, in the formats of compressed-tensors.

Formats: https://github.com/vllm-project/compressed-tensors, 0.19. vLLM loads the same files.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from finetune.errors import ConfigError, extra_command
from finetune.export.plain_reload import load_plain_model

SchemeName = Literal["fp8", "w8a8", "w4a16"]


class Scheme(NamedTuple):
    """A way to store and multiply the weights of linear layers."""

    format: str
    """Its name in config.json."""
    is_calibrated: bool
    """Whether llm-compressor needs rows for it."""
    vllm_dtype: str
    """The type in which vLLM 0.32 multiplies on a CPU. Its kernel for w4a16 has no fp32, and may round inputs to 8 bits
    in bf16. Its kernel for w8a8 has no fp32 if the CPU has AMX."""
    bound: float
    """The largest relative difference of a position's logits that counts as equal. Inputs of fp8 and w8a8 are rounded
    to 8 bits, so a difference in the last bit of fp32 can become a whole step. w4a16 is computed in fp16."""


SCHEMES: dict[SchemeName, Scheme] = {
    "fp8": Scheme("float-quantized", False, "float32", 1.25e-1),
    "w8a8": Scheme("int-quantized", True, "bfloat16", 1.25e-1),
    "w4a16": Scheme("pack-quantized", True, "float16", 2e-2),
}


def scheme_of(folder: Path) -> Scheme | None:
    """Return the scheme of a model folder; None if its weights are not compressed."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    stored = (config.get("quantization_config") or {}).get("format")
    return next((scheme for scheme in SCHEMES.values() if scheme.format == stored), None)


def refuse_no_compressed_tensors() -> None:
    """Refuse to go on without the package with which transformers reads compressed folders.

    Raises:
        ConfigError: says how to install it.
    """
    if find_spec("compressed_tensors") is None:
        raise ConfigError(
            f"a compressed model needs compressed-tensors, not installed here. Run {extra_command('compress')}."
        )


def load_compressed(folder: Path) -> Any:
    """Load a compressed model on the CPU, in fp32, with its weights multiplied out.

    Linear layers still round their inputs as the scheme says, so the model computes what a server computes.

    Raises:
        ConfigError: compressed-tensors is not installed.
        OSError, ValueError: transformers cannot load the folder.
    """
    refuse_no_compressed_tensors()
    with redirect_stderr(io.StringIO()):  # compressed-tensors draws progress bars
        model = load_plain_model(folder, dtype=torch.float32)
        model.hf_quantizer.compressor.decompress_model(model)
    return model.eval()
