from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import DataSection
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.data.examples import load_examples
from finetune.data.formats import Reads
from tests.tiny import tiny_tokenizer


@pytest.fixture
def make_section(tmp_path):
    """A data section with a cache of its own. A single file is all for training unless the test says otherwise."""
    return lambda **keys: DataSection(**{"cache_dir": str(tmp_path / "cache"), "validation": None, **keys})


@pytest.fixture
def logged(caplog, monkeypatch):
    """Return the lines that the package has logged so far, also after another test has configured its log."""
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    caplog.set_level(logging.INFO, "finetune")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("finetune")]


@pytest.fixture
def write_jsonl(tmp_path):
    """Write rows, or lines as they are, to a file of that name; returns its path."""

    def write(rows, name="train.jsonl"):
        return write_lines(tmp_path / name, rows)

    return write


def write_lines(path: Path, rows: Iterable[Any]) -> str:
    """Rows, or lines as they are, to a file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def encode(
    section: DataSection, tokenizer: Any = "phi4_mini", reads: Reads = "answers", **options: Any
) -> EncodedSplits:
    """The encoded rows of a section, with a tokenizer or the tiny one of a style."""
    used = tiny_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return encode_examples(load_examples(section, reads), used, section, **options)


def give_away(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make another user the owner of a file, as far as this process can tell."""
    if os.geteuid() == 0:
        os.chown(file, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)


def encode_train(section: DataSection, tokenizer: Any = "phi4_mini", **options: Any) -> EncodedExamples:
    """The encoded training rows of a section."""
    return encode(section, tokenizer, **options).train
