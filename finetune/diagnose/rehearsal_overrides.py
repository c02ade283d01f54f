"""Choose the configuration keys that a rehearsal changes, and say what it cannot tell because of each change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.distributed.device import accelerator_kind
from finetune.threads import num_cores
from finetune.training.loaders import global_batch_size

if TYPE_CHECKING:
    from finetune.config.schema import Config

MOST_NEW_TOKENS = 16
"""The longest answer that is generated, because a random model does not end its answers."""
MOST_ROWS = 256
"""The most rows of a split that a rehearsal trains on and measures. It encodes and checks all rows."""
MOST_SAMPLES = 8


class Change(NamedTuple):
    """A key that a rehearsal sets."""

    key: str
    real: Any
    rehearsed: Any
    limit: str | None = None
    """What the rehearsal cannot tell about the real run because of this change."""

    @property
    def override(self) -> str:
        """The argument that sets the key."""
        return override(self.key, self.rehearsed)

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for JSON, see docs/rehearse.md."""
        return {"key": self.key, "real": self.real, "rehearsed": self.rehearsed, "missed": self.limit}

    def __str__(self) -> str:
        real, rehearsed = (_format_value(value) for value in (self.real, self.rehearsed))
        return f"{self.key}: {rehearsed} here, {real} in the real run" + (f"; {self.limit}" if self.limit else "")


def override(key: str, value: Any) -> str:
    """Return the argument that sets a key. Strings are quoted, because arguments are read as YAML."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _format_value(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value)


class Scale(NamedTuple):
    """The sizes of a rehearsal."""

    steps: int
    """Optimizer steps."""
    real_steps: int | None
    """Optimizer steps of the real run. None if the number is not known."""
    processes: int
    """The number of processes of the real launch."""
    measured_rows: int
    """Rows of the larger one of the validation split and the test split."""
    minutes: float
    """The time limit of the rehearsal."""


def changes(config: Config, scale: Scale, *, stand_in: Path) -> list[Change]:
    """Return the keys that a rehearsal sets to another value than the real run.

    Args:
        config: the real run.
        scale: the sizes of the rehearsal.
        stand_in: the folder of the model that takes the place of the real one.
    """
    found = [*_model(config, stand_in), *_world(config, scale), *_device(config), *_lengths(config, scale)]
    return [change for change in found if change.real != change.rehearsed]


def _model(config: Config, stand_in: Path) -> Iterator[Change]:
    model, lora = config.model, config.lora
    weights = "the weights themselves are not rehearsed: whether they are complete, and what the model learns"
    yield Change("model.path", model.path, str(stand_in), weights)
    yield Change("model.init", model.init, "pretrained")
    yield Change("model.config", model.config, None)
    code = "the model's own code is not rehearsed, and `merge` refuses a model that needs it"
    yield Change("model.trust_remote_code", model.trust_remote_code, False, code)
    yield Change("lora.start_from", lora.start_from, None, "this adapter does not fit a smaller model")
    if lora.quantize != "none" and (not torch.cuda.is_available() or find_spec("bitsandbytes") is None):
        yield Change("lora.quantize", lora.quantize, "none", "weights in 4 bits need CUDA and bitsandbytes")


def _world(config: Config, scale: Scale) -> Iterator[Change]:
    parallel, wanted = config.parallel, scale.processes
    number = min(wanted, _most_processes(config))
    limit = f"this machine starts {number} processes: a world of {wanted} is not rehearsed" if number < wanted else None
    yield Change("parallel.num_processes", parallel.num_processes, number if number > 1 else None, limit)
    for key in ("world_size", "rank", "master_addr", "master_port"):
        yield Change(f"parallel.{key}", getattr(parallel, key), None, "the launcher and its nodes are not rehearsed")
    patience = min(parallel.timeout_minutes, scale.minutes / 4)
    yield Change(
        "parallel.timeout_minutes", parallel.timeout_minutes, patience if wanted > 1 else parallel.timeout_minutes
    )
    if number < wanted:
        yield Change("training.global_batch_size", config.training.global_batch_size, global_batch_size(config, wanted))
        yield Change("parallel.shard_size", parallel.shard_size, None, limit)
        sharding = parallel.sharding if number > 1 else "none"
        yield Change("parallel.sharding", parallel.sharding, sharding, "sharded weights need two processes")


def _most_processes(config: Config) -> int:
    """Return the most processes to start on this machine: one for each GPU, or else one for each core, at least two."""
    if config.training.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(2, int(num_cores()))


def _device(config: Config) -> Iterator[Change]:
    training, here = config.training, accelerator_kind()
    wished = training.device.partition(":")[0]
    if wished not in ("auto", "cpu", here):
        yield Change("training.device", training.device, "auto", f"this machine has no {wished}")
    if config.parallel.backend == "nccl" and not torch.cuda.is_available():
        yield Change("parallel.backend", "nccl", "auto", "nccl needs CUDA")
    if training.report_to:
        yield Change("training.report_to", training.report_to, [], "nothing is sent to a tracker")


def _lengths(config: Config, scale: Scale) -> Iterator[Change]:
    """Scale down the steps and all keys that count steps. Limit the rows and the lengths of generated answers."""
    training, optim, steps = config.training, config.optim, scale.steps
    every = max(1, steps // 3)
    yield Change("training.max_steps", training.max_steps, steps)
    warmup = optim.warmup_steps if scale.real_steps is None else -(-optim.warmup_steps * steps // scale.real_steps)
    yield Change("optim.warmup_steps", optim.warmup_steps, min(warmup, steps - 1))
    yield Change("checkpoint.save_every", config.checkpoint.save_every, every)
    yield Change("validation.validate_every", config.validation.validate_every, every)
    data, most = config.data, max(MOST_ROWS, steps * global_batch_size(config, scale.processes))
    is_bounded = any((share or "").isdigit() for share in (data.validation, data.test))  # a number of rows to put aside
    if scale.measured_rows > most and not is_bounded:
        yield Change("data.max_rows", data.max_rows, min(data.max_rows or most, most))
    yield Change("testing.max_new_tokens", *_capped(config.testing.max_new_tokens, MOST_NEW_TOKENS))
    if config.validation.metrics:
        yield Change("validation.max_new_tokens", *_capped(config.validation.max_new_tokens, MOST_NEW_TOKENS))
        yield Change("validation.num_samples", *_capped(config.validation.num_samples, MOST_SAMPLES))


def _capped(value: int, most: int) -> tuple[int, int]:
    return value, min(value, most)
