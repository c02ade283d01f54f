"""`finetune plan`: predict a run and whether it fits, without reading weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.diagnose.plan_devices import Device
from finetune.diagnose.plan_evaluation import answer_keys
from finetune.diagnose.plan_record import Plan
from finetune.diagnose.plan_rollouts import Generating, ways_to_generate
from finetune.diagnose.planner import Planner, is_quantized
from finetune.distributed.environment import read_environment
from finetune.distributed.sharding import refuse_what_is_not_sharded
from finetune.errors import ConfigError
from finetune.findings import Finding, problem, warning
from finetune.model.base import count_parameters
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config


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
        why_not_engine=planner.why_not_engine,
        called_layers=planner.called_layers,
        batches=planner.batching.describe(),
        device=device,
        peak=peak,
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
    planner.findings.extend(_judge(plan, config))
    return plan


def _refuse_quantized_on_cpu(config: Config, device: Device) -> None:
    if is_quantized(config) and device.type != "cuda":
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
    for what, total, ways in _phases(plan, plan.peak.total, config):
        if total + plan.device.reserve > plan.device.memory:
            there = f"but {plan.device.name} has {format_bytes(plan.device.memory)}"
            what = f"{what} takes {format_bytes(total + plan.device.reserve)}, {there}"
            yield problem("Memory", what, "; or ".join(ways))


def _phases(plan: Plan, step: int, config: Config) -> Iterator[tuple[str, int, Iterator[str]]]:
    """Yield the phases of a run, with the bytes of each and what takes less."""
    yield "a step", step, _ways_out(plan, config)
    if (made := plan.generating) is not None:
        keys = "rollout.batch_size", "rollout.max_completion_length"
        yield f"generating {made.answers} answers at once", made.total, _ways_to_generate(plan, made, keys, config)
    for section, found in plan.evaluating.items():
        if found.peak is not None:
            size = getattr(config, section).batch_size
            ways = [f"a lower {section}.batch_size (it is {size})", *_shards_out(plan), "a smaller model"]
            yield f"the loss of {found.rows} rows at once in {section}", found.peak.total, iter(ways)
        if (made := found.generating) is not None:
            what, keys = f"generating {made.answers} answers at once in {section}", answer_keys(config, section)
            yield what, made.total, _ways_to_generate(plan, made, keys, config)


def _ways_to_generate(plan: Plan, made: Generating, keys: tuple[str, str], config: Config) -> Iterator[str]:
    yield from ways_to_generate(made, plan.device, config, *keys)
    if made is plan.generating and config.training.method == "lora":
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
    else:
        yield "a smaller model" if is_quantized(config) else "lora.quantize=nf4, or a smaller model"
