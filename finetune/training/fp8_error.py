"""Measure what a base in fp8 does to the loss and to the gradient, before step 1, and refuse it beyond a limit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.decoder import bare_model
from finetune.engine.fp8 import MULTIPLE, ROUNDING
from finetune.engine.loss import summed_cross_entropy
from finetune.errors import ConfigError
from finetune.fallbacks import Fallback
from finetune.model.fp8_base import round_frozen_layers
from finetune.training.objectives.preferences import PreferenceMicrobatch
from finetune.training.optim import trainable_parameters

if TYPE_CHECKING:
    from finetune.distributed.runtime import Runtime

_log = logging.getLogger(__name__)

GRADIENT_LIMIT = 0.5
"""The largest accepted relative difference of the gradient.

It bounds what a step loses: if ‖g_fp8 − g‖ ≤ ‖g‖ / 2, a small step along g_fp8 lowers the loss of the bf16 model by at
least half as much as a step along g, since their product is at least ‖g‖² / 2. Without any amplification by the model,
13 % are to be expected for 32 layers: e4m3 rounds a value by 2.4 % on average (at most 2^-4), a branch of a layer has
two products of two factors each (4.7 %), and the residual stream sums up branches with independent errors, so it is off
by 4.7 % · sqrt(1 + 1/2 + … + 1/32) = 9.5 % in both directions, forward and backward: sqrt(2) · 9.5 % = 13 %.
"""


@dataclass(frozen=True, kw_only=True)
class Fp8Error:
    """The difference that a base in fp8 makes, as run.json records it."""

    num_layers: int
    """The number of linear layers in fp8."""
    num_targets: int
    """The number of target tokens over which it was measured."""
    loss_bf16: float
    """In nats per target token."""
    loss_fp8: float
    loss_limit: float
    """The largest difference of the two that is accepted."""
    gradient_error: float
    """‖g_fp8 − g_bf16‖ / ‖g_bf16‖, over all trained weights together."""
    gradient_limit: float = GRADIENT_LIMIT

    @property
    def is_accepted(self) -> bool:
        """Whether both differences are within their limits. False if one is not a number."""
        is_loss_near = abs(self.loss_fp8 - self.loss_bf16) <= self.loss_limit
        return is_loss_near and self.gradient_error <= self.gradient_limit

    def __str__(self) -> str:
        return (
            f"over {self.num_targets} target tokens, the loss is {self.loss_fp8:.4f} instead of {self.loss_bf16:.4f} "
            f"(limit ±{self.loss_limit:.4f}), and the gradient differs by {self.gradient_error:.2%} "
            f"(limit {self.gradient_limit:.2%})"
        )


def loss_limit(loss: float) -> float:
    """Return the largest accepted difference of a loss: 2^-3 of it, and at least 2^-3 nats.

    A product of two rounded factors may be off by 2^-3. The mean over many tokens should be off by far less.
    """
    return 2 * ROUNDING * max(1.0, abs(loss))


def round_base_to_fp8(runtime: Runtime, model: Any, microbatch: Any) -> Fp8Error:
    """Round a base to fp8, and compare loss and gradient of some rows before and after.

    The weights are never there twice: the rows are computed in bf16 first, and each layer is then rounded in its place.

    Args:
        runtime: records a fallback if a layer stays in bf16.
        model: placed, with an adapter; its steps are computed by the engine.
        microbatch: as the run computes it.

    Raises:
        ConfigError: no layer can be in fp8, or the difference is above its limit.
    """
    rows = microbatch.rows if isinstance(microbatch, PreferenceMicrobatch) else microbatch
    loss, gradient = _loss_and_gradient(runtime, model, rows)
    layers = round_frozen_layers(model)
    why = f"{len(layers.kept)} linear layers have sizes or heads that are not multiples of {MULTIPLE}"
    if not layers.rounded:
        raise ConfigError(f"model.frozen_precision=fp8 rounds nothing here: {why}. Set model.frozen_precision=auto.")
    if layers.kept:
        why = f"{why}: {', '.join(layers.kept)}"
        wanted, used = "all frozen linear layers in fp8", "some layers in bf16"
        runtime.fallbacks.take(Fallback(what="model.frozen_precision", wanted=wanted, used=used, why=why))
    loss_fp8, gradient_fp8 = _loss_and_gradient(runtime, model, rows)
    measured = Fp8Error(
        num_layers=len(layers.rounded),
        num_targets=rows.num_targets,
        loss_bf16=loss,
        loss_fp8=loss_fp8,
        loss_limit=loss_limit(loss),
        gradient_error=float((gradient_fp8 - gradient).norm() / gradient.norm()),
    )
    if not measured.is_accepted:
        raise ConfigError(
            f"model.frozen_precision=fp8 changes this model too much: {measured}. Its weights or activations span "
            "more than fp8 can hold in a row, or it amplifies rounding. Set model.frozen_precision=auto, which trains "
            "on the base in bf16."
        )
    _log.info("%d frozen linear layers are in fp8: %s", measured.num_layers, measured)
    return measured


def _loss_and_gradient(runtime: Runtime, model: Any, rows: Any) -> tuple[float, torch.Tensor]:
    """Return the loss per target and its gradient, flat in fp32, with the same dropout masks every time."""
    weights = trainable_parameters(model)
    devices = [runtime.device] if runtime.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _checkpointed(model):
        torch.manual_seed(0)
        loss = runtime.placement.forward(summed_cross_entropy, model, rows) / rows.num_targets
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


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
