"""Warnings about runs that learn from rewards, on artificial curves."""

from __future__ import annotations

import pytest

from finetune.training.reporting.curve_warnings import CurveWarnings

HEALTHY = {"reward": 0.5, "equal_groups": 0.5, "truncated": 0.1, "entropy": 1.0}


def kinds(events):
    warnings = CurveWarnings()
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


def test_an_entropy_that_collapses():
    assert kinds([*steps(20), *steps(9, entropy=0.0)]) == []
    assert kinds([*steps(20), *steps(10, entropy=0.09)]) == ["collapsed"]


def test_rewards_that_rise_while_validations_fall():
    def run(trained, validated):
        return [e for t, v in zip(trained, validated, strict=True) for e in (*steps(10, reward=t), validation(v))]

    assert kinds(run([0.4, 0.5, 0.6], [0.5, 0.45, 0.4])) == ["overfitted"]
    assert kinds(run([0.4, 0.5, 0.6], [0.5, 0.55, 0.54])) == []
    assert kinds(run([0.6, 0.5, 0.4], [0.5, 0.45, 0.4])) == []
