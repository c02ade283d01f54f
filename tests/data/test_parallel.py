"""Several processes encode to the same bytes as one, and none of them outlives the one that asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from finetune.config.schema import DataSection
from finetune.data import encode as encoding
from finetune.data import parallel
from finetune.data.encode import PAYS_FROM_CHARACTERS, ROWS_AT_ONCE, choose_processes, encode_examples
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.parallel import WorkerLostError
from finetune.data.templates import AnswerTokens
from finetune.errors import ConfigError
from finetune.fallbacks import Fallbacks
from tests.tiny import tiny_tokenizer

NUM_ROWS = 3 * ROWS_AT_ONCE + 7


def row(number: int) -> dict[str, Any]:
    turns = (("system", "Be brief."), ("user", f"Hi {number} 🍊"), ("assistant", "yes " * (number % 5) + "or no"))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture
def section(make_section, write_jsonl):
    return make_section(path=write_jsonl(map(row, range(NUM_ROWS))))


def encode(section: DataSection, fallbacks: Fallbacks | None = None, **keys: Any) -> EncodedExamples:
    section = section.model_copy(update=keys)
    return encode_examples(load_examples(section), tiny_tokenizer(), section, fallbacks=fallbacks).train


def encoding_below(process: psutil.Process) -> list[psutil.Process]:
    children = (child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in children if "finetune.data.parallel" in child.cmdline()]


def cached_bytes(section: DataSection) -> bytes:
    (path,) = Path(section.cache_dir).glob("*.safetensors")
    return path.read_bytes()


@pytest.mark.process
@pytest.mark.slow
def test_the_bytes_are_those_of_one_process_and_none_is_left_behind(section):
    keys = {"train_on": "last", "max_length": 36, "on_truncated_answer": "warn"}
    files = []
    for processes in (1, 2):
        own = section.model_copy(update={"num_processes": processes, "cache_dir": f"{section.cache_dir}-{processes}"})
        fallbacks = Fallbacks()
        encoded = encode(own, fallbacks, **keys)
        assert fallbacks.as_records() == []
        assert encoded.source(NUM_ROWS - 1) == f"{section.path}:{NUM_ROWS}"
        files.append(cached_bytes(own))
    assert files[0] == files[1]
    assert encoding_below(psutil.Process()) == []


@pytest.fixture
def killed_at_first_batch(monkeypatch):
    """The first process that is given a batch is killed at once, as a machine without memory would."""
    killed: list[int] = []
    send = parallel._Worker.send

    def send_and_kill(worker, batch):
        send(worker, batch)
        if not killed and isinstance(batch, list):
            killed.append(worker.process.pid)
            worker.process.kill()

    monkeypatch.setattr(parallel._Worker, "send", send_and_kill)
    return killed


@pytest.mark.process
@pytest.mark.slow
def test_a_process_that_is_lost_is_done_without_and_recorded_unless_the_run_is_strict(section, killed_at_first_batch):
    fallbacks = Fallbacks()
    encoded = encode(section, fallbacks, num_processes=2)
    assert len(encoded) == NUM_ROWS
    (record,) = fallbacks.as_records()
    assert record["what"] == "data.num_processes"
    assert record["wanted"] == f"2 processes that encode {section.path}"
    assert f"process {killed_at_first_batch[0]} that encodes has ended with exit code -9" in record["why"] or (
        "Broken pipe" in record["why"]
    )
    killed_at_first_batch.clear()
    strict = section.model_copy(update={"cache_dir": f"{section.cache_dir}-strict"})
    with pytest.raises(ConfigError, match=r"data.num_processes: wanted 2 processes that encode .* The run is strict"):
        encode(strict, Fallbacks(strict=True), num_processes=2)


def test_a_batch_of_long_rows_with_many_answers_has_fewer_rows(make_section, write_jsonl, monkeypatch):
    """Each answer renders all turns before it again: 512 such rows took gigabytes."""
    turns = [{"role": role, "content": "yes " * 25} for _ in range(4) for role in ("user", "assistant")]
    section = make_section(path=write_jsonl([{"messages": turns}] * 10))
    sizes: list[int] = []
    encode_batch = encoding.encode_batch
    monkeypatch.setattr(
        encoding, "encode_batch", lambda batch, *rest: sizes.append(len(batch)) or encode_batch(batch, *rest)
    )
    encode(section)
    assert sizes == [10]
    monkeypatch.setattr(encoding, "CHARACTERS_AT_ONCE", 2 * 800 * 5)
    split = section.model_copy(update={"cache_dir": f"{section.cache_dir}-split"})
    encode(split)
    assert sizes == [10, 3, 3, 3, 1]
    assert cached_bytes(split) == cached_bytes(section)


class OwnTokenizer(PreTrainedTokenizerFast):
    """A class that another process cannot import from transformers."""


def test_a_tokenizer_of_a_class_of_ones_own_is_encoded_with_by_one_process(section):
    fallbacks = Fallbacks()
    tokenizer = tiny_tokenizer()
    tokenizer.__class__ = OwnTokenizer
    own = section.model_copy(update={"num_processes": 2})
    assert len(encode_examples(load_examples(own), tokenizer, own, fallbacks=fallbacks).train) == NUM_ROWS
    assert "OwnTokenizer is not one of transformers" in fallbacks.as_records()[0]["why"]


def test_a_process_that_has_started_ends_if_a_later_one_cannot_start(monkeypatch):
    ended: list[str] = []
    numbers = iter(range(2))

    class OnlyOne:
        def __init__(self, *_):
            if next(numbers):
                raise WorkerLostError("no more processes")

        connection = SimpleNamespace(close=lambda: ended.append("closed"))

        def end(self):
            ended.append("ended")

    monkeypatch.setattr(parallel, "_Worker", OnlyOne)
    tokens = AnswerTokens(tiny_tokenizer())
    with pytest.raises(WorkerLostError, match="no more"), parallel.encode_in_processes(tokens, "all", 2):
        pass
    assert ended == ["closed", "ended"]


def test_several_processes_are_taken_only_where_it_pays(monkeypatch):
    monkeypatch.setattr("finetune.data.encode.num_cores", lambda: 8)
    assert choose_processes(4096, PAYS_FROM_CHARACTERS, None) == 8
    assert choose_processes(1536, PAYS_FROM_CHARACTERS, None) == 3
    assert choose_processes(4096, PAYS_FROM_CHARACTERS // 2, None) == 1
    assert choose_processes(100, PAYS_FROM_CHARACTERS, None) == 2  # long rows make more than one batch
    assert choose_processes(4096, 4096, 3) == 3
    monkeypatch.setattr("finetune.data.encode.num_cores", lambda: 1)
    assert choose_processes(4096, PAYS_FROM_CHARACTERS, None) == 1


ENCODE_FOR_EVER = """
import itertools, sys
from finetune.data.parallel import encode_in_processes
from finetune.data.formats import Example
from finetune.data.templates import AnswerTokens
from tests.tiny import tiny_tokenizer

batch = [Example(row_type="text", source="a", number=1, text="the answer " * 50)] * 64
with encode_in_processes(AnswerTokens(tiny_tokenizer()), "all", 2) as encode:
    for number, _ in enumerate(encode(itertools.repeat(batch))):
        if number == 4:
            sys.stdout.write("encoding\\n")
            sys.stdout.flush()
"""  # an unguarded script on purpose: nothing must import it again


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_they_end_when_the_one_that_asked_is_killed(tmp_path, by):
    script = tmp_path / "script.py"
    script.write_text(ENCODE_FOR_EVER)
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
        text=True,
    )
    workers: list[psutil.Process] = []
    try:
        assert process.stdout.readline() == "encoding\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(encoding_below(psutil.Process(process.pid))) == 2  # the others render chat templates
        process.send_signal(by)
        process.wait(30)
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert alive == []
    finally:
        for one in (process, *workers):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        process.communicate()
