"""DPO as whole runs: exact on resume, under two processes, and a plain adapter in the end."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from finetune import (
    PreferenceTrainer,
    add_lora,
    build_base_model,
    build_tokenizer,
    encode_preferences,
    launch,
    load_config,
)
from finetune.errors import ConfigError
from finetune.training.preference import FIGURES
from tests.launches import REPOSITORY, run_launched
from tests.methods import tiny_training
from tests.methods.tiny_training import (
    curve,
    events,
    logits_of,
    plain_logits,
    record,
    refuse_to_differ_after_a_break,
    words_for,
)
from tests.tiny_runs import write_base

WORDS = ["task=finetune_preferences", "lora.r=4", "optim.learning_rate=1e-2", "optim.warmup_steps=0"]


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


class Watched(PreferenceTrainer):
    """Keeps what each step found beside the loss."""

    def _report(self, state, result):
        vars(self).setdefault("figures", []).append((result.loss, dict(result.figures)))
        super()._report(state, result)


def train(words):
    """The recipe's lines."""
    config = load_config(words)
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = encode_preferences(config.data, tokenizer, fallbacks=runtime.fallbacks)
        model = add_lora(build_base_model(config.model), config.lora)
        trainer = Watched(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        return trainer


@pytest.fixture(scope="module")
def trainer(inputs, tmp_path_factory):
    return train([*words_for(inputs, tmp_path_factory.mktemp("trained") / "run"), *WORDS])


@pytest.fixture(scope="module")
def trained(trainer):
    return trainer.journal.folder.path, logits_of(trainer)


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


def figures_in_words(run):
    lines = [line.partition("Validation: ")[2] for line in (run / "log.txt").read_text().splitlines()]
    return [line for line in lines if line.startswith("chosen_reward=")]


def test_rewards_begin_at_nothing_and_the_chosen_ones_end_above_the_rejected(trainer, trained):
    (_, first), *_, (_, last) = trainer.figures
    assert [*first] == [*FIGURES]
    assert [*first.values()] == pytest.approx([0, 0, 0, 0.5], abs=1e-5)
    assert last["reward_accuracy"] > 0.5
    for _, figures in trainer.figures:
        difference = figures["chosen_reward"] - figures["rejected_reward"]
        assert figures["reward_margin"] == pytest.approx(difference, abs=1e-9)
    validated = trainer.validation_figures
    assert validated["reward_margin"] > 0
    assert {name: events(trained[0], "validation")[-1][name] for name in FIGURES} == validated
    assert [{name: step[name] for name in FIGURES} for step in curve(trained[0])] == [f for _, f in trainer.figures]
    said = figures_in_words(trained[0])
    assert said[-1] == ", ".join(f"{name}={value:.3f}" for name, value in validated.items())


def test_figures_do_not_depend_on_the_cut_into_micro_batches(trainer, inputs, tmp_path):
    other = train([*words_for(inputs, tmp_path / "run"), *WORDS, "training.batch_size=1", "validation.batch_size=1"])
    pairs = zip(trainer.figures, other.figures, strict=True)
    for (loss, figures), (other_loss, other_figures) in pairs:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_figures == pytest.approx(figures, rel=1e-4, abs=1e-5)
    assert other.validation_figures == pytest.approx(trainer.validation_figures, rel=1e-4, abs=1e-5)


def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(trained, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_training, "train", train)
    refuse_to_differ_after_a_break([*words_for(inputs, tmp_path), *WORDS], trained[0], tmp_path / "broken")


def test_the_model_s_own_forward_gives_the_curve_of_the_engine(trained, inputs, tmp_path):
    train([*words_for(inputs, tmp_path / "run"), *WORDS, "training.kernels=reference"])
    for one, other in zip(curve(tmp_path / "run"), curve(trained[0]), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.launch
@pytest.mark.parametrize("sync", ["flat", "ddp"])
def test_the_recipe_gives_one_curve_as_one_process_and_as_two(trained, inputs, tmp_path, sync):
    """In the last step of an epoch one of the two has no pair."""
    words = [*words_for(inputs, tmp_path / "two"), *WORDS, f"parallel.gradient_sync={sync}"]
    done = run_launched("torchrun", [REPOSITORY / "recipes/finetune_preferences.py", *words])
    assert done.returncode == 0, done.stdout
    for one, two in zip(curve(trained[0]), curve(tmp_path / "two"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
        assert [one[name] for name in FIGURES] == pytest.approx([two[name] for name in FIGURES], rel=1e-5, abs=1e-6)
    for one, two in zip(events(trained[0], "validation"), events(tmp_path / "two", "validation"), strict=True):
        assert [one[name] for name in FIGURES] == pytest.approx([two[name] for name in FIGURES], rel=1e-5, abs=1e-6)
    assert figures_in_words(trained[0]) == figures_in_words(tmp_path / "two") != []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["training.method=full"], "the reference of DPO is the base with its adapter"),
        (["lora.start_from=x"], "Merge that adapter into its base first"),
    ],
)
def test_a_reference_that_is_not_the_base_is_refused(inputs, tmp_path, words, said):
    config = load_config([*words_for(inputs, tmp_path / "run"), *WORDS, *words])
    splits = encode_preferences(config.data, build_tokenizer(config.model))
    with launch(config) as runtime, pytest.raises(ConfigError, match=said):
        PreferenceTrainer(runtime, config, None, None, splits)
