"""Output to a stream whose encoding lacks characters: decoration in ASCII, everything else escaped, exit code 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from finetune.terminal import as_written, prepare_streams, print_json, print_table, print_texts
from tests.launches import REPOSITORY
from tests.terminals import run_on_terminal

TEXT = "Zürich, 价格 5 € 🙂"
DECORATION = "a · b … ±1 × → ▁▂▃▄▅▆▇█ ━─ ↵⇥"
IN_ASCII = r"a | b ... +/-1 x -> _.:-=+*# =- \n\t"
ESCAPED = {
    "ascii": r"Z\xfcrich, \u4ef7\u683c 5 \u20ac \U0001f642",
    "latin-1": r"Zürich, \u4ef7\u683c 5 \u20ac \U0001f642",
    "cp1252": r"Zürich, \u4ef7\u683c 5 € \U0001f642",
    "utf-8": TEXT,
}
PLAIN_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
SCRIPT = """
import sys
from finetune import command
from finetune.terminal import print_json, print_table, say

def main(overrides):
    say(sys.argv[1])
    print_table(["text", "…"], [[sys.argv[1], "±1"]])
    print_json({sys.argv[1]: "…"}, indent=None)
    raise SystemExit(sys.argv[1] not in overrides)

command(main)
"""
OWN_SCRIPT = "import sys; from finetune import load_config, train; train(load_config(sys.argv[1:]))"


def written_by(write, encoding: str, monkeypatch) -> str:
    stream = TextIOWrapper(BytesIO(), encoding=encoding, write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        prepare_streams()
        write()
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ESCAPED)
def test_what_an_encoding_lacks_is_escaped(encoding, monkeypatch):
    shown = written_by(lambda: sys.stdout.write(TEXT), encoding, monkeypatch)
    assert shown == ESCAPED[encoding] == as_written(TEXT, TextIOWrapper(BytesIO(), encoding=encoding))


def test_decoration_has_a_form_in_ascii_and_an_error_handler_that_the_user_chose_stays(monkeypatch):
    assert written_by(lambda: sys.stdout.write(DECORATION), "ascii", monkeypatch) == IN_ASCII
    stream = TextIOWrapper(BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)  # closed by the shell: 2>&-
    prepare_streams()
    assert stream.errors == "replace"
    sys.stderr.close()


@pytest.mark.parametrize(("errors", "read_as"), [("strict", "caf\udce9"), ("replace", "caf\ufffd")])
def test_bytes_of_stdin_that_are_no_text_do_not_raise_before_they_are_refused(errors, read_as, monkeypatch):
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors))
    prepare_streams()
    assert sys.stdin.read() == read_as


@pytest.mark.parametrize("encoding", ESCAPED)
def test_the_columns_of_a_table_stay_aligned_and_json_reads_back(encoding, monkeypatch):
    shown = written_by(
        lambda: print_table(["text", "n"], [[TEXT, "1"], ["…", "2"]], right=["n"]), encoding, monkeypatch
    )
    assert ESCAPED[encoding] in shown
    if encoding != "utf-8":  # there two characters are two columns wide
        assert len({len(line) for line in shown.splitlines()}) == 1, shown
    shown = written_by(lambda: print_texts([("prompt", TEXT)]), encoding, monkeypatch)
    assert shown.split(maxsplit=1)[1].strip() == ESCAPED[encoding]
    value = {TEXT: f"{DECORATION}\x7f"}
    shown = written_by(lambda: print_json(value), encoding, monkeypatch)
    assert json.loads(shown) == value
    assert (TEXT in shown) == (encoding == "utf-8")


@pytest.mark.process
def test_a_command_of_a_process():
    encoding = "ascii"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, TEXT],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1", "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
    )
    lines = done.stdout.decode(encoding).splitlines()
    assert (done.returncode, done.stderr) == (0, b""), lines
    assert lines[0] == ESCAPED[encoding]
    assert ESCAPED[encoding] in lines[4]
    assert json.loads(lines[-1]) == {TEXT: "…"}


@pytest.fixture(scope="module")
def run_words(tmp_path_factory) -> list[str]:
    data = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [[{"role": "user", "content": f"{TEXT} {n} …"}, {"role": "assistant", "content": TEXT}] for n in range(6)]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns), encoding="utf-8")
    return [
        *("model=phi_tiny", f"data={data}", "data.test=1", "data.validation=1", f"data.cache_dir={data.parent}/cache"),
        *("training.max_steps=2", "training.batch_size=2", "optim.warmup_steps=0", "testing.num_samples=1"),
        *("training.device=cpu", "testing.max_new_tokens=4"),
    ]


def output_of(*words: str | Path, **variables: str) -> str:
    """Run a Python process that must succeed, and decode its stdout strictly."""
    encoding = variables["PYTHONIOENCODING"] or "ascii"
    command = [sys.executable, *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=240)
    said = done.stderr.decode(encoding)
    assert done.returncode == 0, said
    assert "Traceback" not in said
    assert "Logging error" not in said
    return done.stdout.decode(encoding)


@pytest.mark.slow
def test_a_run_without_the_command(run_words, tmp_path):
    shown = output_of("-c", OWN_SCRIPT, *run_words, f"output_dir={tmp_path / 'run'}", PYTHONIOENCODING="ascii")
    assert ESCAPED["ascii"] in shown
    assert "..." in shown.splitlines()[-1], "a prompt that cannot be shown as it is makes no command to copy"


@pytest.mark.slow
def test_a_run_and_the_commands_after_it_in_locale_c(run_words, tmp_path):
    folder = tmp_path / "run"
    finetune = partial(output_of, "-m", "finetune", **PLAIN_LOCALE)
    assert ESCAPED["ascii"] in finetune("train", *run_words, f"output_dir={folder}")
    assert "| completed |" in finetune("runs", tmp_path)
    assert " | validation loss " in finetune("watch", folder, "--once")
    (answer,) = finetune("generate", folder, "Hello", "--json").splitlines()
    assert json.loads(answer)["ended_by"]


@pytest.mark.slow
def test_the_live_view_on_a_terminal_in_ascii(run_words, tmp_path):
    done = run_on_terminal(80, "train", *run_words, f"output_dir={tmp_path / 'run'}", encoding="ascii")
    assert done.returncode == 0, done.raw
    assert done.raw.isascii()
    assert "2/2 | epoch 1 | " in done.words
    assert ESCAPED["ascii"] in done.words
