import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from finetune.config.compose import compose
from finetune.errors import ConfigError
from finetune.runs.metrics import FORGOTTEN
from finetune.runs.state import TrainerState
from finetune.training.cadence import Cadence, StopRules
from finetune.training.early_end import describe_unused_patience, record_early_end
from finetune.training.loop import early_stop
from finetune.training.resume import without_other_criteria
from finetune.training.validation import Criteria, Validated, after_validation, refuse_early_stopping


def after(losses, *, min_delta=0.0, patience=2):
    """The state after some validations, and whether training should stop after each."""
    state, stops = TrainerState(), []
    for step, loss in enumerate(losses, start=1):
        state = TrainerState(**{**state.as_record(), "step": step})
        state = after_validation(state, Validated(loss), Criteria(min_delta=min_delta))
        stops.append(early_stop(state, StopRules(patience)) == "no improvement")
    return state, stops


def test_patience_counts_validations_in_a_row_that_are_no_better():
    state, stops = after([3.0, 4.0, 2.0, 2.0, 3.0])
    assert stops == [False, False, False, False, True]
    assert (state.best_loss, state.best_step, state.validations_without_improvement) == (2.0, 3, 2)


def test_min_delta_counts_for_patience_and_not_for_the_best_weights():
    state, stops = after([3.0, 2.95, 2.91, 2.92], min_delta=0.1)
    assert (state.stopping_merit, stops) == (-3.0, [False, False, True, True])
    assert (state.best_loss, state.best_step) == (2.91, 3)
    assert without_other_criteria(state, Criteria(min_delta=0.1)) == state, "a resumed run compares with the same"
    assert after([3.0, 2.95, 2.89], min_delta=0.1)[1] == [False, False, False]
    assert after([3.0], min_delta=5.0)[0].best_step == 1


def test_patience_goes_on_with_the_value_that_an_older_checkpoint_kept_for_both():
    criteria = Criteria(min_delta=0.1)
    older = replace(after([3.0, 2.95], min_delta=0.1)[0], best_loss=3.0, best_step=1, stopping_merit=None)
    state = without_other_criteria(older, criteria)
    assert (state.stopping_merit, state.validations_without_improvement) == (-3.0, 1)
    state = after_validation(replace(state, step=3), Validated(2.91), criteria)
    assert (state.best_step, state.validations_without_improvement) == (3, 2)


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_a_loss_that_is_no_number_is_no_improvement(loss):
    state, stops = after([loss, loss])
    assert (state.best_loss, state.best_step, stops) == (None, None, [False, True])


def test_weights_beyond_the_bound_of_forgetting_end_a_run_and_are_never_the_best():
    rules = StopRules(criteria=Criteria(max_forgotten=0.5))
    state, stops = TrainerState(), []
    for step, (loss, forgotten) in enumerate([(3.0, 0.4), (2.0, 0.5), (1.0, 0.6)], start=1):
        state = after_validation(replace(state, step=step), Validated(loss, {FORGOTTEN: forgotten}), rules.criteria)
        stops.append(early_stop(state, rules))
    assert (state.best_step, state.best_loss, stops) == (2, 2.0, [None, None, "forgot too much"])


def test_the_loss_of_a_source_may_choose_the_best_weights():
    criteria, state = Criteria(best="loss/mine"), TrainerState()
    for step, loss in enumerate([math.nan, 3.0, 2.0, 2.5], start=1):
        state = after_validation(replace(state, step=step), Validated(9.0, {"loss/mine": loss}), criteria)
    assert (state.best_step, state.best_value) == (3, 2.0)


@pytest.mark.parametrize("key", ["early_stopping.patience", "early_stopping.max_forgotten"])
def test_only_a_run_with_validations_can_stop_early(key):
    without, rows = SimpleNamespace(validation=None), SimpleNamespace(validation=object())
    config = compose([f"{key}=2"], complete=False)
    refuse_early_stopping(config, rows)
    refuse_early_stopping(compose([], complete=False), without)
    with pytest.raises(ConfigError, match=rf"{key} is 2.* no validation split that could stop it"):
        refuse_early_stopping(config, without)


def test_without_patience_nothing_stops():
    assert not any(after([1.0] * 50, patience=None)[1])


def ended(reason, *words, state, num_steps=12, has_trained=True):
    """What is logged and recorded at the end of training."""
    journal = SimpleNamespace(result={})
    record_early_end(journal, compose(words, complete=False), state, reason, num_steps, has_trained)
    return journal.result.get("ended_early")


def test_a_run_that_patience_ended_says_so_and_how_it_goes_on(caplog):
    state, words = (
        after([3.0, 2.9, 2.8], min_delta=0.5)[0],
        ["early_stopping.patience=2", "early_stopping.min_delta=0.5"],
    )
    said = ended("no improvement", *words, state=state)
    assert said["reason"] == "no improvement"
    assert said["sentence"] == (
        "training ended after step 3 of 12: loss did not improve by more than 0.5 in the last 2 validations "
        "(early_stopping.patience is 2). To train further, resume with early_stopping.patience=3 or more."
    )
    assert caplog.messages == [said["sentence"]]
    longer = ended("no improvement", *words, state=replace(state, validations_without_improvement=5))
    assert longer["sentence"].endswith("To train further, resume with early_stopping.patience=6 or more.")
    again = ended("no improvement", *words, state=state, has_trained=False)
    assert again["sentence"].startswith("no step was trained: training had ended after step 3 of 12: loss did not")


def test_a_run_that_a_callback_ended_says_so():
    said = ended("stopped", state=TrainerState(step=4))
    assert (
        said["sentence"]
        == 'training ended after step 4 of 12: a callback returned "stop". This run cannot train further.'
    )


def test_only_forgetting_counts_as_an_early_end_after_the_last_step():
    state = TrainerState(step=12, forgotten=0.2, validations_without_improvement=2)
    assert ended("no improvement", "early_stopping.patience=2", state=state) is None
    said = ended("forgot too much", "early_stopping.max_forgotten=0.1", state=state)
    assert (
        "by 0.200 nats per token, and early_stopping.max_forgotten is 0.1; adapter/ holds these weights"
        in said["sentence"]
    )
    assert "set data.keep=5%" in said["sentence"]
    kept = ended("forgot too much", "early_stopping.max_forgotten=0.1", "data.keep=8%", state=state)
    assert "raise data.keep, which is 8%" in kept["sentence"]


@pytest.mark.parametrize(
    ("patience", "validate_every", "is_said"), [(3, 2, False), (4, 2, True), (1, 5, True), (1, 4, False)]
)
def test_a_patience_that_cannot_end_a_run_early_is_said(patience, validate_every, is_said):
    """Validations after steps 2, 4, 6, 8 and 10 are five. The first is an improvement, and the last ends the run."""
    words = [
        f"early_stopping.patience={patience}",
        f"validation.validate_every={validate_every}",
        "training.max_steps=10",
    ]
    config = compose(words, complete=False)
    said = describe_unused_patience(config, Cadence.of(config, 100))
    assert bool(said) is is_said
    losses = [3.0] * sum(map(Cadence.of(config, 100).validates_after, range(1, 11)))
    assert (True in after(losses, patience=patience)[1][:-1]) is not is_said
