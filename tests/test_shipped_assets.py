"""The scripts in tools/phi_tiny make the base model and the data set that are shipped."""

from __future__ import annotations

import json

import pytest

from tests.in_process import run_script
from tests.launches import REPOSITORY

TOOLS = REPOSITORY / "tools" / "phi_tiny"


@pytest.mark.slow
def test_phi_tiny_is_made_by_its_scripts(tmp_path, monkeypatch):
    """At a size that proves nothing about the model, but that every stage hands the next what it needs."""
    monkeypatch.chdir(tmp_path)
    text = run_script(TOOLS / "make_corpus.py", ["runs/phi_tiny_text", "--rows", "64"])
    assert text.returncode == 0, text.stdout
    tiny = ["training.max_steps=2", "data.max_rows=32", f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_script(TOOLS / "pretrain.py", tiny)
    assert done.returncode == 0, done.stdout

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "runs/phi_tiny/phi_tiny"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 3_000_000
    assert (folder / "model.safetensors").stat().st_size <= 4_000_000
    assert model.generation_config.eos_token_id == [tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id]


def test_orders_is_made_by_its_script_byte_for_byte(tmp_path):
    done = run_script(TOOLS / "make_orders.py", [tmp_path])
    assert done.returncode == 0, done.stdout
    shipped = {path.name: path.read_bytes() for path in (REPOSITORY / "finetune/assets/orders").glob("*.jsonl")}
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")} == shipped
    assert len(shipped) == 3


def test_no_name_item_or_place_of_the_test_split_occurs_in_training():
    def open_words(split: str) -> dict[str, set[str]]:
        path = REPOSITORY / f"finetune/assets/orders/{split}.jsonl"
        rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
        answers = [json.loads(row[-1]["content"]) for row in rows]
        return {key: {str(answer[key]) for answer in answers} - {"None"} for key in ("item", "customer", "city")} | {
            "first": {answer["customer"].split()[0] for answer in answers},
            "last": {answer["customer"].split()[1] for answer in answers},
            "text": {row[-2]["content"] for row in rows},
        }

    train, test = open_words("train"), open_words("test")
    for kind, words in test.items():
        assert len(words) >= 15
        assert words & train[kind] == set(), kind
    everything = " ".join(train["text"]).lower()
    assert [word for word in test["city"] | test["first"] | test["last"] if f" {word.lower()} " in everything] == []
