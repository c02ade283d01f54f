"""The engines that are compared. Each module has `train(order, options, clock)`; none is imported before its turn."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_OURS = "benchmarks.engines.ours"
_TRL = "benchmarks.engines.trl_sft"
_TRAINER = "benchmarks.engines.transformers_trainer"
_ACCELERATE = "benchmarks.engines.accelerate_loop"


class Engine(NamedTuple):
    """An engine in one configuration."""

    module: str
    meaning: str
    """For the results page."""
    options: Mapping[str, Any] = MappingProxyType({})
    needs: str | None = None
    """A package that must be installed."""


_SINGLE = {"batch_size": 1}
_GROUPED = {"batch_size": 4, "sampling": "group_by_length"}
_PACKED = {"batch_size": 1, "packing": True, "sampling": "random"}
_TARGETS = {"only_targets": True}

ENGINES: dict[str, Engine] = {
    "ours": Engine(_OURS, "finetune, micro-batches cut by tokens"),
    "trl-1x16": Engine(_TRL, "TRL SFTTrainer, one row in a micro-batch", _SINGLE, "trl"),
    "trl-1x16-targets": Engine(_TRL, "TRL, one row in a micro-batch, loss positions only", _SINGLE | _TARGETS, "trl"),
    "trl-grouped": Engine(_TRL, "TRL SFTTrainer, rows grouped by length, four in a micro-batch", _GROUPED, "trl"),
    "trl-grouped-targets": Engine(_TRL, "TRL, grouped by length, loss positions only", _GROUPED | _TARGETS, "trl"),
    "trl-packed": Engine(_TRL, "TRL SFTTrainer, packing (best fit, position ids)", _PACKED, "trl"),
    "trl-packed-targets": Engine(_TRL, "TRL, packing, loss positions only", _PACKED | _TARGETS, "trl"),
    "trl-1x16-liger": Engine(
        _TRL, "TRL SFTTrainer with Liger's layers (CUDA only)", _SINGLE | {"liger": True}, "liger_kernel"
    ),
    "trainer": Engine(_TRAINER, "transformers Trainer, four rows in a micro-batch", {"batch_size": 4}),
    "trainer-1x16": Engine(_TRAINER, "transformers Trainer, one row in a micro-batch", {"batch_size": 1}),
    "accelerate": Engine(_ACCELERATE, "a plain Accelerate loop, four rows in a micro-batch", {"batch_size": 4}),
}
