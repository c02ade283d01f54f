"""The prediction of `finetune plan`, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from finetune.diagnose.plan_batches import Batches
from finetune.diagnose.plan_devices import Device
from finetune.diagnose.plan_evaluation import Evaluating, Section
from finetune.diagnose.plan_rollouts import Generating
from finetune.findings import Finding
from finetune.runs.checkpoints import DiskNeed
from finetune.training.memory.choice import MemoryChoice
from finetune.training.memory.forecast import Peak

SCHEMA_VERSION = 2
"""Of the JSON form; docs/plan.md describes it."""


class ShardedNeed(NamedTuple):
    """The memory of a process if several shard the weights (`parallel.sharding`)."""

    shards: int
    """Processes that share one copy."""
    needed: int
    """Bytes on the device of each, `device.reserve` included."""
    fits: bool


class Trade(NamedTuple):
    """The memory and time of a step with and without gradient checkpointing."""

    bytes_without: int
    bytes_with: int
    extra_time: float
    """One more forward pass through the layers, as a share of a step without checkpointing."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The prediction for a run. Sizes are in bytes."""

    model_type: str
    layers: int
    parameters: int
    trainable_parameters: int
    targets: list[str]
    """The last part of the names of the layers that LoRA adapts; empty for full fine-tuning."""
    method: str
    objective: str
    precision: str
    why_not_engine: str | None
    """The reason to compute padded rows with the model's own forward; None if the engine computes packed ones."""
    called_layers: dict[str, int]
    """The number of linear layers that the engine calls as PEFT made them, by reason."""
    batches: Batches
    device: Device
    peak: Peak | None
    """None if it cannot be known without data."""
    generating: Generating | None
    """None if the run does not generate the answers that it learns from, or `peak` is None."""
    evaluating: Mapping[Section, Evaluating]
    """Validations and the test phase, as far as the run has them. Empty if the rows or `peak` are not known."""
    checkpointing: Trade | None
    in_shards: list[ShardedNeed]
    """With the same micro-batches; empty if the peak is not known, or the run cannot be sharded."""
    choice: MemoryChoice
    """Gradient checkpointing and the size of micro-batches, as a run on this device would choose them."""
    disk: DiskNeed
    seconds_per_step: float | None = None
    """Measured with `--probe`, with `seconds_generating`; None without it."""
    seconds_generating: float | None = None
    """Measured with `--probe`: the time to generate answers, for each step; None if it is not known."""
    seconds_at_limit: float | None
    """A lower bound for a step, see `finetune.diagnose.plan_time`; None if the device's limit is not known."""
    findings: list[Finding]

    @property
    def forward(self) -> str:
        """In words: the engine's own forward, or another with the reason."""
        if self.why_not_engine is not None:
            return f"transformers' own on padded rows: {self.why_not_engine}"
        called = [f"{number} linear layers as PEFT made them ({why})" for why, number in self.called_layers.items()]
        return f"the engine's own{', which calls ' * bool(called)}{', '.join(called)}"

    @property
    def needed(self) -> int | None:
        """The memory that the run needs on the device in the phase that needs the most, `device.reserve` included."""
        return None if self.phase is None else self.phase[1] + self.device.reserve

    @property
    def phase(self) -> tuple[str, int] | None:
        """See `most_memory`; None if `peak` is."""
        return None if self.peak is None else most_memory(self.peak, self.generating, self.evaluating)

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory."""
        return None if self.needed is None else self.needed <= self.device.memory

    @property
    def fewest_shards(self) -> int | None:
        """The smallest number of shards in which the run fits; None if none of `in_shards` does."""
        return next((need.shards for need in self.in_shards if need.fits), None)

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for JSON, see docs/plan.md."""
        disk = {**self.disk._asdict(), "checkpoint": self.disk.checkpoint, "total": self.disk.total}
        trade = None if self.checkpointing is None else self.checkpointing._asdict()
        shards = {"in_shards": [need._asdict() for need in self.in_shards], "fewest_shards": self.fewest_shards}
        record = {**asdict(self), "forward": self.forward, "disk": disk, "checkpointing": trade, **shards}
        steps = self.batches.steps
        seconds = None if self.seconds_per_step is None or steps is None else steps * self.seconds_per_step
        phase = None if self.phase is None else self.phase[0]
        needs = {"needed": self.needed, "phase": phase, "fits": self.fits}
        return {"version": SCHEMA_VERSION, **record, **needs, "seconds": seconds}


def most_memory(peak: Peak, generating: Generating | None, evaluating: Mapping[Section, Evaluating]) -> tuple[str, int]:
    """Return the phase of a run that uses the most memory, with its bytes; of a training step, the part of the step."""
    phases = [(peak.when, peak.total)]
    if generating is not None:
        phases.append(("generating answers", generating.total))
    for section, evaluation in evaluating.items():
        phases += evaluation.phases(section)
    return max(phases, key=lambda phase: phase[1])
