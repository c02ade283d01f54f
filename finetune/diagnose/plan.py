"""`finetune plan`: predict a run and whether it fits, without reading weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.config.objectives import OBJECTIVES
from finetune.data.batches import Collate
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import check_local_rows
from finetune.data.objective import AnySplits, encode_for_objective
from finetune.diagnose.plan_batches import Batches, Batching
from finetune.diagnose.plan_devices import Device
from finetune.diagnose.plan_rollouts import (
    AssumedAnswers,
    Generating,
    engine_generates,
    forecast_generating,
    measure_generating,
    ways_to_generate,
)
from finetune.diagnose.plan_time import measure_seconds, operations_of_step
from finetune.diagnose.preview_tokens import on_one_line
from finetune.distributed.environment import read_environment
from finetune.distributed.precision import DTYPES, choose_precision, convert_weights
from finetune.distributed.sharding import refuse_uneven_shards, refuse_what_is_not_sharded
from finetune.engine.fused import why_not_fused
from finetune.errors import ConfigError, DataError, ModelError, first_line
from finetune.fallbacks import Fallbacks
from finetune.findings import Finding, problem, warning
from finetune.model.base import (
    build_base_model,
    checkpoint_gradients,
    count_parameters,
    longrope_boundary,
)
from finetune.model.fp8_base import (
    refuse_fp8_without_engine,
    refuse_where_fp8_is_impossible,
    round_frozen_layers,
    wants_fp8,
)
from finetune.model.lora import attach_adapter
from finetune.model.new_tokens import build_run_tokenizer
from finetune.model.published import published_sizes, with_sizes_here
from finetune.model.quantized import quantize_without_data
from finetune.model.targets import resolve_targets
from finetune.model.training_mode import add_embedding_noise
from finetune.runs.disk_space import DiskNeed
from finetune.runs.folder import existing_folder
from finetune.training.checks import has_reference
from finetune.training.forward import choose_forward, wants_fused
from finetune.training.loaders import global_batch_size
from finetune.training.memory.choice import MemoryChoice, choose, shards_of
from finetune.training.memory.forecast import (
    CANNOT_TRACE,
    OptimizerNeed,
    Peak,
    Shards,
    StepForecast,
    Weights,
    forecast_step,
    optimizer_need,
)
from finetune.training.memory.tracing import Computation
from finetune.training.optim import build_optimizer
from finetune.training.prompt_rows import PromptRows
from finetune.training.train import trainer_for
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config, ModelSection

SCHEMA_VERSION = 2
"""Of the JSON form; docs/plan.md describes it."""

SHARDS = (1, 2, 4, 8)
"""The numbers of shards of which the plan says how much memory a process needs."""


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


class Probed(NamedTuple):
    """Measured times, see `Plan`."""

    seconds_per_step: float | None = None
    seconds_generating: float | None = None


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
        """The memory that a step needs on the device, or generating its answers, `device.reserve` included."""
        return None if self.peak is None else _larger(self.peak, self.generating) + self.device.reserve

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
        return {"version": SCHEMA_VERSION, **record, "needed": self.needed, "fits": self.fits, "seconds": seconds}


def make_plan(config: Config, device: Device, *, is_probed: bool = False) -> Plan:
    """Predict a run. Nothing is written but the data cache.

    Args:
        config: a complete run.
        device: where it will run; processes of this machine share its memory if it is the CPU.
        is_probed: measure a few steps of a shallow model with random weights on this machine, for the time.

    Raises:
        ConfigError: the run cannot be trained, or a plan does not support it.
        DataError: `drop_last` leaves nothing of a split.
        LaunchError: the number of processes does not suit `parallel.shard_size`.
        ModelError: there is no such model, or the target modules match nothing.
    """
    _refuse_quantized_on_cpu(config, device)
    refuse_what_is_not_sharded(config, trains=True)
    device = device.limited_to(config.training.memory_fraction)
    device = device.shared_by(config.parallel.num_processes or read_environment(os.environ).local_world_size)
    planner = _Planner(config, device)
    model, forecast = planner.model, planner.forecast(planner.model)
    peak = None if forecast is None else planner.peak_of(forecast)
    trainable, total = count_parameters(model)
    plan = Plan(
        model_type=model.config.model_type,
        layers=model.config.num_hidden_layers,
        parameters=total,
        trainable_parameters=trainable,
        targets=sorted({name.rpartition(".")[2] for name, layer in model.named_modules() if hasattr(layer, "lora_A")}),
        method=config.training.method,
        objective=config.training.objective,
        precision=planner.precision,
        why_not_engine=planner.why_not_engine,
        called_layers=planner.called_layers,
        batches=planner.batching.describe(),
        device=device,
        peak=peak,
        generating=None if peak is None else planner.generating(),
        checkpointing=planner.trade(peak) if peak is not None else None,
        in_shards=[] if forecast is None else planner.in_shards(forecast),
        choice=planner.choice,
        disk=planner.disk(),
        seconds_at_limit=planner.at_limit(),
        findings=planner.findings,
    )
    if is_probed:
        plan = replace(plan, **planner.probe()._asdict())
    planner.findings.extend(_judge(plan, config))
    return plan


class _Planner:
    """Predicts one run on one device, with the functions that make the choices of training."""

    def __init__(self, config: Config, device: Device) -> None:
        self._device = device
        self.findings: list[Finding] = []
        self._trainer = trainer_for(config)
        self.precision = choose_precision(config.training.precision, best=device.precision)
        here = torch.device(device.type) if device.is_here else None
        why_not = (
            f"it needs a GPU from Hopper on, and the plan is for {device.name}" if device.has_fp8 is False else None
        )
        refuse_where_fp8_is_impossible(config, precision=self.precision, device=here, why_not_device=why_not)
        parallel = config.parallel
        self._world_size = parallel.world_size or parallel.num_processes or read_environment(os.environ).world_size
        self._shards = shards_of(parallel, self._world_size)
        if self._shards.size > 1:
            refuse_uneven_shards(config, self._world_size)
        self._config = config
        self._sizes = self._choose_sizes()
        self._is_in_4_bits = self._is_in_fp8 = False
        self.model = self._build_model(checkpointed=False)
        self._compare_sizes()
        forward = choose_forward(config.training, self.model)
        self.why_not_engine = forward.why_not_engine
        self.called_layers = {why: len(names) for why, names in forward.called_layers.items()}
        self._warn_of_fallback()
        if _is_quantized(config):
            self._quantize()
        if wants_fp8(config):
            refuse_fp8_without_engine(config, self.why_not_engine)
            self._is_in_fp8 = True
            self.model = self._build_model(checkpointed=False)
        self._how = Computation(
            loss_of=partial(self._trainer.loss_of, config),
            device_type=device.type,
            dtype=DTYPES[self.precision],
            is_fused=wants_fused(config.training, device.type),
        )
        self._prompts: list[list[int]] | None = None
        self._splits = self._encode()
        self._answers = self._assume_answers()
        collate = self._trainer.collation_of(self._config, forward.collate)
        self.choice = self._choose_by_memory(collate)
        self._config = config = self.choice.resolve(config)
        if self.choice.gradient_checkpointing:
            checkpoint_gradients(self.model, offloads=self.choice.offloads)
        self.batching = Batching(
            config=config,
            rows=None if self._splits is None else self._splits.train,
            collate=collate,
            is_padded=self.why_not_engine is not None,
            boundary=longrope_boundary(self.model),
            world_size=self._world_size,
            answers=self._answers,
        )
        if self._splits is not None:
            self.batching.refuse_dropping_all(self._splits)
        self._need = optimizer_need(build_optimizer(self.model, config.optim), device_type=device.type)
        if self._need is None:
            what = f"the memory of {config.optim.optimizer} is not counted: it cannot take a step without data"
            self.findings.append(warning("Memory", what, "leave room for it"))

    def _choose_sizes(self) -> ModelSection:
        """Return the model to plan. If the hub does not give it, but its sizes are shipped: these, with a finding."""
        section, why = with_sizes_here(self._config.model)
        if why is not None:
            fix = "to plan with the model's own files, give model.path=FOLDER, or plan where the hub can be reached"
            self.findings.append(warning("Model", why, fix))
        return section

    def _compare_sizes(self) -> None:
        """Add a finding for each size of the model that differs from the shipped one."""
        published = published_sizes(self._sizes)
        for difference in () if published is None else published.differences(self.model.config):
            what = f"{self._sizes.path}: {difference}; this plan takes the former"
            self.findings.append(warning("Model", what, "without the hub a plan would differ: update finetune"))

    def _warn_of_fallback(self) -> None:
        """Add a finding if training would record that the engine computes less than was asked for."""
        if self._config.training.kernels == "reference" or not (self.why_not_engine or self.called_layers):
            return
        what = "the engine does not compute all of this model, so steps take longer: `forward` says why"
        fix = "none needed; a run with strict=true refuses it, unless training.kernels=reference asks for it"
        self.findings.append(warning("Engine", what, fix))

    def _quantize(self) -> None:
        """Keep the base in 4 bits, if the engine computes all of it; else add a finding."""
        if self.why_not_engine is None and not self.called_layers:
            self._is_in_4_bits = True
            self.model = self._build_model(checkpointed=False)
            return
        what = "a base in 4 bits is predicted only where the engine computes every layer, so this plan counts 16 bits"
        self.findings.append(warning("Memory", what, "the run takes less than the plan says: see `forward`"))

    def _build_model(self, *, checkpointed: bool) -> Any:
        """Build the model on the meta device, as `Trainer` prepares it."""
        config = self._config
        with torch.device("meta"):
            model: Any = build_base_model(self._sizes.model_copy(update={"init": "random"}))
            if config.training.method == "lora":
                model = attach_adapter(model, config.lora, resolve_targets(model, config.lora.target_modules))
            if self._is_in_4_bits:
                quantize_without_data(model)
        convert_weights(model, self.precision)
        if self._is_in_fp8:
            round_frozen_layers(model)
        if config.training.neftune_alpha:
            add_embedding_noise(model, config.training.neftune_alpha)
        if checkpointed:
            checkpoint_gradients(model)
        return model.train()

    def _encode(self) -> AnySplits | None:
        """Encode the rows; if there are none or they cannot be used, add a finding and return None."""
        config, data = self._config, self._config.data
        learns_prompts = OBJECTIVES[config.training.objective].rows == "prompts"
        rows, loss = ("prompts of up to", "") if learns_prompts else ("rows of", ", all with loss")
        assumed = f"the plan assumes {rows} {data.max_length:,} tokens (data.max_length){loss}"
        if not (data.path or data.mixture or data.train):
            fix = "give data.path=FILE_FOLDER_OR_HUB_ID to plan with its rows"
            self.findings.append(warning("Data", f"no data is given, so {assumed}", fix))
            return None
        try:
            check_local_rows(data, has_format=False)
            tokenizer = build_run_tokenizer(config.model_copy(update={"model": self._sizes}))
            splits = encode_for_objective(config, tokenizer, fallbacks=Fallbacks(strict=config.strict))
            if learns_prompts and isinstance(splits.train, EncodedExamples):
                self._prompts = PromptRows(splits.train, tokenizer, None).prompts
            return splits
        except (DataError, ModelError) as error:
            first = on_one_line(first_line(error)).rstrip(".")
            if isinstance(error, ModelError) and self._sizes is not config.model:
                first = "the tokenizer is not here either"
            fix = "run `finetune preview` with the same arguments to see more"
            self.findings.append(warning("Data", f"the rows cannot be used, so {assumed}: {first}", fix))
            return None

    def _assume_answers(self) -> AssumedAnswers | None:
        """Return the answers that a run learns from if it learns from prompts; else None."""
        if OBJECTIVES[self._config.training.objective].rows != "prompts":
            return None
        size = global_batch_size(self._config, self._world_size)
        return AssumedAnswers.of(self._config, self.model, self._prompts, size)

    def _choose_by_memory(self, collate: Collate) -> MemoryChoice:
        weights = Weights(self.model)
        held = weights.adapter + weights.held(self._shards) + weights.gathered(self._shards)
        longest = self._config.data.max_length if self._answers is None else int(self._answers.lengths.max())
        if self._splits is not None:
            longest = self._trainer.longest_row(self._config, self._splits)
        return choose(
            self._config,
            self.model,
            self._how,
            longest=longest,
            collate=collate,
            room=self._device.memory - self._device.reserve - held,
            world_size=self._world_size,
        )

    def forecast(self, model: Any) -> StepForecast | None:
        """Run a step without data; if its memory cannot be known, add a finding and return None."""
        largest = self.batching.largest
        try:
            return forecast_step(model, largest.microbatch, replace(self._how, accumulates=largest.per_step > 1))
        except CANNOT_TRACE as error:
            cause = f"{type(error).__name__}: {first_line(error)}"
            what = f"memory cannot be predicted: the model's own forward needs data ({cause})"
            fix = "start with a small training.batch_size and look at the memory that the run reports"
            self.findings.append(warning("Memory", what, fix))
            return None

    def peak_of(self, forecast: StepForecast, shards: Shards | None = None) -> Peak:
        """Predict the peak of a step, with the shards of the run or with others."""
        chosen = shards or self._shards
        world_size = max(self._world_size, chosen.size)
        return forecast.peak(self._need or OptimizerNeed(0, 0), world_size=world_size, shards=chosen)

    def generating(self, shards: Shards | None = None) -> Generating | None:
        """Predict the memory while answers are generated, with the shards of the run or with others; None: none are."""
        if self._answers is None or self._config.rollout.server is not None:
            return None
        state = self._need or OptimizerNeed(0, 0)
        return forecast_generating(
            self._config, self.model, self._answers, state, shards or self._shards, self._device.type
        )

    def in_shards(self, forecast: StepForecast) -> list[ShardedNeed]:
        """Predict the same step in each number of `SHARDS`; empty if the run cannot be sharded."""
        sharded = self._config.with_values({"parallel.sharding": ("fsdp2", "default")})
        try:
            refuse_what_is_not_sharded(sharded, trains=True)
        except ConfigError:
            return []
        found = []
        for number in SHARDS:
            shards = Shards(number, sharded.parallel.reshard_after_forward)
            needed = _larger(self.peak_of(forecast, shards), self.generating(shards)) + self._device.reserve
            found.append(ShardedNeed(number, needed, fits=needed <= self._device.memory))
        return found

    def trade(self, peak: Peak) -> Trade | None:
        """Predict the same step with gradient checkpointing turned off, or on."""
        is_on = self.choice.gradient_checkpointing
        forecast = self.forecast(self._build_model(checkpointed=not is_on))
        if forecast is None:
            return None
        other = self.peak_of(forecast)
        with_it, without = (peak, other) if is_on else (other, peak)
        # With frozen weights, backward costs as much as forward; with trained weights, twice as much.
        extra = 1 / 2 if self._config.training.method == "lora" else 1 / 3
        return Trade(without.total, with_it.total, extra)

    def disk(self) -> DiskNeed:
        """Predict the disk space of the checkpoints."""
        trained = sum(parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)
        there = existing_folder(Path(self._config.output_dir).expanduser().absolute())
        keep = self._config.checkpoint.save_total_limit
        has_best = self._splits is not None and self._splits.validation is not None
        cadence = self.batching.cadence
        at_once = keep + 1 if cadence is None else cadence.most_checkpoints(keep=keep, has_best=has_best)
        return DiskNeed(trained, self._need and self._need.state, at_once, shutil.disk_usage(there).free)

    def at_limit(self) -> float | None:
        """Return the seconds of a step at the device's limit; None if the limit is not known."""
        rate = self._device.teraflops.get(self.precision)
        if rate is None:
            return None
        operations = operations_of_step(
            self.model,
            num_computed=self.batching.computed_per_step / self._world_size,
            num_targets=self.batching.targets_per_step / self._world_size,
            is_checkpointing=self.choice.gradient_checkpointing,
            has_reference=has_reference(self._config),
        )
        return operations / (rate * 1e12)

    def probe(self) -> Probed:
        """Measure a step here; for another device, add a finding and measure nothing."""
        if not self._device.is_here:
            fix = "leave out --device, on a machine that has it"
            self.findings.append(warning("Time", f"--probe measures this machine, not {self._device.name}", fix))
            return Probed()
        if _is_quantized(self._config) or self._is_in_fp8:
            fix = "train a few steps: training.max_steps=5"
            self.findings.append(warning("Time", "--probe does not measure a base in 4 bits or in fp8", fix))
            return Probed()
        microbatch = self.batching.largest.microbatch
        can_fuse = self._how.is_fused and why_not_fused(torch.device(self._device.type)) is None
        seconds = measure_seconds(self.model, microbatch, replace(self._how, is_fused=can_fuse), self._config.optim)
        per_step = seconds / max(1, microbatch.num_computed) * self.batching.computed_per_step / self._world_size
        generating = self._measure_generating()
        return Probed(per_step + (generating or 0.0), generating)

    def _measure_generating(self) -> float | None:
        """Measure the seconds in which answers are generated, for each step; None if that cannot be measured here."""
        by_engine = engine_generates(self.model, self._device.type, self._shards)
        if self._answers is None or self._config.rollout.server is not None or not by_engine:
            return None
        order, size = self.batching.first_examples, self._world_size
        return measure_generating(self._config, self.model, self._answers, order=order, world_size=size)


def _larger(peak: Peak, generating: Generating | None) -> int:
    """Return the memory of a step or the memory of generating its answers, whichever is larger."""
    return max(peak.total, 0 if generating is None else generating.total)


def _is_quantized(config: Config) -> bool:
    return config.training.method == "lora" and config.lora.quantize != "none"


def _refuse_quantized_on_cpu(config: Config, device: Device) -> None:
    if _is_quantized(config) and device.type != "cuda":
        raise ConfigError(
            f"lora.quantize={config.lora.quantize} needs a CUDA device, and this plan is for {device.name}. Name the "
            "GPU, for example --device 'RTX 4090', or set lora.quantize=none."
        )


def _judge(plan: Plan, config: Config) -> Iterator[Finding]:
    """Find checkpoints or steps that do not fit, with ways out, and times that are missing."""
    if plan.disk.total > plan.disk.free:
        what = f"the checkpoints take {format_bytes(plan.disk.total)}, but {format_bytes(plan.disk.free)} are free"
        yield problem("Disk", what, "make room, or lower checkpoint.save_total_limit")
    has_time = plan.seconds_per_step is not None or plan.seconds_at_limit is not None
    if plan.batches.answers_per_prompt is not None and has_time and plan.seconds_generating is None:
        where = "rollout.server takes" if config.rollout.server else "generating answers takes"
        what = f"the time that {where} is not in this plan: --probe measures it where the engine generates, on a CPU"
        yield warning("Time", what, "train a few steps, training.max_steps=3: metrics.jsonl has rollout_seconds")
    if plan.fits is not False or plan.peak is None:
        return
    device, generating = plan.device, plan.generating
    there = f"but {device.name} has {format_bytes(device.memory)}"
    if plan.peak.total + device.reserve > device.memory:
        what = f"a step takes {format_bytes(plan.peak.total + device.reserve)}, {there}"
        yield problem("Memory", what, "; or ".join(_ways_out(plan, config)))
    if generating is not None and generating.total + device.reserve > device.memory:
        needed = format_bytes(generating.total + device.reserve)
        what = f"generating {generating.answers} answers at once takes {needed}, {there}"
        ways = [*ways_to_generate(generating, device, config), *_shards_out(plan)]
        yield problem("Memory", what, "; or ".join([*ways, "a smaller model"]))


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
    else:
        yield "a smaller model" if _is_quantized(config) else "lora.quantize=nf4, or a smaller model"
