"""Load a saved adapter, and refuse one that is damaged, asks for too much, or does not fit its base."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open

from finetune.errors import ModelError
from finetune.limits import read_regular
from finetune.model.lora import quiet_peft, trained_in_fp32
from finetune.model.new_tokens import grow_embeddings
from finetune.model.targets import (
    FORM_OF_PATTERNS,
    highest_rank,
    linear_layers,
    match_names,
    parameters_of_adapter,
)
from finetune.model.unsupported import refuse_irregular_folder

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"
_MOST_SHOWN = 60
_PATTERNS = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Keys of an adapter. PEFT may match their values, or the names in them, as regular expressions."""


class _AdapterConfig(BaseModel, strict=True):
    peft_type: Literal["LORA"]
    r: PositiveInt
    rank_pattern: dict[str, PositiveInt] | None = None
    target_modules: list[str] | str | None = None
    trainable_token_indices: list[NonNegativeInt] | dict[str, list[NonNegativeInt]] | None = None
    init_lora_weights: bool | Annotated[str, Field(pattern=r"^[a-z_]*\d{0,3}$")] = True
    """PiSSA may name a number of iterations, which takes time."""
    layer_replication: None = None
    megatron_config: None = None
    target_parameters: Annotated[list[str], Field(max_length=0)] | None = None


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read what PEFT builds an adapter from. No file of the folder is opened that might never end.

    Raises:
        ModelError: a file of the folder is irregular, the configuration cannot be read, or it asks for something that
            neither finetune nor PEFT's plain LoRA writes.
    """
    refuse_irregular_folder(folder)
    file = folder / ADAPTER_CONFIG
    try:
        record: dict[str, Any] = json.loads(read_regular(file, follows_links=True))
        _AdapterConfig.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, value = ".".join(map(str, first["loc"])), repr(first["input"])[:_MOST_SHOWN]
        raise ModelError(
            f"the adapter in {folder} cannot be loaded: {ADAPTER_CONFIG} has {key}={value} ({first['msg']}). Use an "
            "undamaged copy."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Use an undamaged copy.") from error
    return record


def refuse_foreign_adapter(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Refuse an adapter that does not fit the model, before PEFT builds it. Return its configuration.

    PEFT would first allocate layers of any rank, and match patterns without a limit of time.

    Raises:
        ModelError: the adapter is damaged, or has layers, parameters or tokens that the model or its file lacks.
        ConfigError: a pattern takes too long to match.
    """
    record = read_adapter_config(folder)
    names = [name for name, _ in model.named_modules()]
    values = [value for key in _PATTERNS if isinstance(value := record.get(key), (str, list, dict))]
    patterns = [str(each) for value in values for each in ([value] if isinstance(value, str) else value)]
    match_names(f"{ADAPTER_CONFIG} in {folder}", patterns, names, FORM_OF_PATTERNS)
    if isinstance(targets := record.get("target_modules"), list):
        there = linear_layers(model)
        missing = sorted(target for target in targets if not any(f".{name}".endswith(f".{target}") for name in there))
        if missing:
            short = sorted({name.rpartition(".")[2] for name in there})
            raise ModelError(
                f"the adapter in {folder} has layers that this {model.config.model_type} model lacks: "
                f"{', '.join(missing)}. The model has: {', '.join(short)}. Give the model that the adapter was trained "
                "on."
            )
    _refuse_unstored_parameters(model, folder)
    embedding: Any = model.get_input_embeddings()
    rows, tokens = len(embedding.weight), record.get("trainable_token_indices") or {}
    for ids in tokens.values() if isinstance(tokens, dict) else [tokens]:
        if ids and max(ids) >= rows + len(ids):
            raise ModelError(
                f"the adapter in {folder} trains row {max(ids):,} of the embedding, but the base has {rows:,} rows and "
                f"the adapter {len(ids):,} tokens. Use an undamaged copy, or the base that it was trained on."
            )
    return record


def _refuse_unstored_parameters(model: PreTrainedModel, folder: Path) -> None:
    """Refuse an adapter if its configuration describes more parameters than its file holds."""
    from peft import LoraConfig

    config: Any = LoraConfig.from_pretrained(str(folder))
    described = parameters_of_adapter(config, model)
    file = folder / "adapter_model.safetensors"
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Use an undamaged copy.") from error
    if described > stored:
        raise ModelError(
            f"the adapter in {folder} is damaged: {ADAPTER_CONFIG} describes {described:,} parameters (rank "
            f"{highest_rank(config):,}), but {file.name} holds {stored:,}. Use an undamaged copy."
        )


def load_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """Put a saved adapter on its base. The adapter is trainable, so that `Placement.place` keeps it in fp32.

    Raises the errors of `refuse_foreign_adapter`.
    """
    from peft import PeftModel

    tokens = refuse_foreign_adapter(base, folder).get("trainable_token_indices") or {}
    rows = tokens.values() if isinstance(tokens, dict) else [tokens]
    grow_embeddings(base, max((max(ids) + 1 for ids in rows), default=0))
    with quiet_peft():
        model = PeftModel.from_pretrained(base, str(folder), is_trainable=True)
    trained_in_fp32(model)
    return model
