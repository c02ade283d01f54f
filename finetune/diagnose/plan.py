"""The prediction of `finetune plan`: whether the run fits, what takes less, and the JSON form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from finetune.config.keys import values
from finetune.config.schema import Config
from finetune.diagnose.plan_batches import Batches, Section, answer_keys
from finetune.diagnose.plan_devices import Device
from finetune.findings import Finding, problem, warning
from finetune.runs.checkpoints import DiskNeed
from finetune.training.memory.choice import MemoryChoice
from finetune.training.memory.forecast import Peak
from finetune.training.memory.generation import Generating
from finetune.units import format_bytes

SCHEMA_VERSION = 2
"""Of the JSON form; docs/plan.md describes it."""


@dataclass(frozen=True, kw_only=True)
class Evaluating:
    """The memory of a process during validations, or in the test phase.

    Attributes:
        rows: of the batch whose loss takes the most memory.
        peak: while the loss of this batch is computed; None if no loss is computed, or its memory is not known.
        generating: while answers are generated; None if none are.
    """

    rows: int
    peak: Peak | None
    generating: Generating | None


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
    loading: int | None
    """Bytes while the base is quantized, see `PlannedModel`; None if it is not in 4 bits."""
    generating: Generating | None
    """None if the run does not generate the answers that it learns from, or `peak` is None."""
    evaluating: Mapping[Section, Evaluating]
    """Validations and the test phase, as far as the run has them. Empty if the rows or `peak` are not known."""
    checkpointing: Trade | None
    in_shards: list[ShardedNeed]
    """With the same micro-batches. One shard if more would save next to nothing; empty if the peak is not known, or
    the run cannot be sharded."""
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
        called = [
            f"{number} linear layers as PEFT made them ({reason})" for reason, number in self.called_layers.items()
        ]
        return f"the engine's own{', which calls ' * bool(called)}{', '.join(called)}"

    @property
    def needed(self) -> int | None:
        """The memory that the run needs on the device in the phase that needs the most, `device.reserve` included."""
        return None if self.phase is None else self.phase[1] + self.device.reserve

    @property
    def phase(self) -> tuple[str, int] | None:
        """The phase that needs the most memory, and its bytes; None if the peak of a step is not known."""
        return None if self.peak is None else most_memory(self.peak, self.generating, self.evaluating, self.loading)

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


def most_memory(
    peak: Peak, generating: Generating | None, evaluating: Mapping[Section, Evaluating], loading: int | None
) -> tuple[str, int]:
    """Return the phase of a run that uses the most memory, with its bytes; of a training step, the part of the step."""
    phases = [(peak.when, peak.total), ("loading", loading or 0)]
    if generating is not None:
        phases.append(("generating answers", generating.total))
    for section, evaluation in evaluating.items():
        uses = ("loss", evaluation.peak), ("generating answers", evaluation.generating)
        phases += [(f"{section}, {name}", use.total) for name, use in uses if use is not None]
    return max(phases, key=lambda phase: phase[1])


def judge(plan: Plan, config: Config) -> Iterator[Finding]:
    """Find checkpoints or steps that do not fit, with ways out, and times that are missing."""
    if plan.disk.total > plan.disk.free:
        message = f"the checkpoints take {format_bytes(plan.disk.total)}, but {format_bytes(plan.disk.free)} are free"
        yield problem("Disk", message, "make room, or lower checkpoint.save_total_limit")
    has_time = plan.seconds_per_step is not None or plan.seconds_at_limit is not None
    if plan.batches.answers_per_prompt is not None and has_time and plan.seconds_generating is None:
        where = "rollout.server takes" if config.rollout.server else "generating answers takes"
        message = f"the time that {where} is not in this plan: --probe measures it where the engine generates, on a CPU"
        yield warning("Time", message, "train a few steps, training.max_steps=3: metrics.jsonl has rollout_seconds")
    if plan.fits is not False or plan.peak is None:
        return
    for phase, total, ways in _phases(plan, plan.peak.total, config):
        if total + plan.device.reserve > plan.device.memory:
            there = f"but {plan.device.name} has {format_bytes(plan.device.memory)}"
            message = f"{phase} takes {format_bytes(total + plan.device.reserve)}, {there}"
            yield problem("Memory", message, "; or ".join(ways))


def _phases(plan: Plan, step: int, config: Config) -> Iterator[tuple[str, int, Iterator[str]]]:
    """Yield the phases of a run, with the bytes of each and what takes less."""
    yield "a step", step, _ways_out(plan, config)
    if plan.loading is not None:
        yield "loading the base in 4 bits", plan.loading, iter(["a smaller model"])
    if (generation := plan.generating) is not None:
        keys = "rollout.batch_size", "rollout.max_completion_length"
        yield (
            f"generating {generation.answers} answers at once",
            generation.total,
            _ways_to_generate(plan, generation, *keys, config),
        )
    for section, evaluation in plan.evaluating.items():
        if evaluation.peak is not None:
            size = getattr(config, section).batch_size
            ways = [f"a lower {section}.batch_size (it is {size})", *_shards_out(plan), "a smaller model"]
            yield f"the loss of {evaluation.rows} rows at once in {section}", evaluation.peak.total, iter(ways)
        if (generation := evaluation.generating) is not None:
            phase, keys = f"generating {generation.answers} answers at once in {section}", answer_keys(config, section)
            yield phase, generation.total, _ways_to_generate(plan, generation, *keys, config)


def _ways_to_generate(
    plan: Plan, generating: Generating, batch_key: str, length_key: str, config: Config
) -> Iterator[str]:
    """The keys limit how many answers are generated at once, and the tokens of an answer."""
    room = plan.device.memory - plan.device.reserve - generating.held - generating.merged
    # Prompts may begin alike, so fewer of them may take as much memory.
    growing = max(generating.logits, generating.step)
    shares = ((n, n / generating.answers) for n in range(generating.answers - 1, 0, -1))
    fits = (n for n, part in shares if generating.cache * part + max(generating.prompts, growing * part) <= room)
    if fit := next(fits, 0):
        yield f"a lower {batch_key}: {fit} answers at once fit"
    yield f"a lower {length_key} (it is {values(config)[length_key]})"
    if generating is plan.generating and config.training.method == "lora":
        yield "rollout.server, to generate on another device"
    yield from _shards_out(plan)
    yield "a smaller model"


def _shards_out(plan: Plan) -> Iterator[str]:
    if plan.fewest_shards is not None:
        yield f"parallel.sharding=fsdp2 with {plan.fewest_shards} processes or more, each on a device like this"


def _ways_out(plan: Plan, config: Config) -> Iterator[str]:
    batches = plan.batches
    if batches.largest_microbatch_rows > 1:
        rows = f"the largest micro-batch has {batches.largest_microbatch_rows} rows"
        same_curve = f"with training.global_batch_size={batches.global_batch_size} for the same curve"
        yield f"a lower training.batch_size or training.max_tokens_per_microbatch ({rows}), {same_curve}"
    trade = plan.checkpointing
    if trade is not None and not plan.choice.gradient_checkpointing:
        needed = trade.bytes_with + plan.device.reserve
        fits = "fits" if needed <= plan.device.memory else "does not fit either"
        more = f"{trade.extra_time:.0%} more time"
        yield f"training.gradient_checkpointing=true: {format_bytes(needed)}, which {fits}, at about {more}"
    yield from _shards_out(plan)
    yield f"a lower data.max_length (it is {config.data.max_length})"
    if plan.method == "full":
        yield "training.method=lora"
        return
    if plan.precision == "fp32":
        narrow = "fp16" if plan.device.precision == "fp16" else "bf16"
        yield f"training.precision={narrow}, which halves the memory of the frozen weights"
    if plan.device.type == "cuda" and config.lora.quantize == "none":
        yield "lora.quantize=nf4"
    yield "a smaller model"
