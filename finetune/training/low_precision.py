"""Try a low precision before step 1: fp16 by a check, fp8 and NF4 by a measure.

The largest fp16 value is 65504. Before step 1, a base in fp8 or NF4 is measured: what the rounding does to the loss and
to the gradient is held against limits. fp8 is refused beyond them. NF4 is a fallback there: it saves memory that a run
may not do without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from finetune.data.batches import pad
from finetune.engine.decoder import bare_model
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.microbatch import rows_of
from finetune.engine.quantized import MULTIPLE, ROUNDING
from finetune.errors import ConfigError, ModelError
from finetune.fallbacks import Fallback
from finetune.model.quantized import refuse_fp8_without_engine, round_frozen_layers, weights_from_disk
from finetune.training.optim import trainable_parameters

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime
    from finetune.training.forward import Forward
    from finetune.training.reporting.journal import Journal

_log = logging.getLogger(__name__)
GRADIENT_LIMIT = 0.5
"""The largest accepted relative difference of the gradient.

It bounds what a step loses: if ‖g_low − g‖ ≤ ‖g‖ / 2, a small step along g_low lowers the loss of the 16-bit model by
at least half as much as a step along g, since their product is at least ‖g‖² / 2. Without any amplification by the
model, 13 % are to be expected for 32 layers in fp8: e4m3 rounds a value by 2.4 % on average (at most 2^-4), a branch of
a layer has two products of two factors each (4.7 %), and the residual stream sums up branches with independent errors,
so it is off by 4.7 % · sqrt(1 + 1/2 + … + 1/32) = 9.5 % in both directions, forward and backward:
sqrt(2) · 9.5 % = 13 %.
"""

_TOKENS_FOR_ERROR = 1024


def measure_base(
    runtime: Runtime,
    config: Config,
    model: Any,
    rows: Any,
    collate: Callable[[Sequence[Any]], Any],
    forward: Forward,
    states_in_4_bits: Mapping[str, Any],
    journal: Journal | None,
) -> None:
    """Measure the error of a base in fp8 or NF4 on a few training rows, and record it. Collective."""
    if config.model.frozen_precision == "fp8":
        refuse_fp8_without_engine(config, forward.why_not_engine)
        compare: Callable[..., LowPrecisionError | None] = round_base_to_fp8
    elif forward.why_not_engine is not None or forward.called_layers:
        _log.warning("the error of a base in 4 bits is not measured, because the engine does not compute all layers")
        return
    else:
        compare = partial(compare_nf4_with_disk, states=states_in_4_bits)
    with runtime.collectives.failing_together("measuring the error of the base's precision"):
        tokens = 0 if config.training.memory == "least" else _TOKENS_FOR_ERROR
        measured = compare(runtime, config, model, collate(_first_rows(rows, tokens)))
        if journal is not None and measured is not None:
            journal.record(low_precision=asdict(measured))


def _first_rows(rows: Any, tokens: int) -> list[Any]:
    """Return the first rows that carry loss, with no more tokens than the longest row, or than `tokens`."""
    first = int((rows.sides[0].num_targets > 0).int().argmax())
    most = max(int(rows.lengths.max()), tokens)
    count = max(1, int((rows.lengths[first:].cumsum(0) <= most).sum()))
    return [rows[first + index] for index in range(count)]


@torch.no_grad()
def refuse_overflow(runtime: Runtime, model: Any, microbatch: Any, row: Any) -> None:
    """Raise ConfigError on all ranks if a model's activations do not fit into fp16. It names the first module.

    `microbatch` is the first training row as the run computes it; `row` is the row itself, or None if layers cannot be
    called one by one. Collective, if the model is sharded.
    """
    with runtime.collectives.failing_together("trying fp16"):
        rows = rows_of(microbatch)
        loss = runtime.placement.forward(summed_cross_entropy, model, rows)
        if loss.isfinite().all():
            return
        where = "its activations"
        if row is not None:
            with _first_overflow(bare_model(model)) as overflowed:
                runtime.placement.forward(summed_cross_entropy, model, pad([row]))
            where = f"the output of {overflowed[0]}" if overflowed else where
        raise ConfigError(
            f"training.precision={runtime.precision}: the loss of the first row is {float(loss.reshape(-1)[0])}, "
            f"because {where} is larger than 65504, the largest value of fp16. Set training.precision=fp32, or train "
            "on a GPU that computes in bf16."
        )


@contextmanager
def _first_overflow(model: torch.nn.Module) -> Iterator[list[str]]:
    """Within the block, collect the names of modules with an output that is not finite, in the order of their calls."""
    overflowed: list[str] = []

    def note(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.is_floating_point() and not first.isfinite().all():
            overflowed.append(name)

    handles = [
        module.register_forward_hook(lambda _module, _given, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield overflowed
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class LowPrecisionError:
    """The difference that a base in fp8 or NF4 makes, as run.json records it."""

    precision: Literal["fp8", "nf4"]
    num_layers: int
    """The number of linear layers in this precision."""
    num_targets: int
    """The number of target tokens over which it was measured."""
    base_loss: float
    """With the weights as they were before they were rounded. In nats per target token."""
    loss: float
    loss_limit: float
    """The largest difference of the two that is accepted."""
    gradient_error: float
    """‖g_low − g‖ / ‖g‖, over all trained weights together."""
    gradient_limit: float = GRADIENT_LIMIT

    @property
    def is_accepted(self) -> bool:
        """Whether both differences are within their limits. False if one is not a number."""
        is_loss_near = abs(self.loss - self.base_loss) <= self.loss_limit
        return is_loss_near and self.gradient_error <= self.gradient_limit

    def __str__(self) -> str:
        return (
            f"over {self.num_targets} target tokens, the loss is {self.loss:.4f} instead of {self.base_loss:.4f} "
            f"(limit ±{self.loss_limit:.4f}), and the gradient differs by {self.gradient_error:.2%} "
            f"(limit {self.gradient_limit:.2%})"
        )


def loss_limit(loss: float) -> float:
    """Return the largest accepted difference of a loss: 2^-3 of it, and at least 2^-3 nats.

    A product of two factors in e4m3 may be off by 2^-3. The mean over many tokens should be off by far less.
    """
    return 2 * ROUNDING * max(1.0, abs(loss))


def round_base_to_fp8(runtime: Runtime, config: Config, model: Any, microbatch: Any) -> LowPrecisionError:
    """Round a base to fp8, and compare loss and gradient of some rows before and after.

    The weights are never there twice: the rows are computed in bf16 first, and each layer is then rounded in its place.

    Raises:
        ConfigError: no layer can be in fp8, or the difference is above its limit.
    """
    before = _measure(runtime, model, microbatch)
    layers = round_frozen_layers(model, config.model.fp8_layers)
    why = f"{len(layers.kept)} linear layers have sizes or heads that are not multiples of {MULTIPLE}"
    if not layers.rounded:
        raise ConfigError(f"model.frozen_precision=fp8 rounds nothing here: {why}. Set model.frozen_precision=auto.")
    if layers.kept:
        why = f"{why}: {', '.join(layers.kept)}"
        wanted, used = "all frozen linear layers in fp8", "some layers in bf16"
        runtime.fallbacks.take(Fallback(what="model.frozen_precision", wanted=wanted, used=used, why=why))
    measured = _compare("fp8", len(layers.rounded), before, _measure(runtime, model, microbatch))
    if not measured.is_accepted:
        fewer = ", or model.fp8_layers=upper_half, which rounds less" if config.model.fp8_layers == "all" else ""
        raise ConfigError(
            f"model.frozen_precision=fp8 changes this model too much: {measured}. Its weights or activations span "
            "more than fp8 can hold in a row, or it amplifies rounding. Set model.frozen_precision=auto, which trains "
            f"on the base in bf16{fewer}."
        )
    return measured


def compare_nf4_with_disk(
    runtime: Runtime, config: Config, model: Any, microbatch: Any, states: Mapping[str, Any]
) -> LowPrecisionError | None:
    """Compare a base in NF4 with its weights on disk, by loss and gradient of some rows; None if the files hold others.

    Each weight is read where it is needed, so only one at a time is in 16 bits. Too large a difference is a fallback.
    Collective, if the model is sharded.
    """
    try:
        with weights_from_disk(config.model, states):
            before = _measure(runtime, model, microbatch)
    except ModelError as error:
        _log.warning("the error of a base in 4 bits is not measured: %s", error)
        return None
    measured = _compare("nf4", len(states), before, _measure(runtime, model, microbatch))
    if not measured.is_accepted:
        why = (
            f"{measured}. The adapter also has to learn to correct the rounding. Set lora.quantize=none if memory "
            "allows; otherwise train longer or on more rows, or try a larger lora.r, and measure the result with "
            "`finetune evaluate`, which loads the base without quantizing it"
        )
        wanted, used = "4 bits that compute nearly as the base does", "4 bits that do not"
        runtime.fallbacks.take(Fallback(what="lora.quantize", wanted=wanted, used=used, why=why))
    return measured


class _Measured(NamedTuple):
    loss: float
    gradient: torch.Tensor
    num_targets: int


def _compare(
    precision: Literal["fp8", "nf4"], num_layers: int, before: _Measured, after: _Measured
) -> LowPrecisionError:
    measured = LowPrecisionError(
        precision=precision,
        num_layers=num_layers,
        num_targets=before.num_targets,
        base_loss=before.loss,
        loss=after.loss,
        loss_limit=loss_limit(before.loss),
        gradient_error=float((after.gradient - before.gradient).norm() / before.gradient.norm()),
    )
    _log.info("%d frozen linear layers are in %s: %s", num_layers, precision, measured)
    return measured


def _measure(runtime: Runtime, model: Any, microbatch: Any) -> _Measured:
    """Return the loss per target and the gradient of their sum, flat in fp32, with the same dropout masks every time.

    The sum, because in fp16 the gradient of the mean would lose its small values.
    """
    rows = rows_of(microbatch)
    weights = trainable_parameters(model)
    devices = [runtime.device] if runtime.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _checkpointed(model):
        torch.manual_seed(0)
        loss = runtime.placement.forward(summed_cross_entropy, model, rows)
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    gradient = torch.cat([gradient.flatten() for gradient in gradients])
    return _Measured(loss.item() / rows.num_targets, gradient, rows.num_targets)


@contextmanager
def _checkpointed(model: Any) -> Iterator[None]:
    """Recompute the engine's activations in the backward pass inside, since the run's choice comes later."""
    decoder = bare_model(model).get_decoder()
    was_training, before = model.training, getattr(decoder, "gradient_checkpointing", False)
    model.train()
    decoder.gradient_checkpointing = True
    try:
        yield
    finally:
        decoder.gradient_checkpointing = before
        model.train(was_training)
