"""The memory of validations and of the test phase, as `finetune plan` predicts it, against what they really take."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from finetune.cli.plan import plan_from_overrides
from finetune.config.compose import load_config
from finetune.diagnose.plan_devices import find_device
from finetune.diagnose.planner import make_plan
from finetune.distributed.launch import launch
from finetune.inference import decoding, evaluation
from finetune.training.train import build_trainer
from tests.diagnose.measured import peak_of
from tests.diagnose.test_plan_memory import SIZES
from tests.tiny_models import PHI3_SIZES
from tests.tiny_runs import MODEL_VOCABULARY, write_base

pytestmark = pytest.mark.slow

WIDE = {**PHI3_SIZES, **SIZES, "vocab_size": MODEL_VOCABULARY, "num_hidden_layers": 12, "sliding_window": None}
MODELS = {
    name: f"model.config={json.dumps({'model_type': name, **WIDE, **more})}"
    for name, more in {"phi3": {}, "gemma2": {"head_dim": 24, "sliding_window": 4096}}.items()
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Rows of different lengths, longer in validation and test than in training, as answers and as pairs."""
    folder, rng = tmp_path_factory.mktemp("evaluation"), random.Random(0)
    write_base(folder / "base")

    def some(most: int) -> str:
        return " ".join(rng.choices(["crates", "of", "oranges", "to", "Porto"], k=rng.randint(most // 2, most)))

    for kind, names in {"answers": ["completion"], "pairs": ["chosen", "rejected"]}.items():
        (folder / kind).mkdir()
        for split, (count, most) in {"train": (8, 10), "validation": (13, 60), "test": (11, 60)}.items():
            rows = [{"prompt": some(most), **{name: some(most) for name in names}} for _ in range(count)]
            (folder / kind / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def words(inputs, tmp_path):
    return [
        *(f"model.tokenizer={inputs / 'base'}", f"data.path={inputs / 'answers'}", "model.init=random"),
        *(MODELS["phi3"], f"data.cache_dir={tmp_path / 'cache'}"),
        *(f"output_dir={tmp_path / 'run'}", "lora.r=4", "training.batch_size=4", "training.max_steps=1"),
        *("training.device=cpu", "training.precision=fp32", "testing.num_samples=0"),
    ]


@pytest.mark.parametrize(
    "more",
    [
        ["training.gradient_checkpointing=true", "validation.batch_size=3", MODELS["gemma2"]],
        ["task=finetune_preferences"],
    ],
    ids=lambda more: more[-1].partition("{")[0],
)
def test_the_loss_of_a_validation_takes_the_planned_memory(words, inputs, more):
    if "task=finetune_preferences" in more:
        words = [*words, f"data.path={inputs / 'pairs'}"]
    config = load_config([*words, *more])
    found = make_plan(config, find_device("cpu")).evaluating["validation"]
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        _, loader, _ = trainer.prepare_dataloaders()
        measured = peak_of(lambda: trainer.measure(loader))
    held = sum(found.peak.parts[part] for part in ("weights", "adapter", "optimizer"))
    assert (found.peak.parts["gradients"], found.rows) == (0, config.validation.batch_size)
    assert found.peak.total - held == pytest.approx(measured, rel=0.10)


def test_the_answers_of_a_test_phase_take_the_planned_memory(words, monkeypatch):
    """The bound has room for one of twelve layers: the engine's peak comes before the last layer has a cache."""
    monkeypatch.setattr(decoding, "stop_ids", lambda *_: [-1])  # every answer is as long as it may be
    more = [MODELS["gemma2"], "testing.num_samples=11", "testing.batch_size=8", "testing.max_new_tokens=24"]
    config = load_config([*words, *more, "testing.compare_base=false"])
    found = make_plan(config, find_device("cpu")).evaluating["testing"].generating
    measured = []
    generate = evaluation.generate_answers

    def measure(*args, **options):
        answers = []
        measured.append(peak_of(lambda: answers.extend(generate(*args, **options))))
        return answers

    monkeypatch.setattr(evaluation, "generate_answers", measure)
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        _, _, loader = trainer.prepare_dataloaders()
        evaluation.run_test_phase(runtime, trainer.model, trainer.tokenizer, loader, config.testing)
    assert found.answers == 8
    assert found.total - found.held == pytest.approx(*measured, rel=0.10)


@pytest.mark.needs("schedulefree")
def test_a_schedule_free_optimizer_keeps_the_trained_weights_in_a_validation(words):
    plans = [
        make_plan(load_config([*words, "optim.schedule=constant", f"optim.optimizer={name}"]), find_device("cpu"))
        for name in ("torch.optim.AdamW", "schedulefree.AdamWScheduleFree")
    ]
    trained = 4 * plans[0].trainable_parameters
    plain, kept = (plan.evaluating["validation"].peak.parts["optimizer"] for plan in plans)
    assert kept - plain == pytest.approx(trained, abs=1000)  # AdamW counts its steps in a tensor for each weight
    assert plans[0].peak.parts["optimizer"] == pytest.approx(plans[1].peak.parts["optimizer"], abs=1000)


def test_a_phase_that_takes_more_than_training_decides_what_fits(words):
    shallow = f"model.config={json.dumps({'model_type': 'phi3', **WIDE, 'num_hidden_layers': 2})}"
    words = [*words, shallow, "validation.metrics=exact_match", "validation.batch_size=12"]
    words += ["validation.max_new_tokens=600", "testing.batch_size=4"]
    config, roomy = load_config(words), replace(find_device("cpu"), reserve=0)
    plan = make_plan(config, roomy)
    phase = plan.evaluating["validation"]
    made = phase.generating
    assert plan.peak.total < phase.peak.total < made.total == plan.needed == plan.in_shards[0].needed
    assert (plan.phase, plan.fits, plan.findings) == (("validation, generating answers", made.total), True, [])
    tight = replace(roomy, memory=(phase.peak.total + made.total) // 2)
    refused = make_plan(config, tight)
    (told,) = refused.findings
    assert (refused.fits, told.level) == (False, "problem")
    assert told.what.startswith("generating 12 answers at once in validation takes ")
    assert "a lower validation.max_new_tokens (it is 600)" in told.fix
    (fit,) = re.findall(r"a lower validation\.batch_size: (\d+) answers at once fit", told.fix)
    assert make_plan(load_config([*words, f"validation.batch_size={fit}"]), tight).fits
    record = plan.as_record()
    assert (record["phase"], set(record["evaluating"])) == (plan.phase[0], {"validation", "testing"})
    small = ["training.batch_size=2", "validation.batch_size=4"]
    config = load_config([*words, *small, "validation.metrics=[]", "testing.batch_size=11"])
    plan = make_plan(config, roomy)
    found = plan.evaluating["testing"]
    assert (plan.phase, found.generating) == (("testing, loss", found.peak.total), None)
    unread, told = make_plan(config, replace(roomy, memory=plan.needed - 1)).findings
    assert "validation.max_new_tokens=600 (overrides), because validations have no metrics" in unread.what
    assert told.what.startswith("the loss of 11 rows at once in testing takes ")
    assert told.fix.startswith("a lower testing.batch_size (it is 11); or ")


def test_only_the_phases_of_a_run_are_shown(words, inputs, tmp_path, capsys):
    assert plan_from_overrides(words) == 0
    out = capsys.readouterr().out
    assert "validation, the loss of 8 rows at once: " in out
    assert "testing, the loss of 11 rows at once: " in out
    assert "generating" not in out
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_bytes((inputs / "answers/train.jsonl").read_bytes())
    assert plan_from_overrides([*words, f"data.path={rows}"]) == 0
    assert not re.search("validation, |testing, ", capsys.readouterr().out)


def test_a_validation_with_rewards_generates_its_answers(words):
    more = ["task=finetune_grpo", "reward.functions=regex", "reward.pattern=x", "rollout.max_completion_length=5"]
    more += ["rollout.num_generations=2", "training.global_batch_size=2", "rollout.batch_size=9"]
    plan = make_plan(load_config([*words, *more]), find_device("cpu"))
    found = plan.evaluating["validation"]
    assert (plan.generating.answers, found.peak, found.generating.answers) == (4, None, 9)
    assert plan.evaluating["testing"].peak is not None
