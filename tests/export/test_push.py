"""Pushes: the real client sends the right files to a stand-in of the hub's API on loopback, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from finetune.export.push import build_package
from tests.export.finished_runs import write_run
from tests.export.hub_stand_in import Repository, running_hub
from tests.in_process import Ended, run_finetune
from tests.launches import run_command
from tests.model.variants import VARIANTS
from tests.readable_hub import point_to
from tests.replay.scene import edit_json

TOKEN = "hf_tokenThatNobodySees"
BASE = "owner/base"

pytestmark = pytest.mark.warm


@pytest.fixture
def hub():
    with running_hub(TOKEN) as hub:
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "orders").folder.path


@pytest.fixture
def model(tmp_path) -> Path:
    """A model folder with a card, as merge writes it."""
    folder = VARIANTS["phi-4"].write(tmp_path / "merged")
    (folder / "README.md").write_text(f"---\nbase_model: {BASE}\nlicense: mit\n---\n\n# merged\n")
    return folder


@pytest.fixture
def push(hub, monkeypatch):
    """The command in this process, with the client's address and token as the environment would set them."""
    from huggingface_hub import constants

    def run_push(*words: str | Path, token: str | None = TOKEN) -> Ended:
        point_to(monkeypatch, hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        done = run_finetune("push", *words)
        assert TOKEN not in done.stdout
        return done

    return run_push


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "manifest.json"
    }


@pytest.mark.slow
def test_an_adapter_arrives_as_one_private_commit_and_loads_in_plain_peft(hub, run, tmp_path):
    """A push as a process, with address and token in its environment."""
    variables = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    words = [sys.executable, "-m", "finetune", "push", run, "me/orders", "--base", BASE]
    done = run_command(words, variables=variables)
    assert TOKEN not in done.stdout
    assert done.returncode == 0, done.stdout
    assert f"To {hub.address}/me/orders, a new private repository: adapter, base {BASE}" in done.stdout
    assert done.stdout.index("adapter_model.safetensors") < done.stdout.index("Sent: ")
    there = hub.repositories["me/orders"]
    assert there.private
    assert there.messages == ["Upload with finetune"]
    ours = contents(run / "adapter")
    assert there.files.keys() == {*ours, "README.md"}
    assert there.files["adapter_model.safetensors"] == ours["adapter_model.safetensors"]
    assert json.loads(there.files["adapter_config.json"])["base_model_name_or_path"] == BASE
    for name, data in there.files.items():
        assert str(run.parent).encode() not in data, name
    _, header, body = there.files["README.md"].decode().split("---\n", 2)
    header = yaml.safe_load(header)
    assert (header["base_model"], header["base_model_relation"], header["library_name"]) == (BASE, "adapter", "peft")
    assert "license" not in header
    assert f'from_pretrained("{BASE}")' in body

    received = tmp_path / "received"
    received.mkdir()
    for name, data in there.files.items():
        (received / name).write_bytes(data)
    program = (
        "import sys; sys.modules['finetune'] = None\n"
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "base = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "PeftModel.from_pretrained(base, sys.argv[2]); AutoTokenizer.from_pretrained(sys.argv[2])"
    )
    base = run.with_name("orders-base")
    loaded = subprocess.run([sys.executable, "-c", program, base, received], capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr


def test_another_base_is_not_asked_for_the_commit_of_the_one_that_trained(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    edit_json(copy / "adapter" / "adapter_config.json", base_model_name_or_path=BASE, revision="c0ffee")
    with patch("finetune.runs.verification.find_damage", return_value=[]):
        packed = {
            base: json.loads(build_package(copy, base=base).files["adapter_config.json"])
            for base in (BASE, "other/base")
        }
    assert [config["revision"] for config in packed.values()] == ["c0ffee", None]


def test_a_model_arrives_whole(hub, push, model):
    done = push(model, "me/merged", "--public", "--message", "First words")
    assert done.returncode == 0, done.stdout
    assert "a new PUBLIC repository: model, base owner/base" in done.stdout
    assert "names no licence" not in done.stdout
    assert hub.repositories["me/merged"].files == contents(model)
    assert not hub.repositories["me/merged"].private
    assert hub.repositories["me/merged"].messages == ["First words"]


def test_a_dry_run_sends_nothing(hub, push, run):
    done = push(run, "me/orders", "--base", BASE, "--dry-run")
    assert done.returncode == 0, done.stdout
    assert "adapter_model.safetensors" in done.stdout
    assert "The card names no licence" in done.stdout
    assert "Nothing was sent." in done.stdout
    assert hub.repositories == {}
    assert {request.partition(" ")[0] for request in hub.requests} <= {"GET", "HEAD"}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "kind", ["adapter of another base", "model of another base", "model", "model without a card", "model in ONNX"]
)
def test_another_model_is_not_overwritten_unless_it_is_asked_for(hub, push, run, kind):
    card = {"model of another base": "base_model: other/base", "model": f"base_model: {BASE}"}.get(kind)
    files = {".gitattributes": b"*", "model.safetensors": b"theirs", "config.json": b"{}"}
    if kind.startswith("adapter"):
        files = {
            "adapter_model.safetensors": b"theirs",
            "adapter_config.json": b'{"base_model_name_or_path": "other/base"}',
        }
    if kind == "model in ONNX":
        files = {"model.onnx": b"theirs"}
    files |= {"README.md": f"---\n{card}\n---\n".encode()} if card else {}
    there = hub.repositories["me/orders"] = Repository(private=True, files=dict(files))
    refused = push(run, "me/orders", "--base", BASE)
    assert refused.returncode == 2
    assert "me/orders holds a" in refused.stdout
    assert "--replace" in refused.stdout
    assert there.files == files
    done = push(run, "me/orders", "--base", BASE, "--replace")
    assert done.returncode == 0, done.stdout
    assert b"theirs" not in there.files.values()
    assert "config.json" not in there.files
    assert (".gitattributes" in there.files) == (".gitattributes" in files)


def test_files_in_a_repository_without_a_model_stay(hub, push, model):
    files = {".gitattributes": b"*", "LICENSE": b"MIT", "plots/loss.png": b"png"}
    there = hub.repositories["me/merged"] = Repository(private=True, files=dict(files))
    done = push(model, "me/merged")
    assert done.returncode == 0, done.stdout
    assert there.files == {**files, **contents(model)}


def test_a_push_again_replaces_what_it_brought(hub, push, model):
    assert push(model, "me/merged").returncode == 0
    there = hub.repositories["me/merged"]
    there.files["model-00001-of-00002.safetensors"] = b"of an earlier push"
    (model / "config.json").write_text("{}")
    done = push(model, "me/merged")
    assert done.returncode == 0, done.stdout
    assert "the private repository" in done.stdout
    assert there.files == contents(model)


def test_a_public_repository_is_not_written_to_by_accident(hub, push, model):
    there = hub.repositories["me/merged"] = Repository(private=False)
    refused = push(model, "me/merged")
    assert refused.returncode == 2
    assert "me/merged is public" in refused.stdout
    assert there.files == {}
    assert push(model, "me/merged", "--public").returncode == 0
    assert there.files == contents(model)


@pytest.mark.parametrize(
    ("token", "status"), [("hf_another", "the hub refuses it"), (None, "there is no token for the hub")]
)
def test_without_the_right_token_it_is_said_what_to_do(hub, push, model, token, status):
    done = push(model, "me/merged", token=token)
    assert done.returncode == 2
    assert status in done.stdout
    assert "hf auth login" in done.stdout
    assert hub.repositories == {}
    hub.may_write = False
    done = push(model, "me/merged")
    assert (done.returncode, "The token needs write access" in done.stdout) == (2, True)


def test_a_name_that_is_none_and_a_hub_that_is_not_there(hub, push, model):
    for name in ("orders", "me/or ders", "https://huggingface.co/me/orders"):
        done = push(model, name)
        assert (done.returncode, "Expected OWNER/NAME" in done.stdout) == (2, True)
    assert hub.requests == []
    hub.address = "http://127.0.0.1:9"
    done = push(model, "me/merged")
    assert done.returncode == 3
    assert "looking at me/merged failed" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("form", ["adapter", "model"])
def test_a_link_in_the_folder_is_not_followed(hub, push, run, model, tmp_path, form):
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    source = model if form == "model" else shutil.copytree(run, tmp_path / "run", symlinks=True)
    link = (source if form == "model" else source / "adapter") / "notes.txt"
    link.symlink_to(secret)
    done = push(source, "me/orders", "--base", BASE) if form == "adapter" else push(source, "me/orders")
    assert done.returncode == 2
    said = f"{link} is a link to {secret}" if form == "model" else "notes.txt: it is a symbolic link"
    assert said in done.stdout
    assert not any(repository.files for repository in hub.repositories.values())


def test_a_card_quotes_untrusted_names_as_plain_text(hub, push, run, tmp_path):
    name = "orders `x` <script>alert(1)</script> [here](https://evil.example) | \x1b[31m"
    hostile = shutil.copytree(run, tmp_path / name.replace("/", "-"))
    edit_json(hostile / "run.json", versions={"torch\n# Another title": "2\n\n<b>x"})
    push(hostile, "me/orders", "--base", BASE)
    card = hub.repositories["me/orders"].files["README.md"].decode()
    assert "\x1b" not in card
    assert "\\<script\\>" in card
    assert "\\[here\\](" in card
    assert "\n# Another title" not in card
    assert not any(line.startswith("<b>") for line in card.splitlines())


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        *(("local base", "--base"), ("full run", "trained every weight")),
        *(("damage", "is damaged"), ("nothing", "is not a model")),
    ],
)
def test_what_nobody_could_use_is_not_sent(hub, push, run, model, tmp_path, spoil, expected):
    source = {"local base": run, "damage": model, "nothing": tmp_path}.get(spoil)
    if spoil == "full run":
        source = write_run(tmp_path / "full", full=True).folder.path
    if spoil == "damage":
        source = shutil.copytree(run / "adapter", tmp_path / "copy")
        (source / "config.json").write_text("{}")
        (source / "adapter_model.safetensors").write_bytes(b"cut")
    done = push(source, "me/orders")
    assert done.returncode == 2
    assert expected in done.stdout
    assert hub.requests == []
