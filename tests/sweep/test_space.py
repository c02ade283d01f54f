"""The values of a sweep are read as they were meant, and its draws are the same each time."""

from __future__ import annotations

import re

import pytest

from finetune.cli import sweep
from finetune.cli.sweep import _look_for_equal_trials
from finetune.errors import ConfigError
from finetune.sweep.space import draw_trials, read_space, read_values
from tests.in_process import run_finetune


def test_commas_separate_values_except_in_brackets_in_quotes_and_in_keys_that_take_a_list():
    tried = {
        "lora.r": "8, 16,32",
        "lora.target_modules": "[q_proj,v_proj],auto",
        "optim.learning_rate": "log(1e-5,1e-3)",
    }
    same = ["quickstart", "testing.metrics=[a,b]", "validation.metrics=exact_match,json_valid", 'data.path="a,b.jsonl"']
    assert read_space([*same, *(f"{key}={text}" for key, text in tried.items())]) == (same, tried)
    drawn = draw_trials({"lora.target_modules": "[a,b],auto"}, seed=0, num_trials=None)
    assert [trial["lora.target_modules"] for trial in drawn] == ["[a,b]", "auto"]

    drawn = draw_trials({"lora.r": "8,16", "seed": "1,2"}, seed=3, num_trials=None)
    assert drawn == [{"lora.r": r, "seed": s} for r in ("8", "16") for s in ("1", "2")]


def test_the_same_seed_draws_the_same_trials_and_more_trials_begin_with_them():
    space = {"lora.r": "8,16,32", "optim.learning_rate": "log(1e-5,1e-3)", "training.batch_size": "int(2,5)"}
    twelve = draw_trials(space, seed=1, num_trials=12)
    assert twelve == draw_trials(space, seed=1, num_trials=12)
    assert draw_trials(space, seed=1, num_trials=20)[:12] == twelve
    assert draw_trials(space, seed=2, num_trials=12) != twelve
    many = draw_trials(space, seed=0, num_trials=600)
    rates = [float(trial["optim.learning_rate"]) for trial in many]
    assert 1e-5 <= min(rates) < 1.2e-5
    assert 0.8e-3 < max(rates) <= 1e-3
    assert 0.4 < sum(rate < 1e-4 for rate in rates) / 600 < 0.6, "half of them are below the geometric mean"
    assert {trial["training.batch_size"] for trial in many} == {"2", "3", "4", "5"}
    assert {trial["lora.r"] for trial in many} == {"8", "16", "32"}
    pairs = draw_trials({"lora.r": "8,16", "seed": "int(1,3)"}, seed=0, num_trials=6)
    assert len({tuple(trial.values()) for trial in pairs}) == 6, "no combination is drawn twice"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("optim.learning_rate", "log(0,1)", "expected log(LOW,HIGH) with two numbers above 0"),
        ("optim.learning_rate", "uniform(1,1)", "the lower one first"),
        ("lora.r", "int(1,2.5)", "two whole numbers"),
        ("lora.r", "8,,16", "an empty value"),
        ("lora.r", "8,16,8", "a value twice"),
    ],
)
def test_values_that_cannot_be_read_are_refused(key, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_values(key, text)


def test_what_is_no_sweep_is_refused_with_all_problems():
    with pytest.raises(ConfigError, match="needs a key with several values"):
        read_space(["quickstart", "lora.r=8"])
    with pytest.raises(ConfigError) as refused:
        read_space(["lora.r=8,8", "output_dir=a,b", "seed=1,2", "seed=3,4"])
    assert len(str(refused.value).splitlines()) == 3
    assert """quotes around a value with commas: 'output_dir="a,b"'.""" in str(refused.value)
    assert read_space(["lora.r=8,16", 'output_dir="a,b"']) == (['output_dir="a,b"'], {"lora.r": "8,16"})
    with pytest.raises(ConfigError, match="needs --trials N"):
        draw_trials({"optim.learning_rate": "log(1e-5,1e-3)"}, seed=0, num_trials=None)
    with pytest.raises(ConfigError, match="--trials is 5, but these values have only 4 combinations"):
        draw_trials({"lora.r": "8,16", "seed": "1,2"}, seed=0, num_trials=5)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--only=3", "this sweep has the trials 1 to 2"),
        ("--halving=1", "give 2 or more"),
        ("--seed=0", "write seed=0 for the seed"),
    ],
)
def test_a_number_that_suits_no_sweep_is_refused_before_anything_is_read(option, message):
    assert message in run_finetune("sweep", "quickstart", "lora.r=4,8", option, code=2).errors


def test_a_key_that_no_trial_reads_is_refused_before_the_first():
    asked = ["quickstart", "lora.r=4,8", "training.method=full", "optim.learning_rate=1e-3,1e-4"]
    refused = run_finetune("sweep", *asked, code=2).errors
    assert "no trial was started: lora.r has no effect in any of them, because training.method is full." in refused


def test_trials_that_differ_only_in_a_key_without_effect_are_named(capsys):
    drawn = [{"lora.r": r, "training.method": method} for r in ("4", "8") for method in ("lora", "full")]
    unread = [{"lora.r": "it is full"} if trial["training.method"] == "full" else {} for trial in drawn]
    _look_for_equal_trials(drawn, unread, [{}] * 4)
    (said,) = capsys.readouterr().out.splitlines()
    assert said == (
        "trial-002 and trial-004 will be equal. They differ only in a key without effect there: lora.r, because it is "
        "full."
    )


def test_trials_whose_values_are_equal_are_named_with_what_was_written(capsys):
    drawn = [{"seed": seed, "optim.learning_rate": rate} for seed in ("1", "2") for rate in ("1e-3", "0.001", "1e-3")]
    _look_for_equal_trials(
        drawn, [{}] * 6, [{"seed": int(trial["seed"]), "optim.learning_rate": 0.001} for trial in drawn]
    )
    first, _ = capsys.readouterr().out.splitlines()
    same = "will be equal. Their values are the same: optim.learning_rate is 1e-3 and 0.001."
    assert first == f"trial-001 and trial-002 and trial-003 {same}"
    _look_for_equal_trials(drawn[:1] * 2, [{}] * 2, [{}] * 2)
    assert "Their values are the same: seed is 1; optim.learning_rate is 1e-3." in capsys.readouterr().out


def test_a_key_without_effect_in_all_trials_is_said_once_and_a_report_composes_one_trial(tmp_path, caplog, monkeypatch):
    composed: list[object] = []
    compose = sweep.config_from_overrides
    monkeypatch.setattr(sweep, "config_from_overrides", lambda *a, **k: composed.append(a) or compose(*a, **k))
    monkeypatch.setattr(sweep, "run_trials", lambda *a, **k: None)
    asked = ["quickstart", "optim.learning_rate=1e-3,2e-3,3e-3", "early_stopping.min_delta=0.1"]
    asked += [f"output_dir={tmp_path / 'sweep'}"]
    sweep.sweep_from_overrides(asked, num_trials=2)
    assert len(composed) == 2
    said = "set, but without effect in this run: early_stopping.min_delta=0.1 (command line)"
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["set"]
    assert caplog.records[0].getMessage().startswith(said)
    recorded = (tmp_path / "sweep/sweep.json").read_bytes()
    sweep.sweep_from_overrides(asked, num_trials=3, report_only=True)
    assert len(composed) == 3
    assert (tmp_path / "sweep/sweep.json").read_bytes() == recorded, "a report records nothing"
