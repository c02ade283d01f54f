"""`finetune plan`: predict a run and whether it fits."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from finetune.cli.commands import Overrides
from finetune.cli.overrides import config_from_overrides
from finetune.cli.run_options import DeviceOption, JsonOption
from finetune.config.objectives import OBJECTIVES
from finetune.distributed.environment import is_first_process
from finetune.findings import count, exit_code, print_findings
from finetune.logs import configure_logs, importing, waiting
from finetune.terminal import fold, print_json
from finetune.units import counted, format_bytes, format_duration

if TYPE_CHECKING:
    from finetune.diagnose.plan import Plan
    from finetune.diagnose.plan_devices import Device
    from finetune.training.memory.generation import Generating

_WIDEST_BAR = 30
_SHORT_ROWS = 1.5
"""Say how many rows a packed sequence has from this number on."""


def plan_from_overrides(
    overrides: Overrides = None,
    device: DeviceOption = None,
    is_probed: Annotated[
        bool, typer.Option("--probe", help="Run a few steps on this machine to measure the time.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Predict a run and print the plan. Under a launcher, only the first process does so. Return the exit code."""
    config = config_from_overrides(overrides or [], command="plan", needs_data=False)
    if not is_first_process(os.environ):
        return 0
    configure_logs(0, level=logging.ERROR)  # what matters is among the findings

    with importing():
        from finetune.diagnose.plan_devices import find_device, read_device
        from finetune.diagnose.planner import make_plan

    where = find_device(config.training.device) if device is None else read_device(device)
    with waiting("planning"):
        plan = make_plan(config, where, is_probed=is_probed)
    code = exit_code(plan.findings, strict=config.strict)
    if as_json:
        print_json({**plan.as_record(), "exit_code": code}, indent=None)
    else:
        show_plan(plan, Console())
    sys.stdout.flush()
    return code


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan, findings last."""
    for title, lines in (
        ("Model", _model(plan)),
        ("Steps", _steps(plan)),
        ("Memory", _memory(plan)),
        ("Disk", iter([str(plan.disk)])),
        ("Time", _time(plan)),
    ):
        console.print(title, style="bold", markup=False, highlight=False)
        for line in lines:
            text = fold(f"  {line}", console.file, indent="    ")
            console.print(text, soft_wrap=True, markup=False, highlight=False)
    print_findings(plan.findings, console)
    console.print(count(plan.findings), markup=False, highlight=False)


def _model(plan: Plan) -> Iterator[str]:
    share = plan.trainable_parameters / plan.parameters
    yield f"{plan.model_type}, {plan.layers} layers, {plan.parameters:,} parameters"
    method = f"LoRA on {', '.join(plan.targets)}" if plan.targets else "full fine-tuning"
    objective = OBJECTIVES[plan.objective]
    learns_from = "rewards" if objective.generates_answers else "preferences"
    method += "" if objective.learns_answers else f", on {learns_from} ({objective.title})"
    yield f"{plan.trainable_parameters:,} parameters train ({share:.2%}): {method}"
    yield f"{plan.precision} (trained weights in fp32)"
    yield f"forward: {plan.forward}"


def _steps(plan: Plan) -> Iterator[str]:
    batches, row = plan.batches, OBJECTIVES[plan.objective].example_name
    learnt = row if batches.answers_per_prompt is None else "answer"
    if batches.rows is not None and batches.tokens is not None:
        computed = "" if batches.computed_share is None else f", {batches.computed_share:.1%} of them computed"
        tokens = f"{counted(batches.tokens, 'token')} ({batches.target_tokens:,} with loss){computed}"
        of = "" if batches.conversations is None else f" of {counted(batches.conversations, 'conversation')}"
        yield f"an epoch: {counted(batches.rows, row)}{of}, {tokens}"
    if batches.answers_per_prompt is not None:
        longest = "each assumed to have as many tokens as rollout.max_completion_length allows"
        yield f"{counted(batches.answers_per_prompt, 'answer')} to each prompt, {longest}"
    size = counted(batches.global_batch_size, row if batches.conversations is None else "conversation")
    yield f"global batch: {size} = {batches.global_batch_from}"
    if (fits := batches.rows_per_sequence) is not None and fits >= _SHORT_ROWS:
        examples = "rows" if batches.conversations is None else "conversations"
        yield f"a sequence of data.max_length, into which other tools pack rows, has as many as {fits:.1f} {examples}"
    if batches.steps is not None:
        epoch = "" if batches.steps_per_epoch is None else f", {batches.steps_per_epoch:,} an epoch"
        yield f"{counted(batches.steps, 'step')}{epoch}"
    tokens = counted(batches.largest_microbatch_tokens, "token")
    largest = f"{counted(batches.largest_microbatch_rows, learnt)} and computes {tokens}"
    yield f"micro-batches per step and rank: up to {batches.microbatches_per_step}; the largest has {largest}"


def _memory(plan: Plan) -> Iterator[str]:
    device = plan.device
    yield f"{device.name}: {format_bytes(device.memory)}"
    if plan.peak is None or plan.needed is None or plan.phase is None:
        yield "cannot be predicted, see below"
        return
    sizes = [*plan.peak.parts.items(), ("reserved", device.reserve)]
    most = max(size for _, size in sizes)
    for name, size in sizes:
        yield f"{name:<12} {format_bytes(size):>8} {'#' * round(_WIDEST_BAR * size / most)}".rstrip()
    if plan.loading is not None:
        yield f"loading the base, each weight quantized as it arrives: {format_bytes(plan.loading + device.reserve)}"
    if plan.generating is not None:
        yield _generating(plan.generating, device)
    for section, evaluation in plan.evaluating.items():
        if evaluation.peak is not None:
            needed = format_bytes(evaluation.peak.total + device.reserve)
            yield f"{section}, the loss of {counted(evaluation.rows, 'row')} at once: {needed}"
        if evaluation.generating is not None:
            yield f"{section}, {_generating(evaluation.generating, device)}"
    verdict = f"{'fits' if plan.fits else 'does not fit'} (peak: {plan.phase[0]})"
    yield f"{'at most':<12} {format_bytes(plan.needed):>8}, {plan.needed / device.memory:.1%}: {verdict}"
    if plan.checkpointing is not None:
        without, with_it, extra = plan.checkpointing
        state = "on" if plan.choice.gradient_checkpointing else "off"
        both = f"{format_bytes(without + device.reserve)} without, {format_bytes(with_it + device.reserve)} with"
        yield f"gradient checkpointing ({state}): {both}, which takes about {extra:.0%} longer"
    if len(plan.in_shards) == 1:
        yield "in shards (parallel.sharding=fsdp2): they save next to nothing, as weights take little of the memory"
    elif plan.in_shards:
        in_shards = ", ".join(f"{format_bytes(need.needed)} in {need.shards}" for need in plan.in_shards)
        fewest = f"it fits in {plan.fewest_shards}" if plan.fewest_shards else "it does not fit in any of them"
        yield f"in shards (parallel.sharding=fsdp2), per process: {in_shards}; {fewest}"
    if plan.choice.is_chosen:
        yield f"chosen by memory: {plan.choice}"


def _generating(generating: Generating, device: Device) -> str:
    parts = {
        "logits": generating.logits,
        "the pass over the prompts": generating.prompts,
        "the pass over a later token": generating.step,
    }
    other = max(parts, key=lambda part: parts[part])
    answers = counted(generating.answers, "answer")
    needed = format_bytes(generating.total + device.reserve)
    return (
        f"generating {answers} at once: {needed}, of which keys and values take {format_bytes(generating.cache)} and "
        f"{other} {format_bytes(parts[other])}"
    )


def _time(plan: Plan) -> Iterator[str]:
    steps = plan.batches.steps
    if plan.seconds_at_limit is not None:
        limit = f"{plan.device.teraflops[plan.precision]:g} TFLOP/s in {plan.precision}"
        duration = "" if steps is None else f", {format_duration(plan.seconds_at_limit * steps)} in all"
        yield f"at least {plan.seconds_at_limit:.3g} s a step{duration}: matrix products alone, at the limit of {limit}"
    if plan.seconds_per_step is not None:
        seconds = plan.seconds_generating
        of_it = "" if seconds is None else f", {seconds:.3g} s of it to generate answers"
        yield f"{plan.seconds_per_step:.3g} s a step, measured on this machine{of_it}"
        if steps is not None:
            duration = format_duration(plan.seconds_per_step * steps)
            yield f"about {duration} in all, without validation, saves and the test phase"
    elif plan.device.is_here:
        yield "not measured: --probe runs a few steps here"
    elif plan.seconds_at_limit is None:
        yield f"not known: there is no rate for {plan.device.name}"
