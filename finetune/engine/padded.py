"""Micro-batches of padded rows, for a model's own forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class PaddedMicrobatch:
    """Rows of one forward pass, padded on the right to the longest."""

    input_ids: torch.Tensor
    """Token ids, int64, shape (batch, time)."""
    is_target: torch.Tensor
    """True for tokens that carry loss, shape (batch, time)."""
    num_tokens: int
    """Tokens without padding."""
    num_targets: int

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.input_ids)

    @property
    def num_computed(self) -> int:
        """Tokens that go through the model, padding left out."""
        return self.num_tokens

    @property
    def target_row(self) -> torch.Tensor:
        """The row of each target, int64, shape (num_targets,)."""
        return self.is_target[:, 1:].nonzero()[:, 0]

    def to(self, device: torch.device) -> PaddedMicrobatch:
        """A copy on another device."""
        ids, is_target = (tensor.to(device, non_blocking=True) for tensor in (self.input_ids, self.is_target))
        return replace(self, input_ids=ids, is_target=is_target)

    def pin_memory(self) -> PaddedMicrobatch:
        """A copy in page-locked memory, for a loader with `pin_memory`."""
        return replace(self, input_ids=self.input_ids.pin_memory(), is_target=self.is_target.pin_memory())


EMPTY_MICROBATCH = PaddedMicrobatch(
    input_ids=torch.zeros((1, 2), dtype=torch.int64),
    is_target=torch.zeros((1, 2), dtype=torch.bool),
    num_tokens=0,
    num_targets=0,
)
"""A micro-batch with a loss of zero and gradients of zero, for a rank that has fewer micro-batches than others."""
