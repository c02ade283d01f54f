"""`finetune rehearse`: a whole job in miniature, and what would have failed in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.compose import compose
from finetune.config.listing import list_configs
from finetune.config.schema import LoraSection, ModelSection
from finetune.diagnose.rehearsal import Rehearsal, _merge, _train, _write_stand_in
from finetune.diagnose.rehearsal_overrides import (
    MOST_ROWS,
    override,
    rehearsed_values,
    write_stand_in,
)
from finetune.model.base import longrope_boundary
from finetune.model.published import published_sizes
from finetune.model.shrunken import HEAD_SIZE, shrink
from finetune.model.targets import resolve_targets
from finetune.runs.file_lock import file_lock
from tests.in_process import Ended, run_finetune
from tests.launches import wait_until
from tests.runs.made_runs import write_run
from tests.tiny import tiny_tokenizer
from tests.tiny_models import LLAMA_KIN
from tests.tiny_runs import write_base, write_rows

PRESETS = [name for name, _ in list_configs()["model"] if name != "phi_tiny"]

pytestmark = pytest.mark.warm


def on_meta(keys: dict[str, Any]) -> Any:
    with torch.device("meta"):
        rest = {key: value for key, value in keys.items() if key != "model_type"}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(keys["model_type"], **rest))


def target_names(model: Any) -> set[str]:
    return {name.rpartition(".")[2] for name in resolve_targets(model, LoraSection().target_modules)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_stand_in_is_of_the_same_family(name: str) -> None:
    published = published_sizes(compose([f"model={name}"], complete=False).model)
    assert published is not None
    real = on_meta(published.as_config())
    tiny = on_meta(shrink(real.config.to_dict()))
    assert sum(weight.numel() for weight in tiny.parameters()) < 70e6
    assert target_names(tiny) == target_names(real)
    assert longrope_boundary(tiny) == longrope_boundary(real)
    kept = ("model_type", "vocab_size", "max_position_embeddings", "sliding_window", "tie_word_embeddings")
    for key in (*kept, "eos_token_id"):
        assert getattr(tiny.config, key, None) == getattr(real.config, key, None), key
    heads, groups = tiny.config.num_attention_heads, tiny.config.num_key_value_heads
    assert heads / groups == real.config.num_attention_heads / real.config.num_key_value_heads
    assert groups >= 2
    assert tiny.config.hidden_size == heads * HEAD_SIZE


def test_a_stand_in_has_a_layer_of_each_layer_type() -> None:
    keys = LLAMA_KIN["qwen3"].to_dict()
    layer_types = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    tiny = on_meta(shrink({**keys, "num_hidden_layers": 6, "layer_types": layer_types}))
    assert tiny.config.layer_types == ["sliding_attention", "full_attention"]
    assert len(tiny.model.layers) == 2
    every_second = LLAMA_KIN["smollm3"].to_dict()
    assert on_meta(shrink(every_second)).config.no_rope_layers == [1, 0]


def set_dtype(base: Path, dtype: str) -> None:
    """Change the type of a base's weights in its configuration."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": dtype}))


def test_a_stand_in_keeps_the_type_of_the_weights_and_what_ends_an_answer(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [320, 321]}))
    set_dtype(base, "bfloat16")
    section = compose([f"model.path={base}"], complete=False).model
    write_stand_in(section, tmp_path / "one", seed=1, least_width=100)
    write_stand_in(section, tmp_path / "same", seed=1, least_width=100)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert (made.dtype, made.generation_config.eos_token_id) == (torch.bfloat16, [320, 321])
    assert made.config.num_key_value_heads * HEAD_SIZE >= 100
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "same/model.safetensors").read_bytes()


def test_a_stand_in_of_a_class_with_other_names_is_as_small(tmp_path: Path) -> None:
    sizes = {"n_layer": 6, "n_head": 4, "n_embd": 256, "vocab_size": 336}
    described = write_stand_in(ModelSection(init="random", config={"model_type": "gpt2", **sizes}), tmp_path, seed=1)
    made = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert described.startswith("gpt2, 2 layers, hidden size 64, ")
    assert (made.n_layer, made.n_embd, made.vocab_size) == (2, 64, 336)


def changed(*words: str, **sizes: int) -> dict[str, Any]:
    config = compose(["model=phi_tiny", "data=orders", *words])
    scale = {"processes": 1, "minutes": 15.0, "steps": 6, "real_steps": 600, "measured_rows": 0, **sizes}
    return rehearsed_values(config, stand_in=Path("/stand-in"), **scale)


def test_what_is_counted_in_steps_is_scaled_and_the_rest_is_kept() -> None:
    words = ["optim.warmup_steps=150", "training.batch_size=4", "validation.metrics=exact_match"]
    assert changed(*words, "model.trust_remote_code=true") == {
        **{"model.path": "/stand-in", "model.tokenizer": "shipped:phi_tiny", "model.trust_remote_code": False},
        **{"training.max_steps": 6, "optim.warmup_steps": 2, "checkpoint.save_every": 2},
        **{"validation.validate_every": 2, "testing.max_new_tokens": 16},
        **{"validation.max_new_tokens": 16, "validation.num_samples": 8},
    }
    assert changed(measured_rows=10_000)["data.max_rows"] == MOST_ROWS
    left_out = changed("validation.drop_last=true", "validation.batch_size=300", measured_rows=10_000)
    assert (left_out["data.max_rows"], left_out["validation.drop_last"]) == (MOST_ROWS, False), "they fill no batch"
    assert "validation.drop_last" not in changed("validation.drop_last=true")
    for needs_all in (
        ["data.validation=500"],
        ["data.path=null", "data.mixture=[{path: rows.jsonl, validation: 300}]"],
        ["validation.by=language", "checkpoint.best_metric=loss/fr"],
        ["validation.by=language", "early_stopping.metric=loss/fr"],
    ):
        assert "data.max_rows" not in changed(*needs_all, measured_rows=10_000)
    falling = changed("optim.schedule=wsd", "optim.decay_steps=150")
    assert (falling["training.max_steps"], falling["optim.decay_steps"]) == (6, 2)
    rewarded = changed(
        "task=finetune_grpo", "reward.functions=length", "checkpoint.save_every=2", "rollout.server=http://gpu:8000"
    )
    assert (rewarded["rollout.max_completion_length"], rewarded["validation.num_samples"]) == (16, 8)
    assert rewarded["rollout.server"] is None, "the stand-in generates its own answers"
    for path in ("/runs/a #1/ü", "/runs/a: b", "null", "/runs/a\\b"):
        assert compose([override("output_dir", path)], complete=False).output_dir == path


def test_the_limit_of_conversations_with_an_environment_is_kept_because_it_counts_what_reset_adds(
    tmp_path: Path,
) -> None:
    (tmp_path / "game.py").touch()
    environment = f"rollout.environment={tmp_path / 'game.py'}:Game"
    played = changed("task=finetune_grpo", "reward.functions=environment", environment)
    assert "rollout.max_completion_length" not in played


def test_a_world_that_this_machine_cannot_start_is_smaller_and_keeps_the_global_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("finetune.diagnose.rehearsal_overrides.num_cores", lambda: 4.5)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["parallel.world_size=16", "parallel.sharding=fsdp2", "parallel.shard_size=8", "training.batch_size=4"]
    words += ["training.device=cpu", "parallel.backend=nccl", "lora.quantize=nf4"]
    found = changed(*words, processes=16)
    assert found["parallel.num_processes"] == 4
    assert found["parallel.world_size"] is found["parallel.shard_size"] is None
    assert found["training.global_batch_size"] == 64
    assert "parallel.sharding" not in found
    assert (found["parallel.backend"], found["lora.quantize"]) == ("auto", "none")


def test_a_strict_rehearsal_does_not_refuse_what_four_bits_change_in_random_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("finetune.diagnose.rehearsal_overrides.find_spec", lambda name: name)
    words = ["training.device=cpu", "lora.quantize=nf4"]
    assert changed(*words, "strict=true")["lora.quantize"] == "none"
    assert "lora.quantize" not in changed(*words)


Job = Callable[..., list[str]]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return the arguments of a job that can be trained. `change` may change its rows."""

    def make(*words: str, change: Callable[[dict[str, list[Any]]], object] | None = None) -> list[str]:
        base, rows = write_base(tmp_path / "base"), write_rows(tmp_path / "rows")
        splits = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in rows.iterdir()}
        if change is not None:
            change(splits)
        for name, of_split in splits.items():
            (rows / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_split))
        own = [f"model.path={base}", f"data.path={rows}", f"data.cache_dir={tmp_path / 'cache'}"]
        return [*own, f"output_dir={tmp_path / 'runs/run'}", "training.batch_size=4", *words]

    return make


def rehearse(words: list[str], *options: str) -> tuple[Ended, dict[str, dict[str, Any]]]:
    """Run the command; return its end, and its stages by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        ended = run_finetune("rehearse", *words, "--json", *options)
    assert ended.answer, ended.stdout
    record = json.loads(ended.answer)
    assert record["exit_code"] == ended.returncode
    return ended, {stage["name"]: stage for stage in record["stages"]}


@pytest.mark.slow
@pytest.mark.process
def test_a_bad_row_of_the_validation_split_would_have_failed_and_so_would_a_folder(job: Job, tmp_path: Path) -> None:
    def break_row(splits: dict[str, list[Any]]) -> None:
        splits["validation"][3] = {"messages": [{"role": "user", "content": 5}]}

    (tmp_path / "file").touch()
    words = [*job(change=break_row), f"output_dir={tmp_path / 'file/run'}", "lora.quantize=nf4"]
    ended, stages = rehearse(words, "--processes", "3")
    assert ended.returncode == 2
    record = json.loads(ended.answer)
    assert record["plan"]["batches"]["world_size"] == 3
    assert {name: stage["outcome"] for name, stage in stages.items()} == {
        **{"plan": "failed", "folders": "failed", "stand-in": "ok", "data": "failed"},
        **dict.fromkeys(["train", "kill", "resume", "merge", "verify"], "not run"),
    }
    assert "a part of the path is a file" in stages["folders"]["what"]
    assert "validation.jsonl, row 4" in stages["data"]["what"] or "validation.jsonl:4" in stages["data"]["what"]


@pytest.mark.slow
@pytest.mark.process
def test_what_preview_finds_would_have_failed_with_each_finding(job: Job, tmp_path: Path) -> None:
    def lengthen(splits: dict[str, list[Any]]) -> None:
        for row in splits["train"]:
            row["messages"][1]["content"] = "send three crates of oranges " * 40

    template = tmp_path / "closed.jinja"
    template.write_text("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}")
    ended, stages = rehearse(job(f"data.chat_template={template}", "data.max_length=64", change=lengthen))
    assert ended.returncode == stages["data"]["exit_code"] == 2
    assert "data.max_length" in stages["data"]["what"]
    assert "no generation prompt: <|assistant|> carries loss" in stages["data"]["what"]
    assert not (tmp_path / "runs/run").exists()
    assert [path.name for path in Path(stages["data"]["log"]).parent.parent.iterdir()] == ["logs"]


@pytest.mark.slow
@pytest.mark.process
def test_a_model_that_does_not_fit_and_a_metric_that_raises_would_have_failed_also_without_the_hub(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/scores_of_mine.py").write_text("def ratio(answer, expected):\n    return len(answer) / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.syspath_prepend(tmp_path / "own")
    monkeypatch.setenv("COLUMNS", "400")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    words = ["validation.metrics=scores_of_mine.ratio", "validation.metrics_from=scores_of_mine"]
    words += [word for word in job() if not word.startswith("model.path=")]
    preset = ["model=phi4_mini", f"model.tokenizer={tmp_path / 'tokenizer'}", "training.batch_size=2"]
    ended = run_finetune("rehearse", *words, *preset, "--device", "MyGPU 2GB", "--steps", "4")
    shown = " ".join(ended.stdout.split())
    assert "phi3, 2 layers, hidden size 96, " in shown
    assert ended.returncode == 2
    assert "Would have failed plan (exit code 2): " in shown
    assert "not run: it needs what `train` makes" in shown
    assert "division by zero" in shown.partition(" train (exit code ")[2]
    assert "The real run would fail: plan, train. " in shown
    (log,) = tmp_path.glob("*.rehearsal-*/logs/train.log")
    assert f"log: {log}" in shown
    assert "ratio" in log.read_text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.process
def test_a_command_that_does_not_end_in_time_is_ended(job: Job) -> None:
    ended, stages = rehearse(job(), "--minutes", "0.01")
    assert ended.returncode == stages["plan"]["exit_code"] == 3
    assert "finetune plan had not ended when the time of the rehearsal was over" in stages["plan"]["what"]


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_rehearsal_leaves_no_command_behind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", status="running").path
    code = "import sys; from pathlib import Path; from finetune.diagnose.rehearsal_commands import run_command; "
    code += "run_command(['watch', sys.argv[1]], Path(sys.argv[2]), seconds=60)"
    with file_lock(run / ".lock", waiting_for="the run"):  # the command watches it until it is released
        rehearsal = subprocess.Popen([sys.executable, "-c", code, str(run), str(tmp_path / "log")])
        parent = psutil.Process(rehearsal.pid)
        wait_until(parent.children, "the command", 60.0)
        (command,) = parent.children()
        rehearsal.kill()
        rehearsal.wait()
        wait_until(lambda: not command.is_running(), "the end of the command", 10.0)


def test_ctrl_c_leaves_no_folder(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.diagnose.rehearsal.STAGES", {"plan": interrupt})
    words = job()
    before = sorted(tmp_path.iterdir())
    assert run_finetune("rehearse", *words).returncode == 130
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
@pytest.mark.process
def test_an_adapter_that_has_learned_little_is_merged_in_float32(job: Job, tmp_path: Path) -> None:
    """In the type of the base, bfloat16, nothing would be left of it."""
    words = job("optim.learning_rate=1e-7", "training.max_steps=1", "training.precision=fp32")
    set_dtype(tmp_path / "base", "bfloat16")
    folder = tmp_path / "rehearsal"
    assert run_finetune("train", *words, f"output_dir={folder / 'killed'}").returncode == 0
    rehearsal = Rehearsal(config=compose(words), arguments=words, folder=folder, steps=1, minutes=15.0)
    assert _merge(rehearsal, tmp_path / "merge.log").startswith("Reloaded by")
    assert rehearsal.limits[-1].startswith("whether `merge` may round")
    assert json.loads((folder / "merged/config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.process
def test_equal_rewards_of_a_random_model_do_not_end_a_rehearsal(job: Job, tmp_path: Path) -> None:
    words = ["task=finetune_grpo", "reward.functions=json_valid", "strict=true", "rollout.num_generations=2"]
    words = job(*words, "training.global_batch_size=1", "rollout.max_completion_length=2", "testing.metrics=[]")
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    rehearsal = Rehearsal(config=compose(words), arguments=words, folder=folder, steps=1, minutes=15.0)
    _write_stand_in(rehearsal, tmp_path / "unused.log")
    assert "loss 0 to 0, 1 step, " in _train(rehearsal, tmp_path / "train.log")
    assert rehearsal.changes["optim.learning_rate"] == 0
    assert "optim.min_learning_rate" not in rehearsal.changes
    assert rehearsal.limits[-1].startswith("updates: the answers of the stand-in")


@pytest.mark.slow
def test_a_job_of_two_processes_is_rehearsed_to_its_end(job: Job, tmp_path: Path) -> None:
    words = ["parallel.world_size=2", "training.num_epochs=4", "validation.metrics=exact_match"]
    words = job(*words, "lora.new_tokens=[<a>,<b>]", "lora.dropout=0.1")
    folder = tmp_path / "rehearsal"
    rehearsal = Rehearsal(config=compose(words), arguments=words, folder=folder, steps=6, minutes=15.0)
    rehearsal.run()
    stages = {result.name: result.what for result in rehearsal.results}
    assert not rehearsal.failed, rehearsal.failed
    assert "6 steps, 3 validations, 4 checkpoints, tested" in stages["train"]
    # A fast run may have committed the next one by the time of the kill.
    assert re.search(r"SIGKILL to all processes once the checkpoint of step [2-6] was committed", stages["kill"])
    assert stages["resume"].startswith("the same bytes as the run that was not killed: adapter/")
    assert "resumed from step=" in (folder / "logs/resume.log").read_text()
    assert stages["verify"] == "the merged folder answers as the run does"
    assert json.loads((folder / "whole/run.json").read_text())["world_size"] == 2
    rehearsal.clean()
    assert not folder.exists()
    assert not (tmp_path / "runs").exists()
