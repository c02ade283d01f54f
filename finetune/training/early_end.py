"""Say why training ended before its last step, in the log and in run.json."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from finetune.units import counted

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.runs.state import TrainerState
    from finetune.training.reporting.journal import Journal

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
