"""Whether a key may change when a run goes on. The schema says it beside each key; `training.resume` applies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class OnResume:
    """What a change of a key does to a run that goes on.

    Attributes:
        matters: when it changes what later steps compute, rounding left out of account, so that it is refused unless
            `resume.allow` names the key: never, always, or only where an adapter is trained, where that adapter has
            dropout, where the rows themselves are others, or where the learning rate depends on the number of steps
            or of epochs.
        decides: what the key decides, for messages. Empty where it never matters.
        fits: whether a checkpoint could be loaded after the change at all.
    """

    matters: Literal["never", "always", "adapter", "dropout", "rows", "steps", "epochs"]
    decides: str = ""
    fits: bool = True


Free = Annotated[T, OnResume("never")]
"""A key that may change."""
BaseModelKey = Annotated[T, OnResume("always", "the model that is trained")]
TokenKey = Annotated[T, OnResume("always", "which tokens the model is given")]
# The rows themselves are compared, so that a file that was moved is no other file.
RowKey = Annotated[T, OnResume("rows", "the rows to train and validate on")]
AdapterKey = Annotated[T, OnResume("adapter", "what the adapter adds to the model")]
AdapterShape = Annotated[T, OnResume("adapter", "which weights the adapter has", fits=False)]
UpdateKey = Annotated[T, OnResume("always", "how gradients become updates")]
RateKey = Annotated[T, OnResume("always", "the learning rate of every step")]
# Dropout masks belong to the micro-batches; without any, how a global batch is cut changes the rounding alone.
CutKey = Annotated[T, OnResume("dropout", "how a global batch is cut, and with it the dropout masks")]
