"""Find the text model of a model that also reads images or sound, or refuse a model that has none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def causal_config(config: PretrainedConfig, name: str | None, *, takes_text_model: bool) -> PretrainedConfig:
    """Return the configuration of the causal language model that transformers makes of a configuration.

    For some types, such as qwen3_5, transformers leaves the encoders out by itself. For others, such as gemma3, it
    keeps them, and then the adapter would have names that only the whole model has. Their text model has to be written
    to a folder of its own first.

    Args:
        config: of any type.
        name: the folder or hub id of the model, for messages; None: the keys are in `model.config`.
        takes_text_model: return the configuration of the text model for those others too. Its weights are not loaded.

    Raises:
        ModelError: there is no causal language model in it, or its text model is not in a folder of its own.
    """
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM._model_mapping
    text = text_config(config)
    own = classes.get(type(config), None)
    if own is not None and (text is None or own.config_class is not type(config)):
        return config if text is None or type(text) not in classes else _with_facts_of_whole(text, config)
    if text is None:
        raise ModelError(
            f"{name or config.model_type} is a {config.model_type} model, which transformers does not know as a causal "
            "language model. Give one that predicts the next token, for example microsoft/phi-4."
        )
    if type(text) not in classes:
        raise ModelError(
            f"{name or config.model_type} is a {config.model_type} model, and transformers does not know its text "
            f"model ({text.model_type}) as a causal language model. Give one that predicts the next token, for "
            "example microsoft/phi-4."
        )
    if takes_text_model:
        return text
    if name is None:
        advice = f"Give the keys of its text model, whose type is {text.model_type}"
    else:
        out = default_folder(name)
        advice = f"Write its text model to a folder once: finetune export text {name} {out}. Then set model=./{out}"
    raise ModelError(
        f"{name or 'model.config'} is a {config.model_type} model, which reads images or sound as well as text. "
        f"finetune trains text models alone. {advice}."
    )


def text_config(config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the configuration of the text model inside another; None if there is none.

    Raises:
        ModelError: there are several, as in MusicGen, which makes sound.
    """
    try:
        text: PretrainedConfig = config.get_text_config()
    except ValueError as error:
        raise ModelError(
            f"a {config.model_type} model has several text models, so it is no causal language model. Give one that "
            "predicts the next token, for example microsoft/phi-4."
        ) from error
    return None if text is config else text


def _with_facts_of_whole(text: Any, config: Any) -> Any:
    """Give a text model's configuration what only the whole's says: how weights are quantized, and which commit it is.

    transformers copies the first too. Without it, quantized weights would be read as if they were not.
    """
    for name in ("quantization_config", "_commit_hash"):
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    return text


def default_folder(name: str) -> str:
    """Return the name of the folder that a text model is written to: gemma-3-4b-it-text for google/gemma-3-4b-it."""
    return f"{Path(name).resolve().name}-text"
