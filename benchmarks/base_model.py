"""The base model that all engines read from one folder, and its loss on single rows, computed the plain way.

A LoRA adapter begins as nothing, so the loss of an engine's first step is the base model's loss on the rows of that
step: whatever an engine does to be fast, it must give this number.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import FIRST_TEXT_ID, Job, Size
from tools.real_model import real_model

TORCH_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SPECIAL_TOKENS = ["<|endoftext|>", "<|start|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_base(job: Job, folder: Path) -> None:
    """Write the base model with seeded random weights, and a tokenizer that nobody uses but every trainer wants.

    A real model has its own weights and tokenizer.
    """
    if job.shape.real_model is not None:
        real_model(folder, model=job.shape.real_model)
        return
    make_base(job, job.shape, dtype=TORCH_TYPES[job.shape.stored_as]).save_pretrained(folder)
    write_tokenizer(folder)


def write_base_without_weights(job: Job, folder: Path) -> None:
    """Write what `write_wide_base` writes, but for the weights."""
    _wide_config(job.shape).save_pretrained(folder)
    write_tokenizer(folder)


def write_wide_base(job: Job, folder: Path) -> None:
    """Write a base like `write_base`, with weights of a size that suits a wide model.

    Random weights of transformers' usual size (0.02) would make a wide model amplify rounding: with phi-4's width and
    layers, bf16 changes the gradient by a sixth, and a base in fp8 by more than the gradient itself. These are as large
    for any width as 0.02 is for 512 features.
    """
    make_wide_base(job, dtype=TORCH_TYPES[job.precision]).save_pretrained(folder)
    write_tokenizer(folder)


def make_wide_base(job: Job, **arguments: Any) -> Any:
    """Make the model that `write_wide_base` writes. The arguments are those of transformers' `from_config`."""
    return make_base(job, job.shape, _wide_config(job.shape), **arguments)


def _wide_config(shape: Size) -> Any:
    config = _config(shape)
    config.initializer_range = 0.02 * math.sqrt(512 / config.hidden_size)
    return config


def make_base(job: Job, shape: Size, config: Any = None, **arguments: Any) -> Any:
    """Make a model with seeded random weights where it will train.

    Args:
        job: its seed and the device.
        shape: the job's, or another.
        config: of the model; None: the usual one of this shape.
        arguments: of transformers' `from_config`.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(job.seed)
    auto: Any = AutoModelForCausalLM
    with torch.device(job.device):
        return auto.from_config(config or _config(shape), **arguments)


def _config(shape: Size) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(shape.family, **shape.model_config())
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape.family]]
    return config


def row_losses(job: Job, folder: Path, numbers: Sequence[int]) -> dict[int, tuple[float, int]]:
    """Nats summed over the targets of single rows, and how many targets they have: one row at a time, fp32."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(job.device).eval()
    rows = job.rows()
    losses = {}
    with torch.no_grad():
        for number in numbers:
            ids = torch.tensor([rows[number].ids], device=job.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
            is_target = torch.tensor(rows[number].is_target, device=job.device)[1:]
            labels = ids[0, 1:][is_target]
            nats = torch.nn.functional.cross_entropy(logits[is_target], labels, reduction="sum")
            losses[number] = (float(nats), len(labels))
    return losses


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that knows hardly any word: rows are token ids, but every trainer wants one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = _SPECIAL_TOKENS + [f"<{number}>" for number in range(len(_SPECIAL_TOKENS), FIRST_TEXT_ID)]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[-1]))
    backend.add_special_tokens(_SPECIAL_TOKENS)
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[1]))
    if len(sys.argv) > 3:
        sys.stdout.write(json.dumps(row_losses(asked, Path(sys.argv[2]), json.loads(sys.argv[3]))))
    else:
        write_base(asked, Path(sys.argv[2]))
