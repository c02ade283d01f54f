"""The first command a new user types, whole: its numbers, its files, and what comes after it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.in_process import run_finetune
from tests.tiny_training import events

pytestmark = pytest.mark.slow

PROMPT = "Please send 3 crates of oranges to Marta Ruiz in Porto by Friday"
SHORT = ("testing.metrics=[]", "testing.general_prompts=none")
"""Losses alone are measured."""
LOGITS_IN_PLAIN_PEFT = """
import json, sys
sys.modules["finetune"] = None  # whoever imports it fails
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
adapter = sys.argv[1]
base = json.load(open(adapter + "/adapter_config.json"))["base_model_name_or_path"]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
tokenizer = AutoTokenizer.from_pretrained(adapter)
ids = tokenizer.apply_chat_template([{"role": "user", "content": sys.argv[2]}], add_generation_prompt=True)["input_ids"]
with torch.no_grad():
    print(json.dumps([ids, model(torch.tensor([ids])).logits[0, -1].tolist()]))
"""


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder with `runs/quickstart`, and what was printed. `.ci/run` has both from the README's own command."""
    folder = tmp_path_factory.mktemp("quickstart")
    if trained := os.environ.get("FINETUNE_QUICKSTART"):
        shutil.copytree(Path(trained, "runs"), folder / "runs")
        printed = [Path(trained, name).read_text() for name in ("stdout", "stderr")]
        return folder, subprocess.CompletedProcess([], 0, *printed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "finetune", "train", "quickstart"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def here(quickstart, monkeypatch):
    """The folder, as the working folder of the test's own process."""
    monkeypatch.chdir(quickstart[0])
    monkeypatch.setenv("COLUMNS", "120")
    return quickstart[0]


def test_the_adapter_learns_what_the_base_cannot_do(quickstart):
    scores = {event["model"]: event for event in events(quickstart[0] / "runs/quickstart", "test")}
    assert scores["base"]["exact_match"] < 0.05
    assert scores["tuned"]["exact_match"] >= 0.95
    assert scores["tuned"]["json_valid"] >= scores["tuned"]["exact_match"]
    assert scores["tuned"]["loss"] < scores["base"]["loss"]


def test_it_shows_progress_a_table_three_prompts_and_the_next_command(quickstart):
    _, done = quickstart
    assert re.search(r"step \d+/\d+ · epoch 1 · loss [\d.]+ · [\d,]+ tokens/s · .* left", done.stderr)
    tuned = next(e for e in events(quickstart[0] / "runs/quickstart", "test") if e["model"] == "tuned")
    assert f"{tuned['exact_match']:.1%}" in done.stdout
    assert [done.stdout.count(f"\n {name} ") for name in ("prompt", "expected", "base", "tuned")] == [3, 3, 3, 3]
    assert "Written to runs/quickstart" in done.stdout
    assert "Next: finetune generate runs/quickstart" in done.stdout


def test_it_leaves_the_files_of_a_run(quickstart):
    folder = quickstart[0] / "runs/quickstart"
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "completed"
    assert record["world_size"] == 1
    assert record["fallbacks"] == []
    assert {path.name for path in folder.iterdir()} >= {"adapter", "checkpoints", "config.yaml", "log.txt"}


def test_a_second_start_overwrites_nothing(here):
    before = (here / "runs/quickstart/metrics.jsonl").read_bytes()
    done = run_finetune("train", "quickstart", "output_dir=runs/quickstart")
    assert done.returncode == 2
    assert "resume=auto" in done.errors
    words = ("training.max_steps=1", "data.max_rows=8", "testing.num_samples=0", "testing.metrics=[]")
    assert run_finetune("train", "quickstart", *words).returncode == 0
    assert (here / "runs/quickstart-2/adapter").is_dir()
    assert (here / "runs/quickstart/metrics.jsonl").read_bytes() == before


def test_the_tuned_model_answers_an_order(here):
    done = run_finetune("generate", "runs/quickstart", PROMPT)
    assert done.returncode == 0, done.errors
    answer = json.loads(done.answer)
    assert answer["customer"] == "Marta Ruiz"
    assert answer["quantity"] == 3


def test_evaluate_measures_the_same_losses_again(here):
    """Answers too, of fewer rows, in tests/inference/test_evaluate_command.py."""
    done = run_finetune("evaluate", "runs/quickstart", "testing.batch_size=7", *SHORT)
    assert done.returncode == 0, done.errors
    for event in events(here / "runs/quickstart"):
        if event["event"] == "test":
            assert f"{event['loss']:.4f}" in done.answer


def test_the_adapter_gives_the_same_logits_in_plain_peft(quickstart):
    adapter = quickstart[0] / "runs/quickstart/adapter"
    done = subprocess.run(
        [sys.executable, "-c", LOGITS_IN_PLAIN_PEFT, str(adapter), PROMPT], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ids, theirs = json.loads(done.stdout)

    import torch

    from finetune.config.compose import load_config
    from finetune.model.base import build_base_model
    from finetune.model.lora import add_lora
    from finetune.runs.model_files import load_model

    config = load_config([], run=str(adapter.parent / "config.yaml"))
    model = add_lora(build_base_model(config.model).float(), config.lora)
    load_model(model, adapter)
    model.eval()
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0, -1]
    assert torch.allclose(ours, torch.tensor(theirs), atol=1e-5)
