"""A plan on a screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from finetune.diagnose.plan import Plan
from finetune.diagnose.plan_memory import PARTS
from finetune.findings import count
from finetune.findings import show as show_findings
from finetune.runs.durable import in_units

if TYPE_CHECKING:
    from rich.console import Console

_WIDEST_BAR = 30


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
            console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
    show_findings(plan.findings, console)
    console.print(count(plan.findings), markup=False, highlight=False)


def _model(plan: Plan) -> Iterator[str]:
    share = plan.trainable_parameters / plan.parameters
    yield f"{plan.model_type}, {plan.layers} layers, {plan.parameters:,} parameters"
    what = f"LoRA on {', '.join(plan.targets)}" if plan.targets else "full fine-tuning"
    yield f"{plan.trainable_parameters:,} parameters train ({share:.2%}): {what}"
    yield f"{plan.precision} (trained weights in fp32); forward: {plan.forward}"


def _steps(plan: Plan) -> Iterator[str]:
    batches = plan.batches
    if batches.rows is not None:
        computed = "" if batches.computed_share is None else f", {batches.computed_share:.1%} of them computed"
        tokens = f"{batches.tokens:,} tokens ({batches.target_tokens:,} with loss){computed}"
        yield f"an epoch: {batches.rows:,} rows, {tokens}"
    yield f"global batch: {batches.global_batch_size} rows = {batches.global_batch_from}"
    if batches.steps is not None:
        epoch = "" if batches.steps_per_epoch is None else f", {batches.steps_per_epoch:,} an epoch"
        yield f"{batches.steps:,} steps{epoch}"
    largest = f"{batches.largest_microbatch_rows} rows, {batches.largest_microbatch_tokens:,} tokens computed"
    yield f"micro-batches of a step and rank: up to {batches.microbatches_per_step}; the largest: {largest}"


def _memory(plan: Plan) -> Iterator[str]:
    device = plan.device
    yield f"{device.name}: {in_units(device.memory)}"
    if plan.peak is None or plan.needed is None:
        yield "not known, see below"
        return
    sizes = [(part, plan.peak.parts[part]) for part in PARTS] + [("reserved", device.reserve)]
    most = max(size for _, size in sizes)
    for name, size in sizes:
        yield f"{name:<12} {in_units(size):>8} {'#' * round(_WIDEST_BAR * size / most)}".rstrip()
    verdict = f"{'fits' if plan.fits else 'does not fit'} (highest: {plan.peak.when})"
    yield f"{'at most':<12} {in_units(plan.needed):>8}, {plan.needed / device.memory:.1%}: {verdict}"
    if plan.largest_batch_size is not None:
        bound = " (more makes no difference, or was not tried)" if plan.is_largest_tried else ""
        yield f"largest training.batch_size that fits: {plan.largest_batch_size}{bound}"
    elif plan.fits is False:
        yield "not even training.batch_size=1 fits"
    if plan.checkpointing is not None:
        without, with_it, extra = plan.checkpointing
        state = "on" if plan.is_checkpointing else "off"
        sizes_in_words = f"{in_units(without + device.reserve)} without, {in_units(with_it + device.reserve)} with"
        yield f"gradient checkpointing ({state}): {sizes_in_words}, which takes about {extra:.0%} more time"


def _time(plan: Plan) -> Iterator[str]:
    steps = plan.batches.steps
    if plan.seconds_at_limit is not None:
        limit = f"{plan.device.teraflops[plan.precision]:g} TFLOP/s in {plan.precision}"
        whole = "" if steps is None else f", {_duration(plan.seconds_at_limit * steps)} in all"
        yield f"at least {plan.seconds_at_limit:.3g} s a step{whole}: matrix products alone, at the limit of {limit}"
    if plan.seconds_per_step is not None:
        yield f"{plan.seconds_per_step:.3g} s a step, measured on this machine"
        if steps is not None:
            whole = _duration(plan.seconds_per_step * steps)
            yield f"about {whole} in all, without validation, saves and the test phase"
    elif plan.device.is_here:
        yield "not measured: --probe runs a few steps here"
    elif plan.seconds_at_limit is None:
        yield f"the limit of {plan.device.name} is not known"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
