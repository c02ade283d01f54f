"""`finetune preview` as a user meets it: a real pseudo-terminal, pipes of real processes, rows that mean harm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.in_process import run_finetune
from tests.terminals import run_on_terminal
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny_phi3_config
from tests.tiny_runs import MODEL_VOCABULARY
from tests.warm import with_interpreter

PREVIEW = [sys.executable, "-m", "finetune", "preview"]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PROGRESS = re.compile(r"\x1b\[\?25l[^\n]*\n\x1b\[\?25h\r(\x1b\[1A)?\x1b\[2K")
"""What is shown, and removed again, if reading the rows takes longer than a moment."""
HARM = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e\x7f[red]not markup[/red] :smile:\n\tsecond line"

pytestmark = pytest.mark.warm


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("preview")
    tiny_phi3_config(vocab_size=MODEL_VOCABULARY, max_position_embeddings=512).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    row = {"messages": [{"role": "user", "content": f"ask{HARM}"}, {"role": "assistant", "content": f"say{HARM}"}]}
    data = folder / "rows\x1b[35m.jsonl"  # a file's name may mean harm too
    data.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    return [f"model.path={folder / 'base'}", f"data.path={data}", f"data.cache_dir={folder / 'cache'}"]


def assert_is_harmless(text: str) -> None:
    for character in text:
        assert character in "\r\n" or character.isprintable(), hex(ord(character))


def test_colours_say_what_carries_loss_and_the_rows_steer_nothing(words):
    written = run_on_terminal(100, "preview", *words, "--rows", "1").raw
    plain = PROGRESS.sub("", COLOUR.sub("", written))
    assert_is_harmless(plain)
    text = "".join(plain.split())  # it is folded to the width
    assert "say<U+001B>]0;owned<U+0007><U+001B>[2J<U+009B>31m<U+000D><U+0008><U+202E><U+007F>[red]notmarkup" in text
    assert "[/red]:smile:↵⇥secondline" in text
    styles: dict[str, str] = {}
    for style, text in re.findall(r"\x1b\[([0-9;]+)m([^\x1b]*)", written):
        styles[style] = styles.get(style, "") + text
    assert "say<U+001B>]0;" in styles["1;32"]  # carries loss: bold green
    assert "ask<U+001B>]0;" in styles["0"]  # does not: as the terminal writes
    assert "<|end|>" in styles["30;42"]  # the end of turn: special, and carries loss
    assert "<|user|>" in styles["7"]


@pytest.mark.slow
def test_without_colours_a_margin_says_the_same(words):
    written = PROGRESS.sub("", run_on_terminal(100, "preview", *words, "--rows", "1", NO_COLOR="1").raw)
    assert_is_harmless(written)
    command = with_interpreter([*PREVIEW, *words, "--rows", "1"])
    piped = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert piped.returncode == 0, piped.stderr
    assert re.sub(r"[\s|]", "", written) == re.sub(r"[\s|]", "", piped.stdout), "only folded to the width"
    shown = [line for line in piped.stdout.splitlines() if line.startswith(("loss | ", "     | "))]
    for line, beginning in zip(
        shown, ("     | <|user|>ask<U+001B>", "     | ⇥second", "loss | say<U+001B>"), strict=False
    ):
        assert line.startswith(beginning)
    assert shown[3] == "loss | ⇥second line<|end|>"
    assert "rows<U+001B>[35m.jsonl:1" in piped.stdout


@pytest.mark.slow
def test_nothing_but_the_cache_is_written_and_half_a_reader_is_enough(words, tmp_path):
    command = " ".join(f"'{word}'" for word in [*PREVIEW, *words, "--tokens", "--row", "2"])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    slow = "s so far)"  # a slow machine is told what it waits for
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.endswith(slow)]) == (0, [])
    assert done.stdout.startswith("data:")
    assert list(tmp_path.iterdir()) == []


def test_json_is_for_programs(words):
    done = run_finetune("preview", *words, "--json", "--row", "2")
    assert done.returncode == 0, done.stdout
    assert_is_harmless(done.answer)
    (row,) = json.loads(done.answer)["rows"]
    assert row["spans"][1] == {"text": f"ask{HARM}", "loss": False, "special": False}
    assert Path(row["source"]).name == "rows<U+001B>[35m.jsonl:2"
