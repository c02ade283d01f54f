"""Marks that say beside each key of the schema whether it may change on resume. `training.resume` applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class OnResume:
    """The effect of changing a key on a resumed run.

    Attributes:
        matters: when the change affects what later steps compute, beyond rounding, and is refused unless
            `resume.allow` names the key: never, always, or only if an adapter is trained, if tokens are dropped or
            noise is added at random, if the rows themselves change, or if the learning rate depends on the number of
            steps or epochs.
        decides: what the key decides, for messages. Empty if it never matters.
        fits: whether a checkpoint can still be loaded after the change.
    """

    matters: Literal["never", "always", "adapter", "noise", "rows", "steps", "epochs"]
    decides: str = ""
    fits: bool = True


Free = Annotated[T, OnResume("never")]
"""A key that may change."""
BaseModelKey = Annotated[T, OnResume("always", "the model that is trained")]
TokenKey = Annotated[T, OnResume("always", "the tokens that the model is given")]
# The rows themselves are compared, so a file may be moved.
RowKey = Annotated[T, OnResume("rows", "the rows to train and validate on")]
AdapterKey = Annotated[T, OnResume("adapter", "the update that the adapter adds to the model")]
AdapterShape = Annotated[T, OnResume("adapter", "the weights of the adapter", fits=False)]
UpdateKey = Annotated[T, OnResume("always", "the updates of the weights")]
RateKey = Annotated[T, OnResume("always", "the learning rate of every step")]
MeasureKey = Annotated[T, OnResume("always", "the measure by which weights are the best")]
SampleKey = Annotated[T, OnResume("always", "the answers to validate on: metrics before and after are not comparable")]
SubsetKey = Annotated[T, OnResume("always", "the rows of each loss/NAME: losses before and after are not comparable")]
# Dropout masks and noise belong to the micro-batches; without them, the cut changes only the rounding.
CutKey = Annotated[T, OnResume("noise", "the cut of a global batch, and with it the dropout masks or the noise")]
