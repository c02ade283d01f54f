"""The commands that the output of a finished run advises: each of them runs and ends with exit code 0."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from finetune.config import hub
from tests import readable_hub
from tests.in_process import run_finetune
from tests.tiny_runs import write_base

_QUESTIONS = [f"Please send {number} crates of oranges to Porto?" for number in range(48)]
_ANSWERS = [f"Sent {number % 5}." for number in range(48)]


def _write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _pairs(folder: Path) -> list[str]:
    both = zip(_QUESTIONS, _ANSWERS, strict=True)
    rows = [{"prompt": question, "chosen": answer, "rejected": "No."} for question, answer in both]
    return [f"data={_write(folder / 'pairs.jsonl', rows)}"]


def _answers() -> list[dict[str, object]]:
    both = zip(_QUESTIONS, _ANSWERS, strict=True)
    return [{"prompt": question, "completion": answer} for question, answer in both]


def _own_file(folder: Path) -> list[str]:
    return [f"data={_write(folder / 'own.jsonl', _answers())}"]


def _csv(folder: Path) -> list[str]:
    with (folder / "own.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(_answers())
    return [f"data={folder / 'own.csv'}"]


def _texts(folder: Path) -> list[str]:
    rows = [{"text": f"{question} {answer}"} for question, answer in zip(_QUESTIONS, _ANSWERS, strict=True)]
    return ["task=continue_pretraining", f"data={_write(folder / 'texts.jsonl', rows)}"]


def _labelled(folder: Path) -> list[str]:
    rows = [{**row, "label": number % 2 == 0} for number, row in enumerate(_answers())]
    return ["task=finetune_kto", f"data={_write(folder / 'labelled.jsonl', rows)}"]


def _prompts(folder: Path) -> list[str]:
    rows = [{"prompt": question} for question in _QUESTIONS]
    own = folder / "reward.py"
    own.write_text("def sums(completion_ids, **columns): return [float(sum(ids) % 997) for ids in completion_ids]\n")
    small = ["rollout.num_generations=2", "rollout.max_completion_length=4", "training.global_batch_size=2"]
    rewards = ["task=finetune_grpo", f"reward.functions={own}:sums", *small]
    return [f"data={_write(folder / 'prompts.jsonl', rows)}", *rewards]


def _hub(folder: Path) -> list[str]:
    (folder / "someone").mkdir()
    _write(folder / "someone/train.jsonl", _answers())
    return ["data=someone/chats"]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "own file": _own_file,
    "hub": _hub,
    "dpo": lambda folder: ["task=finetune_preferences", *_pairs(folder)],
    "grpo": _prompts,
    "full": lambda folder: ["training.method=full", *_own_file(folder)],
    "csv": _csv,
    "no validation": lambda folder: ["data.validation=null", *_own_file(folder)],
    "texts": _texts,
    "kto": _labelled,
    "orpo": lambda folder: ["task=finetune_orpo", *_pairs(folder)],
    "simpo": lambda folder: ["task=finetune_simpo", *_pairs(folder)],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub with the data set someone/chats, whose files are in a folder of the test."""
    with readable_hub.running_hub() as state:
        state.folders["datasets/someone/chats"] = tmp_path / "someone"
        readable_hub.point_to(monkeypatch, state.address)
        for module in (constants, datasets.config):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", state.address)
        monkeypatch.setattr(hub, "answers_heard", {})
        yield


@pytest.mark.few(2)
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_advises_works(kind: str, base: Path, tmp_path: Path) -> None:
    run, general = tmp_path / "run", _write(tmp_path / "general.jsonl", [{"prompt": "Who are you?"}])
    words = [f"model.path={base}", *KINDS[kind](tmp_path), f"output_dir={run}", f"data.cache_dir={tmp_path}"]
    words += ["training.max_steps=1", "optim.warmup_steps=0", "training.batch_size=2", "testing.num_samples=1"]
    words += ["testing.max_new_tokens=2", f"testing.general_prompts={general}"]
    ending = run_finetune("train", *words, code=0).stdout.partition("checkpoint committed")[2]
    advised = re.findall(r"^Next: (.*(?:\\\n.*)*)|`(finetune [^`]*)`", ending, re.MULTILINE)
    commands = ["".join(groups).replace("\\\n", "") for groups in advised]
    assert [command.split()[1] for command in commands].count("generate") == 1
    for command in commands:
        run_finetune(*shlex.split(command.replace("RUN", str(run)))[1:], code=0)
