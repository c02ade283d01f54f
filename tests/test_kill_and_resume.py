"""A run that was killed ends, once resumed, with the very bytes of the run that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_runs import conversation_words, write_base, write_rows


def start(words: list[str], output_dir: Path, *more: str) -> subprocess.Popen[str]:
    """With dropout and a data worker: neither the masks nor the order of rows may depend on where a run began."""
    recipe = ["train", *words, f"output_dir={output_dir}", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "finetune", *recipe], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    _, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    return log


def steps_in(folder: Path) -> list[tuple[int, float]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


def plain_words(folder: Path) -> list[str]:
    return [f"data.path={write_rows(folder, train=60)}"]


def words_of_each_turn(folder: Path) -> list[str]:
    """The answers of a conversation do not fit into one micro-batch."""
    return [*conversation_words(folder, train=60), "training.max_tokens_per_microbatch=100"]


@pytest.mark.parametrize(
    "words_of_rows",
    [
        pytest.param(plain_words, marks=pytest.mark.promise),
        pytest.param(words_of_each_turn, marks=[pytest.mark.process, pytest.mark.slow, pytest.mark.warm]),
    ],
)
def test_killed_in_mid_epoch_and_resumed(tmp_path, words_of_rows):
    words = [
        *("task=finetune_lora", f"model.path={write_base(tmp_path / 'base')}"),
        *(*words_of_rows(tmp_path / "rows"), f"data.cache_dir={tmp_path / 'cache'}"),
        *("training.batch_size=4", "training.num_epochs=3", "checkpoint.save_every=4", "checkpoint.save_total_limit=3"),
        *("lora.dropout=0.1", "training.num_workers=1", "testing.num_samples=0", "training.log_every=1"),
    ]
    finish(start(words, tmp_path / "whole"))

    with start(words, tmp_path / "killed") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "checkpoint committed step=20" in line:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed/adapter").exists()
    log = finish(start(words, tmp_path / "killed", "resume=auto"))
    assert "resumed from step=2" in log  # 20, or a later one that was committed before the signal came

    files = ["adapter/adapter_model.safetensors", "checkpoints/step-000045/optimizer.safetensors"]
    for name in files:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    whole, killed = steps_in(tmp_path / "whole"), steps_in(tmp_path / "killed")
    assert len(whole) == 45
    assert killed == whole
