"""`finetune init`: the run file that it writes, what it asks, and what it never overwrites."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

from finetune.cli.init import _check_rows, _validation_rows
from finetune.config import load_config
from finetune.config.compose import compose
from finetune.config.config_files import resolve_shipped
from finetune.config.keys import fields
from finetune.config.listing import list_configs
from finetune.config.schema import Config
from finetune.training.setup import check_config
from tests.in_process import run_finetune
from tests.runs.screens import FINETUNE, Screen
from tests.tiny_runs import write_rows


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "rows", validation=0, test=0)
    (rows / "train.jsonl").rename("chats.jsonl")
    rows.rmdir()


def printed(*words: str) -> str:
    done = run_finetune("init", *words)
    assert done.returncode == 0, done.stdout
    return done.answer


def loaded(text: str) -> Config:
    Path("mine.yaml").write_text(text, encoding="utf-8")
    return load_config(run="mine.yaml")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model=phi2", "data=chats.jsonl"],
        ["chats.jsonl", "model=org/phi", "task=finetune_full", "parallel=single", "output_dir=runs/a b"],
        ["data.mixture=[{path: chats.jsonl, weight: 2}]", "optim.args.betas=[0.5, 0.9]", "data.columns.prompt=q"],
        [
            "model.config={model_type: phi3}",
            "model.init=random",
            "model.tokenizer=shipped:phi_tiny",
            "data=./chats.jsonl",
        ],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_without_a_terminal_it_prints_a_file_that_says_the_same_as_the_words(words):
    text = printed(*words, "--full")
    config = loaded(text)
    given = [f"data={word}" if "=" not in word else word for word in words]
    defaults = {"model": "phi_tiny", "data": "orders"} if not words else {"model": "phi_tiny"}
    own_model = any(word.startswith("model.config") for word in words)
    expected = compose(
        [*given, f"output_dir={config.output_dir}"], defaults={} if own_model else defaults | {"task": "finetune_lora"}
    )
    assert config == expected
    short = printed(*words)
    assert set(short.splitlines()) - set(text.splitlines()) == set(short.splitlines()[-2:])
    assert len(short.splitlines()) < 60
    assert loaded(short) == config
    with_every_key = re.sub(r"^#(?=[a-z_]+[.a-z_]*: )", "", text, flags=re.MULTILINE)
    assert loaded(with_every_key) == config


def test_every_key_has_its_meaning():
    lines = printed("lora.r=4", "--full").splitlines()
    for key, field in fields().items():
        (number,) = (n for n, line in enumerate(lines) if re.match(f"#?{re.escape(key)}: ", line))
        assert lines[number - 1] == f"# {field.description}"
    assert "lora.r: 4" in lines
    assert max(map(len, lines)) <= 130


def test_a_key_without_effect_is_said_to_have_none():
    text = printed("model=phi_tiny", "data=orders", "lora.r=4", "training.method=full", "lora.alpha=8")
    lines = text.splitlines()
    without = [lines[number + 1] for number, line in enumerate(lines) if line.startswith("# It has no effect")]
    assert without == ["lora.r: 4", "lora.alpha: 8.0"]
    assert "# It has no effect in this run: training.method is full." in lines
    assert "no effect" not in printed("model=phi_tiny", "data=orders", "lora.r=4")


def test_the_last_lines_name_the_commands_that_show_the_other_keys():
    assert run_finetune("init", "lora.r=4", "--file", "my run.yaml").returncode == 0
    lines = Path("my run.yaml").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if re.match("#[a-z]", line)]
    assert lines[-2] == (
        "# finetune config show 'my run.yaml' lists all other keys with their values, and finetune help KEY explains "
        "one."
    )
    assert "\n  alpha: " in run_finetune("config", "show", "my run.yaml", code=0).answer
    assert "lora.alpha" in run_finetune("help", "lora.alpha", code=0).answer


def test_the_file_names_the_validation_rows_only_where_one_file_would_give_them():
    assert "\ndata.validation: auto\n" in printed("chats.jsonl")
    assert "\ndata.validation: null\n" in printed("chats.jsonl", "data.validation=null")
    for words in ([], ["data.mixture=[{path: chats.jsonl}]"]):
        assert "\n#data.validation: auto\n" in printed(*words, "--full")
    words = ["chats.jsonl", "task=finetune_grpo", "reward.functions=length"]
    assert "\n#data.validation: null\n" in printed(*words, "--full")


def test_a_file_is_written_where_it_is_named_and_never_over_another():
    assert run_finetune("init", "chats.jsonl", "--file", "mine.yaml").returncode == 0
    first = Path("mine.yaml").read_bytes()
    [schema] = re.findall(r"^# yaml-language-server: \$schema=(.+)$", first.decode(), re.MULTILINE)
    assert "optim.warmup_steps" in json.loads(Path(schema).read_text())["properties"]
    assert load_config(run="mine.yaml").data.path == "chats.jsonl"
    again = run_finetune("init", "--file", "mine.yaml")
    assert again.returncode == 2
    assert "mine.yaml exists already. Nothing was written; name another file with --file." in again.errors
    assert Path("mine.yaml").read_bytes() == first
    for words in (["quickstart"], ["model=phi4", "run=quickstart"]):
        done = run_finetune("init", *words, "--file", "other.yaml")
        assert (done.returncode, "init takes no run file, got quickstart." in done.errors) == (2, True)
        assert not Path("other.yaml").exists()
    done = run_finetune("init", "--file", "mine.txt")
    assert (done.returncode, "Name it mine.txt.yaml" in done.errors, Path("mine.txt").exists()) == (2, True, False)
    nowhere = run_finetune("init", "--file", "no/folder/mine.yaml")
    assert nowhere.returncode == 2
    assert re.search("--file is no/folder/mine.yaml, but there is no folder .*/no/folder", nowhere.errors)
    Path("link.yaml").symlink_to("target.yaml")
    assert "link.yaml exists already" in run_finetune("init", "--file", "link.yaml").errors
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("finetune.runs.durable._sync", side_effect=full):
        done = run_finetune("init", "--file", "full.yaml")
    assert done.returncode == 3
    assert "full.yaml cannot be written: No space left on device (ENOSPC). Make room there" in done.errors
    assert not [*Path.cwd().glob("*full.yaml"), *Path.cwd().glob("target.yaml")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["training.objective=kto", "preference.gamma=1"], "preference.gamma is 1"),
        (["task=finetune_grpo"], "reward.functions is empty"),
        (["optim.optimizer=sgd", "optim.args={betas: [0.9, 0.9]}"], "cannot be built"),
        (["training.objective=dpo", "data.train_on=each_turn"], "data.train_on is each_turn"),
        (["model.frozen_precision=fp8", "task=finetune_full"], "model.frozen_precision=fp8"),
        (["parallel.sharding=fsdp2", "task=finetune_full", "optim.optimizer=muon"], "optim.optimizer is"),
    ],
)
def test_a_file_that_train_refuses_is_not_written(words, said):
    assert said in run_finetune("init", *words, "--file", "mine.yaml", code=2).errors
    assert not Path("mine.yaml").exists()


@pytest.mark.parametrize("task", [name for name, _ in dict(list_configs())["task"]])
def test_train_accepts_the_file_of_each_task(task):
    words = ["reward.functions=length"] if "grpo" in task else []
    words += ["lora.new_tokens=['<order>']"] if "new_tokens" in task else []
    check_config(loaded(printed(f"task={task}", *words)))


def test_no_file_lets_code_run_and_the_command_does():
    done = run_finetune("init", "model.trust_remote_code=true", "--file", "mine.yaml", code=0)
    assert "then finetune train mine.yaml model.trust_remote_code=true\n" in done.stdout
    assert not load_config(run="mine.yaml").model.trust_remote_code
    assert load_config(["model.trust_remote_code=true"], run="mine.yaml").model.trust_remote_code


@pytest.mark.process
def test_on_a_terminal_it_asks_checks_and_writes(tmp_path):
    (tmp_path / "taken.yaml").write_text("mine\n")
    (tmp_path / "part/b").mkdir(parents=True)
    for name in ("part/1.jsonl", "part/b/2.jsonl"):
        shutil.copy("chats.jsonl", name)
    with Screen([*FINETUNE, "init"], tmp_path) as screen:
        screen.wait_for("a folder or a hub id [phi_tiny]: ")
        assert "phi4_mini        Phi-4-mini, 3.8B parameters" in screen.text
        screen.press(b"phi5\n")
        screen.wait_for("Error: model=phi5: there is no configs/model/phi5.yaml")
        screen.press(b"\n")
        screen.wait_for("which is shipped [chats.jsonl]: ")
        screen.press(b"./gone.jsonl\n")
        screen.wait_for("Error: there is no file or folder ./gone.jsonl")
        screen.press(b"part\n")
        screen.wait_for("Error: data.path is part, but 1 file in it is not read: b/2.jsonl.")
        screen.press(b"chats.jsonl\n")
        screen.wait_for("The folder of the run [runs/chats-phi_tiny]: ")
        screen.press(b"chats.jsonl\n")
        screen.wait_for("is not a folder, or a part of the path is a file")
        screen.press(b"runs/taken\n")
        screen.wait_for("Error: its run file would be taken.yaml, which exists.")
        screen.press(b"\n")
        screen.wait_for("or a file [auto]: ")
        screen.press(b"part\n")
        screen.wait_for("Error: data.validation is part, which is neither a file nor a split of chats.jsonl")
        screen.press(b"6\n")
        assert screen.wait() == 0
    assert (
        "wrote chats-phi_tiny.yaml\nnext: finetune plan chats-phi_tiny.yaml, then finetune train chats-phi_tiny.yaml\n"
        in screen.text
    )
    assert (tmp_path / "taken.yaml").read_text() == "mine\n"
    config = load_config(run="chats-phi_tiny.yaml")
    assert config.output_dir == "runs/chats-phi_tiny"
    assert (config.model.path, config.data.path) == ("shipped:phi_tiny", "chats.jsonl")
    assert config.data.validation == "6"


def test_rows_that_need_a_setting_are_named_and_taken(capsys):
    Path("excel.csv").write_text("prompt;completion\nq;a\n")
    _check_rows(["data=excel.csv"])
    assert "set data.separator=;" in " ".join(capsys.readouterr().out.split()).replace("'", "")
    _check_rows(["data=excel.csv", "data.separator=;"])
    assert not capsys.readouterr().out
    for answer in ("auto", "null", "none", "5%", "200", "chats.jsonl"):
        assert _validation_rows(["data=chats.jsonl"], answer) == answer
    for answer in ("0", "rows", "gone.jsonl"):
        with pytest.raises(typer.BadParameter, match=f"data.validation is {answer}"):
            _validation_rows(["data=chats.jsonl"], answer)


def test_the_file_trains():
    assert run_finetune("init", "model=phi_tiny", "chats.jsonl", "--file", "mine.yaml").returncode == 0
    words = ["training.max_steps=1", "testing.num_samples=0", "data.cache_dir=cache"]
    done = run_finetune("train", "mine.yaml", *words)
    assert done.returncode == 0, done.stdout
    assert Path("runs/chats-phi_tiny/adapter/adapter_model.safetensors").is_file()


def test_a_base_model_without_a_template_is_told_so_with_the_shipped_ones():
    folder = Path("base")
    shutil.copytree(resolve_shipped("shipped:phi_tiny"), folder)
    assert "DECIDE" not in printed("model=./base", "data=chats.jsonl")
    (folder / "chat_template.jinja").unlink()
    told = " ".join(printed("model=./base", "data=chats.jsonl").replace("\n# ", " ").split())
    assert "DECIDE: ./base has no chat template, which rows of messages need. Set data.chat_template=plain" in told
    for name in ("alpaca", "chatml", "gemma", "llama3", "mistral", "phi4_mini"):
        assert name in told.partition("# Train it")[2].partition("have their tokens.")[0]
    for chosen in ("data.chat_template=chatml", "data.format=text", "model.tokenizer=shipped:phi_tiny"):
        assert "DECIDE" not in printed("model=./base", "data=chats.jsonl", chosen)
    Path("theirs.yml").write_text("base_model: ./base\nsequence_len: 8\ndatasets: [{path: chats.jsonl}]\n")
    assert "# DECIDE: ./base has no chat template" in printed("--from", "theirs.yml")
    assert "has no chat template" not in printed("--from", "theirs.yml", "data.chat_template=plain")
    (folder / "tokenizer_config.json").write_text("[")  # the model is loaded later, with a message of its own
    assert "has no chat template" not in printed("model=./base", "data=chats.jsonl")
