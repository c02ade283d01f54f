"""The command line as a user meets it: what it prints, and its exit codes."""

from __future__ import annotations

import errno
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from finetune import __version__
from finetune.cli import EXIT_INTERRUPTED, _command_first, main
from finetune.config.config_files import shipped_folder
from finetune.errors import RunFailedError
from tests.in_process import Ended, run_finetune
from tests.tiny_runs import write_rows

FINETUNE = [sys.executable, "-m", "finetune"]


@pytest.fixture(autouse=True)
def _wide_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def assert_is_one_message(done: Ended, *parts: str) -> None:
    """A user's mistake: exit code 2, one message, no traceback."""
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stdout
    assert done.errors.count("Error: ") == 1
    for part in parts:
        assert part in done.errors


LIGHT = [
    (["--help"], 0, "huggingface_hub pydantic yaml"),
    (["preview", "--help"], 0, "huggingface_hub numpy"),
    (["train", "quickstart", "optim.learning_rat=1", "training.batch_size=many"], 2, "huggingface_hub"),
    (["doctor", "optim.learning_rat=1"], 2, "huggingface_hub"),
    (["init"], 0, "huggingface_hub"),
    (["init", "task=finetune_preferences", "model=org/base"], 0, ""),
    (["init", "--from", "lora.yml"], 0, ""),
]
"""Words of commands, how they end, and what else none of them up to there has imported."""
HEAVY = "torch transformers peft datasets accelerate safetensors pyarrow pandas"
ONE_AFTER_THE_OTHER = """
import json, sys
from finetune.cli import main
for words, _, more in json.loads(sys.argv.pop()):
    try:
        code = main(words) or 0
    except SystemExit as ended:
        code = ended.code or 0
    print("ended:", json.dumps([words, code, [name for name in more.split() if name in sys.modules]]))
"""


@pytest.mark.process
def test_help_a_config_error_and_init_answer_at_once_and_import_no_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lora.yml").write_text("base_model: org/base\nadapter: lora\nsequence_len: 8\noptimizer: adamw_torch\n")
    asked = json.dumps([(words, code, f"{HEAVY} {more}") for words, code, more in LIGHT])
    done = subprocess.run([sys.executable, "-c", ONE_AFTER_THE_OTHER, asked], capture_output=True, text=True)
    ended = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("ended: ")]
    assert ended == [[words, code, []] for words, code, _ in LIGHT], done.stderr


@pytest.mark.process
def test_python_m_finetune_is_the_command_and_tells_every_problem_of_a_config_at_once():
    done = subprocess.run([*FINETUNE, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"finetune {__version__}\n"), done.stderr
    done = run_finetune("train", "quickstart", "optim.learning_rat=1", "training.batch_size=many")
    assert_is_one_message(done, "optim.learning_rate?", "training.batch_size", "command line")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model.path=nowhere/at/all"], ["model.path is nowhere/at/all", "no such folder"]),
        (["model.path=folder"], ["not a model folder", "no config.json", "notes.txt"]),
        (["data.path=broken.jsonl"], ["broken.jsonl:2"]),
        (["data.path=empty.jsonl"], ["empty.jsonl"]),
        (["data.path=silent.jsonl"], ["silent.jsonl:1", "assistant"]),
        (["output_dir=folder"], ["not empty", "Nothing was changed"]),
        (["optim.optimizer=os.system"], ["os.system"]),
        (["lora.target_modules=[q_proj]"], ["q_proj", "qkv_proj"]),
    ],
    ids=lambda value: value[0] if value and "=" in value[0] else "",
)
def test_bad_input_is_one_clear_message(tmp_path, words, parts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    (tmp_path / "broken.jsonl").write_text(f"{good}\n{{not json\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "silent.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = run_finetune("train", "quickstart", "training.max_steps=1", *words)
    assert_is_one_message(done, *parts)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_command_given_in_words():
    by_words = run_finetune("cmd=config", "run=quickstart")
    assert by_words.returncode == 2  # `config` is a group of commands, not one
    done = run_finetune("config", "train")
    assert (done.returncode, "No such command 'train'" in done.errors) == (2, True), done
    done = run_finetune(
        "cmd=train", "data=orders", "model=phi_tiny", "task=finetune_lora", "ddp=False", "data.max_lenght=3"
    )
    assert_is_one_message(done, "data.max_length")
    assert _command_first(["data=orders", "cmd=train", "run=quickstart"]) == ["train", "quickstart", "data=orders"]
    assert _command_first(["generate", "runs/a", "cmd=ls"]) == ["generate", "runs/a", "cmd=ls"]


def test_config_show_prints_what_runs_and_where_it_came_from():
    done = run_finetune("config", "show", "quickstart", "optim.learning_rate=1e-4")
    assert yaml.safe_load(done.answer)["optim"]["learning_rate"] == 1e-4
    line = next(line for line in done.answer.splitlines() if "learning_rate" in line)
    assert line.endswith("# command line")
    assert "configs/model/phi_tiny.yaml:" in done.answer
    assert "microsoft/phi-4" in run_finetune("config", "show", "model=phi4").answer, "a part"


@pytest.mark.parametrize("command", [["train"], ["plan"], ["preview", "--rows", "0"]], ids=lambda words: words[0])
def test_a_file_of_rows_without_a_model_is_answered_with_the_models(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "my chats")
    done = run_finetune(*command, "my chats/train.jsonl")
    assert_is_one_message(done, f"for example: finetune {command[0]} 'my chats/train.jsonl' model=phi4_mini\n")
    for path in (shipped_folder("configs") / "model").iterdir():
        assert re.search(rf"\n  model={path.stem} |\n  \w+: .*\b{path.stem}\b", done.errors)


def test_the_task_is_finetune_lora_unless_a_word_or_a_run_file_says_something(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("model: phi_tiny\ndata: orders\n")
    words = ["model=phi_tiny", "data=orders"]

    def shown(*words: str) -> tuple[str, str, str]:
        found = json.loads(run_finetune("config", "show", "--json", *words).answer)
        key = "training.method"
        return found["config"]["output_dir"], found["config"]["training"]["method"], found["origins"][key]

    assert shown(*words) == shown(*words, "task=finetune_lora")
    assert shown(*words) == ("runs/orders-phi_tiny", "lora", "shipped configs/task/finetune_lora.yaml:3")
    assert shown(*words, "task=finetune_full")[:2] == ("runs/orders-phi_tiny", "full")
    for run_file in ("mine.yaml", "run=mine.yaml"):
        assert shown(run_file) == ("runs/mine", "lora", "default")


@pytest.mark.slow
def test_all_commands_before_a_run_take_the_same_words_and_the_run_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "chats")
    words = ["chats/train.jsonl", "model=phi_tiny", "data.cache_dir=cache"]
    words += ["training.max_steps=1", "testing.num_samples=0"]
    for command in (["config", "show"], ["preview"], ["plan"], ["doctor"], ["train"]):
        done = run_finetune(*command, *words)
        assert done.returncode == 0, done.stdout
    adapter = tmp_path / "runs/train-phi_tiny/adapter/adapter_model.safetensors"
    first = adapter.read_bytes()
    again = run_finetune("train", "runs/train-phi_tiny/config.yaml", "resume=auto")
    assert again.returncode == 0, again.stdout
    assert adapter.read_bytes() == first
    repeated = run_finetune("train", "runs/train-phi_tiny/config.yaml", "output_dir=runs/again")
    assert repeated.returncode == 0, repeated.stdout
    assert (tmp_path / "runs/again/adapter/adapter_model.safetensors").read_bytes() == first


def test_config_schema_is_json_and_config_list_names_every_file():
    schema = json.loads(run_finetune("config", "schema").answer)
    assert "learning_rate" in json.dumps(schema)
    listed = run_finetune("config", "list").answer
    files = [path.stem for path in shipped_folder("configs").rglob("*.yaml")]
    assert len(files) >= 14
    assert all(name in listed for name in files)


def test_recipes_are_listed_and_copied_but_never_over_something(tmp_path):
    names = [path.stem for path in shipped_folder("recipes").glob("*.py")]
    names += ["slurm_one_node.sbatch", "verdict.yml"]
    listed = run_finetune("recipes").answer
    assert len(names) >= 6
    assert all(name in listed for name in names)
    done = run_finetune("recipes", "copy", "finetune_lora", tmp_path / "mine")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "mine" / "finetune_lora.py").is_file()
    assert "finetune_lora.py model=phi_tiny data=orders" in done.answer
    for name, needs in (("train_ddp_torchrun", "torchrun"), ("finetune_preferences", "data=pairs.jsonl")):
        done = run_finetune("recipes", "copy", name, tmp_path / "mine")
        assert (done.returncode, needs in done.answer.partition("next: ")[2]) == (0, True), done.answer
    assert not (tmp_path / "mine" / "configs").exists(), "it would hide the shipped configs"
    done = run_finetune("recipes", "copy", "slurm_one_node.sbatch", tmp_path / "mine")
    assert 'the lines marked "edit"' in done.answer
    copied = tmp_path / "mine" / "slurm_one_node.sbatch"
    assert copied.read_bytes() == (shipped_folder("recipes") / "launch" / "slurm_one_node.sbatch").read_bytes()
    again = run_finetune("recipes", "copy", "finetune_lora", tmp_path / "mine")
    assert_is_one_message(again, "is there already", "Nothing was written")
    (tmp_path / "file").touch()
    for folder, reason in (("file", "is not a folder"), ("file/deeper", r"cannot be written: Not a directory")):
        assert_is_one_message(run_finetune("recipes", "copy", "finetune_lora", tmp_path / folder), reason)
    (tmp_path / "finetune_lora.py").symlink_to(tmp_path / "elsewhere.py")
    assert_is_one_message(run_finetune("recipes", "copy", "finetune_lora", tmp_path), "is there already")
    with patch("finetune.runs.durable._sync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        full = run_finetune("recipes", "copy", "finetune_lora", tmp_path / "full")
    assert (full.returncode, "cannot be written: No space left on device (ENOSPC). Make room" in full.errors) == (
        3,
        True,
    )
    assert not any((tmp_path / "full").iterdir())
    assert_is_one_message(run_finetune("recipes", "copy", "finetune_lorra"), "finetune_lora")
    assert_is_one_message(run_finetune("evaluate", tmp_path), "not the folder of a run", "config.yaml")


def test_every_train_command_of_the_readme_composes(tmp_path, monkeypatch):
    from finetune.config.compose import compose

    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    commands = [words.split() for words in re.findall(r"finetune train ([^`\n]+)", readme)]
    assert len(commands) >= 4
    (tmp_path / "chats.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    for words in commands:
        run_name = words.pop(0) if "=" not in words[0] else None
        if run_name is None or not run_name.startswith("runs/"):
            compose([word for word in words if "=" in word], run=run_name, complete=False)


@pytest.mark.parametrize("words", ["runs", "init --file x.yaml", "config show quickstart", "--help"])
def test_a_removed_current_folder_is_a_mistake_and_no_bug(words, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_is_one_message(run_finetune(*words.split()), "the current folder was removed")


def test_no_folder_for_temporary_files_is_a_mistake_and_no_bug(capsys, monkeypatch):
    def imports(*args, **options):
        monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/tmp-of-nobody"])
        monkeypatch.setattr("tempfile.tempdir", None)
        tempfile.gettempdir()

    monkeypatch.setattr("finetune.cli.commands.app", imports)
    with pytest.raises(SystemExit) as ended:
        main(["train", "quickstart"])
    assert ended.value.code == 2
    assert "Set TMPDIR to a folder that can be written" in " ".join(capsys.readouterr().err.split())


def test_a_start_up_file_that_cannot_take_the_completion_is_a_mistake_and_no_bug(capsys, monkeypatch):
    def refused(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied", ".bashrc")

    monkeypatch.setattr("finetune.cli.commands.app", refused)
    monkeypatch.setattr(sys, "argv", ["finetune", "--install-completion"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "'.bashrc'. `finetune --show-completion` prints it, for another file" in told


@pytest.mark.parametrize(("words", "advises"), [("train quickstart", True), ("bisect a b", False), ("merge a", False)])
def test_only_a_stopped_training_is_told_how_to_resume(words, advises, capsys, monkeypatch):
    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.cli.commands.app", stopped)
    at_exit = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == EXIT_INTERRUPTED
    assert at_exit == [(signal.signal, signal.SIGINT, signal.SIG_DFL)], "another Ctrl-C would print a traceback"
    told = capsys.readouterr().err
    assert "finetune: stopped." in told
    assert ("resume=auto" in told) == advises


def test_a_function_that_closes_stdout_hides_no_error(capsys, monkeypatch):
    def closes(*args, **options):
        sys.stdout.close()
        raise RunFailedError("the loss is nan")

    monkeypatch.setattr("finetune.cli.commands.app", closes)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        main(["train", "quickstart"])
    assert ended.value.code == RunFailedError.exit_code
    assert "finetune: RunFailedError: the loss is nan" in capsys.readouterr().err
