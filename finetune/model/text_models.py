"""Find the text model of a model that also reads images or sound, or refuse a model that has none."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from finetune.config.schema import ModelSection

_ANOTHER = "Give a model that predicts the next token, for example microsoft/phi-4."


def causal_config(config: PretrainedConfig, section: ModelSection, *, takes_text_model: bool) -> PretrainedConfig:
    """Return the configuration of the causal language model in a model that may have encoders.

    transformers drops the encoders of some types, such as qwen3_5, when it loads a causal language model. It keeps
    those of others, such as gemma3. An adapter trained there would have names that only the whole model has, so these
    are refused until their text model is in a folder of its own.

    Args:
        config: of any type.
        section: names the model in messages.
        takes_text_model: return the configuration of the text model instead of refusing. Set it if no weights are read.

    Raises:
        ModelError: there is no causal language model in it, or only beside encoders that transformers keeps.
    """
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM._model_mapping
    text, own = text_config(config), classes.get(type(config), None)
    if own is not None and (text is None or own.config_class is not type(config)):
        return config if text is None or type(text) not in classes else _with_facts_of_whole(text, config)
    name = section.path or config.model_type
    if text is None:
        raise ModelError(
            f"{name} is a {config.model_type} model, which transformers does not know as a causal language model. "
            f"{_ANOTHER}"
        )
    if type(text) not in classes:
        raise ModelError(
            f"{name} is a {config.model_type} model, and transformers does not know its text model "
            f"({text.model_type}) as a causal language model. {_ANOTHER}"
        )
    if takes_text_model:
        return text
    advice = f"Give the keys of its text model, whose type is {text.model_type}"
    if section.path is not None:
        revision = f" --revision {section.revision}" if section.revision else ""
        model, out = shlex.quote(section.path), shlex.quote(default_folder(section.path))
        advice = f"Write its text model to a folder once: finetune export text {model} {out}{revision}. "
        advice += f"Then set model=./{out}"
    raise ModelError(
        f"{section.path or 'model.config'} is a {config.model_type} model, which reads images or sound as well as "
        f"text. finetune trains text models alone. {advice}."
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
            f"a {config.model_type} model has several text models, so it is no causal language model. {_ANOTHER}"
        ) from error
    return None if text is config else text


def _with_facts_of_whole(text: Any, config: Any) -> Any:
    """Copy to a text model's configuration what only the whole's has: the quantization of the weights, and the commit.

    transformers copies the quantization too. Without it, quantized weights would be read as plain ones.
    """
    for name in ("quantization_config", "_commit_hash"):
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    return text


def default_folder(name: str) -> str:
    """Return the name of the folder that a text model is written to: gemma-3-4b-it-text for google/gemma-3-4b-it."""
    return f"{Path(name).resolve().name}-text"
