"""Choose what a rehearsal sets to other values than the real run, and write its tiny random model."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.config.keys import values
from finetune.config.schema import Config, ModelSection
from finetune.distributed.device import accelerator_type
from finetune.model.base import build_base_model, count_parameters, read_model_config
from finetune.model.from_hub import load_part, locate_model
from finetune.model.published import with_sizes_here
from finetune.model.shrunken import in_common_names, in_own_names, shrink
from finetune.threads import num_cores
from finetune.training.loaders import global_batch_size
from finetune.units import ceil_div, counted

if TYPE_CHECKING:
    from transformers import GenerationConfig


MOST_NEW_TOKENS = 16
"""The longest answer that is generated, because a random model does not end its answers."""
MOST_ROWS = 256
"""The most rows of a split that a rehearsal trains on and measures. It encodes and checks all rows."""
MOST_SAMPLES = 8


def rehearsed_values(
    config: Config,
    *,
    stand_in: Path,
    processes: int,
    minutes: float,
    steps: int,
    real_steps: int | None,
    measured_rows: int,
) -> dict[str, Any]:
    """Return the keys that a rehearsal changes, with their values.

    `processes` and `real_steps` are those of the real run. `measured_rows` are the rows of the validation split or of
    the test split, whichever is larger.
    """
    real = values(config)
    chosen = {
        **_model(config, stand_in),
        **_world(config, processes, minutes),
        **_lengths(config, steps, real_steps),
        "training.report_to": [],
        "rollout.server": None,  # it serves the real model, and the stand-in's adapter does not fit that
    }
    most_rows = max(MOST_ROWS, steps * global_batch_size(config, processes))
    if measured_rows > most_rows and not _needs_all_rows(config):
        chosen["data.max_rows"] = min(config.data.max_rows or most_rows, most_rows)
        # So few rows may not fill one batch, and a run refuses to measure none.
        chosen |= {"validation.drop_last": False, "testing.drop_last": False}
    return {key: value for key, value in chosen.items() if real[key] != value}


def _needs_all_rows(config: Config) -> bool:
    """Return whether a run may refuse to train on the first rows only.

    They may be too few to hold out a number of rows, or have none of the subset whose metric chooses the best weights.
    """
    sources = [dict(config.data), *config.data.mixture]
    sizes = [source.get(split) for source in sources for split in ("validation", "test")]
    criteria = (config.checkpoint.best_metric, config.early_stopping.metric)
    return any(str(size).isdigit() for size in sizes) or any("/" in metric for metric in criteria)


def override(key: str, value: Any) -> str:
    """Return the argument that sets a key. Strings are quoted, because arguments are read as YAML."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _model(config: Config, stand_in: Path) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "model.path": str(stand_in),
        "model.tokenizer": config.model.tokenizer or config.model.path,
        "model.init": "pretrained",
        "model.config": None,
        "model.trust_remote_code": False,
        "model.frozen_precision": "auto",  # fp8 is judged by its error on the real weights
        # Adapters and patterns of the real model do not fit a model with fewer and smaller layers.
        "lora.start_from": None,
        "lora.layers": None,
        "lora.rank_pattern": {},
        "lora.alpha_pattern": {},
    }
    # 4 bits change random weights by another amount than the real ones, which strict=true may refuse.
    if config.strict or not torch.cuda.is_available() or find_spec("bitsandbytes") is None:
        chosen["lora.quantize"] = "none"
    return chosen


def _world(config: Config, processes: int, minutes: float) -> dict[str, Any]:
    most = max(2, int(num_cores()))
    if config.training.device != "cpu" and torch.cuda.is_available() and not config.parallel.share_gpus:
        most = torch.cuda.device_count()
    number = min(processes, most)
    chosen: dict[str, Any] = {"parallel.num_processes": number if number > 1 else None}
    chosen |= {f"parallel.{name}": None for name in ("world_size", "rank", "master_addr", "master_port")}
    if processes > 1:
        chosen["parallel.timeout_minutes"] = min(config.parallel.timeout_minutes, minutes / 4)
    if number < processes:
        chosen |= {"training.global_batch_size": global_batch_size(config, processes), "parallel.shard_size": None}
        if number == 1:
            chosen["parallel.sharding"] = "none"
    if config.training.device.partition(":")[0] not in ("auto", "cpu", accelerator_type()):
        chosen["training.device"] = "auto"
    if config.parallel.backend == "nccl" and not torch.cuda.is_available():
        chosen["parallel.backend"] = "auto"
    return chosen


def _lengths(config: Config, steps: int, real_steps: int | None) -> dict[str, Any]:
    """Scale down the steps and all keys that count steps. Shorten generated answers."""
    warmup, decay = config.optim.warmup_steps, config.optim.decay_steps
    if real_steps is not None:  # the same shares, rounded up
        warmup = ceil_div(config.optim.warmup_in(real_steps) * steps, real_steps)
        decay = decay and ceil_div(decay * steps, real_steps)
    chosen: dict[str, Any] = {
        "training.max_steps": steps,
        "optim.warmup_steps": min(warmup, steps - 1),
        "optim.decay_steps": decay,
        "checkpoint.save_every": max(1, steps // 3),
        "validation.validate_every": max(1, steps // 3),
        "testing.max_new_tokens": min(config.testing.max_new_tokens, MOST_NEW_TOKENS),
    }
    is_rewarded = config.objective.generates_answers
    if is_rewarded and not config.rollout.environment:  # the limit also counts what `reset` adds to a prompt
        chosen["rollout.max_completion_length"] = min(config.rollout.max_completion_length, MOST_NEW_TOKENS)
    if config.validation.metrics:
        chosen["validation.max_new_tokens"] = min(config.validation.max_new_tokens, MOST_NEW_TOKENS)
    if config.validation.metrics or is_rewarded:
        chosen["validation.num_samples"] = min(config.validation.num_samples, MOST_SAMPLES)
    return chosen


def write_stand_in(section: ModelSection, folder: Path, *, seed: int, least_width: int = 0) -> str:
    """Write a tiny random model into a folder that a rehearsal uses as `model.path`, and return its description.

    The tiny model keeps the vocabulary, positions, window, tied embeddings, dtype, stop ids, ratio of heads to
    key-value heads and layer names of the real model. `least_width` is the fewest inputs and outputs of a layer: PiSSA
    needs as many as its rank.

    Raises:
        ModelError: there is no such model, or its sizes can neither be read nor are shipped with finetune.
    """
    sized, why_shipped = with_sizes_here(section)
    real = read_model_config(sized)
    keys = shrink(in_common_names(real), least_width=least_width)
    own = in_own_names(real, keys)
    torch.manual_seed(seed)
    model: Any = build_base_model(section.model_copy(update={"init": "random", "config": own}))
    model.config.use_cache = True
    generation_config = _read_generation_config(sized) if sized.config is None else None
    model.generation_config.eos_token_id = getattr(generation_config or real, "eos_token_id", None)
    model.to(real.dtype or torch.float32).save_pretrained(folder)
    num_parameters = count_parameters(model)[1]
    layers = counted(keys["num_hidden_layers"], "layer")
    sizes = f"{layers}, hidden size {keys['hidden_size']}, {num_parameters:,} parameters"
    return f"{real.model_type}, {sizes}" + (f"; {why_shipped}" if why_shipped else "")


def _read_generation_config(section: ModelSection) -> GenerationConfig | None:
    """Read the model's generation_config.json. Return None if there is none or it is not JSON, as transformers does.

    Raises:
        ModelError: the file cannot be read for another reason, so the model could not be loaded either.
    """
    from transformers import GenerationConfig

    where = locate_model(section)

    def load() -> GenerationConfig | None:
        with suppress(OSError):  # many models have no such file
            return GenerationConfig.from_pretrained(where, revision=section.revision or "main")
        return None

    return load_part(section, load, where=where)
