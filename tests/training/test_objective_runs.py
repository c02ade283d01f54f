"""KTO, ORPO and SimPO as whole runs: exact on resume, one curve, and checks that say what to do."""

from __future__ import annotations

import json
import math
import random

import pytest

from finetune.cli.overrides import train_from_overrides
from finetune.replay.steps import LOSS_BOUNDS, replay_losses
from finetune.training.preferences.losses import KTO_METRICS, METRICS
from tests import tiny_training
from tests.in_process import run_finetune
from tests.launches import REPOSITORY, run_launched
from tests.tiny_runs import write_base
from tests.tiny_training import curve, events, record, refuse_to_differ_after_a_break, words_for

pytestmark = pytest.mark.warm

NAMES = ("kto", "orpo", "simpo")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Pairs in `rows`, and labelled answers in `labelled`."""
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base")
    rng = random.Random(0)
    for kind in ("rows", "labelled"):
        (folder / kind).mkdir()
    for split, count in (("train", 18), ("validation", 5)):
        pairs, labelled = [], []
        for number in range(count):
            prompt = f"{split} {number}: please send three crates of oranges to Porto by Friday?"
            answers = ["yes " * rng.randint(1, 3), "no " * rng.randint(1, 4)]
            pairs.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
            labelled.append({"prompt": prompt, "completion": answers[number % 2], "label": number % 2 == 0})
        for kind, rows in (("rows", pairs), ("labelled", labelled)):
            (folder / kind / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(inputs, run, name):
    rows = [f"data.path={inputs / 'labelled'}", "training.global_batch_size=8"] if name == "kto" else []
    lora = ["lora.r=4", "optim.learning_rate=1e-2", "optim.warmup_steps=0"]
    return [*words_for(inputs, run), f"task=finetune_{name}", *lora, *rows]


@pytest.fixture(scope="module", params=NAMES)
def trained(request, inputs, tmp_path_factory):
    run = tmp_path_factory.mktemp(request.param) / "run"
    train_from_overrides(words(inputs, run, request.param))
    return request.param, run


def test_a_run_learns_and_records_its_figures(trained):
    name, run = trained
    steps, validations = curve(run), events(run, "validation")
    assert steps[-1]["loss"] < steps[0]["loss"]
    again = replay_losses(run, 2)
    assert (again.mismatches, again.bound) == ([], LOSS_BOUNDS["fp32"]), "from its config.yaml, which names every key"
    assert validations[-1]["reward_margin"] > 0
    assert validations[-1]["reward_accuracy"] > 0.5
    figures = KTO_METRICS if name == "kto" else METRICS
    assert set(figures) <= steps[0].keys()
    if name == "kto":
        assert steps[0]["loss"] == pytest.approx(0.5, rel=1e-6), "an untrained adapter is the base"
        assert all(step["kl"] >= 0 for step in steps)
    if name == "simpo":
        assert math.isclose(steps[0]["reward_margin"], steps[0]["chosen_reward"] - steps[0]["rejected_reward"])


@pytest.mark.few(1)
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(trained, inputs, tmp_path, monkeypatch):
    name, run = trained
    monkeypatch.setattr(tiny_training, "train", train_from_overrides)
    refuse_to_differ_after_a_break(words(inputs, tmp_path, name), run, tmp_path / "broken")


@pytest.mark.few(1)
def test_a_run_has_one_curve_however_it_is_split_and_computed(trained, inputs, tmp_path):
    name, run = trained
    other = ["training.batch_size=1", "validation.batch_size=2", "training.kernels=reference"]
    train_from_overrides([*words(inputs, tmp_path / "run", name), *other])
    refuse_to_differ(run, tmp_path / "run")


TWO_PROCESSES = {
    "kto": ["parallel.gradient_sync=ddp", "parallel.sharding=fsdp2"],
    "orpo": ["parallel.gradient_sync=flat"],
}
"""KTO's estimate of the KL divergence is one more sum over all ranks. The other losses only differ by formula."""


@pytest.fixture(scope="module")
def shared(inputs, tmp_path_factory):
    """The folder of the runs of two processes, which train them one after the other."""
    folder = tmp_path_factory.mktemp("shared")
    told = []
    for name, ways in TWO_PROCESSES.items():
        for way in ways:
            told += ["--", "finetune.cli:main", "train", *words(inputs, folder / f"{name} {way}", name), way]
    done = run_launched("torchrun", [REPOSITORY / "tests/distributed/reporting_recipe.py", folder, *told[1:]])
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("trained", TWO_PROCESSES, indirect=True)
def test_two_processes_have_the_curve_of_one(trained, shared):
    name, run = trained
    for way in TWO_PROCESSES[name]:
        two = shared / f"{name} {way}"
        assert record(two)["world_size"] == 2
        refuse_to_differ(run, two)


def refuse_to_differ(one, other):
    for mine, theirs in zip(curve(one), curve(other), strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
    for mine, theirs in zip(events(one, "validation"), events(other, "validation"), strict=True):
        for figure in ("loss", *METRICS):
            assert theirs[figure] == pytest.approx(mine[figure], rel=1e-4, abs=1e-5), figure


def test_without_a_reference_every_weight_may_train(inputs, tmp_path):
    own = ["training.method=full", "optim.learning_rate=1e-3"]
    train_from_overrides([*words(inputs, tmp_path / "run", "simpo"), *own])
    losses = [step["loss"] for step in curve(tmp_path / "run")]
    assert losses[-1] < losses[0]
    assert (tmp_path / "run/adapter/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("kto", ["training.method=full"], "the reference of KTO is the base with its adapter switched off"),
        ("orpo", ["preference.gamma=1"], "training.objective is orpo, which does not read it: it belongs to simpo"),
    ],
)
def test_what_does_not_suit_an_objective_is_refused_before_anything_is_read(inputs, tmp_path, name, more, said):
    done = run_finetune("train", *words(inputs, tmp_path / "run", name), *more)
    assert done.returncode == 2
    assert said in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_label_is_true_or_false_in_any_spelling_and_nothing_else(inputs, tmp_path):
    rows = [{"prompt": f"a{n}", "completion": "b", "label": label} for n, label in enumerate(("True", 0, "maybe"))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_finetune("train", *words(inputs, tmp_path / "run", "kto"), f"data.path={tmp_path / 'rows.jsonl'}")
    assert done.returncode == 2
    assert "rows.jsonl:3: label is 'maybe'; expected true for a good answer or false for a bad one" in done.stdout
    assert "rows.jsonl:2" not in done.stdout


def test_weights_that_are_far_apart_are_warned_about(inputs, tmp_path):
    few = ["training.max_steps=1", "preference.desirable_weight=3"]
    done = run_finetune("train", *words(inputs, tmp_path / "run", "kto"), *few)
    assert done.returncode == 0, done.stdout
    assert "the 9 good answers have a weight of 27 in the loss and the 9 bad ones 9" in done.stdout


def test_a_preview_shows_the_labels(inputs):
    done = run_finetune("preview", *words(inputs, inputs / "run", "kto"), "--rows", "2", code=0)
    assert "labelled as a good answer" in done.stdout
    assert "labelled as a bad answer" in done.stdout


@pytest.mark.slow
def test_a_plan_runs_the_loss_of_the_run(inputs):
    done = run_finetune("plan", *words(inputs, inputs / "run", "kto"))
    assert done.returncode == 0, done.stdout
    assert "on preferences (KTO)" in done.stdout
    assert "18 rows" in done.stdout
