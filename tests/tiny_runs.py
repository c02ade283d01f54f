"""A run's input in miniature: chat rows, a tokenizer, a base model, and the words that name them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.tiny import tiny_tokenizer
from tests.tiny_models import PHI3_SIZES, build_tiny, tiny_phi3_config

MODEL_VOCABULARY = 336
"""At least the tokens of the tiny tokenizer."""
_WORDS = ["please", "send", "three", "crates", "of", "oranges", "to", "Marta", "Ruiz", "in", "Porto", "by", "Friday"]
_MORE_WORDS = ["oranges", "crates", "Porto", "Friday", "please", "send", "three", "to", "the", "answer"]


def write_rows(folder: Path, *, seed: int = 0, train: int = 18, validation: int = 5, test: int = 4) -> Path:
    """A folder with a file of chat rows for each split; the number of rows of 0 leaves a split out."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    for name, count in {"train": train, "validation": validation, "test": test}.items():
        rows = [_row(rng) for _ in range(count)]
        if rows:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _row(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    question = " ".join(rng.choices(_WORDS, k=rng.randint(1, 8)))
    answer = " ".join(rng.choices(_WORDS, k=rng.randint(1, 5)))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def conversation(turns: int, seed: int, *, thinking: int = 24, answer: int = 8, question: int = 6) -> dict[str, Any]:
    """A conversation whose answers carry thinking, which is served with no later turn; the numbers count words."""
    rng = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": sentence(rng, 12)}]
    for _ in range(turns):
        messages.append({"role": "user", "content": sentence(rng, question)})
        thought = {"reasoning_content": sentence(rng, thinking)} if thinking else {}
        messages.append({"role": "assistant", "content": sentence(rng, answer), **thought})
    return {"messages": messages}


def sentence(rng: random.Random, words: int) -> str:
    """Some words in no order."""
    return " ".join(rng.choice(_MORE_WORDS) for _ in range(words))


def conversation_words(folder: Path, *, train: int = 18) -> list[str]:
    """The words for conversations of one to three turns, in which each answer is trained as it is served."""
    folder.mkdir(parents=True)
    for name, seeds in {"train": range(train), "validation": range(1000, 1005)}.items():
        rows = [conversation(1 + seed % 3, seed, thinking=6, answer=3, question=3) for seed in seeds]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.path={folder}", "data.train_on=each_turn", "data.chat_template=phi4_mini"]


def write_base(folder: Path, **changes: Any) -> Path:
    """A random phi3 model with its tokenizer, as a folder that a run takes as its base."""
    settings = {"vocab_size": MODEL_VOCABULARY, "initializer_range": 0.05, "eos_token_id": 320, **changes}
    build_tiny(tiny_phi3_config(**settings)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def random_model_words(tokenizer_folder: Path) -> list[str]:
    """The words for a base that is made from its configuration with seeded random weights."""
    sizes = {**PHI3_SIZES, "vocab_size": MODEL_VOCABULARY, "initializer_range": 0.05}
    config = json.dumps({"model_type": "phi3", **sizes})
    return ["model.init=random", f"model.config={config}", f"model.tokenizer={tokenizer_folder}"]
