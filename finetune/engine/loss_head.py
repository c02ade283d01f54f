"""Compute the head and the cross-entropy of target positions, one chunk of logits at a time.

The gradient is computed in the forward pass, so that logits are computed once and never kept. It is exact, because the
gradient of the summed loss is a scalar, by which the backward pass multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from finetune.engine.fused import fused
from finetune.engine.products import in_float64, plus_product, product, wide_type

CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""The size in bytes of a chunk's logits in fp32, by device type."""
MIN_CHUNK_ROWS = 256
"""The fewest rows of a chunk: with fewer, a matrix product spends most of its time reading the head's weight."""
WIDE_ROWS = 32
"""The rows of 16-bit logits that a CPU converts to fp32 at a time, so that they stay in its cache."""


def summed_head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    chunk_bytes: int | None = None,
) -> torch.Tensor:
    """Sum the nats of targets, as a float64 scalar with a gradient.

    Args:
        hidden: (targets, features), the input of the head where a target is predicted.
        weight: (vocabulary, features), frozen or trained, tied or not.
        labels: (targets,), the tokens to predict.
        bias: (vocabulary,), or None.
        counts: (targets,), the weight of each loss, without a gradient, or None for 1.
        chunk_bytes: the size of a chunk's logits in fp32; None: `CHUNK_BYTES` of the device.
    """
    loss: torch.Tensor = _SummedHeadLoss.apply(hidden, weight, bias, labels, counts, chunk_bytes)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def head_loss_per_target(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_bytes: int | None = None,
) -> torch.Tensor:
    """Return nats of each target, (targets,), in fp32 or better, without a gradient. See `summed_head_loss`."""
    losses = hidden.new_empty(len(hidden), dtype=wide_type(hidden))
    for rows in chunks(hidden, len(weight), chunk_bytes):
        logits = _logits(hidden[rows], weight, bias).to(losses.dtype)
        losses[rows] = nats_and_softmax(logits, labels[rows].unsqueeze(1), out=logits)[0].squeeze(1)
    return losses


class _SummedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        counts: torch.Tensor | None,
        chunk_bytes: int | None,
    ) -> torch.Tensor:
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight: torch.Tensor | None = None
        d_bias = torch.zeros_like(bias, dtype=wide_type(bias)) if wants_bias and bias is not None else None
        losses = hidden.new_empty(len(hidden), dtype=wide_type(hidden))
        counts = torch.ones_like(losses) if counts is None else counts.to(losses.dtype)
        for rows in chunks(hidden, len(weight), chunk_bytes):
            x, count = hidden[rows], counts[rows].unsqueeze(1)
            # The gradient of the logits is without the counts: these go into the narrower factor of each product.
            loss, d_logits = _loss_and_gradient(_logits(x, weight, bias), labels[rows].unsqueeze(1))
            losses[rows] = loss.squeeze(1)
            if d_bias is not None:
                d_bias.addmv_(d_logits.to(d_bias.dtype).t(), counts[rows].to(d_bias.dtype))
            if d_hidden is not None:
                torch.mul(product(d_logits, weight.to(x.dtype).t()), count, out=d_hidden[rows])
            if wants_weight:
                d_weight = plus_product(d_weight, d_logits.t(), (x * count).to(x.dtype), wide_type(weight))
        gradients = zip((d_hidden, d_weight, d_bias), (hidden, weight, bias), strict=True)
        ctx.save_for_backward(
            *(None if gradient is None or part is None else gradient.to(part.dtype) for gradient, part in gradients)
        )
        return in_float64(losses * counts).sum()

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        gradients = (None if gradient is None else _times(gradient, factor) for gradient in ctx.saved_tensors)
        return *gradients, None, None, None


def _times(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply by a scalar, and round only the result: in bf16 the factor itself would lose up to 0.4 %."""
    # With one dimension, and not none, the factor's type counts as that in which torch multiplies.
    # It is on the CPU where the loss is, see `in_float64`.
    return torch.mul(
        gradient, factor.to(gradient.device, wide_type(gradient)).reshape(1), out=torch.empty_like(gradient)
    )


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _loss_and_gradient_without_out(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `_loss_and_gradient` by whole tensors: two passes over the logits, and none of them in fp32 in memory."""
    wide = logits.to(wide_type(logits))
    largest = wide.amax(1, keepdim=True)
    # On a GPU many threads share a row. On a CPU one adds it up, and loses small terms in fp32: see `nats_and_softmax`.
    sums = torch.float64 if logits.device.type == "cpu" else wide.dtype
    total = (wide - largest).exp().sum(1, keepdim=True, dtype=sums).to(wide.dtype)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels
    gradient = (wide - largest).exp() / total - is_label.to(wide.dtype)
    return (largest - wide.gather(1, labels)) + total.log(), gradient.to(logits.dtype)


@fused(launches=3, compiled=_loss_and_gradient_without_out)
def _loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return nats (rows, 1) in fp32 or better, and the gradient of the logits in their type, for labels (rows, 1).

    The gradient takes the place of the logits.
    """
    in_parts = logits.device.type == "cpu" and logits.dtype != wide_type(logits)
    num_rows = WIDE_ROWS if in_parts else max(1, len(logits))
    losses = []
    for part, label in zip(torch.split(logits, num_rows), torch.split(labels, num_rows), strict=True):
        wide = part.to(wide_type(part))
        loss, softmax = nats_and_softmax(wide, label, out=wide)
        softmax[torch.arange(len(label), device=label.device), label.squeeze(1)] -= 1
        part.copy_(softmax)
        losses.append(loss)
    return losses[0] if len(losses) == 1 else torch.cat(losses), logits


def nats_and_softmax(
    logits: torch.Tensor, labels: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return nats of each label, (rows, 1), and the probabilities of each row, (rows, vocabulary).

    On a CPU, torch's softmax adds up a row term by term in a few lanes, and each lane drops terms below half a rounding
    of its sum. A large vocabulary has many: the probabilities then add up to as much as 1 + 4e-5. torch's
    `sum` adds pairwise and drops none, so dividing by it corrects the probabilities.

    Args:
        logits: (rows, vocabulary), in fp32 or better.
        labels: (rows, 1).
        out: takes the probabilities; may be the logits.
    """
    largest = logits.amax(1, keepdim=True)
    below_largest = largest - logits.gather(1, labels)
    softmax = torch.softmax(logits, dim=1, out=out)
    softmax.div_(softmax.sum(1, keepdim=True))
    # The largest probability, exp(largest - log_sum_exp), is never small. This halves the work of a logsumexp.
    return below_largest - softmax.amax(1, keepdim=True).log(), softmax


def chunks(hidden: torch.Tensor, num_logits: int, chunk_bytes: int | None) -> Iterator[slice]:
    """Return the rows of each chunk, given the logits of a row. Without targets, there is one empty chunk."""
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"])
    num_rows = max(MIN_CHUNK_ROWS, chunk_bytes // (4 * num_logits))
    return (slice(start, start + num_rows) for start in range(0, max(1, len(hidden)), num_rows))
