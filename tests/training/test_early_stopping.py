import math

import pytest

from finetune.runs.state import TrainerState
from finetune.training.cadence import StopRules
from finetune.training.loop import early_stop
from finetune.training.validation import Criteria, Validated, after_validation


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


def test_less_than_min_delta_is_no_improvement():
    state, stops = after([3.0, 2.95, 2.91], min_delta=0.1)
    assert (state.best_loss, stops) == (3.0, [False, False, True])
    assert after([3.0, 2.85], min_delta=0.1)[0].best_loss == 2.85
    assert after([3.0], min_delta=5.0)[0].best_step == 1


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_a_loss_that_is_no_number_is_no_improvement(loss):
    state, stops = after([loss, loss])
    assert (state.best_loss, state.best_step, stops) == (None, None, [False, True])


def test_without_patience_nothing_stops():
    assert not any(after([1.0] * 50, patience=None)[1])
