"""Micro-batches in either form, padded or packed, and those with further values for an objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from finetune.engine.layout import PackedMicrobatch
    from finetune.engine.padded import PaddedMicrobatch


Microbatch: TypeAlias = "PaddedMicrobatch | PackedMicrobatch"
"""Padded or packed rows. Both have `to`, `num_rows`, `num_tokens`, `num_targets`, `num_computed` and `target_row`."""


@dataclass(frozen=True, kw_only=True)
class WithRows:
    """Base class: a micro-batch of rows with further values for its objective, such as advantages."""

    rows: Microbatch

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self.rows.num_rows

    @property
    def num_computed(self) -> int:
        """Tokens that go through the model with a gradient; a shared prefix counts once."""
        return self.rows.num_computed

    @property
    def input_ids(self) -> torch.Tensor:
        """Token ids of the rows, padded or packed."""
        return self.rows.input_ids


def rows_of(microbatch: Microbatch | WithRows) -> Microbatch:
    """Return the padded or packed rows of a micro-batch."""
    return microbatch.rows if isinstance(microbatch, WithRows) else microbatch
