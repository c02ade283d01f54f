"""Flags do what overrides do: `--training.max-steps 5` is `training.max_steps=5`."""

import json
import re

import pytest

from finetune.cli.help import OTHER_WORDS, search
from finetune.cli.overrides import config_from_overrides
from finetune.config.compose import as_overrides, compose
from finetune.config.schema import DataSection
from finetune.data.examples import check_local_rows
from finetune.errors import ConfigError, DataError
from tests.in_process import run_finetune
from tests.launches import REPOSITORY


@pytest.mark.parametrize(
    ("typed", "overrides"),
    [
        ("--model phi_tiny --data x.jsonl", "model=phi_tiny data=x.jsonl"),
        ("--training.max-steps 5", "training.max_steps=5"),
        ("quickstart --optim.args.betas [0.9,0.95] seed=1", "quickstart optim.args.betas=[0.9,0.95] seed=1"),
        ("--strict --seed 1", "strict=true seed=1"),
        ("--strict quickstart", "strict=true quickstart"),
        ("--training.gradient-checkpointing auto", "training.gradient_checkpointing=auto"),
        ("--training.gradient-checkpointing", "training.gradient_checkpointing=true"),
        ("--seed -1 --output-dir -x", "seed=-1 output_dir=-x"),
        ("--output-dir=--x", "output_dir=--x"),
        ("--seed --strict", "seed= strict=true"),
        ("--seed", "seed="),
        ("--device 4090 --seed 1", "--device 4090 seed=1"),
        ("--devise 4090", "--devise 4090"),
        ("--seed 1 -- --seed 2", "seed=1 -- --seed 2"),
        ("--config lora.yaml --config=full.yaml", "run=lora.yaml run=full.yaml"),
        ("--no-strict --no-training.drop-last quickstart", "strict=false training.drop_last=false quickstart"),
        ("--lr 1e-4", "lr=1e-4"),
        ("--resume", "resume=auto"),
        ("--resume never", "resume=never"),
        ("--resume -h", "resume=auto -h"),
        ("--resume output_dir=runs/x", "resume=auto output_dir=runs/x"),
        ("--resume quickstart", "resume=auto quickstart"),
        ("--output-dir seed=1", "output_dir=seed=1"),
    ],
)
def test_flags_are_overrides(typed, overrides):
    own_options = ["--device", "--retry-failed", "--json", "-h", "--help"]
    assert as_overrides(typed.split(), own_options) == overrides.split()
    assert as_overrides(overrides.split(), own_options) == overrides.split()


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        (["phi4", "chats.jsonl"], r"Did you mean model=phi4\?"),
        (["chats.jsonl", "phi4-mini"], r"phi4-mini: expected key=value\. Did you mean model=phi4_mini\?"),
        (["model", "phi_tiny"], r"Did you mean model=NAME\?"),
        (["dpo"], r"Did you mean task=finetune_preferences\?"),
        (["orders"], r"Did you mean data=orders\?"),
        (["quickstarts"], r"Did you mean quickstart\?"),
    ],
)
def test_a_name_without_its_key_is_answered_with_the_key(tmp_path, monkeypatch, typed, advice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").touch()
    with pytest.raises(ConfigError, match=advice):
        config_from_overrides(typed)


def test_recipes_and_commands_take_flags(tmp_path):
    typed = ["--model", "phi_tiny", "--data=orders", "--training.max-steps", "5", "--strict"]
    assert compose(typed) == compose(["model=phi_tiny", "data=orders", "training.max_steps=5", "strict=true"])
    shown = run_finetune("config", "show", *typed, "--json")
    assert json.loads(shown.answer)["config"]["training"]["max_steps"] == 5
    folder = tmp_path / "runs/x"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 7\n")
    shown = run_finetune("config", "show", folder, "--json")
    assert json.loads(shown.answer)["config"]["seed"] == 7


def test_a_file_of_another_tool_is_no_run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "peer.yml").write_text("base_model: org/model\nadapter: lora\nlora_r: 8\nnum_epochs: 1\n")
    done = run_finetune("train", "--config", "peer.yml")
    assert done.returncode == 2
    assert "another tool (base_model, adapter, lora_r, …)" in done.errors
    assert "finetune init --from peer.yml" in done.errors
    theirs = "base_model: x\nadapter: x\n"
    for ours in ("lora_r: 8\nlora.r: 8\n", "lora_r: 8\nmodel: phi_tiny\n", "seed: 1\n"):
        (tmp_path / "ours.yml").write_text(theirs + ours)
        assert "--from" not in run_finetune("train", "ours.yml").errors


@pytest.mark.parametrize(
    ("typed", "close"), [("nothere.jsonl", ""), ("openia.jsonl", "openai.jsonl"), ("openai.json", "openai.jsonl")]
)
def test_files_are_alike_without_their_suffixes(tmp_path, monkeypatch, typed, close):
    monkeypatch.chdir(tmp_path)
    for name in ("openai.jsonl", "c.csv"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        config_from_overrides(["model=phi_tiny", f"data={typed}"])
    assert re.findall(r"Did you mean (.*?)\?", str(caught.value)) == ([close] if close else [])


@pytest.mark.parametrize(
    ("file", "is_refused"),
    [
        ({"output_dir": "out", "learning_rate": 5e-5, "num_train_epochs": 3.0, "x": 1}, True),
        ({"zero_optimization": {"stage": 3}, "train_batch_size": 8}, True),
        ({"prompt": "q", "completion": "a"}, False),
        ([{"output_dir": "out", "learning_rate": 5e-5, "num_train_epochs": 3.0}], False),
    ],
)
def test_json_of_another_tool_is_no_file_of_rows(tmp_path, monkeypatch, file, is_refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ta.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError) as caught:  # at least: there is no model
        config_from_overrides(["ta.json"])
    message = r"settings of another tool \(.*\), and no rows?\. Translate the file with: finetune init --from ta\.json"
    assert bool(re.search(message, str(caught.value))) == is_refused
    if is_refused:
        with pytest.raises(DataError, match=message):
            check_local_rows(DataSection(path="ta.json"), "answers")


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ("train -h", 0, ["training.num_epochs", "Default: 0.0002", "finetune config show", "finetune config list"]),
        ("help plan", 0, ["finetune plan", "--probe"]),
        ("help dpo", 0, ["finetune_preferences", "DPO", "preference.beta=0.1"]),
        ("help lora.r", 0, ["Rank of each update. Default: 16.", "a whole number above 0"]),
        ("help nosuchword", 2, ["nosuchword: no command, task, key or page has this name. Try another word"]),
        ("help evaluat", 2, ["Did you mean 'evaluate'?"]),
        ("help vision", 0, [f"Pages in {REPOSITORY / 'docs'}", "phi.md", "The Phi family"]),
        ("help dropout", 0, ["Keys", "lora.dropout", "Default: 0.0", "Pages in"]),
        ("help 8-bit", 0, ["Pages in"]),
        ("help learning rate", 0, ["Keys", "optim.learning_rate", "Pages in"]),
        ("help out of memory", 0, ["Pages in", "troubleshooting.md"]),
        ("help loss nan", 0, ["training.on_nonfinite", "troubleshooting.md"]),
        ("help chat template", 0, ["data.chat_template", "data.md"]),
        ("help system prompt", 0, ["ask.md", "tasks/serve.md"]),
        ("help config show", 0, ["finetune config show"]),
        ("help export nosuch", 2, ["No such command 'nosuch'"]),
        ("help nosuchword atall", 2, ["nosuchword atall: no command, task, key or page has this name. Try another"]),
        ("help Qwen3", 0, ["Models, rows, tasks and runs", "model=qwen3_4b", "models.md"]),
        ("help loar", 2, ["no command, task, key or page has this name. Did you mean lora?"]),
        ("version", 2, ["Did you mean '--version'?"]),
        ("help lora_r", 0, ["Keys\n  lora.r "]),
        ("help OOM", 0, ['OOM: searched for "out of memory" instead.', "troubleshooting.md"]),
        ("help mixed-precision", 0, ["Keys\n  training.precision "]),
        ("help epochs", 0, ["Keys\n  training.num_epochs "]),
        ("help max_seq_length", 0, ["Keys\n  data.max_length "]),
        ("help gradient accumulation", 0, ["gradient accumulation: Set training.global_batch_size", "Pages in"]),
        ("help packing", 0, ["Keys\n  training.packing "]),
        ("help flash_attn", 0, ["flash_attn: Nothing to set"]),
        ("help phi4", 0, ["model=phi4: Phi-4", "finetune config show model=phi4"]),
        ("help list", 2, ["Did you mean 'runs'?"]),
        ("help predict", 2, ["Did you mean 'generate'?"]),
        ("list", 2, ["Did you mean 'runs'?"]),
        ("qlora --config x.yaml", 2, ["Did you mean 'train task=finetune_qlora'?"]),
        ("help grpo", 0, ["finetune train task=finetune_grpo model=phi4_mini data=FILE reward.functions=exact_match"]),
        ("help new_tokens", 0, ["data=FILE \"lora.new_tokens=['<order>']\"", "Its rows: finetune preview"]),
        ("help resume.allow", 0, ["resume_allow: Keys or sections that may change", "resume.allow=seed,data"]),
        ("help warmup_ratio", 0, ["optim.warmup_steps: Optimizer steps"]),
        ("config show --lora.target-modules q k v", 2, ["in brackets: 'lora.target_modules=[q,k,v]'."]),
        ("config show lora.layers=[30, 31]", 2, ["in brackets: 'lora.layers=[30,31]'."]),
        ("plan --devise 4090 --model phi_tiny", 2, ["--devise", "--device"]),
        ("generate nosuch Hi --max_new_tokens 0", 2, ["Invalid value for '--max-new-tokens'"]),
        ("generate nosuch Hi --top_k=0", 2, ["Invalid value for '--top-k'"]),
        ("export gguf nosuch --type q", 2, ["'q4_k_m'"]),
        ("rehearse model=phi_tiny data=orders --minutes 0", 2, ["Invalid value for '--minutes'"]),
        ("report no_such --no_data", 2, ["no_such is not the folder of a run"]),
    ],
)
def test_help_and_refusals(arguments, code, parts):
    done = run_finetune(*arguments.split())
    assert done.returncode == code
    assert all(part in done.stdout + done.errors for part in parts), done.stdout + done.errors


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("optim.warmup_steps=0.1", "optim.warmup_steps", 0.1),
        ("warmup_ratio=0.1", "optim.warmup_steps", 0.1),
        ("training.num_epochs=0.5", "training.num_epochs", 0.5),
        ("training.report_to=wandb", "training.report_to", ["wandb"]),
        ("report_to=wandb,mlflow", "training.report_to", ["wandb", "mlflow"]),
        ("lora.target_modules=q_proj,v_proj", "lora.target_modules", ["q_proj", "v_proj"]),
        ("lora.layers=30,31", "lora.layers", [30, 31]),
        ("lora.layers=30", "lora.layers", [30]),
        ("reward.weights=1,0.1", "reward.weights", [1.0, 0.1]),
        ("lora.modules_to_save=embed_tokens,norm", "lora.modules_to_save", ["embed_tokens", "norm"]),
        ("testing.metrics=exact_match,token_f1", "testing.metrics", ["exact_match", "token_f1"]),
        ("lora.target_modules=layers.[0-9]{1,2}.*", "lora.target_modules", ["layers.[0-9]{1,2}.*"]),
        ("lora.target_modules=all-linear", "lora.target_modules", "auto"),
        ("optim.optimizer=adamw", "optim.optimizer", "torch.optim.AdamW"),
        ("optim.optimizer=AdamW_8bit", "optim.optimizer", "bitsandbytes.optim.AdamW8bit"),
        ("optim.optimizer=torch.optim.Adam", "optim.optimizer", "torch.optim.Adam"),
    ],
)
def test_values_that_other_tools_take(typed, key, value):
    config = compose([typed], complete=False)
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value
    assert type(getattr(getattr(config, section), name)) is type(value) or value == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("warmup_ratio=0.1 optim.warmup_steps=3", "Keep one of the two"),
        ("warmup_ratio=1", "(written warmup_ratio): expected a whole number of at least 0 or a number of at least 0"),
        ("optim.warmup_steps=1.5", "below 1, got 1.5"),
        ("report_to=none training.report_to=wandb", "Keep one of the two"),
        ("report_to=clearml", "one of none, tensorboard, wandb, trackio, mlflow or a list"),
        ("optim.optimizer=adam", "one of adamw, adamw_8bit"),
    ],
)
def test_values_that_are_refused(typed, said):
    with pytest.raises(ConfigError) as caught:
        compose(typed.split(), complete=False)
    assert said in str(caught.value)


def test_a_search_for_other_words_finds_pages(capsys: pytest.CaptureFixture[str]) -> None:
    for ours, words in OTHER_WORDS.items():
        for word in words.split():
            assert search([word.replace("_", " ")])
            printed = capsys.readouterr().out
            assert f'searched for "{ours}" instead' in printed
            assert "Pages in" in printed, ours
