"""Tokens and keys of the environment appear nowhere: not on the screen, not in a file, not in what a command prints."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from finetune.cli import main as finetune
from tests.export.hub_stand_in import running_hub
from tests.launches import REPOSITORY, run_command
from tests.tiny_runs import random_model_words, write_base, write_rows

SECRETS = {
    "HF_TOKEN": "hf_QmZ7tokenOfTheHub",
    "HUGGING_FACE_HUB_TOKEN": "hf_Xw31olderTokenOfTheHub",
    "WANDB_API_KEY": "9f3akeyOfWeightsAndBiases",
    "AWS_SECRET_ACCESS_KEY": "wJalr/secretKeyOfAws+x",
    "AWS_SESSION_TOKEN": "FwoGZsessionTokenOfAws==",
    "OPENAI_API_KEY": "sk-proj-keyOfOpenAi",
}
PASSWORD = "passw0rdInAnAddress"
ADDRESS = f"https://anna:{PASSWORD}@127.0.0.1:9/rows.jsonl"
BUG, MISTAKE = 1, 2

pytestmark = pytest.mark.warm


def spellings(secret: str) -> list[bytes]:
    """As it is, and as a library might write it."""
    texts = [secret, secret.lower(), quote(secret, safe=""), json.dumps(secret)[1:-1]]
    encoded = base64.b64encode(secret.encode()).rstrip(b"=")
    return [*(text.encode() for text in texts), encoded[:-1]]


def leaks(data: bytes, *, of: dict[str, str] = SECRETS) -> list[str]:
    """The variables whose value is in some bytes."""
    return [name for name, secret in of.items() if any(spelling in data for spelling in spellings(secret))]


def leaking_files(folder: Path) -> dict[str, list[str]]:
    """Every file below a folder that holds a secret, or has one in its name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if names := leaks(str(path).encode() + b"\n" + data):
            found[str(path)] = names
    return found


class Place:
    """All that a run may write to: its folder, its cache and a folder for temporary files, all below one; and home."""

    def __init__(self, inputs: Path, folder: Path) -> None:
        self.folder = folder
        self.variables = SECRETS | {"TMPDIR": str(folder / "tmp")}
        (folder / "tmp").mkdir(parents=True)
        self.words = [
            *("task=finetune_lora", *random_model_words(inputs / "tokenizer"), f"output_dir={folder / 'run'}"),
            *(f"data.path={inputs / 'rows'}", f"data.cache_dir={folder / 'cache'}", "training.device=cpu"),
            *("training.batch_size=2", "training.global_batch_size=4", "training.max_steps=3", "training.debug=true"),
            *("checkpoint.save_every=1", "checkpoint.save_total_limit=5", "validation.validate_every=1"),
            "testing.max_new_tokens=4",
        ]

    def run(self, *words: str, program: tuple[str, ...] = ("-m", "finetune", "train"), **variables: str) -> str:
        """The screen of a run; its exit code is the last line."""
        command = [sys.executable, *program, *self.words, *words]
        done = run_command(command, variables={**self.variables, **variables}, limit_seconds=180)
        return f"{done.stdout}\nexit code {done.returncode}"

    def assert_nothing_leaked(self, screen: str) -> None:
        assert leaks(screen.encode()) == [], screen
        assert leaking_files(self.folder) == leaking_files(Path.home()) == {}
        names = {path.name for path in self.folder.rglob("*")}
        assert {"config.yaml", "run.json", "log.txt", "metrics.jsonl"} <= names, "there was little to search"
        assert any((self.folder / "cache").iterdir())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "tokenizer")
    write_rows(folder / "rows")
    return folder


@pytest.fixture
def place(inputs, tmp_path):
    return Place(inputs, tmp_path / "place")


@pytest.fixture(scope="module")
def completed(inputs, tmp_path_factory):
    """A run of two processes that has done all there is to do, and its screen."""
    place = Place(inputs, tmp_path_factory.mktemp("completed"))
    return place, place.run("parallel.num_processes=2")


def test_the_search_finds_what_is_there(tmp_path):
    for number, (name, secret) in enumerate(SECRETS.items()):
        file = tmp_path / "deep" / f"{number}.bin"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"\x00\xff" + spellings(secret)[number % 5] + b"\n")
        assert leaking_files(tmp_path) == {str(file): [name]}
        file.unlink()


@pytest.mark.slow
def test_a_run_that_completes(completed):
    place, screen = completed
    assert screen.endswith("exit code 0"), screen
    assert "DEBUG" in screen
    place.assert_nothing_leaked(screen)


@pytest.mark.slow
def test_two_processes_of_which_one_has_a_bug(place):
    """Python's own traceback, the guardians' words and those of torch's launcher."""
    program = (str(REPOSITORY / "tests" / "faulty_run.py"),)
    fault_at = str(place.folder / "fault")
    screen = place.run("parallel.num_processes=2", program=program, FAULT="forward:1:2", FAULT_AT=fault_at)
    assert screen.endswith(f"exit code {BUG}"), screen
    assert "ValueError: a row of three columns" in screen
    place.assert_nothing_leaked(screen)


@pytest.mark.parametrize(
    "command",
    [
        ["doctor", "WORDS"],
        ["doctor", "WORDS", "--json"],
        ["checkpoints", "RUN"],
        ["config", "show", "WORDS"],
        ["preview", "WORDS", "--json"],
        ["evaluate", "RUN", "--output", "NEW.json"],
        ["generate", "RUN", "three crates of oranges", "--compare", "--json"],
        ["chat", "RUN"],
        ["merge", "RUN", "NEW"],
        ["runs", "RUN", "--json"],
        ["diff", "RUN", "RUN"],
        ["bisect", "RUN"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_what_commands_print(completed, monkeypatch, capfd, command):
    place, _ = completed
    for name, value in place.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.StringIO("three crates of oranges\n"))
    given = {"WORDS": [*place.words, f"output_dir={place.folder / 'other'}"], "RUN": [str(place.folder / "run")]}
    given |= {name: [str(place.folder / name.lower())] for name in ("NEW", "NEW.json")}
    code = exit_code(lambda: finetune([word for part in command for word in given.get(part, [part])]))
    printed = "".join(capfd.readouterr())
    assert code in (0, None), printed
    assert printed.strip()
    assert leaks(printed.encode()) == []
    assert leaking_files(place.folder) == {}
    assert all(Path(*given[word]).exists() for word in command if word.startswith("NEW"))


@pytest.mark.slow
def test_what_reaches_the_hub(completed):
    """The token that opens it, and the others beside it."""
    place, _ = completed
    words = [sys.executable, "-m", "finetune", "push", place.folder / "run", "me/orders", "--base", "owner/base"]
    with running_hub(SECRETS["HF_TOKEN"]) as hub:
        variables = {**place.variables, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = run_command(words, variables=variables)
    assert done.returncode == 0, done.stdout
    assert leaks(done.stdout.encode()) == []
    there = hub.repositories["me/orders"].files
    assert "adapter_model.safetensors" in there
    assert {name: found for name, data in there.items() if (found := leaks(data))} == {}
    assert leaking_files(place.folder) == {}


def exit_code(run: Callable[[], object]) -> object:
    try:
        run()
    except SystemExit as ended:
        return ended.code
    return None


@pytest.mark.parametrize(
    "word",
    [
        f"data.path={ADDRESS}",
        f"data.train={ADDRESS}",
        f"model.path={ADDRESS}",
        f"model.tokenizer=https://{PASSWORD}@127.0.0.1:9/owner/model",
        f"data.pathh={ADDRESS}",
        f"data.path=https://127.0.0.1:9/rows.jsonl?session={PASSWORD}",
        f"data.train=[https://127.0.0.1:9/rows.jsonl%3Bticket={PASSWORD}]",
        f"training.batch_size={ADDRESS}",
        f"optim.args={{proxies: [{{https: 'http://anna:{PASSWORD}@proxy:3128'}}]}}",
        f"output_dir={ADDRESS}",
        ADDRESS,
    ],
)
@pytest.mark.parametrize("command", ["train", "config show"])
def test_an_address_with_a_password_is_refused_and_not_repeated(tmp_path, monkeypatch, capfd, command, word):
    """It would stand in config.yaml, run.json and log.txt for whoever is shown the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["model=phi_tiny", "data=orders", word]
    code = exit_code(lambda: finetune([*command.split(), *words]))
    printed = "".join(capfd.readouterr())
    assert code == MISTAKE, printed
    assert PASSWORD not in printed
    assert word.partition("=")[0] in printed or word == ADDRESS, printed
    assert not any(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "RUN", "x", "--base", ADDRESS],
        ["generate", "RUN", "--from", ADDRESS],
        ["generate", "RUN", "x", "--set", f"data.path={ADDRESS}"],
        ["chat", "RUN", "--base", ADDRESS],
        ["evaluate", "RUN", "--base", ADDRESS],
        ["evaluate", "RUN", f"data.path={ADDRESS}"],
        ["merge", "RUN", "OUT", "--base", ADDRESS],
        ["push", "RUN", "me/orders", "--base", ADDRESS],
        ["push", "RUN", ADDRESS],
    ],
    ids=" ".join,
)
def test_a_password_given_to_a_command_on_a_run_is_refused_and_not_repeated(tmp_path, monkeypatch, capfd, command):
    from tests.export.finished_runs import write_run

    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "RUN")
    before = sorted(tmp_path.rglob("*"))
    code = exit_code(lambda: finetune(command))
    printed = "".join(capfd.readouterr())
    assert code == MISTAKE, printed
    assert PASSWORD not in printed
    assert "https://…@127.0.0.1:9/rows.jsonl" in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_an_address_with_a_password_in_a_file_is_refused_with_its_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text(f"model: phi_tiny\ndata:\n  path: {ADDRESS}\n")
    assert exit_code(lambda: finetune(["train", "lab.yaml"])) == MISTAKE
    printed = "".join(capfd.readouterr())
    assert PASSWORD not in printed
    assert "lab.yaml:3: data.path: " in printed
    assert "127.0.0.1:9" in printed, "which of them it is"
    assert [path.name for path in tmp_path.iterdir()] == ["lab.yaml"]


@pytest.mark.parametrize("address", ["https://127.0.0.1:9/a@b/rows.jsonl", "rows@home/x.jsonl", "s3://bucket/x@y"])
def test_other_addresses_are_not_meant(address):
    from finetune.config.compose import load_config

    assert load_config(["model=phi_tiny", f"data.path={address}"]).data.path == address
