"""Go on from an adapter that is there already: read its weights into one that was built for this run."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import ModelError

if TYPE_CHECKING:
    from finetune.config.schema import LoraSection

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_SHOWN = 3
_log = logging.getLogger(__name__)


def locate_adapter(path: str) -> Path:
    """The folder of an adapter: the given one, or `adapter/` in a run's folder.

    Raises:
        ModelError: neither holds an adapter.
    """
    folder = Path(path).expanduser()
    for candidate in (folder, folder / "adapter"):
        if (candidate / _CONFIG).is_file() and (candidate / _WEIGHTS).is_file():
            return candidate.resolve()
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
    raise ModelError(
        f"lora.start_from is {path}, which holds no adapter: {_CONFIG} and {_WEIGHTS} are expected there or in its "
        f"adapter/ (found: {found or 'nothing'}). Give the folder of an adapter or of a finished run."
    )


def start_from_adapter(model: Any, section: LoraSection) -> None:
    """Read the weights at `section.start_from` into a model's adapter, all of them, and say so in the log.

    Args:
        model: a PEFT model whose adapter was built from `section`.
        section: `start_from` is set.

    Raises:
        ModelError: the adapter there has another base, another kind or other shapes; names what to set.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    folder = locate_adapter(str(section.start_from))
    name = next(iter(model.peft_config))
    try:
        record = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        saved = load_file(folder / _WEIGHTS)
    except Exception as error:  # a damaged file has as many types as there are libraries that read it
        raise ModelError(f"lora.start_from: the adapter in {folder} cannot be read: {error}") from error
    _refuse_other_base(folder, record, model, section)
    here = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    differences = [*_config_differences(record, model.peft_config[name]), *_tensor_differences(saved, here)]
    if differences:
        raise ModelError(
            f"lora.start_from: the adapter in {folder} is another than the one that is to be trained: "
            f"{'; '.join(differences)}. Give the lora section it was trained with."
        )
    set_peft_model_state_dict(model, saved, adapter_name=name)
    arrived = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    lost = [key for key, value in saved.items() if not torch.equal(arrived[key].to(value), value)]
    if lost:
        raise ModelError(f"lora.start_from: {len(lost)} tensors of {folder} did not arrive, the first is {lost[0]}.")
    _log.info(
        "starts from the adapter in %s: %d tensors, %s values, trained on %s",
        folder,
        len(saved),
        f"{sum(tensor.numel() for tensor in saved.values()):,}",
        record.get("base_model_name_or_path"),
    )


def _refuse_other_base(folder: Path, record: Mapping[str, Any], model: Any, section: LoraSection) -> None:
    theirs, ours = record.get("base_model_name_or_path"), model.config._name_or_path
    if section.start_from_any_base or _same_place(theirs, ours):
        return
    raise ModelError(
        f"lora.start_from: the adapter in {folder} was trained on {theirs}, but the base here is "
        f"{ours or 'a new one with random weights'}. On another model it means nothing. If it is the same model at "
        "another place, set lora.start_from_any_base=true."
    )


def _same_place(one: str | None, other: str | None) -> bool:
    if not one or not other:
        return False
    return one == other or (Path(one).is_dir() and Path(one).resolve() == Path(other).resolve())


def _config_differences(record: Mapping[str, Any], config: Any) -> Iterator[str]:
    """What the weights' shapes do not show."""
    if record.get("peft_type") != "LORA":
        yield f"it is of kind {record.get('peft_type')}, not LORA"
        return
    theirs = _scale(record["r"], record["lora_alpha"], bool(record.get("use_rslora")))
    ours = _scale(config.r, config.lora_alpha, config.use_rslora)
    if record["r"] != config.r or not math.isclose(theirs, ours):
        said = {True: "true", False: "false"}
        yield (
            f"it has lora.r={record['r']}, lora.alpha={record['lora_alpha']:g} and "
            f"lora.rslora={said[bool(record.get('use_rslora'))]}, this run {config.r}, {config.lora_alpha:g} and "
            f"{said[config.use_rslora]}"
        )
    tokens = record.get("trainable_token_indices")
    if tokens != config.trainable_token_indices:
        yield f"it trains the rows {tokens} of the embedding, this run {config.trainable_token_indices}"
    for key in ("rank_pattern", "alpha_pattern"):
        if record.get(key):
            yield f"its {key} gives layers ranks of their own"


def _scale(r: int, alpha: float, is_root: bool) -> float:
    return alpha / (math.sqrt(r) if is_root else r)


def _tensor_differences(saved: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> Iterator[str]:
    kinds = {
        "are not in this run's": sorted(saved.keys() - here.keys()),
        "are missing in it": sorted(here.keys() - saved.keys()),
        "have another shape": [
            f"{key} {list(saved[key].shape)}, here {list(here[key].shape)}"
            for key in sorted(saved.keys() & here.keys())
            if saved[key].shape != here[key].shape
        ],
    }
    for what, names in kinds.items():
        if names:
            shown = ", ".join(names[:_MAX_SHOWN]) + (", …" if len(names) > _MAX_SHOWN else "")
            yield f"{len(names)} of the tensors {what} ({shown})"
