"""Summarize a run in a few lines before the live view: model, data, steps, device and folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.logs import screen
from finetune.model.base import count_parameters
from finetune.terminal import fold, shown_folder
from finetune.training.checks import named_splits
from finetune.training.loaders import describe_held_out
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.data.batches import BatchRule
    from finetune.distributed.runtime import Runtime

_LABEL_WIDTH = 8
_COUNTS = ("lengths", "num_targets")


def show_summary(
    runtime: Runtime, config: Config, model: Any, splits: Any, rule: BatchRule, *, first_step: int, num_steps: int
) -> None:
    """Write the lines to a terminal or a notebook. Elsewhere, the log has the same information."""
    row, held_out = config.objective.example_name, describe_held_out(config, splits)
    batch = counted(rule.global_batch_size, row if rule.examples is None else "conversation")
    folder = shown_folder(Path(config.output_dir).absolute())
    done = ": the run is complete, and nothing is trained" if 0 < num_steps <= first_step else ""
    facts = {
        "model": _model(config, model),
        "data": _data(config, splits, row),
        **({"measure": held_out} if held_out else {}),
        "steps": f"{num_steps:,} of {batch}, {rule.steps_per_epoch:,} an epoch",
        "device": f"{_device(runtime.device)}, {runtime.precision}",
        "run": f"{folder}, resumed from step {first_step}{done}" if first_step else str(folder),
    }
    for name, fact in facts.items():
        line = fold(f"{name:<{_LABEL_WIDTH}}{fact}", screen(), indent=" " * _LABEL_WIDTH)
        screen().write(f"{line}\n")


def _model(config: Config, model: Any) -> str:
    trainable, total = count_parameters(model)
    how = f"LoRA r={config.lora.r}" if config.training.method == "lora" else "full"
    name = config.model.path or (config.model.config or {}).get("model_type")
    return f"{name}, {_short(total)} parameters, {_short(trainable)} train ({how})"


def _data(config: Config, splits: Any, row: str) -> str:
    purposes = {"validation": "validate", "test": "test"}
    others = [f", {len(rows):,} to {purposes[name]}" for name, rows in named_splits(splits).items() if name in purposes]
    tokens, targets = (_short(sum(int(getattr(side, of).sum()) for side in splits.train.sides)) for of in _COUNTS)
    size = f"{counted(len(splits.train), row)} ({tokens} tokens, {targets} with loss)"
    return f"{config.data.label}, {size}{''.join(others)}"


def _short(number: int) -> str:
    """Write a number with three digits, so that a line holds it: ``3.84B``."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} with {counted(threads, 'thread')}"
