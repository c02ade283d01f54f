"""The state of a training run that a checkpoint keeps beside weights and optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from finetune.errors import CheckpointError
from finetune.limits import read_regular
from finetune.runs.durable import describe_os_error

STATE_FILE = "state.json"
SCHEMA_VERSION = 1
"""Raised when a field of `TrainerState` changes its meaning; checkpoints of another version are refused."""
_ADDED_LATER = {
    *("num_skipped_steps", "best_value", "stopping_merit", "best_metric", "stopping_metric", "forgotten", "is_due"),
    *("validated_step", "loss_scale", "steps_at_loss_scale", "num_overflows", "is_stopped", "num_without_gradient"),
}
"""Fields that older checkpoints lack. Their defaults are the values that they had then."""
_MOST = 1 << 62
"""Counting can continue from every number below this one."""
_Count = Annotated[int, Field(strict=True, ge=0, lt=_MOST)]
_Value = Annotated[float, Field(strict=True, gt=-_MOST, lt=_MOST, allow_inf_nan=False)]
_Text = Annotated[str, Field(strict=True)]
_adapter: Any = cache(TypeAdapter)  # making one takes longer than reading a checkpoint with it


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that training needs to continue, besides weights and optimizer.

    There is no RNG state: the order of rows and dropout are functions of the seed and these counters.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: _Count = 0
    """Optimizer steps done since the start of the run."""
    epoch: _Count = 0
    """The epoch of the next step, counted from 0."""
    steps_in_epoch: _Count = 0
    """Optimizer steps already done in that epoch."""
    best_loss: _Value | None = None
    """Validation loss of the best weights so far, in nats per target token."""
    best_step: _Count | None = None
    """The step after which the best weights so far were validated."""
    best_value: _Value | None = None
    """`checkpoint.best_metric` of the best weights; None if that is the loss."""
    stopping_merit: _Value | None = None
    """The `early_stopping.metric` that patience compares with, negated if a loss. Older checkpoints may lack it."""
    best_metric: _Text | None = None
    """`checkpoint.best_metric` of the last validation; None before the first, and in older checkpoints."""
    stopping_metric: _Text | None = None
    """`early_stopping.metric`, likewise."""
    validations_without_improvement: _Count = 0
    """Consecutive validations without improvement, for early stopping."""
    forgotten: _Value | None = None
    """The divergence from the base in the last validation; None unless `early_stopping.max_forgotten` is set."""
    validated_step: _Count | None = None
    """The step after which the last validation was; None before the first, and in older checkpoints."""
    num_targets: _Count = 0
    """Target tokens trained on since the start of the run."""
    num_tokens: _Count = 0
    """Tokens, targets or not, seen since the start of the run."""
    num_skipped_steps: _Count = 0
    """Steps without an update, because their loss or gradient was not finite (`training.on_nonfinite=skip`)."""
    num_without_gradient: _Count = 0
    """Steps in which the gradient of every trained weight was zero. Older checkpoints did not count them."""
    loss_scale: _Count | None = None
    """The factor of the loss in the next step; None unless the run computes in fp16."""
    steps_at_loss_scale: _Count = 0
    """Steps since it last changed."""
    num_overflows: _Count = 0
    """Steps in fp16 that were computed in vain, because gradients overflowed, and computed again."""
    is_stopped: Annotated[bool, Field(strict=True)] = False
    """Whether a callback ended training after this step. A resumed run trains no further."""
    is_due: Annotated[bool, Field(strict=True)] = True
    """Whether the run saves after this step in any case. A preempted run also saves after other steps."""
    world_size: _Count = 1
    """Processes that trained this state."""
    global_batch_size: _Count = 1
    """Examples per optimizer step over all processes."""
    schema_version: _Count = SCHEMA_VERSION

    def renumbered(self, steps_per_epoch: int) -> TrainerState:
        """Return the state with epoch and step in the epoch computed again: other rows may have changed the epochs."""
        epoch, steps_in_epoch = divmod(self.step, steps_per_epoch)
        return replace(self, epoch=epoch, steps_in_epoch=steps_in_epoch)

    @property
    def has_no_update(self) -> bool:
        """Whether steps were done, over all starts of the run, and none of them updated the weights."""
        return 0 < self.step <= self.num_skipped_steps + self.num_without_gradient

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
        missing = {field.name for field in fields(cls)} - _ADDED_LATER - record.keys()
        problems = [f"{name} is missing" for name in sorted(missing)]
        try:
            _adapter(cls).validate_python(record)
        except ValidationError as error:
            problems += [f"{each['loc'][0]}={each['input']!r} ({each['msg']})" for each in error.errors()]
        if problems:
            raise CheckpointError(f"{source} is not as a run writes it: {'; '.join(problems)}.")
        return cls(**record)  # pydantic would convert integers to floats


def read_state(checkpoint: Path) -> TrainerState:
    """Read the counters of training from a checkpoint.

    Raises:
        CheckpointError: state.json is missing, damaged or of another schema.
    """
    file = checkpoint / STATE_FILE
    try:
        record = json.loads(read_regular(file))
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        raise CheckpointError(f"{file} cannot be read: {reason}.") from error
    return TrainerState.from_record(record, source=str(file))
