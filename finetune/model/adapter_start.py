"""Initialize an adapter from the largest singular values of the base (PiSSA), or from an existing adapter."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from finetune.errors import CheckpointError, ModelError
from finetune.limits import read_regular
from finetune.model.base import train_first_half
from finetune.runs.model_files import load_model
from finetune.runs.tensors import read_tensors
from finetune.units import counted, name_first

if TYPE_CHECKING:
    from finetune.config.schema import LoraSection

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF_LORA = ".lora_"
"""In the name of a tensor, it follows the name of the adapted layer."""
_SVD_ITERATIONS = 16
"""Iterations of the fast decomposition, as in the experiments of the PiSSA paper."""
_log = logging.getLogger(__name__)


def start_from_principal_values(model: Any, r: int, init: Literal["pissa", "pissa_fast"]) -> None:
    """Start from the largest singular values of each layer (PiSSA: Meng et al., 2024, arXiv:2404.02948).

    The paper moves these values out of the base, W = residual + s * B0 A0, and trains A and B from A0 and B0. Here the
    base stays as it is, and the adapter of rank 2r holds both: s * (B A - B0 A0) with A0 and B0 frozen, which is the
    same function with the same gradients. So every checkpoint is a plain LoRA adapter for the original base, a resumed
    run has the A0 and B0 it began with, and switching the adapter off gives the base. PEFT's own conversion ends at the
    same rank 2r (`path_initial_model_for_weight_conversion`, https://huggingface.co/docs/peft/developer_guides/lora).

    The layers are plain LoRA layers of rank 2r, not yet placed; r is the rank of the trained half. `pissa_fast`
    decomposes by subspace iterations from torch's global generator.

    Raises:
        ModelError: a layer has fewer than r singular values.
    """
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A") or not len(layer.lora_A):
            continue
        (adapter,) = layer.lora_A
        weight = layer.get_base_layer().weight.T if layer.fan_in_fan_out else layer.get_base_layer().weight
        if min(weight.shape) < r:
            raise ModelError(
                f"lora.r is {r}, but {name} is {list(weight.shape)} and has {min(weight.shape)} singular values. "
                f"Set lora.r={min(weight.shape)} or less, or lora.init=default."
            )
        a, b = _principal_factors(weight, r, layer.scaling[adapter], init)
        with torch.no_grad():
            layer.lora_A[adapter].weight.copy_(torch.cat([a, a]))
            layer.lora_B[adapter].weight.copy_(torch.cat([b, -b], dim=1))
        train_first_half(layer.lora_A[adapter].weight, r, dim=0)
        train_first_half(layer.lora_B[adapter].weight, r, dim=1)


def start_from_adapter(model: Any, section: LoraSection) -> None:
    """Read all weights of the adapter at `section.start_from` into a model's adapter, which was built from the section.

    Raises:
        ModelError: there is no adapter, or it has another base, type or shape; the message names what to set.
    """
    folder = _locate_adapter(str(section.start_from))
    try:
        record = json.loads(read_regular(folder / _CONFIG, follows_links=True))
    except (OSError, ValueError) as error:
        raise ModelError(f"lora.start_from: {folder / _CONFIG} cannot be read: {error}") from error
    _refuse_other_base(folder, record, model, section)
    (config,) = model.peft_config.values()
    try:
        differences = [*_config_differences(record, config), *_layer_differences(folder / _WEIGHTS, model)]
        if differences:
            raise ModelError(
                f"lora.start_from: the adapter in {folder} differs from the one to train: {'; '.join(differences)}. "
                "Give the lora section it was trained with."
            )
        num_tensors = load_model(model, folder)
    except CheckpointError as error:
        raise ModelError(f"lora.start_from: {error}") from error
    trained_on = record.get("base_model_name_or_path")
    _log.info("starts from the adapter in %s: %d tensors, trained on %s", folder, num_tensors, trained_on)


def update_scale(r: int, alpha: float, is_root: bool) -> float:
    """Return the factor of the update B A: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    return alpha / (math.sqrt(r) if is_root else r)


def _principal_factors(
    weight: torch.Tensor, r: int, scaling: float, init: Literal["pissa", "pissa_fast"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A, shape (r, in), and B, shape (out, r), so that scaling * B A is the best approximation of rank r."""
    matrix = weight.detach().float()
    if init == "pissa":
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        left, values, transposed = torch.svd_lowrank(matrix, q=r, niter=_SVD_ITERATIONS)
        right = transposed.T
    root = (values[:r] / scaling).sqrt()
    return root[:, None] * right[:r], left[:, :r] * root


def _locate_adapter(path: str) -> Path:
    folder = Path(path).expanduser()
    for candidate in (folder, folder / "adapter"):
        if (candidate / _CONFIG).is_file() and (candidate / _WEIGHTS).is_file():
            return candidate.resolve()
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else ["no such folder"]
    raise ModelError(
        f"lora.start_from is {path}, which holds no adapter: {_CONFIG} and {_WEIGHTS} are expected there or in its "
        f"adapter/ (found: {name_first(names, 8) or 'nothing'}). Give the folder of an adapter or of a finished run."
    )


def _refuse_other_base(folder: Path, record: Mapping[str, Any], model: Any, section: LoraSection) -> None:
    trained_on, base = record.get("base_model_name_or_path"), model.config._name_or_path
    is_same = trained_on and base and (trained_on == base or Path(trained_on).resolve() == Path(base).resolve())
    if section.start_from_any_base or is_same:
        return
    raise ModelError(
        f"lora.start_from: the adapter in {folder} was trained on {trained_on}, but the base here is "
        f"{base or 'a new one with random weights'}. On another model it means nothing. If it is the same model in "
        "another folder, set lora.start_from_any_base=true."
    )


def _config_differences(record: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Yield the differences between two adapter configurations."""
    if record.get("peft_type") != "LORA":
        yield f"its peft_type is {record.get('peft_type')}, not LORA"
        return
    is_root = bool(record.get("use_rslora"))
    adapter_scale = update_scale(record["r"], record["lora_alpha"], is_root)
    scale = update_scale(config.r, config.lora_alpha, config.use_rslora)
    if record["r"] != config.r or not math.isclose(adapter_scale, scale):
        yield (
            f"it has lora.r={record['r']}, lora.alpha={record['lora_alpha']:g} and lora.rslora={json.dumps(is_root)}, "
            f"this run {config.r}, {config.lora_alpha:g} and {json.dumps(config.use_rslora)}"
        )
    is_dora = bool(record.get("use_dora"))
    if is_dora != config.use_dora:
        yield f"it has lora.dora={json.dumps(is_dora)}, this run {json.dumps(config.use_dora)}"
    tokens = record.get("trainable_token_indices")
    if tokens != config.trainable_token_indices:
        yield f"it trains the rows {tokens} of the embedding, this run {config.trainable_token_indices}"
    whole, whole_here = (_last_parts(names) for names in (record.get("modules_to_save"), config.modules_to_save))
    if whole != whole_here:
        yield f"it has lora.modules_to_save=[{', '.join(whole)}], this run [{', '.join(whole_here)}]"
    for key in ("rank_pattern", "alpha_pattern"):
        if (record.get(key) or {}) != getattr(config, key):
            yield f"its {key} is {record.get(key) or 'empty'}, here {getattr(config, key) or 'empty'}"


def _last_parts(names: Iterable[str] | None) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names or ()})


def _layer_differences(file: Path, model: Any) -> Iterator[str]:
    """Yield the difference between the layers that an adapter on disk adapts and those that a model's adapter adapts.

    The tensors of the file are compared: PEFT's configuration may have names, full names or a regular expression.
    """
    there = {name.partition(_OF_LORA)[0] for name in read_tensors(file)[0] if _OF_LORA in name}
    here = {name.partition(_OF_LORA)[0] for name, _ in model.named_parameters() if _OF_LORA in name}
    if there != here:
        yield (
            f"it adapts {_describe_layers(there)}, this run {_describe_layers(here)}. Only one of the two adapts "
            f"{min(there ^ here)}, for example: see lora.target_modules and lora.layers"
        )


def _describe_layers(names: set[str]) -> str:
    return f"{counted(len(names), 'layer')} ({name_first(_last_parts(names), 8)})" if names else "no layer"
