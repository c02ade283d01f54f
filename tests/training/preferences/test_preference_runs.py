"""DPO as whole runs: exact on resume, under two processes, and a plain adapter in the end."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

import finetune
from finetune import (
    Trainer,
    add_lora,
    build_base_model,
    build_tokenizer,
    encode_preferences,
    launch,
    load_config,
)
from finetune.cli.overrides import train_from_overrides
from finetune.errors import ConfigError
from finetune.runs.record import digest_of
from finetune.training.preferences.losses import METRICS
from finetune.training.training_run import TrainingRun
from tests import tiny_training
from tests.in_process import run_finetune
from tests.launches import REPOSITORY, run_launched
from tests.tiny import tiny_tokenizer
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import (
    contents,
    curve,
    events,
    logits_of,
    plain_logits,
    record,
    refuse_to_differ_after_a_break,
    words_for,
)

pytestmark = pytest.mark.warm

WORDS = ["task=finetune_preferences", "lora.r=4", "optim.learning_rate=1e-2", "optim.warmup_steps=0"]
WORDS += ["validation.batch_size=2"]  # so that each of two processes has a batch


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base")
    (folder / "rows").mkdir()
    rng = random.Random(0)
    for split, count in (("train", 18), ("validation", 4)):
        rows = [
            {
                "prompt": f"{split} {number}: please send three crates of oranges to Porto by Friday?",
                "chosen": "yes " * rng.randint(1, 3),
                "rejected": "no " * rng.randint(1, 4),
            }
            for number in range(count)
        ]
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def keep_figures(patch):
    """Return a list that gets the loss and the other metrics of each step."""
    found, report = [], TrainingRun.report

    def reporting(self, state, result):
        found.append((result.loss, dict(result.metrics)))
        report(self, state, result)

    patch.setattr(TrainingRun, "report", reporting)
    return found


def train(words):
    """The recipe's lines."""
    config = load_config(words)
    with launch(config) as runtime, pytest.MonkeyPatch.context() as patch:
        tokenizer = build_tokenizer(config.model)
        splits = encode_preferences(config.data, tokenizer, fallbacks=runtime.fallbacks)
        model = add_lora(build_base_model(config.model), config.lora)
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.figures = keep_figures(patch)
        trainer.run_training(train_loader, val_loader)
        return trainer


@pytest.fixture(scope="module")
def trainer(inputs, tmp_path_factory):
    return train([*words_for(inputs, tmp_path_factory.mktemp("trained") / "run"), *WORDS])


@pytest.fixture(scope="module")
def trained(trainer):
    return trainer.journal.folder.path, logits_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_run_with_new_tokens_starts_at_log_2_and_resumes_with_the_same_reference(tmp_path, is_tied):
    """The base has rows in reserve, as the Phi models do. The rows of new tokens begin elsewhere."""
    write_base(tmp_path / "base", vocab_size=len(tiny_tokenizer()) + 9, tie_word_embeddings=is_tied)
    (tmp_path / "rows").mkdir()
    rows = [
        {"prompt": f"{number} <o>?", "chosen": f"<o> {'yes ' * (number % 3)}", "rejected": f"no <o><o> {number}"}
        for number in range(18)
    ]
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(run, num_steps):
        words = [*words_for(tmp_path, tmp_path / run), *WORDS, "lora.new_tokens=['<o>']", "optim.schedule=constant"]
        train_from_overrides([*words, f"training.max_steps={num_steps}"])
        return [step["loss"] for step in curve(tmp_path / run)]

    whole = train("whole", 2)
    assert whole[0] == pytest.approx(math.log(2), rel=1e-6)
    train("cut", 1)
    assert train("cut", 2) == whole
    log = tmp_path / "cut" / "log.txt"
    assert "against a reference with other rows" not in log.read_text()
    earlier = record(tmp_path / "cut")
    del earlier["fingerprints"]["reference"]
    (tmp_path / "cut" / "run.json").write_text(json.dumps(earlier))
    train("cut", 3)
    assert "against a reference with other rows" in log.read_text()


@pytest.mark.slow
def test_a_run_starts_at_log_2_and_learns_to_prefer(trained, inputs, tmp_path):
    run, ours = trained
    losses = [step["loss"] for step in curve(run)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] < losses[0] - 0.05
    validations = [event["loss"] for event in events(run, "validation")]
    assert validations[-1] < math.log(2)
    assert [step["num_targets"] for step in curve(run)] == [8, 8, 2, 8], "a step's targets are its pairs"
    assert record(run)["result"]["shared_tokens"] > 0.2, "prompts are computed once"
    plain = plain_logits(tmp_path, {"tuned": (inputs / "base", run / "adapter", 0)})
    torch.testing.assert_close(plain["tuned"], ours, rtol=1e-5, atol=1e-5)


def described_metrics(run):
    lines = [line.partition("Validation: ")[2] for line in (run / "log.txt").read_text().splitlines()]
    return [line for line in lines if line.startswith("chosen_reward=")]


def test_rewards_begin_at_nothing_and_the_chosen_ones_end_above_the_rejected(trainer, trained):
    (_, first), *_, (_, last) = trainer.figures
    assert [*first] == [*METRICS]
    assert [*first.values()] == pytest.approx([0, 0, 0, 0.5], abs=1e-5)
    assert last["reward_accuracy"] > 0.5
    for _, figures in trainer.figures:
        difference = figures["chosen_reward"] - figures["rejected_reward"]
        assert figures["reward_margin"] == pytest.approx(difference, abs=1e-9)
    validated = trainer.validation_metrics
    assert validated["reward_margin"] > 0
    assert {name: events(trained[0], "validation")[-1][name] for name in METRICS} == validated
    assert [{name: step[name] for name in METRICS} for step in curve(trained[0])] == [f for _, f in trainer.figures]
    said = described_metrics(trained[0])
    assert said[-1] == ", ".join(f"{name}={value:.3f}" for name, value in validated.items())


def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(trained, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_training, "train", train)
    refuse_to_differ_after_a_break([*words_for(inputs, tmp_path), *WORDS], trained[0], tmp_path / "broken")


def test_the_command_trains_pairs_and_writes_what_the_trainer_writes(trained, inputs, tmp_path):
    train_from_overrides([*words_for(inputs, tmp_path / "run"), *WORDS])
    for folder in ("checkpoints/step-000002", "checkpoints/step-000004", "adapter"):
        assert contents(tmp_path / "run" / folder) == contents(trained[0] / folder), folder
    assert curve(tmp_path / "run") == curve(trained[0])
    assert (tmp_path / "run/config.yaml").read_text().count("objective: dpo") == 1


@pytest.mark.parametrize("name", ["PreferenceTrainer", "RewardTrainer"])
def test_the_older_trainers_name_the_one_that_is_left(name):
    with pytest.raises(ImportError, match=rf"has no {name}. Use Trainer: training.objective says"):
        getattr(finetune, name)


def test_evaluate_asks_for_rows_with_one_answer(trained, inputs, tmp_path):
    done = run_finetune("evaluate", trained[0])
    assert done.returncode == 2
    assert "was trained on pairs of answers, and evaluate measures rows with one answer" in done.stdout
    rows = write_rows(tmp_path / "rows")
    done = run_finetune("evaluate", trained[0], f"data.path={rows}", "--split", "validation", "--json")
    assert done.returncode == 0, done.stdout
    assert set(json.loads(done.answer)) > {"base", "tuned"}


def test_evaluate_measures_suites_alone(trained, tmp_path):
    """Of a run whose rows it cannot measure, and of any other one that is asked for no rows."""
    suite = tmp_path / "own.jsonl"
    rows = [{"prompt": text, "refused": False} for text in ("send oranges", "send crates to Porto")]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["evaluate", trained[0], "--suite", suite, "testing.max_new_tokens=4", "testing.general_prompts=none"]
    files = [tmp_path / "scores.json", tmp_path / "scores.md"]
    done = run_finetune(*words, "--output", files[0], "--markdown", files[1], "--fail-if-worse", "suite_own:1")
    assert done.returncode == 0, done.stdout
    assert "was trained on pairs of answers, so only the suites are measured" in done.stdout
    assert "loss" not in done.answer
    scores = json.loads(files[0].read_text())
    assert (scores["split"], scores["num_rows"], scores["tuned"]["loss"]) == ("none", 0, None)
    assert scores["verdict"].keys() == {"suite_own"}
    assert [row["prompt"] for row in scores["rows"]] == [row["prompt"] for row in rows]
    text = files[1].read_text()
    assert ", suites\n" in text
    assert "loss" not in text
    against = finetune.evaluate(trained[0], suites=[str(suite)], against=trained[0], overrides=words[4:])
    assert against.verdicts["suite_own"].num_equal == 2
    for more, reason in (
        (["--fail-if-worse", "loss"], "--fail-if-worse is loss; expected one of suite_own"),
        (["--split", "none", "--metric", "exact_match"], "Drop --metric exact_match, which needs rows"),
        (["--split", "validation"], "or only suites with --suite NAME"),
    ):
        done = run_finetune(*words, *more)
        assert done.returncode == 2
        assert reason in " ".join(done.stdout.split())
    done = run_finetune("evaluate", trained[0], "--split", "none")
    assert "there is none. Give --suite NAME" in " ".join(done.stdout.split())


COMMAND = ["-m", "finetune", "train"]
RECIPE = [REPOSITORY / "recipes/finetune_preferences.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "program", "sync"),
    [
        ("torchrun", RECIPE, "flat"),
        ("python", [*COMMAND, "parallel.num_processes=2"], "ddp"),
    ],
    ids=["recipe-flat", "spawn-ddp"],
)
def test_pairs_give_one_curve_as_one_process_and_as_two(trained, inputs, tmp_path, launcher, program, sync):
    """In the last step of an epoch one of the two has no pair."""
    words = [*words_for(inputs, tmp_path / "two"), *WORDS, f"parallel.gradient_sync={sync}"]
    done = run_launched(launcher, [*program, *words])
    assert done.returncode == 0, done.stdout
    assert record(tmp_path / "two")["world_size"] == 2
    for one, two in zip(curve(trained[0]), curve(tmp_path / "two"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
        assert [one[name] for name in METRICS] == pytest.approx([two[name] for name in METRICS], rel=1e-5, abs=1e-6)
    for one, two in zip(events(trained[0], "validation"), events(tmp_path / "two", "validation"), strict=True):
        assert [one[name] for name in METRICS] == pytest.approx([two[name] for name in METRICS], rel=1e-5, abs=1e-6)
    assert described_metrics(trained[0]) == described_metrics(tmp_path / "two") != []


def test_a_reference_that_is_not_the_base_is_refused(inputs, tmp_path):
    config = load_config([*words_for(inputs, tmp_path / "run"), *WORDS, "lora.start_from=x"])
    splits = encode_preferences(config.data, build_tokenizer(config.model))
    with launch(config) as runtime, pytest.raises(ConfigError, match="Merge that adapter into its base first"):
        Trainer(runtime, config, None, None, splits)


def test_a_run_on_pairs_that_is_older_than_the_objective_goes_on_with_the_same_bytes(trained, inputs, tmp_path):
    def forget_objective(folder):
        file = folder / "config.yaml"
        file.write_text(file.read_text().replace("  objective: dpo\n", ""))
        older = record(folder)
        del older["started_with"]["config"]["training"]["objective"]
        del older["started_with"]["sha256"]
        older["started_with"]["sha256"] = digest_of(older["started_with"])
        (folder / "run.json").write_text(json.dumps(older))

    words = [*words_for(inputs, tmp_path / "broken"), *WORDS]
    with pytest.MonkeyPatch.context() as patch:
        tiny_training.break_at(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            train(words)
    forget_objective(tmp_path / "broken")
    train_from_overrides(words)
    log = (tmp_path / "broken/log.txt").read_text()
    assert "resumed from step=2" in log
    assert "could not be compared: training.objective" in log
    assert contents(tmp_path / "broken/adapter") == contents(trained[0] / "adapter")


def test_rows_of_another_objective_are_refused(inputs, tmp_path):
    config = load_config([*words_for(inputs, tmp_path / "run"), *WORDS, "training.objective=sft"])
    pairs = encode_preferences(config.data, build_tokenizer(config.model))
    with launch(config) as runtime, pytest.raises(ConfigError, match="the rows are encoded for dpo or orpo or simpo"):
        Trainer(runtime, config, None, None, pairs)
