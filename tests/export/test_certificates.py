"""The quickstart's adapter in each runtime, and a SentencePiece model in llama.cpp: the certificates of docs/verify.md.

Every command is the one that a user types. With FINETUNE_WRITE_TABLES=1 the table is written into the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.export.merge import write_merged
from tests.docs.pages import DOCS
from tests.export.finished_runs import write_run
from tests.export.llama_cpp_build import add_to_path, build, needs_llama_cpp
from tests.export.sentencepiece_models import build_base, build_tokenizer, train

pytestmark = [needs_llama_cpp, pytest.mark.slow]

PAGE, MARK = DOCS / "verify.md", "<!-- certificates -->"
HEAD = "| what is served | runtime | conversations | greedy answers | tensors | logits apart by at most | bound |"
COUNTED = 5
"""The first columns must be those on the page; the others, and near ties, differ a little between machines."""


def test_the_certificates_of_the_page_are_those_of_a_run(tmp_path: Path) -> None:
    rows = [*quickstart(tmp_path), sentencepiece_model(tmp_path)]
    table = "\n".join([HEAD, "| --- | --- | --- | --- | --- | --- | --- |", *rows])
    before, inside, after = PAGE.read_text(encoding="utf-8").split(MARK)
    if os.environ.get("FINETUNE_WRITE_TABLES"):
        PAGE.write_text(f"{before}{MARK}\n\n{table}\n\n{MARK}{after}", encoding="utf-8")
        return
    assert counts(inside) == counts(table)


def counts(table: str) -> list[list[str]]:
    rows = [re.sub(r", \d+ at a near tie", "", row) for row in table.splitlines() if row.startswith("|")]
    return [row.split("|")[1 : 1 + COUNTED] for row in rows]


def quickstart(folder: Path) -> list[str]:
    """Train it, or take the run of FINETUNE_QUICKSTART; then merge, export and verify each form."""
    if trained := os.environ.get("FINETUNE_QUICKSTART"):
        shutil.copytree(Path(trained, "runs"), folder / "runs")
    else:
        finetune(folder, "train", "quickstart")
    finetune(folder, "merge", "runs/quickstart", "merged")
    finetune(folder, "merge", "runs/quickstart", "wide", "--dtype", "float32")
    for kind in ("f32", "int4"):
        finetune(folder, "export", "onnx", "wide", f"onnx-{kind}", "--type", kind)
    return [
        row("the quickstart's adapter", verified(folder, "runs/quickstart", "--vectors", "merged")),
        row("merged, bfloat16", verified(folder, "merged")),
        row("merged, float32", verified(folder, "wide")),
        row("ONNX, f32", verified(folder, "onnx-f32")),
        row("ONNX, int4", verified(folder, "onnx-int4")),
    ]


def sentencepiece_model(folder: Path) -> str:
    """A random phi3 model with a tokenizer like Phi-3's, and an adapter, as GGUF in llama.cpp."""
    built = build()
    add_to_path(built)
    train(folder / "tokenizer.model")
    tokenizer = build_tokenizer(folder / "tokenizer.model", "each piece")
    run = write_run(folder / "run", base=build_base(tokenizer), tokenizer=tokenizer)
    shutil.copy(folder / "tokenizer.model", folder / "run-base")
    write_merged(run, folder / "phi3", dtype=torch.float32)
    llama_cpp = ["--llama-cpp", str(built.source), "--base", "run-base", "--type", "f32"]
    finetune(folder, "export", "gguf", "phi3", "gguf", *llama_cpp)
    return row("a SentencePiece model, GGUF, f32", verified(folder, "gguf"))


def verified(folder: Path, *words: str) -> dict[str, Any]:
    """Verify with the command, and return the certificate."""
    finetune(folder, "verify", *words, "--out", str(folder / "certificate.json"))
    content: dict[str, Any] = json.loads((folder / "certificate.json").read_text(encoding="utf-8"))
    assert content["verdict"] == "same"
    return content


def finetune(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "finetune", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def row(what: str, content: Mapping[str, Any]) -> str:
    def count(name: str) -> str:
        return f"{content[name]['equal']} of {content[name]['compared']}" if content[name]["compared"] else "–"

    ties = f", {content['near_ties']} at a near tie" if content["near_ties"] else ""
    apart = [f"{content[name]:.2g}" for name in ("relative", "bound")]
    cells = [what, content["runtime"], count("rendered"), count("answers") + ties, count("tensors"), *apart]
    return f"| {' | '.join(cells)} |"
