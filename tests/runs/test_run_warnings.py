"""Warnings about curves and rewards, on artificial runs."""

import math
import random

import pytest

from finetune.training.reporting.run_warnings import RunWarnings
from finetune.training.rewards.warnings import RewardWarnings
from tests.runs.made_runs import step_event

HEALTHY = {"reward": 0.5, "equal_groups": 0.5, "truncated": 0.1, "drawn_entropy": 1.0}


def said(losses, warnings=None, **changes):
    """(step, kind) of each warning over a curve."""
    warnings = warnings or RunWarnings()
    events = (step_event(step, loss, **changes) for step, loss in enumerate(losses, 1))
    return [(event["step"], found.name) for event in events if (found := warnings.take(event))]


def learning(num_steps, *, noise, seed, start=3.0, end=1.5):
    rng = random.Random(seed)
    level = (end + (start - end) * math.exp(-step / 60) for step in range(num_steps))
    return [max(value * (1 + rng.gauss(0, noise)), 0.0) for value in level]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.25, 0.4])
def test_a_run_that_learns_is_no_alarm_however_noisy(noise):
    assert [said(learning(1500, noise=noise, seed=seed)) for seed in range(12)] == [[]] * 12


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_a_loss_that_never_moves_is_flat(noise):
    rng = random.Random(1)
    found = said([2.5 * (1 + rng.gauss(0, noise)) for _ in range(600)])
    assert [kind for _, kind in found] == ["flat"]
    assert 150 <= found[0][0] <= 600


def test_a_run_that_has_learned_may_stay_where_it_is():
    assert said(learning(400, noise=0.05, seed=3) + [1.5] * 2000) == []


def test_a_slow_but_certain_fall_is_not_flat():
    rng = random.Random(2)
    assert said([3 - 0.002 * step + rng.gauss(0, 0.05) for step in range(600)]) == []


def test_a_loss_that_fell_in_its_first_steps_is_not_flat():
    assert said([*[3.0] * 5, *[2.9] * 600]) == []
    assert said([*[2.0] * 5, *[2.6] * 45, *[2.0] * 600]) == [], "the first steps were low by chance"


def test_a_rate_of_zero_is_named():
    warnings = RunWarnings()
    events = (step_event(step, 2.0, learning_rate=0.0) for step in range(1, 151))
    [found] = filter(None, map(warnings.take, events))
    assert "the learning rate is 0" in found.text


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_a_loss_that_grows_again_is_exploding(noise):
    rng = random.Random(4)
    grows = [1.5 * math.exp(0.05 * step) * (1 + rng.gauss(0, noise)) for step in range(60)]
    found = said(learning(300, noise=noise, seed=5) + grows)
    assert [kind for _, kind in found] == ["exploding"]
    assert 300 < found[0][0] <= 360


def test_a_run_that_explodes_from_its_first_steps_is_said():
    assert said([2.0, 2.1, 2.6, 4.0, 6.5, 8.0, 8.9, 9.5, *[10.0] * 40])[0][1] == "exploding"
    assert said([*[1.0] * 5, *[1.6] * 30])[0][1] == "exploding"


def test_one_bad_step_is_not():
    assert said([*learning(200, noise=0.05, seed=6), 12.0, *learning(50, noise=0.05, seed=7, start=1.6)]) == []


def test_steps_without_a_loss_are_passed_over():
    assert said([math.nan, "NaN", "Infinity", *learning(150, noise=0.05, seed=8)]) == []


def test_losses_of_skipped_steps_are_passed_over():
    warnings = RunWarnings()
    curve = [*learning(60, noise=0.05, seed=8), *[40.0] * 20]
    events = [step_event(step, loss, skipped=loss == 40.0) for step, loss in enumerate(curve, 1)]
    assert [warnings.take(event) for event in events] == [None] * 80


def test_a_small_rise_of_a_negative_loss_is_no_explosion():
    assert said([*[-3.0] * 30, *[-2.9] * 30]) == []
    assert [kind for _, kind in said([*[-3.0] * 30, *[-1.4] * 30])] == ["exploding"]


def interval(share):
    return {"event": "resources", "step": 10, "data_wait_share": share}


def test_a_loader_that_is_waited_for_twice_in_a_row_is_the_brake():
    warnings = RunWarnings()
    found = [bool(warnings.take(interval(share))) for share in (0.6, 0.1, 0.3, 0.3, 0.5)]
    assert found == [False, False, False, True, False]
    assert RunWarnings().take({"event": "resources", "step": 10}) is None


def test_what_an_earlier_start_has_said_is_not_said_again():
    warnings = RunWarnings()
    warnings.take({"event": "warning", "step": 100, "kind": "flat", "text": "…"})
    assert said([2.0] * 300, warnings) == []


def kinds(events):
    warnings = RewardWarnings()
    return [found.name for event in events if (found := warnings.take(event))]


def steps(count, **values):
    return [{"event": "step", "step": n, "loss": (-1) ** n / n, **HEALTHY, **values} for n in range(1, count + 1)]


def validation(reward):
    return {"event": "validation", "step": 1, "loss": -reward, "reward": reward}


def test_a_healthy_run_has_none_although_its_loss_is_about_0():
    assert kinds(steps(300)) == []


@pytest.mark.parametrize(("values", "kind"), [({"equal_groups": 0.95}, "equal"), ({"truncated": 0.6}, "truncated")])
def test_ten_bad_steps_are_said_once(values, kind):
    assert kinds(steps(9, **values)) == []
    assert kinds(steps(40, **values)) == [kind]


def test_a_warning_does_not_hide_the_others_and_causes_come_first():
    bad = {"equal_groups": 1.0, "truncated": 1.0}
    assert kinds(steps(40, **bad)) == ["truncated", "equal"]
    assert kinds([*steps(20, **bad), *steps(20, **bad, drawn_entropy=0.01)]) == ["truncated", "equal", "collapsed"]


def test_an_entropy_that_collapses():
    assert kinds([*steps(20), *steps(9, drawn_entropy=0.0)]) == []
    assert kinds([*steps(20), *steps(10, drawn_entropy=0.09)]) == ["collapsed"]
    assert kinds([*steps(20), *steps(10, entropy=0.09)]) == [], "that of the answers with an advantage alone"


def test_rewards_that_rise_while_validations_fall():
    def run(trained, validated):
        return [e for t, v in zip(trained, validated, strict=True) for e in (*steps(10, reward=t), validation(v))]

    assert kinds(run([0.4, 0.5, 0.6], [0.5, 0.45, 0.4])) == ["overfitted"]
    assert kinds(run([0.4, 0.5, 0.6], [0.5, 0.55, 0.54])) == []
    assert kinds(run([0.6, 0.5, 0.4], [0.5, 0.45, 0.4])) == []
    assert kinds(run([0.4, 0.41, 0.415], [0.5, 0.45, 0.4])) == kinds(run([0.4, 0.5, 0.6], [0.5, 0.49, 0.485])) == []
