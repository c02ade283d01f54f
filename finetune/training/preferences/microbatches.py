"""Compute preference losses for micro-batches of pairs or of labelled answers.

The reference is the base: the same model with its adapter switched off. The answers of a pair are in one micro-batch,
so that the engine computes their shared prompt once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.batches import Collate, EvaluationLoader
from finetune.data.preferences import EncodedPair, LabelledExample
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import BY_DEVICE, Choices, cross_entropy_per_target
from finetune.engine.loss_of_nats import function_of_nats
from finetune.engine.microbatch import Microbatch, WithRows
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.engine.products import in_float64
from finetune.inference.losses import LossSums, in_even_rounds
from finetune.model.base import evaluation_mode
from finetune.training.preferences.losses import NOTHING, GlobalSums, Outcomes, PreferenceLoss, RowNats

if TYPE_CHECKING:
    from finetune.config.objectives import ObjectiveFacts


@dataclass(frozen=True, kw_only=True)
class PreferenceMicrobatch(WithRows):
    """One forward over pairs or labelled answers.

    The loss is divided by the number of pairs or labelled answers, so these are its targets.

    Attributes:
        rows: rows 2k and 2k + 1 are the chosen and the rejected answer of pair k. For ORPO, a third row of each pair
            learns the prompt. A labelled answer is one row.
        each: rows of a pair or of a labelled answer.
        num_tokens: tokens of all answers with their prompts.
        mismatched: of labelled answers, each prompt with the completion of another row (`finetune.data.preferences`).
        is_good: the labels, bool, shape (rows,).
        counts: what the micro-batch adds to the sums over the whole global batch.
        whole: the sums over the whole global batch; `NOTHING` until they are computed.
    """

    each: int = 2
    num_tokens: int
    mismatched: Microbatch | None = None
    is_good: torch.Tensor | None = None
    counts: GlobalSums = NOTHING
    whole: GlobalSums = NOTHING

    @property
    def num_rows(self) -> int:
        """Pairs, or labelled answers."""
        return self.rows.num_rows // self.each

    @property
    def num_targets(self) -> int:
        """Pairs, or labelled answers."""
        return self.num_rows

    def to(self, device: torch.device) -> PreferenceMicrobatch:
        """A copy on another device."""
        mismatched = None if self.mismatched is None else self.mismatched.to(device)
        is_good = None if self.is_good is None else self.is_good.to(device, non_blocking=True)
        return replace(self, rows=self.rows.to(device), mismatched=mismatched, is_good=is_good)

    def pin_memory(self) -> PreferenceMicrobatch:
        """A copy in page-locked memory, for a loader with `pin_memory`."""
        mismatched = None if self.mismatched is None else self.mismatched.pin_memory()
        is_good = None if self.is_good is None else self.is_good.pin_memory()
        return replace(self, rows=self.rows.pin_memory(), mismatched=mismatched, is_good=is_good)


def put_pairs_together(
    pairs: Sequence[EncodedPair], *, rows: Collate, learns_prompt: bool = False
) -> PreferenceMicrobatch:
    """Return a micro-batch with the answers of each pair next to each other. `rows` packs or pads them.

    With `learns_prompt`, each pair has a third row: the chosen answer again, with the loss on its prompt. If rows are
    packed, this row costs nothing, because it shares all its tokens with the chosen answer.
    """
    of_pairs = [
        [*pair, pair.chosen._replace(is_target=~pair.chosen.is_target)] if learns_prompt else [*pair] for pair in pairs
    ]
    return PreferenceMicrobatch(
        rows=rows([row for of_pair in of_pairs for row in of_pair]),
        each=3 if learns_prompt else 2,
        num_tokens=sum(len(side.input_ids) for pair in pairs for side in pair),
        counts=GlobalSums(num_rows=len(pairs), num_read=sum(len(pair.chosen.input_ids) - 1 for pair in pairs)),
    )


def put_labelled_together(answers: Sequence[LabelledExample], *, rows: Collate) -> PreferenceMicrobatch:
    """Make a micro-batch of labelled answers and one of their mismatched completions; `rows` packs or pads them."""
    return PreferenceMicrobatch(
        rows=rows([each.answer for each in answers]),
        each=1,
        num_tokens=sum(len(each.answer.input_ids) for each in answers),
        mismatched=rows([each.mismatched for each in answers]),
        is_good=torch.tensor([each.is_good for each in answers]),
        counts=GlobalSums(num_rows=len(answers), num_good=sum(each.is_good for each in answers)),
    )


def summed_preferences(
    model: Any, microbatch: PreferenceMicrobatch, *, loss: PreferenceLoss, choices: Choices = BY_DEVICE
) -> torch.Tensor:
    """Return the sum of the loss over a micro-batch, then the sums of its metrics. Only the loss has a gradient.

    The model is in training mode, and a PEFT model if the loss has a reference.
    """
    return measure_preferences(model, microbatch, loss=loss, choices=choices).sums()


def measure_preferences(
    model: Any, microbatch: PreferenceMicrobatch, *, loss: PreferenceLoss, choices: Choices = BY_DEVICE
) -> Outcomes:
    """Measure each pair or labelled answer. `EMPTY_MICROBATCH` has none."""
    preferences = _as_preferences(microbatch, loss.objective)
    reference = _reference_nats(model, preferences.rows, loss.objective, choices)

    def summed(nats: torch.Tensor) -> tuple[torch.Tensor, Outcomes]:
        outcomes = loss(_row_nats(preferences, _by_row(preferences.rows, nats), reference))
        return outcomes.losses.sum(), outcomes

    total, outcomes = function_of_nats(model, preferences.rows, summed, choices)
    # Only the sum of the losses is used, so it does not matter how its gradient is divided among the pairs.
    losses = outcomes.losses.detach()
    return outcomes._replace(losses=losses + (total - total.detach()) / max(1, len(losses)))


def local_sums(runtime: Runtime, model: Any, microbatches: Iterable[Any], *, loss: PreferenceLoss) -> GlobalSums:
    """Add up this rank's part of `GlobalSums`, without gradients. The sum over ranks goes into every micro-batch.

    Collective if the model is sharded: every rank, with equally many micro-batches.
    """
    totals = NOTHING
    with evaluation_mode(model):
        for microbatch in microbatches:
            preferences = _as_preferences(microbatch, loss.objective)
            gained = (
                _gained_by_mismatched(runtime, model, preferences, loss) if preferences.is_good is not None else 0.0
            )
            totals = _added(totals, preferences.counts._replace(gained=gained))
    return totals


def with_global_sums(microbatch: Any, values: Sequence[float]) -> Any:
    """Return a copy of a micro-batch that holds the sums over the global batch. The empty one needs none."""
    return microbatch if microbatch is EMPTY_MICROBATCH else replace(microbatch, whole=GlobalSums(*values))


def sum_preference_losses(
    runtime: Runtime, model: Any, loader: EvaluationLoader, *, loss: PreferenceLoss
) -> tuple[LossSums, list[float]]:
    """Add up losses and metrics of this rank's pairs or answers, without gradients and in evaluation mode.

    Once a rank is preempted, the evaluation is cut short and the sums are zero. Collective.
    """
    measured: list[RowNats] = []
    own, is_cut = NOTHING, False
    each: Any = in_even_rounds(runtime, loader)  # yields `PreferenceMicrobatch`, which its type does not say
    with evaluation_mode(model):
        for microbatch in each:
            if is_cut := runtime.stop_requests.is_on_any_rank():
                break
            measured.append(
                runtime.placement.forward(partial(measure_rows, objective=loss.objective), model, microbatch)
            )
            own = _added(own, local_sums(runtime, model, [microbatch], loss=loss))
    num_cut_short, *global_values = runtime.collectives.sum([float(is_cut), *own])
    if num_cut_short:
        return LossSums(num_cut_short=float(is_cut)), [0.0] * len(loss.metrics)
    totals, metrics = [0.0] * 4, [0.0] * len(loss.metrics)
    for rows in measured:
        outcomes = loss(rows._replace(whole=GlobalSums(*global_values)))
        losses = outcomes.losses
        value, *more = outcomes.sums().tolist()
        added = (value, float(len(losses)), value, float((losses**2).sum()))
        totals = [total + term for total, term in zip(totals, added, strict=True)]
        metrics = [total + term for total, term in zip(metrics, more, strict=True)]
    nats, pairs, means, squares = totals
    return LossSums(nats, pairs, pairs, means, squares), metrics


def _as_preferences(microbatch: Any, objective: ObjectiveFacts) -> PreferenceMicrobatch:
    """Return a micro-batch as it is, and the empty one as one without pairs or labelled answers."""
    if isinstance(microbatch, PreferenceMicrobatch):
        return microbatch
    is_good = torch.zeros(0, dtype=torch.bool) if objective.reads_labels else None
    return PreferenceMicrobatch(rows=microbatch, num_tokens=0, mismatched=EMPTY_MICROBATCH, is_good=is_good)


def measure_rows(model: Any, microbatch: Any, *, objective: ObjectiveFacts, choices: Choices = BY_DEVICE) -> RowNats:
    """Return the nats of a micro-batch's rows, without a gradient if the caller has switched it off."""
    preferences = _as_preferences(microbatch, objective)
    nats = _by_row(preferences.rows, in_float64(cross_entropy_per_target(model, preferences.rows, choices)))
    return _row_nats(preferences, nats, _reference_nats(model, preferences.rows, objective, choices))


def _gained_by_mismatched(
    runtime: Runtime, model: Any, preferences: PreferenceMicrobatch, loss: PreferenceLoss
) -> float:
    """Return how much more the model prefers all mismatched completions than the reference does, in nats."""
    mismatched = PreferenceMicrobatch(rows=preferences.mismatched or preferences.rows, num_tokens=0, each=1)
    rows = runtime.placement.forward(partial(measure_rows, objective=loss.objective), model, mismatched)
    return float(rows.gained.sum())


def _row_nats(preferences: PreferenceMicrobatch, nats: torch.Tensor, reference: torch.Tensor | None) -> RowNats:
    """Leave out the row of the empty micro-batch, which belongs to no pair."""
    end = preferences.num_rows * preferences.each
    is_good = None if preferences.is_good is None else preferences.is_good.to(nats.device)
    num_targets = _by_row(
        preferences.rows, torch.ones(preferences.rows.num_targets, dtype=torch.float64, device=nats.device)
    )
    cut = None if reference is None else reference[:end]
    return RowNats(nats[:end], cut, num_targets[:end], is_good, preferences.whole)


def _reference_nats(
    model: Any, rows: Microbatch, objective: ObjectiveFacts, choices: Choices = BY_DEVICE
) -> torch.Tensor | None:
    """Return the nats of rows under the base; None if the objective has no reference."""
    if not objective.has_reference:
        return None
    with evaluation_mode(model), model.disable_adapter():
        return _by_row(rows, in_float64(cross_entropy_per_target(model, rows, choices)))


def _by_row(rows: Microbatch, values: torch.Tensor) -> torch.Tensor:
    """Sum the values of targets by row: float64, shape (rows,)."""
    owner = rows.target_row.to(values.device)
    return torch.zeros(rows.num_rows, dtype=torch.float64, device=values.device).index_add(0, owner, values)


def _added(first: GlobalSums, second: GlobalSums) -> GlobalSums:
    return GlobalSums(*map(sum, zip(first, second, strict=True)))
