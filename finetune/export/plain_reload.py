"""Load a model folder with transformers alone and write down what it answers. Started as a process of its own.

It imports nothing of this package, and makes sure of that: what it can load, anybody can.
Usage: `python plain_reload.py REQUEST.json`, see `main`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCKED = ("finetune", "peft")
"""Packages that a merged model must not need."""


def logits_in_fp32(model: Any, prompts: Sequence[Sequence[int]]) -> Any:
    """Logits at every position of each prompt, computed one prompt at a time in fp32 on the weights as they are stored.

    Args:
        model: a causal language model on the CPU.
        prompts: token ids, none empty.

    Returns:
        A tensor, (tokens of all prompts, vocabulary).
    """
    import torch

    model.eval()
    with torch.no_grad(), _weights_in_fp32(model):
        return torch.cat([model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]).float()


@contextmanager
def _weights_in_fp32(model: Any) -> Iterator[None]:
    """Widen each module's own weights while it runs: at no time is there a second copy of the whole model."""
    import torch

    handles: list[Any] = []
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if hasattr(module, "get_base_layer"):  # an adapter around a layer, some of which read its weight themselves
            own += module.get_base_layer().parameters(recurse=False)
        narrow = [p for p in own if p.is_floating_point() and p.dtype != torch.float32]
        if narrow:
            handles += _widened_while_running(module, narrow)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _widened_while_running(module: Any, narrow: list[Any]) -> list[Any]:
    stored: list[Any] = []

    def widen(*_: object) -> None:
        stored[:] = [parameter.data for parameter in narrow]
        for parameter in narrow:
            parameter.data = parameter.data.float()

    def restore(*_: object) -> None:
        for parameter, data in zip(narrow, stored, strict=True):
            parameter.data = data
        stored.clear()

    return [module.register_forward_pre_hook(widen), module.register_forward_hook(restore)]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """What a user's turn is to the model, the header of the answer included; the bare text without a template."""
    rendered = text
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def main(request_file: str) -> None:
    """Answer a request.

    The request is an object with `folder`, `prompts` (token ids), `texts` (each rendered and encoded here again),
    `logits_file` and `report_file`.
    """
    for name in BLOCKED:
        sys.modules[name] = None  # type: ignore[assignment]  # whoever imports it fails
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, load = request["folder"], _quietly(AutoModelForCausalLM.from_pretrained)
    model, info = load(folder, output_loading_info=True, local_files_only=True, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    report = {
        "problems": {name: sorted(map(str, keys)) for name, keys in info.items() if keys},
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}),
        "is_tied": tied,
        "stop_ids": model.generation_config.eos_token_id,
        "texts": [prompt_ids(tokenizer, text) for text in request["texts"]],
    }
    save_file({"logits": logits_in_fp32(model, request["prompts"])}, request["logits_file"])
    Path(request["report_file"]).write_text(json.dumps(report), encoding="utf-8")


def _quietly(load: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return load


if __name__ == "__main__":
    main(sys.argv[1])
