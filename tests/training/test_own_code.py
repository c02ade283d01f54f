"""What a script gives to `finetune.train` and to a trainer is used, recorded, and checked when its run is resumed."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import Adafactor, AutoModelForCausalLM, Cohere2Config

import finetune
from finetune.config.config_files import resolve_shipped
from finetune.config.schema import Config, OptimSection
from finetune.engine.decoder import bare_model
from finetune.engine.given_loss import refuse_no_sum
from finetune.engine.supported import unsupported_reason
from finetune.errors import CheckpointError, ConfigError, ModelError, RunFailedError
from finetune.fallbacks import Fallbacks
from finetune.inference.finished_run import find_run
from finetune.model.base import train_first_half
from finetune.replay.steps import replay_config
from finetune.runs.recorded_run import RecordedRun
from finetune.training.checks import check_fit
from finetune.training.given import check_given_base, configure, describe_given_model
from finetune.training.given_optimizer import same_optimizer
from finetune.training.hooks import Hooks
from finetune.training.optim import build_optimizer, set_learning_rate, trainable_parameters
from finetune.training.own_code import call_callbacks, fingerprint_code
from tests.in_process import run_script
from tests.launches import run_command, run_launched
from tests.tiny_models import SIZES, build_tiny, tiny_phi3_config
from tests.tiny_training import losses, record
from tests.training.own_code import ROWS, SHORT, length, smoothed

SCRIPT = Path(__file__).with_name("own_code.py")
SETTINGS = {"training.max_steps": 2, "training.batch_size": 8, "testing.num_samples": 0, "training.device": "cpu"}
SETTINGS |= {"testing.max_new_tokens": 8, "validation.max_new_tokens": 8, "testing.general_prompts": "none"}


def shipped_model():
    return AutoModelForCausalLM.from_pretrained(resolve_shipped("shipped:phi_tiny"))


@pytest.mark.slow
@pytest.mark.warm
def test_one_rank_asks_and_all_ranks_save_and_stop(tmp_path):
    words = [SCRIPT, "asks", f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_launched("torchrun", words)
    assert done.returncode == 0, done.stdout
    calls = [("step", 1), ("step", 2), ("save", 2), ("step", 3), ("save", 3), ("stopped", 3)]
    assert all(f"rank {rank} calls {calls}" in done.stdout for rank in range(2))
    alone = run_script(SCRIPT, ["watches", f"output_dir={tmp_path / 'alone'}", f"data.cache_dir={tmp_path / 'cache'}"])
    assert alone.returncode == 0, alone.stdout
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone")[:3], rel=1e-6)
    calls = [*(("step", step) for step in range(1, 5)), ("validation", 4), ("save", 4), ("complete", 4)]
    assert f"rank 0 calls {calls}" in alone.stdout
    again = run_script(SCRIPT, [*words[1:], "resume=auto"])
    assert again.returncode == 0, again.stdout
    assert "rank 0 calls [('stopped', 3)]" in again.stdout
    assert again.stdout.count("no step was trained: training had ended after step 3 of 4: a callback returned") == 1


@pytest.mark.slow
@pytest.mark.warm
def test_the_error_of_a_callback_names_it_on_its_rank_and_ends_the_others(tmp_path):
    words = [SCRIPT, "fails", f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_command([sys.executable, *words, "parallel.num_processes=2"])
    assert done.returncode == 3
    assert "RunFailedError: the callback Watch.on_step raised ValueError: no luck" in done.stdout
    assert 'raise ValueError("no luck")' in done.stdout


@pytest.mark.slow
def test_a_callback_that_calls_sys_exit_is_named_and_fails_the_run(tmp_path):
    words = [SCRIPT, "leaves", f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_script(words[0], words[1:])
    assert done.returncode == 3
    assert 'the callback Watch.on_step raised SystemExit: 0. Correct it, or return "stop"' in done.errors
    assert record(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_a_killed_data_worker_is_named_and_fails_the_run(tmp_path):
    words = [f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}", "training.num_workers=1"]
    handler = signal.getsignal(signal.SIGCHLD)
    done = run_script(SCRIPT, ["kills a worker", *words, "training.batch_size=1", "training.prefetch_factor=1"])
    assert done.returncode == 3
    assert "RunFailedError: a data worker was killed: " in done.errors
    assert record(tmp_path / "run")["status"] == "failed"
    assert signal.getsignal(signal.SIGCHLD) == handler, "torch's handler raises anywhere"


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone keeps to such a limit")
def test_a_step_without_address_space_is_out_of_memory(tmp_path):
    words = [f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_command([sys.executable, SCRIPT, "no address space", *words, "checkpoint.save_every=1"])
    assert done.returncode == 3, done.stdout
    assert "checkpoint.background: wanted written in the background" in done.stdout, "a thread would wait for ever"
    assert "RunFailedError: out of memory: " in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_a_callback_may_change_the_current_folder_and_turn_gradients_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "general.jsonl").write_text('{"prompt": "What is it?"}\n')
    words = ["output_dir=run", f"data.cache_dir={tmp_path / 'cache'}", "testing.general_prompts=general.jsonl"]
    done = run_script(SCRIPT, ["moves", *words])
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert record(tmp_path / "run")["status"] == "completed"
    assert "output_dir: run\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert torch.is_grad_enabled()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a validation split, and its result."""
    folder = tmp_path_factory.mktemp("own code")
    settings = {**SETTINGS, "output_dir": folder / "run", "data.cache_dir": folder / "cache"}
    data = {"train": ROWS[8:], "validation": ROWS[:8], "test": ROWS[:4]}
    result = finetune.train(
        model=shipped_model(), data=data, overrides=settings, metrics={"length": length}, loss=smoothed
    )
    return result, data, settings


@pytest.mark.slow
def test_a_run_records_what_its_script_gave_and_is_not_replayed_without_it(trained):
    result, _, _ = trained
    assert {"loss", "validation/loss", "validation/length", "base/loss", "test/length"} <= result.metrics.keys()
    assert next(result.model.parameters()).device.type == "cpu"
    assert result.tokenizer.chat_template
    assert len(repr(result)) < 1000  # a notebook shows it
    given = record(result.folder)["script"]
    assert given["loss"] == "tests.training.own_code.smoothed"
    assert given["metrics"] == {"length": "tests.training.own_code.length"}
    assert given["model"].endswith("Phi3ForCausalLM")
    assert "adapter" not in given
    assert find_run(result.folder).config.lora.r == 16
    with pytest.raises(CheckpointError, match="cannot be replayed: a script gave its loss"):
        replay_config(RecordedRun(result.folder))


@pytest.mark.slow
def test_another_loss_or_other_rows_refuse_to_resume(trained):
    result, data, settings = trained
    again = {**settings, "resume": "auto"}
    with pytest.raises(CheckpointError, match=r"training\.objective: started with .*smoothed \w+, now none"):
        finetune.train(model=shipped_model(), data=data, overrides=again)
    with pytest.raises(CheckpointError, match="the encoded rows"):
        finetune.train(model=shipped_model(), data={**data, "train": ROWS[9:]}, overrides=again, loss=smoothed)
    same = finetune.train(model=shipped_model(), data=data, overrides=again, loss=smoothed)
    assert same.folder == result.folder


def test_code_with_arguments_is_known_again_in_another_process():
    """Each object has another address, as it has in another process."""

    class Plain:
        pass

    def made():
        return lambda logits: logits

    config = finetune.load_config([], model="phi_tiny", data="orders", task="finetune_lora")

    def fingerprint(*args, **keywords):
        return Hooks(loss=partial(smoothed, *args, **keywords)).fingerprints(config)["loss"]

    assert fingerprint(Plain(), base=made()) == fingerprint(Plain(), base=made())
    assert fingerprint(base=partial(smoothed, Plain())) == fingerprint(base=partial(smoothed, Plain()))
    functions = (smoothed, length, partial(smoothed, 1), partial(smoothed, 2), np.exp, np.log, torch.exp, 0.1, 0.2)
    assert len({fingerprint(base=value) for value in functions}) == len(functions)
    source = inspect.getsource(smoothed) + str({"args": (), "base": 0.1})
    assert fingerprint(base=0.1).endswith(hashlib.sha256(source.encode()).hexdigest()[:12]), "as in earlier versions"


def fingerprint_of(code, **options):
    return fingerprint_code(code, None, **options)["loss"]


def smoothed_by(value, other=None):
    def inner(logits, targets):
        return value if other is None else other(logits, targets)

    return inner


class Scaled:
    """A loss with a setting, and with a method of its own."""

    def __init__(self, factor):
        self.factor, self.scale = factor, self.by_factor

    def __call__(self, logits, targets):
        return self.scale(smoothed(logits, targets))

    def by_factor(self, loss):
        return self.factor * loss


@pytest.mark.parametrize(
    "make",
    [
        lambda value: torch.nn.CrossEntropyLoss(reduction="sum", label_smoothing=value),
        lambda value: torch.nn.CrossEntropyLoss(weight=torch.full((2000,), value)),
        smoothed_by,
        lambda value: smoothed_by(1, smoothed_by(value)),
        lambda value: smoothed_by({"of": [torch.full((2000,), value)]}),
        lambda value: lambda logits, targets, factor=value: factor,
        Scaled,
        lambda value: Scaled(value).by_factor,
        lambda value: partial(smoothed_by(value), 1),
    ],
)
def test_the_values_that_code_holds_are_part_of_its_fingerprint(make):
    assert fingerprint_of(make(0.1)) == fingerprint_of(make(0.1))
    assert fingerprint_of(make(0.1)) != fingerprint_of(make(0.9))
    assert fingerprint_of(make(0.1), is_former=True) == fingerprint_of(make(0.9), is_former=True)


def test_a_model_that_code_holds_may_have_trained():
    model = torch.nn.Linear(2, 2)
    before = fingerprint_of(smoothed_by(model))
    model.weight.data += 1
    assert fingerprint_of(smoothed_by(model)) == before


def test_of_a_lambda_only_its_own_source_counts():
    """Its statement may change: `resume=auto` is added to it."""
    first, second = fingerprint_of(lambda logits, targets: logits), fingerprint_of(lambda logits, targets: targets)
    both = [fingerprint_of(lambda logits, targets: logits), fingerprint_of(lambda logits, targets: targets), "resume"]
    assert both[:2] == [first, second]
    assert first != second
    nested = (lambda: lambda logits, targets: logits)()
    assert fingerprint_of(nested).split()[1] == first.split()[1]


@pytest.mark.slow
def test_a_run_that_recorded_a_former_fingerprint_resumes(tmp_path):
    settings = {**SETTINGS, "optim.schedule": "constant", "output_dir": tmp_path / "run", "data.cache_dir": tmp_path}
    settings |= {"training.max_steps": 1}
    loss = torch.nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)
    finetune.train(model="phi_tiny", data=ROWS, overrides=settings, loss=loss)
    again = {**settings, "training.max_steps": 2, "resume": "auto"}
    other = torch.nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.9)
    with pytest.raises(CheckpointError, match=r"training\.objective: started with .*CrossEntropyLoss"):
        finetune.train(model="phi_tiny", data=ROWS, overrides=again, loss=other)
    file, before = tmp_path / "run" / "run.json", record(tmp_path / "run")
    assert before["fingerprints"]["loss"] == fingerprint_of(loss)
    before["fingerprints"]["loss"] = fingerprint_of(loss, is_former=True)
    file.write_text(json.dumps(before))
    finetune.train(model="phi_tiny", data=ROWS, overrides=again, loss=loss)
    assert record(tmp_path / "run")["fingerprints"]["loss"] == fingerprint_of(loss)


@pytest.mark.parametrize("answer", [["stop"], np.array([1, 2]), {"stop": 1}, 1, "end"])
def test_a_callback_that_returns_something_else_is_named(answer):
    class Answers:
        def on_step(self, result):
            return answer

    def agree(error, _):
        raise error

    with pytest.raises(RunFailedError, match=r'Answers\.on_step returned .*; expected None, "stop" or "save"'):
        call_callbacks(alone(agree), [Answers()], torch.nn.Linear(1, 1), "on_step", None)


def test_a_callback_that_calls_os_exit_does_not_end_the_program_as_if_it_had_trained():
    class Leaves:
        def on_step(self, result):
            os._exit(0)

    def agree(error, _):
        raise error

    with pytest.raises(RunFailedError, match=r"Leaves\.on_step raised RuntimeError: it called os\._exit\(0\)"):
        call_callbacks(alone(agree), [Leaves()], torch.nn.Linear(1, 1), "on_step", None)


CHANGES = {
    "half": lambda model: model.half(),
    "merge": lambda model: model.merge_adapter(),
    "unload": lambda model: model.unload(),
    "switch off": lambda model: model.disable_adapter_layers(),
    "freeze": lambda model: next(adapter_weights(model)).requires_grad_(False),
    "unfreeze": lambda model: model.requires_grad_(True),
    "add": lambda model: model.add_adapter("second", LoraConfig(r=2, target_modules=["o_proj"])),
}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("half", r"\d+ have another dtype"),
        ("merge", "2 have another shape, are merged or are switched off"),
        ("unload", r"\d+ are missing \(.*lora_A"),
        ("switch off", "2 have another shape, are merged or are switched off"),
        ("freeze", r"1 are frozen \(.*lora_A"),
        ("unfreeze", r"\d+ are no longer frozen"),
        ("add", r"2 are missing \(.*o_proj"),
    ],
)
def test_a_callback_that_changes_more_of_the_model_than_values_is_named(change, what):
    class Changes:
        def on_step(self, model):
            CHANGES[change](model)

    def agree(error, _):
        raise error

    model = get_peft_model(build_tiny(tiny_phi3_config()), LoraConfig(r=2, target_modules=["qkv_proj"]))
    with pytest.raises(ModelError, match=rf"Changes\.on_step changed the model that trains: {what}"):
        call_callbacks(alone(agree), [Changes()], model, "on_step", model)


def test_a_callback_may_look_at_the_base_and_at_merged_weights_and_freeze_a_part_of_a_model():
    class Looks:
        def on_step(self, model):
            with model.disable_adapter():
                pass
            model.merge_adapter()
            model.unmerge_adapter()

    class Freezes:
        def on_step(self, model):
            next(model.parameters()).requires_grad_(False)

    model = get_peft_model(build_tiny(tiny_phi3_config()), LoraConfig(r=2, target_modules=["qkv_proj"]))
    assert call_callbacks(alone(), [Looks()], model, "on_step", model) == set()
    whole = torch.nn.Linear(2, 2)
    assert call_callbacks(alone(), [Freezes()], whole, "on_step", whole) == set()


def adapter_weights(model):
    return (weight for name, weight in model.named_parameters() if "lora_A" in name)


def alone(agree=None):
    """Return what `call_callbacks` uses of a runtime of one process."""
    collectives = SimpleNamespace(sum=list, agree=agree)
    return SimpleNamespace(collectives=collectives, placement=SimpleNamespace(shard_size=None))


def test_a_model_that_a_callback_leaves_in_evaluation_mode_trains_on_with_dropout():
    model = torch.nn.ModuleList([torch.nn.Dropout(), torch.nn.Dropout()])
    model[1].eval()

    class Evaluates:
        def on_step(self, result):
            model.eval()
            model[1].train()

    call_callbacks(alone(), [Evaluates()], model, "on_step", None)
    assert [model.training, model[0].training, model[1].training] == [True, True, False]


class Asks:
    """Asks another run, and measures it, while a run trains and when it ends."""

    def __init__(self, other):
        self.other, self.calls = other, []

    def on_save(self, result):
        self.calls += finetune.generate(self.other, ["Is it so?"], max_new_tokens=2)

    def on_end(self, result):
        self.calls += finetune.generate(result.folder, ["Is it so?"], max_new_tokens=2)
        assert finetune.evaluate(result.folder, split="validation").scores


@pytest.mark.slow
def test_a_callback_may_ask_a_run_and_changes_nothing_of_its_own(trained, tmp_path):
    result, data, settings = trained
    other = {**settings, "checkpoint.save_every": 1, "lora.dropout": 0.1, "data.on_overlap": "warn"}
    runs = {}
    for name, callbacks in {"plain": [], "asks": [asks := Asks(result.folder)]}.items():
        overrides = {**other, "output_dir": tmp_path / name}
        runs[name] = finetune.train(model="phi_tiny", data=data, overrides=overrides, callbacks=callbacks)
    assert len(asks.calls) == 3
    first, second = runs["plain"].folder, runs["asks"].folder
    assert losses(first) == losses(second)
    adapters = [(run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (first, second)]
    assert adapters[0] == adapters[1]
    assert record(second)["status"] == "completed"
    log = (second / "log.txt").read_text()
    assert "Starting testing phase" in log, "the log goes on as before"


class Loses:
    """Takes the folder of the checkpoints away in step 2, and brings it back in step 3."""

    def __init__(self, run):
        self.checkpoints, self.elsewhere = run / "checkpoints", run.with_name("elsewhere")
        self.saved = []

    def on_step(self, result):
        if result.step == 2:
            self.checkpoints.rename(self.elsewhere)
            self.checkpoints.write_text("")
        if result.step == 3:
            self.checkpoints.unlink()
            self.elsewhere.rename(self.checkpoints)

    def on_save(self, result):
        assert (result.path / "manifest.json").is_file()
        self.saved.append(result.step)


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_on_save_is_not_called_for_a_checkpoint_that_was_not_written(tmp_path, background):
    run = tmp_path / "run"
    settings = {**SETTINGS, "training.max_steps": 4, "checkpoint.save_every": 1, "data.cache_dir": tmp_path}
    settings |= {"output_dir": run, "checkpoint.on_disk_failure": "continue", "checkpoint.background": background}
    finetune.train(model="phi_tiny", data=ROWS, overrides=settings, callbacks=[watch := Loses(run)])
    assert watch.saved == [1, 3, 4]
    assert record(run)["status"] == "completed"
    assert "saving step 2" in [taken["what"] for taken in record(run)["fallbacks"]]


@pytest.mark.slow
def test_a_given_adapter_is_recorded_as_it_is_and_answers_from_its_folder(tmp_path):
    model = get_peft_model(shipped_model(), LoraConfig(r=4, lora_alpha=4, target_modules=["qkv_proj"]))
    settings = {**SETTINGS, "output_dir": tmp_path / "run", "data.cache_dir": tmp_path}
    result = finetune.train(model=model, data=ROWS, overrides=settings)
    lora = find_run(result.folder).config.lora
    assert (lora.r, lora.alpha, lora.target_modules) == (4, 4.0, ["qkv_proj"])
    assert record(result.folder)["script"]["adapter"].startswith("peft.")
    with pytest.raises(ConfigError, match=r"lora\.r is 8 in overrides, but 4 in the given model"):
        finetune.train(model=model, data=ROWS, overrides={**settings, "lora.r": 8})


def test_a_model_that_the_configuration_cannot_describe_is_refused():
    nameless = build_tiny(tiny_phi3_config())
    with pytest.raises(ModelError, match="not loaded from a folder or the hub"):
        describe_given_model(nameless)
    nameless.config._name_or_path = "somewhere"
    assert describe_given_model(nameless) == {"model.path": "somewhere"}
    windowless = build_tiny(Cohere2Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 2))
    windowless.config._name_or_path = "there"
    with pytest.raises(ModelError, match=r'there has no sliding window .* set "sliding_window"'):
        describe_given_model(windowless)
    nameless.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(ModelError, match="spread over several devices"):
        describe_given_model(nameless)
    nameless.hf_device_map = {"model": "cpu", "lm_head": "cpu"}
    nameless.hf_quantizer = object()
    with pytest.raises(ModelError, match=r"is quantized\. .* set lora\.quantize=nf4"):
        describe_given_model(nameless)
    nameless.hf_quantizer = None
    with pytest.raises(ModelError, match=r"is a Phi3Model, which has no head .* AutoModelForCausalLM"):
        describe_given_model(nameless.get_decoder())
    with pytest.raises(ModelError, match="is on the meta device and has no weights"):
        describe_given_model(build_tiny(tiny_phi3_config()).to("meta"))
    adapted = get_peft_model(nameless, LoraConfig(r=2, target_modules=["qkv_proj"], bias="lora_only"))
    with pytest.raises(ModelError, match="has bias='lora_only', which no key"):
        describe_given_model(adapted)
    weights = {name.partition("layers.0.")[2]: weight for name, weight in adapted.named_parameters()}
    weights["self_attn.qkv_proj.lora_A.default.weight"].requires_grad_(False)
    with pytest.raises(ModelError, match=r"1 of 4 tensors of the given adapter are frozen \(.*qkv_proj\.lora_A"):
        describe_given_model(adapted)
    weights["self_attn.qkv_proj.lora_A.default.weight"].requires_grad_(True)
    weights["input_layernorm.weight"].requires_grad_(True)
    with pytest.raises(
        ModelError, match=r"1 tensors of the given adapter's base have requires_grad=True \(.*layernorm"
    ):
        describe_given_model(adapted)
    weights["input_layernorm.weight"].requires_grad_(False)
    adapted.merge_adapter()
    with pytest.raises(ModelError, match=r"is merged into its base\. Call model\.unmerge_adapter\(\)"):
        describe_given_model(adapted)
    adapted.unmerge_adapter()
    for weight in adapted.parameters():
        weight.requires_grad_(False)
    with pytest.raises(ModelError, match="is frozen"):
        describe_given_model(adapted)
    adapted.add_adapter("second", LoraConfig(target_modules=["o_proj"]))
    with pytest.raises(ModelError, match=r"has the adapters default \(LoraConfig\), second \(LoraConfig\); expected"):
        describe_given_model(adapted)
    with pytest.raises(ModelError, match="model is Linear"):
        describe_given_model(torch.nn.Linear(2, 2))


def test_a_compiled_model_and_half_of_a_pissa_adapter_are_refused():
    model = build_tiny(tiny_phi3_config())
    model.config._name_or_path = "somewhere"
    with pytest.raises(ModelError, match=r"the given model is compiled \(torch\.compile\)"):
        describe_given_model(torch.compile(model))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["qkv_proj"]))
    train_first_half(next(weight for weight in adapted.parameters() if weight.requires_grad), 2, dim=0)
    with pytest.raises(ModelError, match=r"began with lora\.init=pissa, and half of it is frozen"):
        describe_given_model(adapted)


def test_a_frozen_model_is_refused_if_all_its_weights_are_to_train(tmp_path):
    overrides = {"data.cache_dir": tmp_path}
    merged = get_peft_model(shipped_model(), LoraConfig(r=2, target_modules=["qkv_proj"])).merge_and_unload()
    assert configure(merged, ROWS, "finetune_lora", overrides)
    with pytest.raises(
        ModelError, match=r"26 of 26 tensors .* frozen \(model\.embed_tokens\.weight, .*requires_grad_\(True\)"
    ):
        configure(merged, ROWS, "finetune_full", overrides)
    assert configure(merged.requires_grad_(True), ROWS, "finetune_full", overrides)


def test_an_override_of_given_rows_is_named_as_theirs(tmp_path):
    data, overrides = {"train": ROWS, "validation": ROWS[:2]}, {"data.cache_dir": tmp_path, "data.validation": "5%"}
    with pytest.raises(ConfigError, match=r"data\.validation is 5% in overrides, but .* in the given data\. Remove"):
        configure("phi_tiny", data, "finetune_lora", overrides)


def test_rounded_weights_are_a_fallback_unless_the_run_rounds_them_alike(tmp_path):
    build_tiny(tiny_phi3_config()).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    lora, full = (
        Config.model_validate({"model": {"path": str(tmp_path)}, "training": {"method": method}})
        for method in ("lora", "full")
    )
    fallbacks = Fallbacks()
    check_given_base(model, lora, "bf16", fallbacks)
    assert not list(fallbacks)
    for config, precision in ((lora, "fp32"), (full, "bf16")):
        fallbacks = Fallbacks()
        check_given_base(model, config, precision, fallbacks)
        assert [taken.used for taken in fallbacks] == ["these weights, rounded to bfloat16"]
    with pytest.raises(ConfigError, match="The run is strict"):
        check_given_base(model, lora, "fp32", Fallbacks(strict=True))


def test_a_forward_of_its_own_which_no_run_calls_is_a_fallback(tmp_path):
    build_tiny(tiny_phi3_config()).save_pretrained(tmp_path)
    model, config = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
        Config.model_validate({"model": {"path": str(tmp_path)}}),
    )
    own = type("Own", (type(model),), {"forward": lambda self, *args, **kwargs: None})
    fallbacks = Fallbacks()
    check_given_base(model, config, "fp32", fallbacks)
    assert not list(fallbacks)
    handle = model.register_forward_hook(lambda *_: None)
    check_given_base(model, config, "fp32", fallbacks)
    handle.remove()
    model.forward = print
    check_given_base(get_peft_model(model, LoraConfig(target_modules=["qkv_proj"])), config, "fp32", fallbacks)
    model.__class__ = own
    check_given_base(model, config, "fp32", fallbacks)
    assert [taken.wanted for taken in fallbacks] == ["hooks", "a forward that was replaced", "the forward of Own"]


def test_a_forward_that_a_library_put_into_the_class_of_a_model_or_of_its_layers_is_noticed(tmp_path, monkeypatch):
    """Liger and others replace forwards of transformers' classes."""
    build_tiny(tiny_phi3_config()).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config, fallbacks = Config.model_validate({"model": {"path": str(tmp_path)}}), Fallbacks()
    monkeypatch.setattr(type(model), "forward", lambda self, *args, **kwargs: None)
    check_given_base(model, config, "fp32", fallbacks)
    assert [taken.wanted for taken in fallbacks] == ["a forward that was replaced"]
    mlp = model.model.layers[0].mlp
    monkeypatch.setattr(type(mlp), "forward", lambda self, states: states)
    assert unsupported_reason(model) == "layers.0.mlp has a forward that was replaced"


@pytest.mark.slow
def test_a_refused_run_leaves_the_model_as_it_was_given_and_a_changed_one_is_refused(tmp_path):
    model = shipped_model()
    settings = {**SETTINGS, "output_dir": tmp_path / "run", "data.cache_dir": tmp_path}
    with pytest.raises(ConfigError, match="must return the sum"):
        finetune.train(model=model, data=ROWS, loss=torch.nn.CrossEntropyLoss(), overrides=settings)
    assert describe_given_model(model)
    assert all(weight.requires_grad for weight in model.parameters())
    model.lm_head.weight.data[0] += 1
    with pytest.raises(
        ModelError, match=r"the given model has other weights than .*phi_tiny: model\.embed_tokens\.weight"
    ):
        finetune.train(model=model, data=ROWS, overrides=settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_noise_of_a_run_is_not_in_its_result(tmp_path):
    settings = {**SETTINGS, "output_dir": tmp_path / "run", "data.cache_dir": tmp_path}
    result = finetune.train(model="phi_tiny", data=ROWS, overrides={**settings, "training.neftune_alpha": 5})
    assert not bare_model(result.model).get_input_embeddings()._forward_hooks


@pytest.mark.slow
def test_a_factory_makes_the_optimizer(tmp_path):
    made = []

    def factory(groups, lr):
        made.append((len(groups), lr))
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)

    words = [f"{key}={value}" for key, value in SETTINGS.items()]
    words += [f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path}", "data.max_rows=8"]
    config = finetune.load_config(words, model="phi_tiny", data="orders", task="finetune_lora")
    with finetune.launch(config) as runtime:
        splits = finetune.encode_examples(
            finetune.load_examples(config.data),
            tokenizer := finetune.build_tokenizer(config.model),
            config.data,
            fallbacks=runtime.fallbacks,
        )
        model = finetune.add_lora(finetune.build_base_model(config.model), config.lora)
        trainer = finetune.Trainer(runtime, config, model, tokenizer, splits, Hooks(optimizer=factory))
        train_loader, *_ = trainer.prepare_dataloaders()
        assert len(list(train_loader)) == len(train_loader) == 1
        trainer.run_training(train_loader)
    assert made
    assert {rate for _, rate in made} == {config.optim.learning_rate}
    assert "script:" in (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="a script made this optimizer"):
        finetune.train(
            finetune.load_config([f"run={tmp_path / 'run' / 'config.yaml'}", f"output_dir={tmp_path / 'b'}"])
        )


@pytest.mark.slow
def test_an_optimizer_of_its_own_trains_resumes_and_is_compared(tmp_path):
    """A function of the weights and an object give the same run; a resumed run ends with the bytes of a whole one."""

    def momentum(weights):
        return torch.optim.SGD([{"params": weights[:1], "lr": 0.02}, {"params": weights[1:]}], lr=0.01, momentum=0.9)

    def adapted():
        torch.manual_seed(0)
        return get_peft_model(shipped_model(), LoraConfig(r=4, target_modules=["qkv_proj", "o_proj"]))

    def train(name, optimizer, model, **overrides):
        settings = {**SETTINGS, "optim.learning_rate": 0.01, "data.cache_dir": str(tmp_path)}
        settings |= {"output_dir": str(tmp_path / name), "resume": "auto", **overrides}
        finetune.train(model=model, data=ROWS, optimizer=optimizer, overrides=settings)
        return (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes()

    whole = train("whole", momentum, adapted())
    model = adapted()
    given = momentum([weight for weight in model.parameters() if weight.requires_grad])
    torch.optim.lr_scheduler.LambdaLR(given, lambda step: 0.0)  # patches `step` of this object
    for group, rate in zip(given.param_groups, (0.02, 0.01), strict=True):
        group["lr"] = rate
    assert train("object", given, model) == whole
    assert not given.state
    train("cut", momentum, adapted(), **{"training.max_steps": 1, "optim.schedule": "constant"})
    train("flat", momentum, adapted(), **{"optim.schedule": "constant"})
    cut = train("cut", momentum, adapted(), **{"optim.schedule": "constant"})
    assert cut == (tmp_path / "flat" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert record(tmp_path / "object")["script"]["optimizer"] == "torch.optim.sgd.SGD"

    other = adapted()
    heavier = torch.optim.SGD([weight for weight in other.parameters() if weight.requires_grad], lr=0.01, momentum=0.8)
    with pytest.raises(CheckpointError, match="optimizer"):
        train("object", heavier, other)


DECAY = {"weight_decay": 0.1}
BETAS = {"args": {"betas": [0.5, 0.6]}}


def flat(groups):
    return [weight for group in groups for weight in group["params"]]


def sgd(lr):
    return lambda weights: torch.optim.SGD(weights, lr=lr)


@pytest.mark.parametrize(
    ("optimizer", "message", "changes"),
    [
        (
            sgd(0.5),
            r'learning rate 0\.5, but optim\.learning_rate is 0\.01.*overrides={"optim\.learning_rate": 0\.5}',
            {},
        ),
        (lambda weights: torch.optim.SGD(weights[:1], lr=0.01), "holds 1 tensors, and the run trains 2", {}),
        (lambda weights, rate: None, "ours cannot be built of the trained weights: .* missing .* argument: 'rate'", {}),
        (lambda weights: len(weights), "returned int; expected a torch.optim.Optimizer", {}),
        (sgd(0.01), r"optim\.weight_decay is set, but .* gets no parameter groups", {"weight_decay": 0.1}),
        # With `lr`, the groups of `optim.*` would replace what the function sets.
        (partial(AdamW, lr=0.5), r"sets lr=0\.5, but optim\.learning_rate is 0\.01", {}),
        (partial(partial(AdamW, betas=(0.8, 0.9)), eps=1e-6), r"but optim\.args\.betas is \(0\.5, 0\.6\)", BETAS),
        (lambda groups, lr: AdamW(groups, lr=0.5), r"rate 0\.5, but optim\.learning_rate is 0\.01", {}),
        (lambda groups, lr: Adafactor(groups, lr=None), "has parameter groups without a learning rate", {}),
        (partial(AdamW, weight_decay=0.01), r"decay 0\.01, but optim\.weight_decay is 0\.0", {}),
        (lambda groups, lr: AdamW(groups, lr=lr, weight_decay=0.3), r"decay 0\.3, but optim\.weight_decay is 0\.0", {}),
        (lambda groups, lr: AdamW(groups, lr=lr, weight_decay=0.01), r'overrides={"optim\.weight_decay": 0\.01}', {}),
        (lambda groups, lr: AdamW(groups, lr=lr, weight_decay=0.3), r"but optim\.weight_decay is 0\.1", DECAY),
        (lambda groups, lr: AdamW(flat(groups), lr=lr), r"decay 0\.01, but optim\.weight_decay is 0\.1", DECAY),
        (torch.optim.Rprop, r"has no weight decay\. Set optim\.weight_decay=0", DECAY),
    ],
)
def test_an_optimizer_that_a_run_cannot_keep_is_refused(optimizer, message, changes):
    section = OptimSection(learning_rate=0.01, **changes)
    with pytest.raises(ConfigError, match=message):
        build_optimizer(torch.nn.Linear(2, 2), section.with_factory(optimizer, "ours"))


class Tensor(AdamW):
    def __init__(self, params, **arguments):
        super().__init__(params, **{**arguments, "lr": torch.tensor(arguments["lr"])})


@pytest.mark.parametrize(
    ("optimizer", "changes", "expected"),
    [
        (AdamW, {}, {0.0}),
        (AdamW, DECAY, {0.0, 0.1}),
        (Tensor, DECAY, {0.0, 0.1}),
        (lambda groups, lr: AdamW(groups, lr=lr), DECAY, {0.0, 0.1}),
        (lambda groups, lr: AdamW(groups, lr=lr, weight_decay=0.1), DECAY, {0.0, 0.1}),
        (partial(AdamW, lr=0.01, weight_decay=0.0, betas=(0.5, 0.6)), BETAS, {0.0}),
        (lambda groups, lr: AdamW(flat(groups), lr=lr, weight_decay=0.3), {}, {0.3}),
        (lambda groups, lr: AdamW([{"params": flat(groups), "weight_decay": 0.2}], lr=lr), {}, {0.2}),
    ],
)
def test_an_optimizer_that_agrees_with_the_keys_trains_with_its_settings(optimizer, changes, expected):
    section = OptimSection(learning_rate=0.01, **changes).with_factory(optimizer, "ours")
    built = build_optimizer(torch.nn.Linear(2, 2), section)
    assert {group["weight_decay"] for group in built.param_groups} == expected
    set_learning_rate(built, 0.002)
    assert [float(group["lr"]) for group in built.param_groups] == pytest.approx([0.002] * len(built.param_groups))


def test_a_group_with_another_rate_keeps_its_ratio_and_another_ratio_is_not_ignored():
    def two_rates(groups, lr):
        weights = flat(groups)
        return AdamW([{"params": weights[:1], "lr": 2 * lr}, {"params": weights[1:]}], lr=lr)

    section = OptimSection(learning_rate=0.01)
    built = build_optimizer(torch.nn.Linear(2, 2), section.with_factory(two_rates, "ours"))
    set_learning_rate(built, 0.002)
    assert [group["lr"] for group in built.param_groups] == pytest.approx([0.004, 0.002])
    layer = torch.nn.Module()
    layer.lora_A, layer.lora_B = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer)
    faster = OptimSection(learning_rate=0.01, lora_plus_ratio=4)
    built = build_optimizer(model, faster.with_factory(AdamW, "ours"))
    set_learning_rate(built, 0.002)
    assert {group["lr"] for group in built.param_groups} == {0.002, 0.008}
    with pytest.raises(ConfigError, match=r"optim\.lora_plus_ratio is 4, but script:ours makes .* without it"):
        build_optimizer(model, faster.with_factory(lambda groups, lr: AdamW(flat(groups), lr=lr), "ours"))


@pytest.mark.parametrize("optimizer", [lambda weights: AdamW(weights, lr=0.01), lambda g, lr: AdamW(flat(g), lr=lr)])
def test_a_decay_of_its_own_does_not_shrink_the_start_that_pissa_keeps(optimizer):
    layer = torch.nn.Linear(4, 4, bias=False)
    train_first_half(layer.weight, 2, dim=0)
    with pytest.raises(ConfigError, match=r"a weight decay of 0\.01, which would shrink what lora\.init=pissa keeps"):
        build_optimizer(layer, OptimSection(learning_rate=0.01).with_factory(optimizer, "ours"))


def test_an_optimizer_of_a_rate_of_zero_is_built():
    section = OptimSection(learning_rate=0.0).with_factory(sgd(0.0), "ours")
    assert build_optimizer(torch.nn.Linear(2, 2), section).param_groups[0]["lr"] == 0.0


def test_an_optimizer_object_holds_the_trained_weights_and_is_new():
    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    with pytest.raises(ConfigError, match="the given SGD does not hold exactly the weights that this run trains"):
        same_optimizer(optimizer, trainable_parameters(other))
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="the given SGD has made steps"):
        same_optimizer(optimizer, trainable_parameters(layer))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rate": 1e-3}, r'overrides={"optim\.learning_rate": 0\.001}'),
        ({"batch_size": 4}, r'training\.batch_size or .* overrides={"training\.batch_size": 4}'),
        ({"gradient_accumulation_steps": 4}, r"Set training\.global_batch_size"),
        ({"callback": print, "model_name": "x"}, r"Did you mean callbacks\?\n  .*model_name. Did you mean model\?$"),
        ({"train_dataset": ROWS}, r"train has no argument train_dataset\. Did you mean data\?$"),
        ({"output_dir": "a"}, r"has no argument output_dir\. Keys of .*: overrides=\{\"output_dir\": 'a'\}\.$"),
        ({"foo": 1}, r"It takes model, data, task, overrides, callbacks, metrics, loss, optimizer \("),
    ],
)
def test_an_unknown_argument_is_answered_with_what_it_means(given, message):
    with pytest.raises(ConfigError, match=message):
        finetune.train(**given)


class WithHook:
    def on_step_end(self, *_):
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "message", "words"),
    [
        ({"callbacks": [WithHook()]}, "WithHook defines on_step_end, which is not called", []),
        ({"callbacks": [object()]}, "object defines none of the methods", []),
        ({"callbacks": [WithHook]}, r"is a class. Give an object: WithHook\(\)", []),
        *(
            ({"metrics": {name: length}}, f"metrics has {name}, a name that finetune uses itself", [])
            for name in ("exact_match", "step", "model", "loss/long", "forgotten")
        ),
        (
            {"metrics": {"own": len}},
            r"metrics\['own'\], which takes \(obj, /\), but it is called with \(answer, exp",
            [],
        ),
        ({"metrics": {1: length}}, "metrics has the name 1; expected text", []),
        ({"loss": "focal"}, "loss is 'focal'; expected a function", []),
        ({"loss": torch.nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss. Give an object", []),
        (
            {"metrics": length},
            r'metrics is <function length .*; expected functions by name: metrics={"name": function}',
            [],
        ),
        (
            {"callbacks": WithHook()},
            r"callbacks is <.*WithHook.*; expected a list of objects: callbacks=\[object\]",
            [],
        ),
        ({"loss": smoothed}, r"loss is given, but training\.objective is dpo", ["training.objective=dpo"]),
    ],
)
def test_hooks_that_would_be_ignored_are_refused(given, message, words):
    config = finetune.load_config(words, model="phi_tiny", data="orders", task="finetune_lora")
    with pytest.raises(ConfigError, match=message):
        Hooks(**given).check(config)


def test_one_description_of_a_run_is_enough(monkeypatch):
    monkeypatch.setattr("finetune.training.train.launch", lambda _: pytest.fail("it trained"))
    config = finetune.load_config([], model="phi_tiny", data="orders", task="finetune_lora")
    for first in (config, "phi_tiny", {"model": "phi_tiny"}, 3, Path("run.yaml")):
        with pytest.raises(ConfigError, match=r"train takes a configuration from load_config .* Give one of the two"):
            finetune.train(first, data=ROWS)
    with pytest.raises(ConfigError, match="data is given as rows, but the overrides name"):
        finetune.train(model="phi_tiny", data=ROWS, overrides=["data=orders"])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logits, _: logits.sum().detach(), "random targets, which has no gradient. It must return the sum"),
        (lambda logits, _: logits.sum() * math.nan, "returns nan for 6 random targets, which has no finite value"),
        (
            lambda logits: logits.sum(),
            r"failed on 6 random targets: TypeError\(.* It is called as loss\(logits, targets\)",
        ),
    ],
)
def test_a_loss_that_no_weight_can_learn_from_is_refused(loss, message):
    with pytest.raises(ConfigError, match=message):
        refuse_no_sum(loss, 8, torch.device("cpu"))
    refuse_no_sum(lambda logits, targets: logits.mul_(2).sum(), 8, torch.device("cpu"))


class ScaledLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, logits, targets):
        return torch.nn.functional.cross_entropy(logits * self.scale, targets, reduction="sum")


def test_a_loss_with_weights_of_its_own_is_refused_unless_they_are_frozen_or_of_the_model():
    loss = ScaledLoss()
    for given in (loss, loss.forward, lambda *pair: loss(*pair)):
        with pytest.raises(ConfigError, match=r"has weights of its own .* shape \(8,\)\. A run trains only"):
            refuse_no_sum(given, 8, torch.device("cpu"))
    refuse_no_sum(loss, 8, torch.device("cpu"), of_model=loss.parameters())
    refuse_no_sum(loss.requires_grad_(False), 8, torch.device("cpu"))


def test_arguments_of_another_type_are_refused(monkeypatch):
    monkeypatch.setattr("finetune.training.train.launch", lambda _: pytest.fail("it trained"))
    with pytest.raises(ConfigError, match=r"^run is 3; expected a name or a path\.$"):
        finetune.load_config(run=3)
    with pytest.raises(ConfigError, match=r"run=runs/none\.yaml: the file does not exist"):
        finetune.load_config(run=Path("runs/none.yaml"))
    with pytest.raises(ConfigError, match=r"^task is None; expected a name or a path\.$"):
        finetune.train(model="phi_tiny", data=ROWS, task=None)
    for hooks in ({}, [], {"loss": smoothed}):
        with pytest.raises(ConfigError, match=r"^hooks is .*; expected Hooks\(loss="):
            finetune.Trainer(None, None, None, None, None, hooks)


def test_what_is_no_transformers_model_is_refused():
    class Alike:
        config = SimpleNamespace(model_type="phi3", _name_or_path="folder")
        get_input_embeddings = get_base_model = lambda self: self

    with pytest.raises(ModelError, match=r"^model is Alike; expected a name or a path, a transformers model"):
        describe_given_model(Alike())
    inner = get_peft_model(shipped_model(), LoraConfig(target_modules=["o_proj"])).get_base_model()
    with pytest.raises(ModelError, match="already has an adapter in its layers"):
        check_fit(finetune.load_config(model="phi_tiny", data="orders", task="finetune_lora"), inner, None)


def test_overrides_of_a_script_are_called_overrides(monkeypatch):
    monkeypatch.setattr("finetune.training.train.launch", pytest.fail)
    monkeypatch.setattr("sys.argv", ["script.py", "lora.r=0"])
    for wrong, says in (
        ({"lora.r": 0}, "overrides: lora.r: expected a whole number above 0, got 0"),
        ({"lora.r": np.int64(8)}, r"overrides: lora.r: is .*8.*; expected text, a number, .* Give value\.tolist\(\)\."),
        ({"reward.functions": [length]}, r"; expected text, .*\. Name a function by its file: \./rewards\.py:NAME\.$"),
        ({"lora.r": [torch.tensor(8)]}, r"overrides: lora.r: is \[tensor\(8\)\]; expected text, a number"),
        ("lora.r=0", "overrides: lora.r: expected a whole number above 0, got 0"),
        ({"lora.r": object()}, "overrides: lora.r: is <object object at .*; expected text, a number"),
    ):
        with pytest.raises(ConfigError, match=says):
            finetune.train(model="phi_tiny", data="orders", overrides=wrong)
    for given, name in ((["lora.r=0"], "command line"), (["lora.r=0", "seed=1"], "overrides")):
        with pytest.raises(ConfigError, match=f"^{name}: lora.r: expected"):
            finetune.load_config(given, model="phi_tiny", data="orders")


def test_a_model_object_that_holds_the_adapter_of_a_run_is_refused(tmp_path):
    model = shipped_model()
    settings = {**SETTINGS, "training.max_steps": 1, "data.cache_dir": tmp_path}
    result = finetune.train(model=model, data=ROWS, overrides={**settings, "output_dir": tmp_path / "one"})
    with pytest.raises(
        ModelError, match=r"already has an adapter in its layers: an earlier run .* Load the model again"
    ):
        finetune.train(model=model, data=ROWS, overrides={**settings, "output_dir": tmp_path / "two"})
    further = finetune.train(model=result.model, data=ROWS, overrides={**settings, "output_dir": tmp_path / "further"})
    assert further.metrics["loss"] != result.metrics["loss"]


def test_methods_of_other_trainers_are_refused():
    class Mine(finetune.Trainer):
        def compute_loss(self, *_):
            raise AssertionError

    with pytest.raises(ConfigError, match="Mine defines compute_loss, which this trainer does not call: give loss="):
        Mine(None, None, None, None, None)


@pytest.mark.slow
@pytest.mark.warm
def test_a_metric_that_fails_loses_no_step_on_any_rank(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def brittle(answer, expected): return 1 / 0\n")
    words = [sys.executable, "-m", "finetune", "train", "model=phi_tiny", "data=orders", "task=finetune_lora", *SHORT]
    words += [f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}", "parallel.num_processes=2"]
    words += [f"validation.metrics={file}:brittle", "validation.validate_every=2", "training.batch_size=4"]
    done = run_command(words)
    assert done.returncode == 2, done.stdout
    assert "DataError: the metric own.brittle failed on the answer" in done.stdout
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000002"]
    file.write_text("def brittle(answer, expected): return 0.5\n")
    again = run_command([*words, "resume=auto", "resume.allow=validation.metrics"])
    assert again.returncode == 0, again.stdout
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(each["step"], each["own.brittle"]) for each in events if each["event"] == "validation"] == [
        (2, 0.5),
        (4, 0.5),
    ]
