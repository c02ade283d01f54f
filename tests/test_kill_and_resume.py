"""A run that was killed ends, once resumed, with the very bytes of the run that was not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.in_process import run_finetune
from tests.tiny_runs import conversation_words, write_base, write_rows
from tests.tiny_training import events

NUM_STEPS = 24
"""Three epochs of eight."""


def start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "finetune", "train", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps_in(folder: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in events(folder, "step")]


def plain_words(folder: Path) -> list[str]:
    return [f"data.path={write_rows(folder, train=32)}"]


def words_of_each_turn(folder: Path) -> list[str]:
    """The answers of a conversation do not fit into one micro-batch."""
    return [*conversation_words(folder, train=16), "training.batch_size=2", "training.max_tokens_per_microbatch=100"]


@pytest.mark.parametrize(
    "words_of_rows",
    [
        pytest.param(plain_words, marks=pytest.mark.promise),
        pytest.param(words_of_each_turn, marks=[pytest.mark.process, pytest.mark.slow, pytest.mark.warm]),
    ],
)
def test_killed_in_mid_epoch_and_resumed(tmp_path, words_of_rows):
    """With dropout and a data worker: neither the masks nor the order of rows may depend on where a run began."""
    words = [
        *("task=finetune_lora", f"model.path={write_base(tmp_path / 'base')}"),
        *(f"data.cache_dir={tmp_path / 'cache'}", "training.batch_size=4", *words_of_rows(tmp_path / "rows")),
        *("training.num_epochs=3", "checkpoint.save_every=4", "checkpoint.save_total_limit=3"),
        *("lora.dropout=0.1", "training.num_workers=1", "testing.num_samples=0", "training.log_every=1"),
        "testing.general_prompts=none",
    ]
    done = run_finetune("train", *words, f"output_dir={tmp_path / 'whole'}", code=0)

    words.append(f"output_dir={tmp_path / 'killed'}")
    with start(words) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "checkpoint committed step=12" in line:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed/adapter").exists()
    done = run_finetune("train", *words, "resume=auto", code=0)
    found = re.search(r"resumed from step=(\d+)", done.stdout)
    assert found is not None
    assert int(found[1]) in range(12, NUM_STEPS), "12, or a later one that was committed before the signal came"

    files = ["adapter/adapter_model.safetensors", f"checkpoints/step-{NUM_STEPS:06d}/optimizer.safetensors"]
    for name in files:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    whole, killed = steps_in(tmp_path / "whole"), steps_in(tmp_path / "killed")
    assert len(whole) == NUM_STEPS
    assert killed == whole
