"""`finetune plan`: what a run will be and whether it fits, from its configuration alone; no weights are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.diagnose.plan_batches import Batches, Batching, Largest
from finetune.diagnose.plan_devices import Device
from finetune.diagnose.plan_limit import operations_of_step
from finetune.diagnose.plan_memory import OptimizerNeed, Peak, optimizer_need, predict_peak
from finetune.diagnose.preview_tokens import on_one_line
from finetune.distributed.environment import read_environment
from finetune.engine.supported import unsupported_reason
from finetune.errors import ConfigError, DataError, ModelError
from finetune.fallbacks import Fallbacks
from finetune.findings import Finding, problem, warning
from finetune.model.base import (
    build_base_model,
    checkpoint_gradients,
    count_parameters,
)
from finetune.model.lora import add_lora
from finetune.model.new_tokens import build_run_tokenizer
from finetune.runs.disk_space import DiskNeed
from finetune.runs.durable import in_units
from finetune.training.optim import build_optimizer

if TYPE_CHECKING:
    from finetune.config.schema import Config

SCHEMA_VERSION = 1
"""Of the JSON form; docs/plan.md describes it."""

_MOST_TRIALS = 7
_FAR_BELOW = 0.8
"""Of a limit: what a straight line puts below it need not be tried."""


class Trade(NamedTuple):
    """What computing layers again in the backward pass would save and cost."""

    bytes_without: int
    bytes_with: int
    extra_time: float
    """Of the time of a step without it, as a share: one more forward pass through the layers."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that `finetune plan` says. Sizes are in bytes."""

    model_type: str
    layers: int
    parameters: int
    trainable_parameters: int
    targets: list[str]
    """What LoRA adapts, by the last part of the name; empty for full fine-tuning."""
    method: str
    precision: str
    forward: str
    """Which way a model goes: the engine's own, or why not."""
    batches: Batches
    device: Device
    peak: Peak | None
    """None where it cannot be known without data."""
    largest_batch_size: int | None
    """The largest `training.batch_size` that fits; None where none does, or nothing is known."""
    is_largest_tried: bool
    """There may be larger ones: the search has an end."""
    checkpointing: Trade | None
    is_checkpointing: bool
    disk: DiskNeed
    seconds_per_step: float | None
    """Measured (`--probe`); None where it was not."""
    seconds_at_limit: float | None
    """Of a step, at the least: see `finetune.diagnose.plan_limit`; None where the device's limit is not known."""
    findings: list[Finding]

    @property
    def needed(self) -> int | None:
        """Memory of a device, with what is gone before the first tensor."""
        return None if self.peak is None else self.peak.total + self.device.reserve

    @property
    def fits(self) -> bool | None:
        """Whether the device has as much."""
        return None if self.needed is None else self.needed <= self.device.memory

    def as_record(self) -> dict[str, Any]:
        """As plain values for JSON, see docs/plan.md."""
        disk = {**self.disk._asdict(), "checkpoint": self.disk.checkpoint, "total": self.disk.total}
        trade = None if self.checkpointing is None else self.checkpointing._asdict()
        record = {**asdict(replace(self, disk=self.disk)), "disk": disk, "checkpointing": trade}
        steps = self.batches.steps
        seconds = None if self.seconds_per_step is None or steps is None else steps * self.seconds_per_step
        return {
            "version": SCHEMA_VERSION,
            **record,
            "needed": self.needed,
            "fits": self.fits,
            "seconds": seconds,
        }


def make_plan(config: Config, device: Device, *, is_probed: bool = False) -> Plan:
    """Work out a run. The data cache is all that is written.

    Args:
        config: a complete run.
        device: where it will be.
        is_probed: measure a few steps of a shallow model with random weights on this machine, for the time.

    Raises:
        ConfigError: the run needs what a plan cannot know.
        ModelError: there is no such model, or LoRA's targets match nothing.
    """
    _refuse_quantized(config)
    findings: list[Finding] = []
    planner = _Planner(config, device, findings)
    model = planner.build_model(checkpointed=config.training.gradient_checkpointing)
    rows = planner.read_rows()
    packs = planner.packs(model)
    batching = Batching(config, model, rows, packs=packs, world_size=planner.world_size)
    largest = batching.largest(config.training.batch_size)
    need = optimizer_need(build_optimizer(model, config.optim), kind=device.kind)
    if need is None:
        what = f"{config.optim.optimizer} does not say without data what it keeps: its memory is not counted"
        findings.append(warning("Memory", what, "leave room for it"))
    peak = planner.predict(model, largest, need)
    trade = planner.trade(largest, need, peak) if peak is not None else None
    best, is_end = planner.search(model, batching, need, peak) if peak is not None else (None, False)
    trainable, total = count_parameters(model)
    plan = Plan(
        model_type=model.config.model_type,
        layers=model.config.num_hidden_layers,
        parameters=total,
        trainable_parameters=trainable,
        targets=sorted({name.rpartition(".")[2] for name, layer in model.named_modules() if hasattr(layer, "lora_A")}),
        method=config.training.method,
        precision=planner.precision,
        forward=planner.forward,
        batches=batching.describe(largest, rows),
        device=device,
        peak=peak,
        largest_batch_size=best,
        is_largest_tried=is_end,
        checkpointing=trade,
        is_checkpointing=config.training.gradient_checkpointing,
        disk=_disk(config, model, need, has_best=planner.validates),
        seconds_at_limit=planner.at_limit(model, batching),  # before a probe, which cuts the model short
        seconds_per_step=planner.probe(model, batching, largest) if is_probed else None,
        findings=findings,
    )
    findings.extend(_judge(plan, config))
    return plan


class _Planner:
    """One run on one device."""

    def __init__(self, config: Config, device: Device, findings: list[Finding]) -> None:
        self._config = config
        self._device = device
        self._findings = findings
        self.forward = "the engine's own"
        self.validates = False
        parallel = config.parallel
        self.world_size = parallel.world_size or parallel.num_processes or read_environment(os.environ).world_size

    @property
    def precision(self) -> str:
        """What a step is computed in."""
        return "bf16" if self.is_bf16(self._config) else "fp32"

    def is_bf16(self, config: Config) -> bool:
        """What `training.precision` means on the device."""
        wish = config.training.precision
        return self._device.has_bf16 if wish == "auto" else wish == "bf16"

    def build_model(self, *, checkpointed: bool) -> Any:
        """The model that trains, without memory: weights in the types that `Runtime.place` gives them."""
        config = self._config
        with torch.device("meta"):
            model: Any = build_base_model(config.model.model_copy(update={"init": "random"}))
            if config.training.method == "lora":
                # PiSSA's adapter has twice the rank (finetune.model.pissa); what it starts as takes no memory.
                rank = config.lora.r * (1 if config.lora.init == "default" else 2)
                plain = {"r": rank, "init": "default", "start_from": None, "new_tokens": []}
                model = add_lora(model, config.lora.model_copy(update=plain))
        frozen = torch.bfloat16 if self.is_bf16(config) else torch.float32
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen)
        if checkpointed:
            checkpoint_gradients(model)
        return model.train()

    def read_rows(self) -> EncodedExamples | None:
        """The training rows; None where they cannot be read, which becomes a finding."""
        config = self._config
        try:
            tokenizer = build_run_tokenizer(config)
            splits = encode_examples(
                load_examples(config.data), tokenizer, config.data, fallbacks=Fallbacks(strict=config.strict)
            )
        except (DataError, ModelError) as error:
            limit = config.data.max_length
            what = f"the plan takes every row to be {limit:,} tokens (data.max_length), all with loss, since the rows "
            first = on_one_line(str(error).splitlines()[0]).rstrip(".")
            fix = "`finetune preview` with the same words says more"
            self._findings.append(warning("Data", f"{what}cannot be used: {first}", fix))
            return None
        self.validates = splits.validation is not None
        return splits.train

    def packs(self, model: Any) -> bool:
        """Whether micro-batches go through the engine, by the rule of `finetune.training.forward`."""
        if self._config.training.kernels == "reference":
            self.forward = "transformers' own on padded rows (training.kernels=reference)"
            return False
        reason = unsupported_reason(model)
        if reason is None and self._config.training.method == "full" and self.is_bf16(self._config):
            reason = "it trains the base's weights in fp32 and computes in bf16"
        if reason is not None:
            self.forward = f"transformers' own on padded rows: {reason}"
        return reason is None

    def predict(self, model: Any, largest: Largest, need: OptimizerNeed | None) -> Peak | None:
        """The peak of a step; None where it cannot be known, which becomes a finding."""
        try:
            return predict_peak(
                model,
                largest.microbatch,
                need or OptimizerNeed(0, 0),
                kind=self._device.kind,
                is_bf16=self.is_bf16(self._config),
                accumulates=largest.per_step > 1,
                world_size=self.world_size,
            )
        except (RuntimeError, NotImplementedError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            what = f"memory cannot be predicted: the model's own forward needs data ({type(error).__name__}: {first})"
            fix = "start with a small training.batch_size and look at the memory that the run reports"
            self._findings.append(warning("Memory", what, fix))
            return None

    def trade(self, largest: Largest, need: OptimizerNeed | None, peak: Peak) -> Trade | None:
        """The same step with and without gradient checkpointing, of which one is known."""
        is_on = self._config.training.gradient_checkpointing
        other = self.predict(self.build_model(checkpointed=not is_on), largest, need)
        if other is None:
            return None
        with_it, without = (peak, other) if is_on else (other, peak)
        # Forward and backward of frozen weights cost about the same; weights that train make the backward twice that.
        extra = 1 / 2 if self._config.training.method == "lora" else 1 / 3
        return Trade(without.total, with_it.total, extra)

    def search(self, model: Any, batching: Batching, need: OptimizerNeed | None, peak: Peak) -> tuple[int | None, bool]:
        """The largest `training.batch_size` that fits, and whether larger ones were not tried."""

        def total(batch_size: int) -> int:
            if batch_size == self._config.training.batch_size:
                return peak.total + self._device.reserve
            found = self.predict(model, batching.largest(batch_size), need)
            return self._device.reserve + (0 if found is None else found.total)

        return find_largest(total, self._device.memory, first=self._config.training.batch_size, end=batching.end)

    def at_limit(self, model: Any, batching: Batching) -> float | None:
        """Seconds of a step at the device's limit."""
        rate = self._device.teraflops.get(self.precision)
        if rate is None:
            return None
        operations = operations_of_step(
            model,
            num_computed=batching.computed_per_step() / self.world_size,
            num_targets=batching.targets_per_step() / self.world_size,
            is_checkpointing=self._config.training.gradient_checkpointing,
        )
        return operations / (rate * 1e12)

    def probe(self, model: Any, batching: Batching, largest: Largest) -> float | None:
        """Seconds of a step here, measured; see `finetune.diagnose.plan_probe`."""
        from finetune.diagnose.plan_probe import seconds_of

        if not self._device.is_here:
            fix = "leave --device out, on a machine that has it"
            self._findings.append(warning("Time", f"--probe measures this machine, not a {self._device.name}", fix))
            return None
        seconds = seconds_of(model, largest.microbatch, self._config, kind=self._device.kind)
        per_token = seconds / max(1, largest.microbatch.num_computed)
        return per_token * batching.computed_per_step() / self.world_size


def find_largest(total: Callable[[int], int], limit: int, *, first: int, end: int) -> tuple[int | None, bool]:
    """The largest number whose total is within a limit, for totals that grow about evenly.

    Args:
        total: of a number.
        limit: what it may be.
        first: where to begin.
        end: the largest number that makes a difference.

    Returns:
        The number, None where not even 1 is within the limit; and whether it is `end`, so that no larger was tried.
    """
    known: dict[int, int] = {}
    guess = min(first, end)
    for _ in range(_MOST_TRIALS):
        known[guess] = total(guess)
        good = max((n for n, size in known.items() if size <= limit), default=0)
        bad = min((n for n, size in known.items() if size > limit), default=end + 1)
        if bad - good == 1:
            break
        if len(known) == 1:
            guess = 2 * guess if good else guess // 2
        else:
            low, high = sorted(sorted(known, key=lambda n: abs(known[n] - limit))[:2])
            slope = (known[high] - known[low]) / (high - low)
            if known[high] + slope * (end - high) < _FAR_BELOW * limit:
                return end, True
            guess = int(low + (limit - known[low]) / slope) if slope > 0 else end
        guess = min(max(guess, good + 1), bad - 1)
    return good or None, good == end


def _disk(config: Config, model: Any, need: OptimizerNeed | None, *, has_best: bool) -> DiskNeed:
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    folder = Path(config.output_dir).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    at_once = config.checkpoint.save_total_limit + has_best + 1  # one is being written
    return DiskNeed(trained, None if need is None else need.state, at_once, shutil.disk_usage(there).free)


def _refuse_quantized(config: Config) -> None:
    if config.training.method == "lora" and config.lora.quantize != "none":
        raise ConfigError(
            f"lora.quantize is {config.lora.quantize}: a plan does not know yet what bitsandbytes keeps. Plan with "
            "lora.quantize=none; the base's weights then count with 16 bits in place of about 4.5."
        )


def _judge(plan: Plan, config: Config) -> Iterator[Finding]:
    """What to change where the run does not fit."""
    if plan.disk.total > plan.disk.free:
        what = f"the checkpoints take {in_units(plan.disk.total)} and {in_units(plan.disk.free)} are free"
        yield problem("Disk", what, "make room, or lower checkpoint.save_total_limit")
    if plan.fits is not False or plan.needed is None:
        return
    what = f"a step takes {in_units(plan.needed)}, but {plan.device.name} has {in_units(plan.device.memory)}"
    yield problem("Memory", what, "; or ".join(_ways_out(plan, config)))


def _ways_out(plan: Plan, config: Config) -> Iterator[str]:
    if plan.largest_batch_size is not None:
        keep = f", with training.global_batch_size={plan.batches.global_batch_size} for the same curve"
        yield f"training.batch_size={plan.largest_batch_size}{keep}"
    trade = plan.checkpointing
    if trade is not None and not plan.is_checkpointing:
        needed = trade.bytes_with + plan.device.reserve
        fits = "fits" if needed <= plan.device.memory else "does not fit either"
        more = f"{trade.extra_time:.0%} more time"
        yield f"training.gradient_checkpointing=true: {in_units(needed)}, which {fits}, at about {more}"
    yield f"a lower data.max_length (it is {config.data.max_length}) or training.max_tokens_per_microbatch"
    if plan.method == "full":
        yield "training.method=lora"
    elif plan.largest_batch_size is None:
        yield "lora.quantize=nf4, or a smaller model"
