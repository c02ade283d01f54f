"""Make the plan of a run: predict it on one device, with the functions that make the choices of training.

No weights are read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from finetune.config.schema import Config
from finetune.data.batches import Collate
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import check_local_rows, is_all_here
from finetune.diagnose.plan import Evaluating, Plan, ShardedNeed, Trade, judge, most_memory
from finetune.diagnose.plan_batches import AssumedAnswers, Batching, PlannedEvaluation, Section, evaluations_of
from finetune.diagnose.plan_devices import Device
from finetune.diagnose.plan_model import PlannedModel
from finetune.diagnose.plan_time import measure_generating, measure_seconds, operations_of_step, sampling_of
from finetune.diagnose.preview_splits import on_one_line
from finetune.distributed.device import DTYPES, choose_precision
from finetune.distributed.environment import read_environment
from finetune.distributed.sharding import refuse_uneven_shards, refuse_what_is_not_sharded
from finetune.engine.fused import why_not_fused
from finetune.engine.host_embedding import keep_embedding_on_host
from finetune.errors import ConfigError, DataError, ModelError, first_line
from finetune.fallbacks import Fallbacks
from finetune.findings import Finding, ok, problem, warning
from finetune.inference.answer_graphs import wants_replays
from finetune.inference.decoding import room_for_answer
from finetune.inference.replayed_answers import why_not_replayed
from finetune.model.base import checkpoint_gradients, count_parameters, longrope_boundary
from finetune.model.quantized import refuse_where_fp8_is_impossible, wants_fp8
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.checkpoints import DiskNeed
from finetune.runs.folder import existing_folder
from finetune.training.checks import check_fit, sometimes_read
from finetune.training.early_end import SHORTEN_PATIENCE, describe_unused_patience
from finetune.training.forward import Computation, wants_fused
from finetune.training.loaders import global_batch_size
from finetune.training.memory.choice import MemoryChoice, choose
from finetune.training.memory.forecast import (
    CANNOT_TRACE,
    OptimizerNeed,
    Peak,
    Shards,
    StepForecast,
    Weights,
    forecast_step,
    optimizer_need,
    shards_of,
    wants_captures,
)
from finetune.training.memory.generation import (
    AnswerBatch,
    Generating,
    GenerationForecast,
    engine_generates,
    forecast_generation,
)
from finetune.training.memory.tracing import Part
from finetune.training.objective import encode_for_objective
from finetune.training.optim import build_optimizer, describe_short_schedule, is_schedule_free
from finetune.training.rewards.prompt_rows import PromptRows
from finetune.training.setup import check_config
from finetune.training.unread_keys import OF_SPLITS, describe_missing_splits, describe_unread_keys
from finetune.training.validation import refuse_early_stopping

if TYPE_CHECKING:
    from finetune.training.objective import AnySplits

Forecast = TypeVar("Forecast", StepForecast, GenerationForecast)

SHARDS = (1, 2, 4, 8)
"""The plan says how much memory a process needs with each of these numbers of shards."""
WORTH_SHARDING = 0.1
"""The least share of the needed memory that shards must divide. Below it, the plan predicts one shard only."""
_SHARDED: tuple[Part, ...] = ("weights", "adapter", "gradients", "optimizer")


def make_plan(config: Config, device: Device, *, is_probed: bool = False) -> Plan:
    """Predict a complete run. Nothing is written but the data cache.

    With `is_probed`, a few steps of a shallow model with random weights are measured on this machine.

    Raises:
        FinetuneError: the run cannot be trained, or a plan does not support it.
    """
    if config.is_quantized and device.type != "cuda":
        raise ConfigError(
            f"lora.quantize={config.lora.quantize} needs a CUDA device, and this plan is for {device.name}. Name the "
            "GPU, for example --device 'RTX 4090', or set lora.quantize=none."
        )
    device = device.limited_to(config.training.memory_fraction)
    device = device.shared_by(config.parallel.num_processes or read_environment(os.environ).local_world_size)
    planner = Planner(config, device)
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
        why_not_engine=planner.forward.why_not_engine,
        called_layers={reason: len(names) for reason, names in planner.forward.called_layers.items()},
        batches=planner.batching.describe(),
        device=device,
        peak=peak,
        loading=planner.loading,
        generating=None if peak is None else planner.generating(),
        evaluating={} if peak is None else planner.evaluating(),
        checkpointing=planner.trade(peak) if peak is not None else None,
        in_shards=[] if forecast is None else planner.in_shards(forecast),
        choice=planner.choice,
        disk=planner.disk(),
        seconds_at_limit=planner.at_limit(),
        findings=planner.findings,
    )
    if is_probed:
        seconds_per_step, seconds_generating = planner.probe()
        plan = replace(plan, seconds_per_step=seconds_per_step, seconds_generating=seconds_generating)
    planner.findings.extend(judge(plan, config))
    return plan


class Planner:
    """Predicts one run on one device, with the functions that make the choices of training."""

    def __init__(self, config: Config, device: Device) -> None:
        self._device = device
        self.findings: list[Finding] = []
        checked = check_config(config)
        self._objective = checked.objective
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
        self._planned = PlannedModel(config, self.precision, device.type)
        self.findings += self._planned.findings
        self.model = self._planned.model
        self.forward = forward = self._planned.forward
        self._how = Computation(
            loss_of=self._objective.loss,
            device_type=device.type,
            dtype=DTYPES[self.precision],
            is_fused=wants_fused(config.training, device.type),
        )
        self._replays = wants_replays(config.training, device.type) and why_not_replayed(self.model) is None
        self._prompts: list[list[int]] | None = None
        self._splits = self._encode()
        self._name_unread_keys(has_metrics=bool(checked.metrics))
        self._answers: AssumedAnswers | None = None
        if config.objective.generates_answers:
            size = global_batch_size(config, self._world_size)
            self._answers = AssumedAnswers.of(config, self.model, self._prompts, size)
        collate = self._objective.collate(forward.collate)
        self.choice = self._choose_by_memory(collate)
        self._config = config = self.choice.resolve(config)
        if self.choice.gradient_checkpointing:
            checkpoint_gradients(self.model, offloads=self.choice.offloads)
        if self.choice.embedding_on_host:
            keep_embedding_on_host(self.model)
            self._planned.keeps_embedding_on_host = True
        self.batching = Batching(
            config=config,
            rows=None if self._splits is None else self._splits.train,
            rows_of=self._objective.filler_rows,
            collate=collate,
            is_padded=forward.why_not_engine is not None,
            boundary=longrope_boundary(self.model),
            world_size=self._world_size,
            answers=self._answers,
        )
        if self._splits is not None:
            self.batching.refuse_dropping_all(self._splits)
            refuse_early_stopping(config, self._splits)
        self._name_what_has_too_few_steps()
        optimizer = build_optimizer(self.model, config.optim)
        self._need = optimizer_need(optimizer, device_type=device.type)
        self._is_schedule_free = is_schedule_free(optimizer)
        self._optimizer = self._need or OptimizerNeed(0, 0)
        self._generations: dict[tuple[str, bool], GenerationForecast | None] = {}
        if self._need is None:
            message = f"the memory of {config.optim.optimizer} is not counted: it cannot take a step without data"
            self.findings.append(warning("Memory", message, "leave room for it"))

    def _name_unread_keys(self, *, has_metrics: bool) -> None:
        """Add findings of the keys that the run does not read. How it will be launched may not be known here."""
        config, parallel = self._config, self._config.parallel
        world_size = parallel.world_size or parallel.num_processes
        chosen = sometimes_read(config)
        keys = [describe_unread_keys(config, chosen, has_metrics=has_metrics, world_size=world_size)]
        if self._splits is not None:
            keys.append(describe_missing_splits(config, sometimes_read(config, OF_SPLITS), self._splits))
        fix = "remove them, or set what they need"
        self.findings += [warning("Keys", sentence, fix) for sentence in keys if sentence]

    def _name_what_has_too_few_steps(self) -> None:
        """Add a finding if the schedule or the patience is too long for the steps of the run."""
        config, cadence = self._config, self.batching.cadence
        if cadence is None:
            return
        if schedule := describe_short_schedule(config.optim, cadence.num_steps):
            self.findings.append(warning("Steps", schedule, "train more steps, or change the schedule"))
        if patience := describe_unused_patience(config, cadence):
            self.findings.append(warning("Steps", patience, SHORTEN_PATIENCE))

    def _encode(self) -> AnySplits | None:
        """Encode the rows; if there are none or they cannot be used, add a finding and return None.

        Raises:
            ConfigError: a row is longer than the model's context, see `check_fit`.
        """
        config, data = self._config, self._config.data
        learns_prompts = config.objective.generates_answers
        rows, loss = ("prompts of up to", "") if learns_prompts else ("rows of", ", all with loss")
        assumed = f"the plan assumes {rows} {data.max_length:,} tokens (data.max_length){loss}"
        if not (data.path or data.mixture or data.train):
            fix = "give data.path=FILE_FOLDER_OR_HUB_ID to plan with its rows"
            self.findings.append(warning("Data", f"no data is given, so {assumed}", fix))
            return None
        has_read = False
        try:
            check_local_rows(data)
            has_read = is_all_here(data) and self._planned.sizes is config.model  # with the run's own tokenizer
            tokenizer = build_run_tokenizer(config.model_copy(update={"model": self._planned.sizes}))
            splits = encode_for_objective(config, tokenizer, fallbacks=Fallbacks(strict=config.strict))
            check_fit(config, self.model, splits)
            if learns_prompts and isinstance(splits.train, EncodedExamples):
                self._prompts = PromptRows(splits.train, tokenizer, None).prompts
            if config.data.keep is not None and isinstance(splits.train, EncodedExamples):
                from finetune.training.keeping import assumed_rows, describe_rows_on_top, with_rows_on_top

                on_top = assumed_rows(config, tokenizer, len(splits.train))
                self.findings.append(ok("Data", describe_rows_on_top(config, on_top)))
                splits = with_rows_on_top(splits, on_top)
            return splits
        except (DataError, ModelError) as error:
            first = on_one_line(first_line(error)).rstrip(".")
            if isinstance(error, ModelError) and self._planned.sizes is not config.model:
                first = "the tokenizer is not here either"
            fix = "run `finetune preview` with the same arguments to see more"
            report = problem if has_read and isinstance(error, DataError) else warning  # a run would end, too
            self.findings.append(report("Data", f"the rows cannot be used, so {assumed}: {first}", fix))
            return None

    def _choose_by_memory(self, collate: Collate) -> MemoryChoice:
        weights = Weights(self.model)
        resident = weights.adapter + weights.held(self._shards) + weights.gathered(self._shards)
        longest = self._config.data.max_length if self._answers is None else int(self._answers.lengths.max())
        if self._splits is not None:
            longest = self._objective.longest_row(self._splits)
        return choose(
            self._config,
            self.model,
            self._how,
            longest=longest,
            rows_of=self._objective.filler_rows,
            collate=collate,
            room=self._device.memory - self._device.reserve - resident,
            world_size=self._world_size,
        )

    @property
    def loading(self) -> int | None:
        """The most bytes on the device while a base is quantized; None if it is not in 4 bits."""
        return self._planned.loading

    def forecast(self, model: Any) -> StepForecast | None:
        """Run a step without data; if its memory cannot be known, add a finding and return None."""
        largest = self.batching.largest
        how = replace(self._how, accumulates=largest.per_step > 1)
        captures = wants_captures(self._config, how)
        forecast = partial(forecast_step, model, largest.microbatch, how, captures=captures)
        return self._predict(forecast, "", "training.batch_size")

    def _predict(self, forecast: Callable[[], Forecast], subject: str, batch_key: str) -> Forecast | None:
        try:
            return forecast()
        except CANNOT_TRACE as error:
            cause = f"{type(error).__name__}: {first_line(error)}"
            of = f" of {subject}" if subject else ""
            message = f"memory{of} cannot be predicted: the model's own forward needs data ({cause})"
            fix = f"start with a small {batch_key} and look at the memory that the run reports"
            self.findings.append(warning("Memory", message, fix))
            return None

    def peak_of(self, forecast: StepForecast, shards: Shards | None = None) -> Peak:
        """Predict the peak of a step, with the shards of the run or with others."""
        chosen = shards or self._shards
        world_size = max(self._world_size, chosen.size)
        return forecast.peak(self._optimizer, world_size=world_size, shards=chosen)

    def generating(self, shards: Shards | None = None) -> Generating | None:
        """Predict the memory while answers are generated, with the shards of the run or with others; None: none are."""
        rollout, answers = self._config.rollout, self._answers
        if answers is None or rollout.server is not None:
            return None
        prompts = answers.longest_prompts(rollout.batch_size)
        room = room_for_answer(self.model, prompts[-1], rollout.max_completion_length)
        batch = AnswerBatch(prompts, room, sampling_of(self._config))
        return self._generating(batch, "", self._optimizer, shards or self._shards)

    def evaluating(self, shards: Shards | None = None) -> dict[Section, Evaluating]:
        """Predict the memory of validations and of the test phase, with the shards of the run or with others."""
        chosen, optimizer = shards or self._shards, self._optimizer
        if self._is_schedule_free:  # it keeps the trained weights while the model has those that answer
            trained = sum(weight.nbytes for weight in self.model.parameters() if weight.requires_grad)
            optimizer = optimizer._replace(state=optimizer.state + trained)
        world_size, evaluating = max(self._world_size, chosen.size), {}
        for planned, num_rows, loss, answers in self._evaluations:
            peak = None if loss is None else loss.peak(optimizer, world_size=world_size, shards=chosen)
            where = f" in {planned.section}"
            generating = None if answers is None else self._generating(answers, where, optimizer, chosen)
            evaluating[planned.section] = Evaluating(rows=num_rows, peak=peak, generating=generating)
        return evaluating

    @cached_property
    def _evaluations(self) -> list[tuple[PlannedEvaluation, int, StepForecast | None, AnswerBatch | None]]:
        """The evaluations, each with its largest batch: the number of rows, the forecast of their loss, the answers."""
        how = replace(self._how, learns=False, loss_of=self._objective.evaluation)
        evaluations = []
        for planned in () if self._splits is None else evaluations_of(self._config, self._splits):
            rows, loss = planned.largest_batch(self.batching), None
            if planned.has_loss:
                microbatch = self.batching.collate([planned.rows[row] for row in rows])
                forecast = partial(forecast_step, self.model, microbatch, how)
                loss = self._predict(forecast, f"the loss in {planned.section}", f"{planned.section}.batch_size")
            evaluations.append((planned, len(rows), loss, planned.largest_answers(self._config, self.model)))
        return evaluations

    def _generating(
        self, batch: AnswerBatch, where: str, optimizer: OptimizerNeed, shards: Shards
    ) -> Generating | None:
        """Predict the memory while a batch of answers is generated; None if it cannot be known."""
        by_engine = engine_generates(self.model, self._device.type, shards, replays=self._replays)
        if (where, by_engine) not in self._generations:
            # Products of weights in 4 bits need data. The model in 16 bits has the same activations.
            quantized = self.model if self._planned.is_in_4_bits else None
            model = self.model if quantized is None else self._planned.build(is_in_4_bits=False)
            # A single process generates the answers that it learns from without autocast.
            dtype = self._how.dtype if where or max(self._world_size, shards.size) > 1 else torch.float32
            how: dict[str, Any] = {"by_engine": by_engine, "replays": self._replays, "quantized": quantized}
            forecast = partial(forecast_generation, model, batch, dtype, **how)
            self._generations[where, by_engine] = self._predict(
                forecast, f"generating answers{where}", "number of answers at once"
            )
        known = self._generations[where, by_engine]
        return None if known is None else known.with_held(optimizer, shards)

    def in_shards(self, forecast: StepForecast) -> list[ShardedNeed]:
        """Predict the step in each number of `SHARDS`, in one if more save nothing, in none if it cannot be."""
        sharded = self._config.with_values({"parallel.sharding": ("fsdp2", "default")})
        try:
            refuse_what_is_not_sharded(sharded, trains=True)
        except ConfigError:
            return []
        needs = []
        for number in SHARDS:
            shards = Shards(number, sharded.parallel.reshard_after_forward)
            peaks = self.peak_of(forecast, shards), self.generating(shards), self.evaluating(shards)
            needed = most_memory(*peaks, self.loading)[1] + self._device.reserve
            needs.append(ShardedNeed(number, needed, fits=needed <= self._device.memory))
            divided = sum(peaks[0].parts.get(part, 0) for part in _SHARDED)
            if number == 1 and self._shards.size == 1 and divided < WORTH_SHARDING * needed:
                break
        return needs

    def trade(self, peak: Peak) -> Trade | None:
        """Predict the same step with gradient checkpointing turned off, or on."""
        is_on = self.choice.gradient_checkpointing
        forecast = self.forecast(self._planned.build(checkpointed=not is_on))
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
            has_reference=self._config.has_reference,
        )
        return operations / (rate * 1e12)

    def probe(self) -> tuple[float | None, float | None]:
        """Measure the seconds of a step and of generating its answers. Add a finding if that cannot be done here."""
        if not self._device.is_here:
            fix = "leave out --device, on a machine that has it"
            self.findings.append(warning("Time", f"--probe measures this machine, not {self._device.name}", fix))
            return None, None
        trains_tokens = self._config.training.method == "lora" and self._config.lora.new_tokens
        if self._config.is_quantized or wants_fp8(self._config) or trains_tokens:
            what = "new tokens (lora.new_tokens)" if trains_tokens else "a base in 4 bits or in fp8"
            fix = "train a few steps: training.max_steps=5"
            self.findings.append(warning("Time", f"--probe does not measure {what}", fix))
            return None, None
        microbatch = self.batching.largest.microbatch
        can_fuse = self._how.is_fused and why_not_fused(torch.device(self._device.type)) is None
        seconds = measure_seconds(self.model, microbatch, replace(self._how, is_fused=can_fuse), self._config.optim)
        per_step = seconds / max(1, microbatch.num_computed) * self.batching.computed_per_step / self._world_size
        generating = None
        by_engine = engine_generates(self.model, self._device.type, self._shards, replays=False)
        if self._answers is not None and self._config.rollout.server is None and by_engine:
            order, size = self.batching.first_examples, self._world_size
            generating = measure_generating(self._config, self.model, self._answers, order=order, world_size=size)
        return per_step + (generating or 0.0), generating
