"""The state of a training run that a checkpoint keeps beside weights and optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from finetune.errors import CheckpointError

SCHEMA_VERSION = 1
"""Raised when a field of `TrainerState` changes its meaning; checkpoints of another version are refused."""
_ADDED_LATER = {
    *("num_skipped_steps", "best_value", "stopping_merit", "best_metric", "stopping_metric", "validated_step"),
    *("loss_scale", "steps_at_loss_scale", "num_overflows"),
}
"""Fields that older checkpoints lack. Their defaults are the values that they had then."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that training needs to continue, besides weights and optimizer.

    There is no RNG state: the order of rows and dropout are functions of the seed and these counters.
    """

    step: int = 0
    """Optimizer steps done since the start of the run."""
    epoch: int = 0
    """The epoch of the next step, counted from 0."""
    steps_in_epoch: int = 0
    """Optimizer steps already done in that epoch."""
    best_loss: float | None = None
    """Validation loss of the best weights so far, in nats per target token."""
    best_step: int | None = None
    """The step after which the best weights so far were validated."""
    best_value: float | None = None
    """`checkpoint.best_metric` of the best weights; None if that is the loss."""
    stopping_merit: float | None = None
    """The best `early_stopping.metric` so far, negated if a loss; None if `checkpoint.best_metric` is the same."""
    best_metric: str | None = None
    """`checkpoint.best_metric` of the last validation; None before the first, and in older checkpoints."""
    stopping_metric: str | None = None
    """`early_stopping.metric`, likewise."""
    validations_without_improvement: int = 0
    """Consecutive validations without improvement, for early stopping."""
    validated_step: int | None = None
    """The step after which the last validation was; None before the first, and in older checkpoints."""
    num_targets: int = 0
    """Target tokens trained on since the start of the run."""
    num_tokens: int = 0
    """Tokens, targets or not, seen since the start of the run."""
    num_skipped_steps: int = 0
    """Steps without an update, because their loss or gradient was not finite (`training.on_nonfinite=skip`)."""
    loss_scale: int | None = None
    """The factor of the loss in the next step; None unless the run computes in fp16."""
    steps_at_loss_scale: int = 0
    """Steps since it last changed."""
    num_overflows: int = 0
    """Steps in fp16 that were computed in vain, because gradients overflowed, and computed again."""
    world_size: int = 1
    """Processes that trained this state."""
    global_batch_size: int = 1
    """Examples per optimizer step over all processes."""
    schema_version: int = SCHEMA_VERSION

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for state.json."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, source: str) -> TrainerState:
        """Read what `as_record` wrote, strictly by names and types. `source` names the file in messages.

        Raises:
            CheckpointError: the record has another schema version, or a field is missing, unknown or of another type.
        """
        if record.get("schema_version") != SCHEMA_VERSION:
            raise CheckpointError(
                f"{source} has schema_version {record.get('schema_version')!r}, this version of finetune "
                f"reads {SCHEMA_VERSION}. Go on with the version that wrote it (see run.json)."
            )
        defaults = {field.name: field.default for field in fields(cls)}
        names = defaults.keys()
        record = {**{name: defaults[name] for name in _ADDED_LATER}, **record}
        if record.keys() != names:
            raise CheckpointError(
                f"{source} has other fields than expected: missing {sorted(names - record.keys()) or 'none'}, "
                f"unknown {sorted(record.keys() - names) or 'none'}."
            )
        wrong = [f"{name}={record[name]!r}" for name in sorted(names) if not _fits(name, record[name])]
        if wrong:
            raise CheckpointError(f"{source} has values of the wrong type: {', '.join(wrong)}.")
        return cls(**record)


def _fits(name: str, value: object) -> bool:
    """Return whether a field may have a value: counts are never negative, and results of validations may be None."""
    if name in ("best_loss", "best_value", "stopping_merit"):
        return value is None or type(value) is int or (type(value) is float and math.isfinite(value))
    if name in ("best_metric", "stopping_metric"):
        return value is None or type(value) is str
    if name in ("best_step", "validated_step", "loss_scale") and value is None:
        return True
    return type(value) is int and value >= 0
