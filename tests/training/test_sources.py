"""Losses of each source: the same with several processes, their mean is the whole, and a run can choose by one."""

from __future__ import annotations

import json

import pytest

from finetune import load_config
from finetune.cli.evaluate import evaluate_command as evaluate
from finetune.cli.overrides import train_from_overrides
from finetune.errors import ConfigError
from finetune.runs.view import RunView
from finetune.training.setup import check_config
from tests.in_process import run_finetune
from tests.launches import run_launched
from tests.tiny_runs import write_base
from tests.tiny_training import events, record, words_for

NAMES = ("short", "long")
LONG = "Marta Ruiz wants three crates of lemons in Porto by Friday, and no oranges at all."


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two sources with validation rows of their own. All training rows have the short answer of the first.

    A column divides the validation rows as the sources do.
    """
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base")
    for name, numbers in (("short", range(0, 16)), ("long", range(20, 24))):
        (folder / name).mkdir()
        for split, count in (("train", 1), ("validation", 3)):
            answer = LONG if name == "long" and split == "validation" else "yes"
            rows = [
                {"prompt": f"{split} {number}: oranges?", "completion": answer, "size": len(answer) > 9}
                for number in list(numbers)[::count]
            ]
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(inputs, run, *more):
    """The words of a run on both sources."""
    mixture = json.dumps([{"path": str(inputs / name)} for name in NAMES])
    return [
        *(word for word in words_for(inputs, run) if not word.startswith("data.path=")),
        f"data.mixture={mixture}",
        *("lora.r=4", "optim.learning_rate=1e-2", "optim.warmup_steps=0", "optim.schedule=constant"),
        *("training.max_steps=10", "validation.validate_every=2", "checkpoint.save_total_limit=20"),
        *("validation.metrics=exact_match", "validation.max_new_tokens=6", "testing.max_new_tokens=6"),
        "checkpoint.best_metric=loss/long",
        *more,
    ]


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    train_from_overrides(words(inputs, run))
    return run


def refuse_another_whole(event, names=NAMES):
    """The mean of the losses by target tokens is the loss of the whole."""
    total = sum(event[f"num_targets/{name}"] for name in names)
    assert total == event["num_targets"]
    mean = sum(event[f"loss/{name}"] * event[f"num_targets/{name}"] for name in names) / total
    assert mean == pytest.approx(event["loss"], rel=1e-12)


def test_the_mean_of_the_sources_is_the_whole_and_the_best_weights_are_those_of_one_source(trained):
    found = events(trained, "validation")
    for event in found:
        refuse_another_whole(event)
    by_long, by_whole = (min(found, key=lambda event: event[name])["step"] for name in ("loss/long", "loss"))
    assert found[-1]["loss/short"] < found[0]["loss/short"]
    assert found[-1]["loss/long"] > found[0]["loss/long"]
    result = record(trained)["result"]
    assert (result["best_step"], result["best_metric"]) == (by_long, "loss/long")
    assert result["best_value"] == min(event["loss/long"] for event in found)
    assert by_long < found[-1]["step"], by_whole
    assert (found[-1]["exact_match/short"], found[-1]["exact_match/long"]) == (1.0, 0.0)


def test_a_column_gives_the_losses_of_the_sources_that_it_divides_alike(trained, inputs, tmp_path):
    by_column = ["validation.by=size", "checkpoint.best_metric=loss/true", "early_stopping.metric=loss/true"]
    train_from_overrides(words(inputs, tmp_path / "run", *by_column, "early_stopping.patience=1"))
    for one, other in zip(events(trained, "validation"), events(tmp_path / "run", "validation"), strict=False):
        refuse_another_whole(other, ("true", "false"))
        for name, value in (("short", "false"), ("long", "true")):
            for metric in ("loss", "standard_error", "num_targets", "exact_match"):
                assert one[f"{metric}/{name}"] == other[f"{metric}/{value}"]
    losses = [event["loss/long"] for event in events(trained, "validation")]
    rises = next(place for place in range(1, len(losses)) if losses[place] >= min(losses[:place]))
    assert record(tmp_path / "run")["result"]["step"] == 2 * (rises + 1), "it stopped where this loss first rose"


@pytest.mark.slow
@pytest.mark.warm
def test_two_processes_have_the_losses_of_one(trained, inputs, tmp_path):
    more = ["validation.batch_size=2", "training.batch_size=2"]
    done = run_launched("torchrun", ["-m", "finetune", "train", *words(inputs, tmp_path / "two", *more)])
    assert done.returncode == 0, done.stdout
    assert record(tmp_path / "two")["world_size"] == 2
    for one, two in zip(events(trained, "validation"), events(tmp_path / "two", "validation"), strict=True):
        refuse_another_whole(two)
        for name in ("loss", *(f"loss/{name}" for name in NAMES)):
            assert two[name] == pytest.approx(one[name], rel=1e-6, abs=1e-6)
        assert [two[f"exact_match/{name}"] for name in NAMES] == [one[f"exact_match/{name}"] for name in NAMES]


def test_evaluate_measures_each_source_of_a_split(trained, capsys):
    at_best = next(
        event for event in events(trained, "validation") if event["step"] == record(trained)["result"]["best_step"]
    )
    evaluate(trained, [], split="validation", metric=["exact_match"], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert list(found["sources"]) == list(NAMES)
    for name in NAMES:
        source = found["sources"][name]
        assert source["num_targets"] == at_best[f"num_targets/{name}"]
        assert source["tuned"]["loss"] == pytest.approx(at_best[f"loss/{name}"], rel=1e-6)
        assert source["tuned"]["standard_error"] == pytest.approx(at_best[f"standard_error/{name}"], rel=1e-4)
        assert source["tuned"]["exact_match"] == at_best[f"exact_match/{name}"]
        assert source["base"]["loss"] > 0
    evaluate(trained, ["validation.by=size"], split="validation", metric=["exact_match"])
    assert "true" in capsys.readouterr().out


@pytest.mark.process
def test_the_report_and_the_view_show_each_source_and_each_metric(trained, tmp_path):
    view = RunView()
    for event in events(trained, "validation"):
        view.take(event)
    last = events(trained, "validation")[-1]
    assert f"loss/short {last['loss/short']:.4f} · loss/long {last['loss/long']:.4f}" in view.validation_line()
    best = min(event["loss/long"] for event in events(trained, "validation"))
    assert f"best loss/long {best:.3f} at step" in view._validated()
    pytest.importorskip("vl_convert")
    done = run_finetune("report", trained, "--output", tmp_path / "page.html")
    assert done.returncode == 0, done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "Validation loss of each source" in page
    assert "Exact match" in page


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["early_stopping.metric=loss/lonk"],
            "loss, exact_match, loss/short, exact_match/short, loss/long, exact_match/long. Did you mean loss/long?",
        ),
        (["validation.num_samples=1", "checkpoint.best_metric=exact_match/long"], "does not measure"),
    ],
)
def test_an_unknown_source_is_refused_before_the_folder_of_the_run_is_made(inputs, tmp_path, more, said):
    with pytest.raises(ConfigError) as caught:
        train_from_overrides(words(inputs, tmp_path / "run", "checkpoint.best_metric=loss", *more))
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["early_stopping.metric=loss/long"], "early_stopping.metric is loss/long (overrides), which this run does"),
        (["validation.by=size", "task=finetune_preferences"], "validation.by is size (overrides), but the"),
    ],
)
def test_a_run_without_sources_refuses_them_before_anything_is_read(more, said):
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(["model=phi_tiny", "data=orders", *more]))
    assert said in str(caught.value)
