"""Choose the configuration keys that a rehearsal changes, and say what it cannot show because of each change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.config.keys import values
from finetune.config.objectives import OBJECTIVES
from finetune.distributed.device import accelerator_type
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
    """A key that a rehearsal sets to another value than the real run."""

    key: str
    real: Any
    rehearsed: Any
    limit: str | None = None
    """What the rehearsal cannot show about the real run because of this change."""

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


class Scale(NamedTuple):
    """The sizes of a rehearsal."""

    steps: int
    """Optimizer steps."""
    real_steps: int | None
    """Optimizer steps of the real run. None if the number is not known."""
    processes: int
    """The number of processes of the real launch."""
    measured_rows: int
    """Rows of the validation split or of the test split, whichever is larger."""
    minutes: float
    """The time limit of the rehearsal."""


class _Setting(NamedTuple):
    key: str
    value: Any
    limit: str | None = None


def changes(config: Config, scale: Scale, *, stand_in: Path) -> list[Change]:
    """Return the keys that a rehearsal sets to another value than the real run.

    `stand_in` is the folder of the model that takes the place of the real one.
    """
    real = values(config)
    settings = [*_model(config, stand_in), *_world(config, scale), *_device(config), *_lengths(config, scale)]
    return [Change(key, real[key], value, limit) for key, value, limit in settings if real[key] != value]


def override(key: str, value: Any) -> str:
    """Return the argument that sets a key. Strings are quoted, because arguments are read as YAML."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _model(config: Config, stand_in: Path) -> Iterator[_Setting]:
    weights = "the weights themselves are not rehearsed: whether they are complete, and what the model learns"
    yield _Setting("model.path", str(stand_in), weights)
    yield _Setting("model.init", "pretrained")
    yield _Setting("model.config", None)
    code = "the model's own code is not rehearsed, and `merge` refuses a model that needs it"
    yield _Setting("model.trust_remote_code", False, code)
    yield _Setting("lora.start_from", None, "this adapter does not fit a smaller model")
    fewer = "the smaller model has fewer layers, and all of them are adapted alike"
    yield _Setting("lora.layers", None, fewer)
    yield _Setting("lora.rank_pattern", {}, fewer)
    yield _Setting("lora.alpha_pattern", {}, fewer)
    yield _Setting(
        "model.frozen_precision", "auto", "the error of fp8 is measured on the real weights, before step 1 of the run"
    )
    if not torch.cuda.is_available() or find_spec("bitsandbytes") is None:
        yield _Setting("lora.quantize", "none", "weights in 4 bits need CUDA and bitsandbytes")
    elif config.strict:
        limit = "4 bits change random weights by another amount than the real ones, which strict=true may refuse"
        yield _Setting("lora.quantize", "none", limit)


def _world(config: Config, scale: Scale) -> Iterator[_Setting]:
    parallel, wanted = config.parallel, scale.processes
    number = min(wanted, _most_processes(config))
    limit = f"this machine starts {number} processes: a world of {wanted} is not rehearsed" if number < wanted else None
    yield _Setting("parallel.num_processes", number if number > 1 else None, limit)
    for name in ("world_size", "rank", "master_addr", "master_port"):
        yield _Setting(f"parallel.{name}", None, "the launcher and its nodes are not rehearsed")
    if wanted > 1:
        yield _Setting("parallel.timeout_minutes", min(parallel.timeout_minutes, scale.minutes / 4))
    if number < wanted:
        yield _Setting("training.global_batch_size", global_batch_size(config, wanted))
        yield _Setting("parallel.shard_size", None, limit)
        sharding = parallel.sharding if number > 1 else "none"
        yield _Setting("parallel.sharding", sharding, "sharded weights need two processes")


def _most_processes(config: Config) -> int:
    """Return the most processes to start on this machine: one for each GPU, or else one for each core, at least two."""
    if config.training.device != "cpu" and torch.cuda.is_available() and not config.parallel.share_gpus:
        return torch.cuda.device_count()
    return max(2, int(num_cores()))


def _device(config: Config) -> Iterator[_Setting]:
    wanted = config.training.device.partition(":")[0]
    if wanted not in ("auto", "cpu", accelerator_type()):
        yield _Setting("training.device", "auto", f"this machine has no {wanted}")
    if config.parallel.backend == "nccl" and not torch.cuda.is_available():
        yield _Setting("parallel.backend", "auto", "nccl needs CUDA")
    yield _Setting("training.report_to", [], "nothing is sent to a tracker")


def _lengths(config: Config, scale: Scale) -> Iterator[_Setting]:
    """Scale down the steps and all keys that count steps. Limit the rows and the lengths of generated answers."""
    data, validation, steps = config.data, config.validation, scale.steps
    every = max(1, steps // 3)
    warmup = config.optim.warmup_steps
    if scale.real_steps is not None:
        warmup = -(-warmup * steps // scale.real_steps)
    yield _Setting("training.max_steps", steps)
    yield _Setting("optim.warmup_steps", min(warmup, steps - 1))
    yield _Setting("checkpoint.save_every", every)
    yield _Setting("validation.validate_every", every)
    most = max(MOST_ROWS, steps * global_batch_size(config, scale.processes))
    has_held_out_rows = any(isinstance(rows, str) and rows.isdigit() for rows in (data.validation, data.test))
    if scale.measured_rows > most and not has_held_out_rows:
        yield _Setting("data.max_rows", min(data.max_rows or most, most))
    yield _Setting("testing.max_new_tokens", min(config.testing.max_new_tokens, MOST_NEW_TOKENS))
    is_rewarded = OBJECTIVES[config.training.objective].rows == "prompts"
    if is_rewarded:
        length = min(config.rollout.max_completion_length, MOST_NEW_TOKENS)
        limit = "a random model's answers have no end and are worth little: rewards are computed, but not judged"
        yield _Setting("rollout.max_completion_length", length, limit)
    if validation.metrics:
        yield _Setting("validation.max_new_tokens", min(validation.max_new_tokens, MOST_NEW_TOKENS))
    if validation.metrics or is_rewarded:
        yield _Setting("validation.num_samples", min(validation.num_samples, MOST_SAMPLES))


def _format_value(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)
