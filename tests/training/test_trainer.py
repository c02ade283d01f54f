import json
import shutil
import sys
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune import (
    Trainer,
    add_lora,
    build_base_model,
    build_tokenizer,
    encode_examples,
    launch,
    load_config,
    load_examples,
)
from finetune.errors import CheckpointError, ConfigError, DataError, LaunchError, RunFailedError
from finetune.inference.losses import LossSums, SplitLosses
from finetune.threads import set_waiting
from finetune.training import supervised
from finetune.training.reporting.journal import Journal
from finetune.training.train import build_parts, build_trainer
from finetune.units import format_bytes
from tests.launches import run_command
from tests.tiny_runs import random_model_words, write_rows
from tests.tiny_training import break_at, contents, curve, events, record

IDS = torch.arange(5, 25).reshape(1, -1)


class Ended(NamedTuple):
    """What a run leaves in memory."""

    trainer: Trainer
    results: object
    comparison: object


def words_for(inputs, run):
    """18 rows in global batches of 8 make 3 steps an epoch, the last of 2 rows."""
    return [
        f"model.path={inputs / 'base'}",
        *(f"data.path={inputs / 'rows'}", f"data.cache_dir={inputs / 'cache'}", f"output_dir={run}", "lora.r=2"),
        *("optim.learning_rate=1e-2", "training.device=cpu", "training.precision=fp32"),
        *("training.global_batch_size=8", "training.batch_size=3", "training.max_steps=5"),
        *("checkpoint.save_total_limit=9", "testing.num_samples=1", "testing.max_new_tokens=3"),
        "testing.general_prompts=none",
    ]


@pytest.fixture
def words(inputs, tmp_path):
    return words_for(inputs, tmp_path / "run")


def train(words, *, task="finetune_lora", has_adapter=True):
    """What a recipe does."""
    config = load_config(words, task=task)
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        model = build_base_model(config.model)
        if has_adapter and task != "finetune_full":
            model = add_lora(model, config.lora)
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        results, _ = trainer.run_training(train_loader, val_loader)
        return Ended(trainer, results, trainer.run_test(test_loader))


@pytest.fixture(scope="module")
def complete(inputs, tmp_path_factory):
    """A run that is only read: its folder, and what it left in memory."""
    run = tmp_path_factory.mktemp("complete") / "run"
    return run, train(words_for(inputs, run))


def give_validation_losses(monkeypatch, losses):
    each = iter(losses)
    sums = (SplitLosses(LossSums(nats=loss, num_targets=1.0)) for loss in each)
    monkeypatch.setattr(supervised, "sum_losses", lambda *_, **__: next(sums))


def test_a_run_leaves_the_promised_folder_and_events(words, tmp_path):
    ended = train([*words, "validation.validate_every=2"])
    run = tmp_path / "run"

    names = {path.name for path in run.iterdir()}
    files = {"config.yaml", "config.schema.json", "run.json", "metrics.jsonl", "rows.safetensors", "log.txt"}
    assert names - {".lock"} == {*files, "checkpoints", "adapter"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-000003", "step-000005"}
    assert {path.name for path in (run / "checkpoints" / "step-000005").iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "generation_config.json"),
        *("optimizer.safetensors", "state.json", "manifest.json"),
    }
    adapter = {path.name for path in (run / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja"} <= adapter

    order = [(event["event"], event.get("step")) for event in events(run)]
    assert [event for event in order if event[0] != "checkpoint"] == [
        *(("step", 1), ("step", 2), ("validation", 2), ("step", 3), ("step", 4), ("validation", 4)),
        *(("step", 5), ("resources", 5), ("validation", 5), ("test", None), ("test", None)),
    ]
    # A thread writes them while training goes on: an event stands where its checkpoint was on the disk.
    assert [event for event in order if event[0] == "checkpoint"] == [("checkpoint", 3), ("checkpoint", 5)]
    assert order.index(("step", 3)) < order.index(("checkpoint", 3)) < order.index(("checkpoint", 5))
    assert order.index(("checkpoint", 5)) < order.index(("test", None))
    assert [event["epoch"] for event in events(run, "step")] == [0, 0, 0, 1, 1]
    assert [(event["step"], event["epoch"]) for event in events(run, "validation")] == [(2, 0), (4, 1), (5, 1)]
    first = events(run, "step")[0]
    assert {"loss", "learning_rate", "grad_norm", "num_targets", "num_tokens", "tokens_per_second"} < first.keys()
    assert first["loss"] > events(run, "step")[4]["loss"], "nothing was learnt"
    assert [event["model"] for event in events(run, "test")] == ["base", "tuned"]
    assert ended.results.loss == events(run, "step")[4]["loss"]

    written = record(run)
    assert (written["status"], written["world_size"], written["launcher"]) == ("completed", 1, "none")
    assert written["backend"] == "none"
    assert written["threads"] == {"count": torch.get_num_threads(), **set_waiting()._asdict()}
    assert written["fallbacks"] == []
    assert {"data.train", "data.validation", "data.test", "config", "chat_template"} <= written["fingerprints"].keys()
    (size,) = {event["num_bytes"] for event in events(run, "checkpoint")}
    need = f"disk: a checkpoint takes {format_bytes(size)} (model "
    assert (run / "log.txt").read_text().count(need) == 1, "with the optimizer's state, which step 1 has made"
    assert load_config([f"run={run / 'config.yaml'}"]) == ended.trainer.config


@pytest.mark.parametrize(("asked", "count"), [("", 1), ("2", 2)])
def test_one_thread_computes_a_narrow_model_unless_the_user_asks_for_more(asked, count, words, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    torch.set_num_threads(2)
    try:
        train([*words, "training.max_steps=1"])
        assert torch.get_num_threads() == 2, "the next run begins as this one did"
    finally:
        torch.set_num_threads(1)
    assert record(tmp_path / "run")["threads"]["count"] == count
    assert ("one thread computes" in (tmp_path / "run" / "log.txt").read_text()) == (count == 1)


def test_a_trainer_trains_once_and_only_in_its_launch(words, tmp_path):
    config = load_config([*words, "training.max_steps=1"])
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        early = build_trainer(runtime, config.model_copy(update={"output_dir": str(tmp_path / "early")}))
        loader, *_ = trainer.prepare_dataloaders()
        with torch.no_grad(), pytest.raises(LaunchError, match="no_grad is in force"):
            trainer.run_training(loader)
        torch.set_float32_matmul_precision("high")
        with pytest.raises(LaunchError, match="set_float32_matmul_precision is in force"):
            trainer.run_training(loader)
        torch.set_float32_matmul_precision("highest")
        trainer.run_training(loader)
        losses = curve(tmp_path / "run")
        with pytest.raises(ConfigError, match="is over: this trainer has trained it already"):
            trainer.run_training(loader)
    with pytest.raises(ConfigError, match="is over: its launch has ended"):
        early.run_training(loader)
    assert curve(tmp_path / "run") == losses
    assert record(tmp_path / "run")["status"] == "completed"


def test_the_log_tells_the_run_from_its_first_line_to_its_last(complete):
    run, _ = complete
    log = (run / "log.txt").read_text()
    lines = log.splitlines()
    assert "Process 0/1 started" in lines[1]
    assert f"launcher none, device cpu, fp32, world of 1; threads: 1, {set_waiting()}" in lines[0]
    assert "global batch of 8 examples (training.global_batch_size): micro-batches of at most 3 over 1 process" in log
    assert log.index("checkpoint committed step=3") < log.index("checkpoint committed step=5")
    assert [(event["step"], event["epoch"]) for event in events(run, "validation")] == [(3, 0), (5, 1)]
    assert "no fallbacks taken" in log
    assert all(line.startswith("[RANK 0] ") for line in lines if "INFO finetune" in line)


@pytest.mark.parametrize(("broken_at", "goes_on_from"), [pytest.param(1, None, marks=pytest.mark.slow), (4, 2)])
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(words, tmp_path, monkeypatch, broken_at, goes_on_from):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = [*words, "training.max_steps=6", "lora.dropout=0.3", "resume=auto"]
    words += ["checkpoint.save_every=2", "checkpoint.save_every_epochs=null"]
    train([*words, f"output_dir={whole}"])
    with monkeypatch.context() as patch:
        break_at(patch, broken_at, RuntimeError("power cut"))
        with pytest.raises(RuntimeError, match="power cut"):
            train([*words, f"output_dir={broken}"])
    assert record(broken)["status"] == "failed"
    train([*words, f"output_dir={broken}"])

    if goes_on_from is not None:
        assert f"resumed from step={goes_on_from}" in (broken / "log.txt").read_text()
    for step in (2, 4, 6):
        ours, theirs = (contents(run / "checkpoints" / f"step-{step:06d}") for run in (broken, whole))
        assert ours == theirs
    assert contents(broken / "adapter") == contents(whole / "adapter")
    train([*words, f"output_dir={whole}"])
    assert "the run is complete, with step 6 of 6: nothing is trained" in (whole / "log.txt").read_text()
    assert curve(broken) == curve(whole)
    assert [event["step"] for event in events(broken, "checkpoint")] == [2, 4, 6]
    assert record(broken)["status"] == "completed"


def test_another_global_batch_cannot_go_on_with_a_run(words, complete, tmp_path, capsys):
    shutil.copytree(complete[0], tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"global batch of 8 examples, this run asks for 6.*batch_size=8"):
        train([*words, "training.global_batch_size=6", "resume=auto"])
    assert "no effect on the curve" not in capsys.readouterr().err


def test_the_adapter_folder_holds_the_best_step(words, tmp_path, monkeypatch):
    give_validation_losses(monkeypatch, [3.0, 1.0, 2.0])
    kept = ["checkpoint.save_every=2", "checkpoint.save_total_limit=1"]
    train([*words, "training.max_steps=6", "validation.validate_every=2", *kept])
    run = tmp_path / "run"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-000004", "step-000006"}
    weights = "adapter_model.safetensors"
    best = (run / "checkpoints" / "step-000004" / weights).read_bytes()
    assert (run / "adapter" / weights).read_bytes() == best
    assert (run / "checkpoints" / "step-000006" / weights).read_bytes() != best
    assert (record(run)["result"]["best_step"], record(run)["result"]["best_loss"]) == (4, 1.0)
    give_validation_losses(monkeypatch, [5.0])  # step 4 would not be saved any more
    longer = ["training.max_steps=7", "checkpoint.save_every=5", "resume=auto", "resume.allow=training.max_steps"]
    train([*words, "validation.validate_every=2", "checkpoint.save_total_limit=1", *longer])
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-000004", "step-000007"}
    assert (run / "adapter" / weights).read_bytes() == best
    assert (record(run)["result"]["best_step"], record(run)["result"]["best_loss"]) == (4, 1.0)


def test_a_best_step_without_a_checkpoint_is_said_and_the_last_is_published(words, tmp_path, monkeypatch):
    give_validation_losses(monkeypatch, [1.0, 3.0, 2.0])
    train([*words, "validation.validate_every=2", "early_stopping.patience=2"])
    run = tmp_path / "run"
    weights = "adapter_model.safetensors"
    last = run / "checkpoints" / "step-000005" / weights
    assert (run / "adapter" / weights).read_bytes() == last.read_bytes()
    log = (run / "log.txt").read_text()
    assert "the best validation was at step 2, after which checkpoint.save_every" in log
    assert "early_stopping.patience=2 cannot end this run early: that takes 4 validations or more" in log
    published = record(run)["result"]
    assert (published["best_step"], published["best_loss"]) == (5, 2.0)  # the loss of the weights in adapter/


def test_the_test_phase_measures_the_published_weights_and_the_base(words, tmp_path):
    ended = train([*words, "testing.metrics=[exact_match, json_valid]", "testing.num_samples=2"])
    comparison = ended.comparison
    assert comparison.num_rows == 4
    assert comparison.tuned.loss != comparison.base.loss
    assert comparison.tuned.metrics == {"exact_match": 0.0, "json_valid": 0.0}
    assert len(comparison.answers) == 2
    base, tuned = events(tmp_path / "run", "test")
    assert (base["loss"], tuned["loss"]) == (comparison.base.loss, comparison.tuned.loss)
    assert tuned["exact_match"] == 0.0
    assert record(tmp_path / "run")["result"]["test_rows_left_out"] == 0


def test_a_resumed_run_keeps_its_random_base_whatever_the_seed_is_now(words, inputs, tmp_path):
    words = [*words[1:], *random_model_words(inputs / "base")]
    train([*words, "training.max_steps=3"])
    before = contents(tmp_path / "run" / "base")
    ended = train([*words, "seed=5", "resume=auto", "resume.allow=seed,training.max_steps"])
    assert contents(tmp_path / "run" / "base") == before
    with torch.no_grad():
        plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "adapter").eval()(input_ids=IDS).logits
        ours = ended.trainer.model.eval()(input_ids=IDS).logits
    assert torch.equal(plain, ours)


def test_full_fine_tuning_trains_every_weight_and_loads_in_plain_transformers(words, inputs, tmp_path):
    ended = train([*words, "training.gradient_checkpointing=true"], task="finetune_full")
    run = tmp_path / "run"
    before = load_file(inputs / "base" / "model.safetensors")
    after = load_file(run / "adapter" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(run / "adapter").eval()(input_ids=IDS).logits
        ours = ended.trainer.model.eval()(input_ids=IDS).logits
    assert torch.equal(plain, ours)
    assert ended.comparison.base is None


def test_full_fine_tuning_resumes_to_the_same_bytes(words, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train([*words, f"output_dir={whole}"], task="finetune_full")
    with monkeypatch.context() as patch:
        break_at(patch, 5, RuntimeError("power cut"))
        with pytest.raises(RuntimeError, match="power cut"):
            train([*words, f"output_dir={broken}"], task="finetune_full")
    train([*words, f"output_dir={broken}", "resume=auto"], task="finetune_full")
    assert contents(broken / "checkpoints" / "step-000005") == contents(whole / "checkpoints" / "step-000005")


def test_a_run_that_fails_says_so_and_gives_its_folder_back(words, tmp_path, monkeypatch):
    break_at(monkeypatch, 2, RunFailedError("the loss is nan"))
    with pytest.raises(RunFailedError):
        train(words)
    assert record(tmp_path / "run")["status"] == "failed"
    assert "the loss is nan" in record(tmp_path / "run")["result"]["error"]
    assert "the loss is nan" in (tmp_path / "run" / "log.txt").read_text()
    monkeypatch.undo()
    train([*words, "resume=auto"])


def test_a_save_that_fails_in_the_background_of_the_last_step_fails_the_run(words, tmp_path, monkeypatch):
    collect = Journal.collect_saves

    def failing(journal):
        collect(journal)
        if (events(tmp_path / "run", "step") or [{"step": 0}])[-1]["step"] == 4:
            raise RunFailedError("the disk is full")

    monkeypatch.setattr(Journal, "collect_saves", failing)
    with pytest.raises(RunFailedError, match="the disk is full"):
        train([*words, "training.max_steps=4"])
    assert record(tmp_path / "run")["status"] == "failed"


def test_a_row_longer_than_the_models_context_is_refused_before_anything_is_written(words, tmp_path):
    rows = write_rows(tmp_path / "rows")
    long = {"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "no"}]}
    (rows / "validation.jsonl").write_text(json.dumps(long) + "\n")
    with pytest.raises(ConfigError, match=r"validation split has a row of 2\d\d tokens.*context ends at 128.*=128"):
        train([*words, f"data.path={rows}"])
    assert not (tmp_path / "run").exists()


def test_a_recipe_and_a_method_that_do_not_belong_together_are_refused(words):
    with pytest.raises(ConfigError, match=r"training\.method is full .* carries an adapter"):
        train([*words, "training.method=full"])
    with pytest.raises(ConfigError, match=r"training\.method is lora .* has no adapter"):
        train(words, has_adapter=False)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("training.global_batch_size", "18 rows, fewer than one global batch of 40"),
        ("validation.batch_size", r"the validation split has \d rows, not enough for a batch of 40 .*drop_last=false"),
        ("testing.batch_size", r"the test split has \d rows, not enough for a batch of 40 .*drop_last=false"),
    ],
)
def test_dropping_the_only_batch_is_refused_before_training(words, tmp_path, key, said):
    with pytest.raises(DataError, match=said):
        train([*words, f"{key}=40", f"{key.partition('.')[0]}.drop_last=true"])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_unset_global_batch_is_batch_size_times_the_world_and_is_recorded(words, tmp_path):
    words = [word for word in words if not word.startswith("training.global_batch_size")]
    train(words)
    assert record(tmp_path / "run")["global_batch"]["global_batch_size"] == 3
    assert "global batch of 3 examples (batch_size x world size)" in (tmp_path / "run" / "log.txt").read_text()


def test_a_debug_run_logs_what_passes_through(words, tmp_path):
    train(words, task="debug")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "DEBUG finetune.training.loaders: step 1 micro-batch 0: 3 rows, " in log
    assert "targets, on cpu; it begins: " in log


FEW_OPEN_FILES = """
import resource
from finetune.cli import main

resource.setrlimit(resource.RLIMIT_NOFILE, (300, 4096))
main()
"""


@pytest.mark.slow
@pytest.mark.warm
def test_a_run_raises_its_limit_of_open_files(words, tmp_path):
    """A step of 60 micro-batches needs more open files than 300: the tensors of workers are open files."""
    (tmp_path / "few.py").write_text(FEW_OPEN_FILES)
    rows = write_rows(tmp_path / "many", train=60, validation=0, test=0)
    many = [f"data.path={rows}", "training.batch_size=1", "training.global_batch_size=60", "training.num_workers=1"]
    command = [sys.executable, tmp_path / "few.py", "train", "task=finetune_lora", *words, *many]
    done = run_command([*command, "training.max_steps=1"])
    assert done.returncode == 0, done.stdout


def test_each_way_to_a_trainer_checks_the_configuration_once(words, tmp_path):
    counts = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("finetune.training."):
            counts[frame.f_code.co_qualname] += 1

    def in_parts(runtime, config):
        return Trainer(runtime, config, *build_parts(runtime, config))

    for door in (build_trainer, in_parts):
        counts.clear()
        config = load_config([*words, f"output_dir={tmp_path / door.__name__}"], task="finetune_lora")
        with launch(config) as runtime:
            sys.setprofile(count)
            try:
                door(runtime, config)
            finally:
                sys.setprofile(None)
        checks = ("check_settings", "check_objective", "Hooks.check", "Objective.check", "check_metrics")
        assert [counts[check] for check in checks] == [1] * len(checks)


def test_a_recipe_is_refused_before_its_model_and_rows_are_looked_at(words):
    refused = {
        "early_stopping.metric=exact_match": "exact_match.*, which this run does not measure",
        "preference.beta=0.5": "it belongs to",
        "optim.optimizer=torch.optim.Rprop": "no weight decay",
    }
    for word, why in refused.items():
        config = load_config([*words, word, "optim.weight_decay=0.1"], task="finetune_lora")
        with launch(config) as runtime, pytest.raises(ConfigError, match=why):
            Trainer(runtime, config, None, None, None)
