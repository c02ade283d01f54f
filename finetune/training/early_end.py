"""Say why training ended before its last step, in the log and in run.json, and when it cannot end early at all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from finetune.units import counted

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.runs.state import TrainerState
    from finetune.training.cadence import Cadence
    from finetune.training.reporting.journal import Journal

SHORTEN_PATIENCE = "lower validation.validate_every or early_stopping.patience"
_log = logging.getLogger(__name__)


def record_early_end(
    journal: Journal, config: Config, state: TrainerState, reason: str, num_steps: int, has_trained: bool
) -> None:
    """Log why training ended after step `state.step`, and keep the sentence for `result` in run.json.

    After the last step, only forgetting is said: it decides which weights are the best. `has_trained` is False for a
    start that found the run ended, and trained no step.
    """
    if state.step >= num_steps and reason != "forgot too much":
        return
    explain = {"no improvement": _describe_patience, "forgot too much": _describe_forgetting}.get(reason)
    why = 'a callback returned "stop". This run cannot train further' if explain is None else explain(config, state)
    when = "training ended" if has_trained else "no step was trained: training had ended"
    sentence = f"{when} after step {state.step} of {num_steps}: {why}."
    _log.warning("%s", sentence)
    journal.result["ended_early"] = {"reason": reason, "sentence": sentence}


def describe_unused_patience(config: Config, cadence: Cadence) -> str:
    """Say that `early_stopping.patience` is too long to end this run early. Empty if it is not, or is null.

    The first validation always counts as an improvement, and after the last one a run ends anyway.
    """
    patience, num_steps = config.early_stopping.patience, cadence.num_steps
    if patience is None:
        return ""
    num = sum(map(cadence.validates_after, range(1, num_steps + 1)))
    if num >= patience + 2:
        return ""
    return (
        f"early_stopping.patience={patience} cannot end this run early: that takes {patience + 2} validations or more, "
        f"and there is room for {num} in {counted(num_steps, 'step')}"
    )


def warn_of_unused_patience(config: Config, cadence: Cadence) -> None:
    """Log what `describe_unused_patience` says, and what to do."""
    if why := describe_unused_patience(config, cadence):
        _log.warning("%s; %s", why, SHORTEN_PATIENCE)


def _describe_patience(config: Config, state: TrainerState) -> str:
    stopping, num = config.early_stopping, state.validations_without_improvement
    by = f" by more than {stopping.min_delta}" if stopping.min_delta else ""
    return (
        f"{stopping.metric} did not improve{by} in the last {counted(num, 'validation')} (early_stopping.patience is "
        f"{stopping.patience}). To train further, resume with early_stopping.patience={num + 1} or more"
    )


def _describe_forgetting(config: Config, state: TrainerState) -> str:
    holds = "the best weights before it"
    if state.best_step is None:
        keep = "set data.keep=5%" if config.data.keep is None else f"raise data.keep, which is {config.data.keep}"
        holds = f"these weights, since no validation was within it. Lower optim.learning_rate, or {keep}"
    return (
        f"the model diverges from its base by {state.forgotten:.3f} nats per token, and early_stopping.max_forgotten "
        f"is {config.early_stopping.max_forgotten}; adapter/ holds {holds}"
    )
