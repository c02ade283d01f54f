"""Runs that stop and choose their weights by generated answers, where those and the loss disagree."""

from __future__ import annotations

import json
import os
import signal

import pytest

from finetune import load_config
from finetune.cli.overrides import train_from_overrides
from finetune.errors import ConfigError, DataError, PreemptedError
from finetune.inference import validation_answers
from finetune.runs.state import TrainerState
from finetune.training.hooks import Hooks
from finetune.training.resume import without_other_criteria
from finetune.training.setup import check_config
from finetune.training.training_run import TrainingRun
from finetune.training.validation import (
    Criteria,
    Validated,
    after_validation,
    check_metrics,
    refuse_rows_without_answers,
)
from tests import tiny_training
from tests.launches import run_launched
from tests.tiny_runs import write_base
from tests.tiny_training import (
    break_at,
    events,
    record,
    refuse_to_differ_after_a_break,
    train,
    words_for,
    write_inputs,
)

LOSSES, MATCHES = (0.9, 0.5, 0.7), (0.5, 0.25, 0.75)
DISAGREEING = [Validated(loss, {"exact_match": match}) for loss, match in zip(LOSSES, MATCHES, strict=True)]


def states(found, criteria):
    state, after = TrainerState(), []
    for step, one in enumerate(found, start=1):
        state = after_validation(TrainerState(**{**state.as_record(), "step": step}), one, criteria)
        after.append(state)
    return after


def test_the_best_weights_follow_the_metric_and_not_the_loss():
    by_loss = states(DISAGREEING, Criteria())[-1]
    assert (by_loss.best_step, by_loss.best_loss, by_loss.best_value) == (2, 0.5, None)
    by_match = states(DISAGREEING, Criteria(best="exact_match"))[-1]
    assert (by_match.best_step, by_match.best_loss, by_match.best_value) == (3, 0.7, 0.75)


def test_patience_counts_the_metric_that_stops_whatever_chooses_the_best():
    def counts(criteria):
        return [state.validations_without_improvement for state in states(DISAGREEING, criteria)]

    assert counts(Criteria()) == [0, 0, 1]
    assert counts(Criteria(stopping="exact_match")) == [0, 1, 0]
    assert counts(Criteria(best="exact_match")) == [0, 0, 1]
    assert counts(Criteria(best="exact_match", stopping="exact_match")) == [0, 1, 0]
    assert counts(Criteria(stopping="exact_match", min_delta=0.3)) == [0, 1, 2]


def test_values_of_another_metric_are_forgotten_and_those_of_the_same_are_kept(caplog):
    before = states(DISAGREEING, Criteria())[-1]
    assert without_other_criteria(before, Criteria()) == before
    assert not caplog.messages
    state = without_other_criteria(before, Criteria(best="exact_match"))
    assert (state.best_step, state.best_loss, state.best_value) == (None, None, None)
    assert (state.stopping_merit, state.validations_without_improvement) == (-0.5, 1)
    assert caplog.messages == [
        "checkpoint.best_metric is exact_match now and was loss: the best step so far, 2, is forgotten"
    ]
    state = after_validation(state, Validated(0.6, {"exact_match": 0.25}), Criteria(best="exact_match"))
    assert (state.best_step, state.best_value, state.validations_without_improvement) == (3, 0.25, 2)
    by_match = without_other_criteria(state, Criteria(best="exact_match", stopping="exact_match"))
    assert (by_match.best_value, by_match.validations_without_improvement) == (0.25, 0)
    assert caplog.messages[1:] == [
        "early_stopping.metric is exact_match now and was loss: validations without improvement are counted anew"
    ]


def config_of(*words):
    return load_config(["model=phi_tiny", "data=orders", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["early_stopping.metric=exact_match"],
            "early_stopping.metric is exact_match .* does not measure; it measures loss. Add validation.metrics",
        ),
        (
            ["validation.metrics=exact_match", "checkpoint.best_metric=exact_mach"],
            "checkpoint.best_metric is exact_mach .* it measures loss, exact_match. Did you mean exact_match",
        ),
        (
            ["validation.metrics=json_vald"],
            "validation.metrics is json_vald; expected one of exact_match, .* Did you mean json_valid",
        ),
        (
            ["validation.metrics=json.dumps"],
            "validation.metrics is json.dumps, but json is not allowed: .*validation.metrics_from=json",
        ),
        (
            ["task=finetune_preferences", "validation.metrics=exact_match"],
            "the rows of training.objective=dpo have no expected answer.* may be reward_accuracy or reward_margin",
        ),
    ],
)
def test_what_is_not_measured_is_refused_before_anything_is_read(words, said):
    with pytest.raises(ConfigError, match=said):
        check_config(config_of(*words))


def test_plain_text_has_no_answers_to_measure():
    with pytest.raises(DataError, match="measure answers by exact_match, but the validation rows are plain text"):
        refuse_rows_without_answers(["exact_match"], "text")
    refuse_rows_without_answers(["exact_match"], "messages")
    refuse_rows_without_answers([], "text")


def test_only_the_command_line_allows_a_module(tmp_path):
    (tmp_path / "run.yaml").write_text("validation: {metrics: [math.dist], metrics_from: [math]}\n")
    with pytest.raises(ConfigError, match="metrics would run here, so only the command line may allow it"):
        load_config(["model=phi_tiny", "data=orders"], run=str(tmp_path / "run.yaml"))
    words = ["validation.metrics=math.dist", "validation.metrics_from=math", "early_stopping.metric=math.dist"]
    assert list(check_metrics(config_of(*words), ())) == ["math.dist"]


def test_a_metric_of_the_script_replaces_ours_of_the_same_name():
    config = config_of("validation.metrics=exact_match")
    assert check_metrics(config, (), given={"exact_match": len, "mine": len}) == {"exact_match": len, "mine": len}


def test_a_metric_in_a_file_is_a_criterion(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text("def bleu(answer, expected): return float(len(answer))\n")
    monkeypatch.chdir(tmp_path)
    config = config_of("validation.metrics=./scores.py:bleu,exact_match", "checkpoint.best_metric=scores.bleu")
    metrics = check_metrics(config, ())
    assert list(metrics) == ["scores.bleu", "exact_match"]
    assert metrics["scores.bleu"]("four", "") == 4
    before = Hooks().fingerprints(config)
    assert before["validation.metrics"].startswith("scores.py ")
    (tmp_path / "scores.py").write_text("def bleu(answer, expected): return 1.0\n")
    after = Hooks().fingerprints(config)
    assert after.keys() == before.keys() == {"validation.metrics"}
    assert after != before
    assert Hooks().fingerprints(config_of("validation.metrics=exact_match")) == {}


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """All training rows have one short answer. So have most validation rows, but one has a long answer of its own.

    Most of the loss is the long answer's. The surer the model gets of the short one, the worse it gets there.
    """
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base")
    (folder / "rows").mkdir()
    for split, count in (("train", 16), ("validation", 8)):
        rows = [{"prompt": f"{split} {number}: oranges?", "completion": "yes"} for number in range(count)]
        if split == "validation":
            rows[3]["completion"] = "Marta Ruiz wants three crates of lemons in Porto by Friday, and no oranges at all."
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(inputs, run, *more):
    training = ["lora.r=4", "optim.learning_rate=1e-2", "optim.warmup_steps=0", "optim.schedule=constant"]
    asked = ["validation.metrics=exact_match,json_valid", "validation.num_samples=4", "validation.max_new_tokens=6"]
    steps = ["training.max_steps=24", "validation.validate_every=2", "checkpoint.save_every=2"]
    steps += ["checkpoint.save_total_limit=20"]
    return [*words_for(inputs, run), *training, *asked, *steps, *more]


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    train_from_overrides(words(inputs, run, "checkpoint.best_metric=exact_match"))
    return run


def best_of(run, name):
    """The first step with the best figure."""
    found = events(run, "validation")
    return (min if name == "loss" else max)(found, key=lambda event: event[name])["step"]


@pytest.mark.slow
def test_a_run_publishes_the_weights_that_answer_best_and_not_those_of_the_lowest_loss(trained):
    by_match, by_loss = best_of(trained, "exact_match"), best_of(trained, "loss")
    assert by_match < by_loss
    cut = "Validation: 4 of 4 answers did not end within 6 tokens (validation.max_new_tokens)"
    assert cut in (trained / "log.txt").read_text()
    result = record(trained)["result"]
    assert (result["best_step"], result["best_metric"], result["best_value"]) == (by_match, "exact_match", 1.0)
    weights = "adapter_model.safetensors"
    published = (trained / "adapter" / weights).read_bytes()
    assert published == (trained / f"checkpoints/step-{by_match:06d}" / weights).read_bytes()
    assert published != (trained / f"checkpoints/step-{by_loss:06d}" / weights).read_bytes()


@pytest.mark.slow
def test_a_run_that_answers_better_goes_on_although_its_loss_rises(trained, inputs, tmp_path):
    found = {event["step"]: event for event in events(trained, "validation")}
    rises = [step for step in found if step > 2 and found[step]["loss"] > found[step - 2]["loss"]]
    first = rises[0]
    assert found[first]["exact_match"] > found[first - 2]["exact_match"]
    train_from_overrides(words(inputs, tmp_path / "by_loss", "early_stopping.patience=1"))
    assert record(tmp_path / "by_loss")["result"]["step"] == first
    by_match = ["early_stopping.metric=exact_match", "early_stopping.patience=2"]
    train_from_overrides(words(inputs, tmp_path / "by_match", *by_match))
    assert first < record(tmp_path / "by_match")["result"]["step"] < 24


@pytest.mark.slow
def test_metrics_are_in_each_validation_and_in_the_record(trained):
    found = events(trained, "validation")
    assert [event["exact_match"] * 4 % 1 for event in found] == [0.0] * 12, "four rows were answered"
    assert all(event["json_valid"] == 0.0 and event["best_metric"] == "exact_match" for event in found)
    result = record(trained)["result"]
    assert result["validation_figures"] == {name: found[-1][name] for name in ("exact_match", "json_valid")}


@pytest.mark.slow
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(trained, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_training, "train", train_from_overrides)
    refuse_to_differ_after_a_break(
        words(inputs, tmp_path, "checkpoint.best_metric=exact_match"), trained, tmp_path / "broken"
    )
    assert events(tmp_path / "broken", "validation") == events(trained, "validation")
    assert record(tmp_path / "broken")["result"]["best_value"] == 1.0


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_while_it_answers_saves_and_validates_again(trained, inputs, tmp_path, monkeypatch):
    whole, calls = validation_answers.generate_answers, []

    def stopped(*args, **keys):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(validation_answers, "generate_answers", stopped)
        with pytest.raises(PreemptedError):
            train_from_overrides(words(inputs, tmp_path / "run", "checkpoint.best_metric=exact_match"))
    assert [event["step"] for event in events(tmp_path / "run", "validation")] == [2, 4]
    train_from_overrides(words(inputs, tmp_path / "run", "checkpoint.best_metric=exact_match"))
    assert events(tmp_path / "run", "validation") == events(trained, "validation")
    assert tiny_training.contents(tmp_path / "run/adapter") == tiny_training.contents(trained / "adapter")


@pytest.mark.slow
@pytest.mark.warm
def test_two_processes_have_the_metrics_of_one(trained, inputs, tmp_path):
    more = ["checkpoint.best_metric=exact_match", "parallel.sharding=fsdp2"]
    done = run_launched("torchrun", ["-m", "finetune", "train", *words(inputs, tmp_path / "two", *more)])
    assert done.returncode == 0, done.stdout
    assert record(tmp_path / "two")["world_size"] == 2
    for one, two in zip(events(trained, "validation"), events(tmp_path / "two", "validation"), strict=True):
        assert (one["exact_match"], one["json_valid"]) == (two["exact_match"], two["json_valid"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert record(tmp_path / "two")["result"]["best_step"] == record(trained)["result"]["best_step"]


@pytest.mark.slow
def test_a_validation_that_a_resumed_run_owes_is_recorded_once(tmp_path):
    words = words_for(write_inputs(tmp_path), tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "validate", lambda *_: None)  # as if a signal had come meanwhile
        with pytest.raises(PreemptedError):
            train(words)
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, 4)
        with pytest.raises(RuntimeError, match="power cut"):
            train(words)
    assert [event["step"] for event in events(tmp_path / "run", "validation")] == [3]
    train(words)
    assert [event["step"] for event in events(tmp_path / "run", "validation")] == [3, 4]
