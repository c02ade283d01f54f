"""Every command on a run of each kind of rows: the quickstart's own, chats, prompts with their answers, and text."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from tests.in_process import run_finetune
from tests.tiny_runs import write_base
from tests.tiny_training import events

pytestmark = pytest.mark.slow

SYSTEM = "Be brief."
ITEMS = ["oranges", "pens", "crates of rice", "boxes of tea", "lamps", "chairs", "maps", "bolts", "nails", "cups"]
SPLITS = {"train": ITEMS[:6], "validation": ITEMS[6:8], "test": ITEMS[8:]}
FORMATS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "messages": lambda question, answer: {
        "messages": [
            {"role": "system", "content": SYSTEM},
            *({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}),
            *({"role": "user", "content": question}, {"role": "assistant", "content": answer}),
        ]
    },
    "prompt_completion": lambda question, answer: {"prompt": question, "completion": answer},
    "text": lambda question, answer: {"text": f"{question} {answer}"},
}


class Run(NamedTuple):
    """A finished run, and what it was trained on."""

    name: str
    folder: Path
    words: list[str]
    """With them a run of the same kind can be begun."""
    test_file: Path

    @property
    def has_answers(self) -> bool:
        return self.name != "text"


def write_splits(folder: Path, name: str) -> Path:
    folder.mkdir()
    for split, items in SPLITS.items():
        rows = [FORMATS[name](f"Please send three {item} to Porto.", f"{item} to Porto") for item in items]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module", params=list(FORMATS))
def run(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    data = write_splits(folder / "data", request.param)
    words = [
        *("task=finetune_lora", f"model.path={base}", f"data.path={data}", f"data.cache_dir={folder / 'cache'}"),
        *("training.max_steps=3", "training.batch_size=3", "optim.learning_rate=1e-2", "training.device=cpu"),
        *("testing.num_samples=0", "testing.max_new_tokens=8", f"output_dir={folder / 'new'}"),
    ]
    printed("train", *words, f"output_dir={folder / 'run'}")
    return Run(request.param, folder / "run", words, data / "test.jsonl")


def printed(*words: str | Path) -> str:
    """What a command that ends well writes to standard output."""
    done = run_finetune(*words)
    assert done.returncode == 0, done.stdout
    return done.answer


def test_preview_shows_what_is_learnt(run: Run) -> None:
    record = json.loads(printed("preview", *run.words, "--split", "test", "--json"))
    assert record["exit_code"] == 0
    assert record["splits"]["test"]["rows"] == len(SPLITS["test"])
    row = record["rows"][0]
    learnt = "".join(span["text"] for span in row["spans"] if span["loss"])
    shown = "".join(span["text"] for span in row["spans"])
    assert f"nails to Porto{'<|end|>' if run.has_answers else '<|endoftext|>'}" in learnt
    assert ("send three" in learnt) == (not run.has_answers), "a question carries no loss"
    assert "send three nails" in shown


def test_generate_answers_the_rows_of_a_file(run: Run) -> None:
    shown = printed("generate", run.folder, "--from", run.test_file, "--json", "--compare", "--max-new-tokens", "8")
    answers = [json.loads(line) for line in shown.splitlines()]
    assert len(answers) == 2
    for answer in answers:
        assert answer["ended_by"] in ("stop", "length")
        assert answer["base"].keys() >= {"answer", "num_tokens"}
        assert ("expected" in answer) == run.has_answers
    assert not run.has_answers or answers[1]["expected"] == "cups to Porto"


def test_chat_says_what_generate_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    question = "Please send three oranges to Porto."
    alone = printed("generate", run.folder, question, "--max-new-tokens", "8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n"))
    assert printed("chat", run.folder, "--max-new-tokens", "8").split() == alone.split()


def test_evaluate_measures_what_the_run_measured(run: Run) -> None:
    found = json.loads(printed("evaluate", run.folder, "--json"))
    tests = {event["model"]: event for event in events(run.folder, "test")}
    assert found["num_rows"] == len(SPLITS["test"])
    for name in ("base", "tuned"):
        assert found[name]["loss"] == pytest.approx(tests[name]["loss"], rel=1e-6)


@pytest.mark.warm
def test_merge_gives_a_model_of_its_own(run: Run, tmp_path: Path) -> None:
    assert "Reloaded by transformers alone, against base and adapter: largest difference" in printed(
        "merge", run.folder, tmp_path / "merged"
    )
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert not [name for name in tensors if "lora" in name]
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()
