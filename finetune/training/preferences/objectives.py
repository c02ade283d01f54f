"""The objectives that compare answers: DPO, SimPO and ORPO on pairs, KTO on labelled answers.

The formulas are in `finetune.training.preferences.losses`.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.data.batches import Collate, EvaluationLoader
from finetune.data.encoded import filler_rows
from finetune.data.examples import holds_out_by_default
from finetune.data.preferences import EncodedLabelled, EncodedPairs, encode_labelled, encode_preferences
from finetune.engine.loss import Choices, LossFunction
from finetune.errors import ConfigError, DataError
from finetune.inference.losses import SplitLosses
from finetune.inference.scores import Evaluation, ModelName, Scores, show_evaluation
from finetune.logs import waiting
from finetune.model.base import longrope_boundary, max_context
from finetune.runs.model_files import has_adapter
from finetune.training.objective import Objective
from finetune.training.preemption import preempted_in_training
from finetune.training.preferences.losses import PreferenceLoss
from finetune.training.preferences.microbatches import (
    local_sums,
    measure_rows,
    put_labelled_together,
    put_pairs_together,
    sum_preference_losses,
    summed_preferences,
    with_global_sums,
)
from finetune.training.step import LossWithMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.fallbacks import Fallbacks
    from finetune.training.objective import AnySplits, Setup

_log = logging.getLogger(__name__)


class _Preferences(Objective):
    """What the objectives of pairs and of labelled answers have in common."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._loss = PreferenceLoss(self.facts.name, config.preference)
        self.metrics = self._loss.metrics

    def loss(self, choices: Choices) -> LossFunction:
        """Return the function that sums the loss and the metrics over pairs or labelled answers."""
        loss = self._loss
        return LossWithMetrics(
            partial(summed_preferences, loss=loss, choices=choices),
            loss.metrics,
            global_sums=partial(local_sums, loss=loss) if loss.needs_global_sums else None,
            with_global_sums=with_global_sums,
        )

    def evaluation(self, choices: Choices) -> Any:
        """Return the function that computes the nats of each row."""
        return partial(measure_rows, objective=self.facts, choices=choices)

    def measure(self, setup: Setup, loader: EvaluationLoader) -> SplitLosses:
        """Sum the losses and the metrics of this rank's rows. Collective."""
        sums, metrics = sum_preference_losses(setup.runtime, setup.model, loader, loss=self._loss)
        counts = [sums.num_targets, sums.num_cut_short]
        num_rows, num_cut_short, *totals = setup.runtime.collectives.sum([*counts, *metrics])
        if not num_rows or num_cut_short:
            return SplitLosses(sums)
        means = {name: total / num_rows for name, total in zip(self.metrics, totals, strict=True)}
        return SplitLosses(sums, metrics={name: mean for name, mean in means.items() if not math.isnan(mean)})

    def after_training(self, setup: Setup, val_loader: EvaluationLoader, step: int) -> None:
        """Compare the base with the published weights on validation rows that were held out. Collective."""
        if not holds_out_by_default(self.config.data):
            return
        _log.info("Comparing base and tuned model on the validation rows...")
        setup.load_published()
        scores: dict[ModelName, Scores] = {}
        names: list[ModelName] = ["base", "tuned"] if has_adapter(setup.model) else ["tuned"]
        for name in names:
            without = setup.model.disable_adapter() if name == "base" else nullcontext()
            with without, waiting(f"measuring the {name} model on the validation rows"):
                measured = self.measure(setup, val_loader).over_ranks(setup.runtime)
            sums = measured.whole
            if sums.num_cut_short:
                raise preempted_in_training(setup.runtime, step)
            scores[name] = Scores(loss=sums.loss, standard_error=sums.standard_error, metrics=measured.metrics)
        comparison = Evaluation(
            num_rows=int(sums.num_examples), split="validation", scores=scores, loss_unit=self.facts.unit
        )
        setup.on_main(lambda journal: journal.test(comparison), "recording the comparison")
        if setup.runtime.is_main_process:
            show_evaluation(comparison)


class Pairs(_Preferences):
    """DPO and SimPO: prefer the chosen answer of a pair to the rejected one."""

    no_gradient = (
        "In each pair, the chosen and the rejected answer may be the same: see finetune preview. "
        f"{Objective.no_gradient}"
    )
    _learns_prompt = False

    def encode(self, tokenizer: PreTrainedTokenizerBase, *, fallbacks: Fallbacks, is_checked: bool) -> AnySplits:
        """Read and encode both sides of the pairs."""
        return encode_preferences(self.config.data, tokenizer, fallbacks=fallbacks, is_checked=is_checked)

    def prepare(self, model: Any, tokenizer: PreTrainedTokenizerBase, splits: Any) -> Any:
        """Refuse pairs that need different LongRoPE factors for their two answers."""
        del tokenizer
        for split in (splits.train, splits.validation):
            refuse_straddling(split, longrope_boundary(model))
        return splits

    def collate(self, rows: Collate) -> Any:
        """Put the answers of each pair next to each other."""
        return partial(put_pairs_together, rows=rows, learns_prompt=self._learns_prompt)

    def filler_rows(self, number: int, length: int) -> EncodedPairs:
        """Make pairs of two answers of this length."""
        return EncodedPairs(filler_rows(number, length), filler_rows(number, length, first=number), "train")


class PairsAndPrompts(Pairs):
    """ORPO: prefer the chosen answer of a pair, and learn it with its prompt."""

    _learns_prompt = True


class LabelledAnswers(_Preferences):
    """KTO: make good answers more likely and bad ones less likely."""

    no_gradient = (
        "The good and the bad answers may be the same, or no answer differs from those to other prompts: see finetune "
        f"preview. {Objective.no_gradient}"
    )

    def encode(self, tokenizer: PreTrainedTokenizerBase, *, fallbacks: Fallbacks, is_checked: bool) -> AnySplits:
        """Read and encode the rows with their labels."""
        return encode_labelled(self.config.data, tokenizer, fallbacks=fallbacks, is_checked=is_checked)

    def prepare(self, model: Any, tokenizer: PreTrainedTokenizerBase, splits: Any) -> Any:
        """Refuse rows if a prompt with the answer of another row is too long, and warn of unequal labels."""
        del tokenizer
        for name, split in (("train", splits.train), ("validation", splits.validation)):
            if split is not None:
                _refuse_long_mismatched(self.config, split, name, max_context(model), longrope_boundary(model))
        _warn_of_imbalance(self.config, splits.train)
        return splits

    def collate(self, rows: Collate) -> Any:
        """Add the mismatched completions."""
        return partial(put_labelled_together, rows=rows)

    def filler_rows(self, number: int, length: int) -> EncodedLabelled:
        """Make labelled answers of this length, at least two."""
        return EncodedLabelled(filler_rows(max(2, number), length), "train", max_length=length)


def refuse_straddling(pairs: EncodedPairs | None, boundary: int | None) -> None:
    """Raise DataError for pairs with one side within LongRoPE's boundary and the other one beyond it."""
    if pairs is None or boundary is None:
        return
    chosen_is_short, rejected_is_short = (side.lengths <= boundary for side in pairs.sides)
    straddling = (chosen_is_short != rejected_is_short).nonzero()[:, 0].tolist()
    if straddling:
        raise DataError(
            f"{len(straddling)} pairs have one side of at most {boundary} tokens and a longer one; the first is "
            f"{pairs.chosen.source(straddling[0])}. LongRoPE would rotate both sides with the factors of the longer "
            f"one. Set data.max_length={boundary}, or remove these pairs."
        )


def _refuse_long_mismatched(
    config: Config, rows: EncodedLabelled, name: str, context: int | None, boundary: int | None
) -> None:
    """Raise an error if a prompt with the answer of another row may exceed the context or LongRoPE's boundary."""
    if context is not None and rows.max_length > context and rows.longest_mismatched > context:
        raise ConfigError(
            f"the {name} split: the longest prompt with the longest answer has {rows.longest_mismatched} tokens, but "
            f"the model's context ends at {context}. KTO puts prompts before the answers of other rows. Set "
            f"data.max_length={context} (it is {config.data.max_length}, {config.origin('data.max_length')})."
        )
    if boundary is not None and rows.longest_mismatched > boundary:
        raise DataError(
            f"{rows.label}: the longest prompt with the longest answer has {rows.longest_mismatched} tokens. KTO puts "
            f"prompts before the answers of other rows, and LongRoPE rotates rows of more than {boundary} tokens with "
            f"other factors. Set data.max_length={boundary}."
        )


def _warn_of_imbalance(config: Config, rows: EncodedLabelled) -> None:
    """Warn if good and bad answers have very different weights: the paper advises 1:1 to 4:3 (section 4.2)."""
    num_good = int(rows.is_good.sum())
    good = config.preference.desirable_weight * num_good
    bad = config.preference.undesirable_weight * (len(rows) - num_good)
    if not 1.0 <= (good / bad if bad else math.inf) <= 4 / 3:
        to_do = "Set preference.desirable_weight or preference.undesirable_weight"
        _log.warning(
            "the %d good answers have a weight of %g in the loss and the %d bad ones %g; KTO's paper advises 1:1 to "
            "4:3. %s",
            *(num_good, good, len(rows) - num_good, bad),
            to_do if 0 < num_good < len(rows) else "All rows have one label: add rows with the other one",
        )
