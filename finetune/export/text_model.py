"""Write the text model of a model that also reads images or sound to a folder of its own, which finetune can train."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finetune.config.schema import ModelSection
from finetune.errors import ModelError, RunFailedError
from finetune.export.merge import is_tied, refuse_other, reload_plainly, sharded
from finetune.export.out_folder import new_folder
from finetune.export.plain_reload import logits_in_fp32
from finetune.export.vectors import LogitDifference, compare_logits, prompts_to_ask
from finetune.model.base import count_parameters, read_whole_config, refuse_what_cannot_fit
from finetune.model.from_hub import load_part, locate_model
from finetune.model.text_models import causal_config, text_config
from finetune.model.tokens import build_tokenizer, set_stop_and_pad_ids
from finetune.runs.model_files import encode_full_model, encode_tokenizer

_NAME = "text model"
_MOST_DIFFERENCE = 1e-5
"""Relative. Both models compute the same operations on the same weights, in two processes."""


class TextModel(NamedTuple):
    """A text model that was written."""

    whole_type: str
    model_type: str
    num_parameters: int
    num_left_out: int
    """Parameters of the encoders, which only images and sound reach."""
    num_bytes: int
    difference: LogitDifference
    """How far the logits of the written folder, loaded by transformers alone, are from those of the whole model."""


def write_text_model(path: str, out: Path, revision: str | None = None) -> TextModel:
    """Write the text model of a model with encoders, then load it and compare it with the whole model.

    Nothing is left in `out` after an error.

    Args:
        path: the hub id or folder of the whole model.
        out: a folder that does not exist or is empty.
        revision: the branch, tag or commit at the hub.

    Raises:
        CheckpointError: the folder is taken.
        ModelError: it has no text model that transformers knows as a causal language model, or cannot be loaded.
        RunFailedError: the disk has too little room or failed, or the folder does not compute what the whole does.
    """
    section = ModelSection(path=path, revision=revision)
    whole = _load_whole(section)
    model = _text_model_of(whole, path)
    tokenizer = build_tokenizer(section)
    stops = set_stop_and_pad_ids(model, tokenizer)
    tied = model.config.tie_word_embeddings = is_tied(model)  # the whole model's configuration decides it there
    prompts = prompts_to_ask(tokenizer, model, None)
    expected = logits_in_fp32(whole, [prompt.token_ids for prompt in prompts])
    types = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()})
    whole_type, model_type = whole.config.model_type, model.config.model_type
    num_whole, num_parameters = count_parameters(whole)[1], count_parameters(model)[1]
    model.generation_config._from_model_config = False  # or transformers would make it anew
    files = {**encode_full_model(model), **encode_tokenizer(tokenizer)}
    weights: Any = files.pop("model.safetensors")
    num_bytes = weights.num_bytes
    with new_folder(out, num_bytes) as writer:
        for name, content in [*files.items(), *sharded(weights).items()]:
            writer.write(name, content)
        del whole, model, weights, files, content  # the other process needs the memory
        report, logits = reload_plainly(writer.path, prompts, _NAME)
        refuse_other(report, _NAME, problems={}, dtypes=types, is_tied=tied, stop_ids=stops)
        difference = compare_logits(logits, expected)
        if not difference.relative <= _MOST_DIFFERENCE:  # also for not a number
            raise RunFailedError(
                f"the text model does not compute what the whole model computes for text: {difference}; expected a "
                f"relative difference of at most {_MOST_DIFFERENCE:g}. It was removed again. Train another model."
            )
    return TextModel(whole_type, model_type, num_parameters, num_whole - num_parameters, num_bytes, difference)


def _load_whole(section: ModelSection) -> Any:
    """Load the model with its encoders, on the CPU and in the type of its weights.

    Raises:
        ModelError: it has no encoders or no causal text model, its weights are quantized, incomplete or too large for
            this machine, or it cannot be loaded.
    """
    from transformers import AutoModelForImageTextToText

    classes: Any = AutoModelForImageTextToText
    where, config, name = locate_model(section), read_whole_config(section), shlex.quote(str(section.path))
    if text_config(config) is None:
        raise ModelError(
            f"{section.path} is a {config.model_type} model, which has no text model beside encoders. Train it as it "
            f"is: finetune train model={name}."
        )
    text = causal_config(config, section, takes_text_model=True)
    if type(config) not in classes._model_mapping:
        raise ModelError(
            f"{section.path} is a {config.model_type} model, which transformers does not read as a model of images and "
            "text. Give a model that predicts the next token, for example microsoft/phi-4."
        )
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise ModelError(
            f"the weights of {section.path} are quantized. Give the model in 16 bits, which has another name at the "
            "hub: often the same with BF16."
        )
    refuse_what_cannot_fit(section, text)
    whole, info = load_part(
        section,
        lambda: classes.from_pretrained(
            where,
            revision=section.revision,
            config=config,
            dtype="auto",
            trust_remote_code=False,
            use_safetensors=True,  # never a pickled checkpoint
            output_loading_info=True,
        ),
        where=where,
        part="weights",
    )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{where} lacks {len(missing)} weights, the first is {missing[0]}. Is the folder complete?")
    return whole.eval()


def _text_model_of(whole: Any, name: str) -> Any:
    """Put the decoder and the output head of a model with encoders into transformers' class for the text alone.

    Both models then share their weights.

    Raises:
        ModelError: the class for the text alone has other parts.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(whole.config.get_text_config())
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    if type(decoder) is type(model.get_decoder()) and head is not None:
        setattr(model, model.base_model_prefix, decoder)
        model.set_output_embeddings(head)
        model.generation_config = whole.generation_config
        if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            return model.eval()
    raise ModelError(
        f"the text model of {name} ({model.config.model_type}) has other parts than transformers' class for the text "
        "alone. Give a model that predicts the next token, for example microsoft/phi-4."
    )
