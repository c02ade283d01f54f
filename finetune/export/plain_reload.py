"""Load a model folder with transformers alone, and record its logits. A merge starts this file as a process of its own.

The process cannot import finetune or peft, so any user of transformers can load what it loads.
Usage: `python plain_reload.py REQUEST.json`, see `_main`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def load_plain_model(folder: Path | str, **options: Any) -> Any:
    """Load a model with transformers, from safetensors files of this machine, and without code of the model."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, **options)


def logits_in_fp32(model: Any, prompts: Sequence[Sequence[int]]) -> Any:
    """Compute logits at every position, one prompt at a time, in fp32 on the weights as they are stored on the CPU.

    Their shape is (tokens of all prompts, vocabulary). No prompt may be empty.
    """
    import torch

    model.eval()
    with torch.no_grad(), weights_in_fp32(model):
        return torch.cat([model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]).float()


def render(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
    """Render a conversation with the header of the next answer, and encode it.

    Without a chat template, the text is the content of the last turn.
    """
    text = turns[-1]["content"]
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text, ids


def _main(request_file: str) -> None:
    """Answer a request: an object with `folder`, `prompts` (token ids), `turns`, `logits_file` and `report_file`.

    The logits of `prompts` go to `logits_file`. A description of the loaded model, and the rendered `turns`, go to
    `report_file`.
    """
    for name in ("finetune", "peft"):
        sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    folder = request["folder"]
    model, info = load_plain_model(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    report = {
        "problems": {name: sorted(map(str, keys)) for name, keys in info.items() if keys},
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}),
        "is_tied": tied,
        "stop_ids": model.generation_config.eos_token_id,
        "rendered": [list(render(tokenizer, turns)) for turns in request["turns"]],
    }
    save_file({"logits": logits_in_fp32(model, request["prompts"])}, request["logits_file"])
    Path(request["report_file"]).write_text(json.dumps(report), encoding="utf-8")


@contextmanager
def weights_in_fp32(model: Any) -> Iterator[None]:
    """Convert each module's own weights to fp32 while it runs, so that the whole model is never copied."""
    import torch

    handles: list[Any] = []
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if hasattr(module, "get_base_layer"):  # some adapters read the weight of the layer that they wrap
            own += module.get_base_layer().parameters(recurse=False)
        narrow = [p for p in own if p.is_floating_point() and p.dtype != torch.float32]
        if narrow:
            handles += _widen_while_running(module, narrow)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _widen_while_running(module: Any, narrow: list[Any]) -> list[Any]:
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


if __name__ == "__main__":
    _main(sys.argv[1])
