"""Decide by the metrics of a validation when a run stops early and which weights are the best."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.splits import shuffled
from finetune.errors import ConfigError, DataError
from finetune.runs.metrics import FORGOTTEN, sign_of, subset_key
from finetune.runs.state import TrainerState

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.data.encoded import EncodedExamples
    from finetune.inference.answers import Metric

LOSS = "loss"
"""The metric that every validation has. For it and for the loss of a source, lower is better; for others, higher is."""
_HIGHER_IS_BETTER = ("reward_accuracy", "reward_margin", "reward")
"""Metrics of objectives that may be a criterion."""


class Validated(NamedTuple):
    """The metrics of a validation, over all ranks."""

    loss: float
    metrics: Mapping[str, float] = {}
    """The other metrics, by name."""

    def merit(self, name: str) -> float | None:
        """Return a metric, negated if lower is better; None if it was not measured or is not finite."""
        value = self.loss if name == LOSS else self.metrics.get(name)
        return sign_of(name) * value if value is not None and math.isfinite(value) else None


class Criteria(NamedTuple):
    """The metrics that decide about early stopping and the best weights."""

    best: str = LOSS
    """`checkpoint.best_metric`."""
    stopping: str = LOSS
    """`early_stopping.metric`."""
    min_delta: float = 0.0
    """The smallest improvement of `stopping` that counts for patience."""
    max_forgotten: float | None = None
    """`early_stopping.max_forgotten`. Weights beyond it are never the best."""

    @classmethod
    def of(cls, config: Config) -> Criteria:
        """Make the criteria of a configuration."""
        stopping = config.early_stopping
        return cls(config.checkpoint.best_metric, stopping.metric, stopping.min_delta, stopping.max_forgotten)

    def has_forgotten(self, state: TrainerState) -> bool:
        """Return whether the weights of the last validation diverge too far from the base."""
        forgotten, bound = state.forgotten, self.max_forgotten
        return forgotten is not None and bound is not None and forgotten > bound


def after_validation(state: TrainerState, validated: Validated, criteria: Criteria) -> TrainerState:
    """Return the state after one more validation. A metric that is not finite is no improvement."""
    state = replace(state, forgotten=validated.metrics.get(FORGOTTEN))
    is_best = _improves(validated.merit(criteria.best), best_merit(state, criteria.best))
    if is_best and not criteria.has_forgotten(state):
        value = None if criteria.best == LOSS else validated.metrics[criteria.best]
        state = replace(state, best_loss=validated.loss, best_step=state.step, best_value=value)
    merit = validated.merit(criteria.stopping)
    has_improved = _improves(merit, state.stopping_merit, criteria.min_delta)
    state = replace(state, stopping_merit=merit) if has_improved else state
    without = 0 if has_improved else state.validations_without_improvement + 1
    return replace(
        state,
        best_metric=criteria.best,
        stopping_metric=criteria.stopping,
        validated_step=state.step,
        validations_without_improvement=without,
    )


def best_merit(state: TrainerState, name: str) -> float | None:
    """Return the merit of the best weights so far; None before the first."""
    if name == LOSS:
        return None if state.best_loss is None else -state.best_loss
    return None if state.best_value is None else sign_of(name) * state.best_value


def _improves(merit: float | None, best: float | None, min_delta: float = 0.0) -> bool:
    return merit is not None and (best is None or merit > best + min_delta)


def check_metrics(
    config: Config, measured: Sequence[str], *, given: Mapping[str, Metric] = MappingProxyType({})
) -> dict[str, Metric]:
    """Return the metrics of validations by name: `validation.metrics` and the script's own (`given`).

    `measured` names the metrics that the objective measures.

    Raises:
        ConfigError: a metric is unknown, or a criterion is not measured.
    """
    names = config.validation.metrics
    if config.validation.by is not None and not config.objective.learns_answers:
        raise ConfigError(
            f"validation.by is {config.validation.by} ({config.origin('validation.by')}), but the validation of "
            f"training.objective={config.training.objective} is not reported by parts of the rows. Only sft's is. "
            "Remove validation.by."
        )
    if names and not config.objective.learns_answers:
        raise ConfigError(
            f"validation.metrics is {', '.join(names)} ({config.origin('validation.metrics')}), but the rows of "
            f"training.objective={config.training.objective} have no expected answer. Remove it; early_stopping.metric "
            f"and checkpoint.best_metric may be {' or '.join(each for each in _HIGHER_IS_BETTER if each in measured)}."
        )
    metrics = dict(given)
    if names:
        from finetune.config.own_functions import METRIC_PARAMETERS, resolve_functions
        from finetune.inference.answers import METRICS

        allowed, asked_by = config.validation.metrics_from, "validation.metrics"
        named = resolve_functions(names, METRICS, allowed, asked_by=asked_by, parameters=METRIC_PARAMETERS)
        metrics = named | metrics
    check_criteria(config, measured, metrics)
    return metrics


def check_criteria(
    config: Config, measured: Sequence[str], metrics: Collection[str], *, in_subsets: Sequence[str] | None = None
) -> None:
    """Raise ConfigError for a criterion of early stopping or of the best weights that the run does not measure.

    `in_subsets` is the result of `measured_in_subsets`; None before the rows are read. Then any name of a subset is
    accepted if the run may have subsets.
    """
    known = (LOSS, *metrics, *(name for name in _HIGHER_IS_BETTER if name in measured))
    may_have_subsets = config.objective.learns_answers and (config.validation.by or len(config.data.mixture) > 1)
    later = known if in_subsets is None and may_have_subsets else ()
    known = (*known, *(in_subsets or ()))
    for key, name in (
        ("early_stopping.metric", config.early_stopping.metric),
        ("checkpoint.best_metric", config.checkpoint.best_metric),
    ):
        if name not in known and not ("/" in name and name.partition("/")[0] in later):
            from finetune.config.key_advice import did_you_mean
            from finetune.inference.answers import METRICS

            is_built_in = name in METRICS and not measured
            advice = f"Add validation.metrics={name}." if is_built_in else did_you_mean(name, known)
            raise ConfigError(
                f"{key} is {name} ({config.origin(key)}), which this run does not measure; it measures "
                f"{', '.join(known)}. {advice}".rstrip()
            )


def answered_rows(config: Config, rows: EncodedExamples) -> EncodedExamples:
    """Return the rows that validations answer. They depend only on the split and on `data.split_seed`."""
    answered = rows.has_answer.nonzero()[:, 0]
    chosen = sorted(shuffled(len(answered), config.data.split_seed)[: config.validation.num_samples])
    return rows.select(answered[chosen])


def measured_in_subsets(config: Config, rows: EncodedExamples | None, metrics: Collection[str]) -> list[str]:
    """Return the names of what validations measure in each subset of their rows: `loss/NAME`, and of `metrics`."""
    if rows is None or not config.objective.learns_answers:
        return []
    names = []
    sample = answered_rows(config, rows) if metrics else None
    for index, name in enumerate(rows.subset_names):
        if int(rows.num_targets[rows.subset == index].sum()):
            names.append(subset_key(LOSS, name))
        if sample is not None and bool((sample.subset == index).any()):
            names += [subset_key(metric, name) for metric in metrics]
    return names


def refuse_early_stopping(config: Config, splits: Any) -> None:
    """Raise ConfigError for a rule of early stopping in a run without a validation split."""
    for name in ("patience", "max_forgotten"):
        key, value = f"early_stopping.{name}", getattr(config.early_stopping, name)
        if value is not None and splits.validation is None:
            raise ConfigError(
                f"{key} is {value} ({config.origin(key)}), but the run has no validation split that could stop it: "
                f"data.validation is {config.data.validation or 'null'}. Set data.validation=5%, or name a file or a "
                f"split; or remove {key}."
            )


def refuse_rows_without_answers(metrics: Collection[str], row_type: str) -> None:
    """Raise DataError for metrics of answers on rows of plain text."""
    if metrics and row_type == "text":
        raise DataError(
            f"validations measure answers by {', '.join(metrics)}, but the validation rows are plain text, which has "
            "no answers. Remove these metrics, or give rows with prompts and answers."
        )
