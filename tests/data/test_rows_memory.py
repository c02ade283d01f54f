"""Encoded rows take no memory of a process's own: 100 MB of them, written, mapped, chosen, joined and read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from array import array
from pathlib import Path

import torch

from finetune.config.schema import TrainingSection
from finetune.data.batches import BatchRule, TrainLoader, pad
from finetune.data.row_file import load_or_encode
from finetune.data.encoded import EncodedExamples
from finetune.data.row_file import RowFacts
from finetune.data.templates import TokenisedRow
from finetune.fallbacks import Fallbacks

LENGTH, NUM_ROWS = 10_000, 2_000
ids, marks = array("i", range(2 * LENGTH)), bytearray([0, 1] * LENGTH)

def encode(writer):
    for number in range(NUM_ROWS):
        start = number % LENGTH
        writer.add(number, TokenisedRow(ids[start : start + LENGTH], marks[start : start + LENGTH]), max_length=LENGTH)
    return RowFacts()

def anonymous():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")) / 1000

def check(row, number):
    start = number % LENGTH
    assert row.input_ids.tolist() == list(ids[start : start + LENGTH])
    assert row.is_target.tolist() == [bool(mark) for mark in marks[start : start + LENGTH]]

before = anonymous()
for _ in ("encoded", "mapped"):
    rows = load_or_encode(Path(sys.argv[1]), "0" * 64, encode, Fallbacks(strict=True), "rows")
    print(f"{anonymous() - before:.0f} MB")
all_rows = EncodedExamples.of(rows, end_id=1)
joined = EncodedExamples.joined([all_rows.select(range(0, NUM_ROWS, 2)), all_rows.select(range(NUM_ROWS - 1, 0, -2))])
joined.fingerprint
list(joined.digests(with_targets=True))
check(joined[5], 10)
check(joined[NUM_ROWS // 2 + 1], NUM_ROWS - 3)
for workers in (0, 1):
    loader = TrainLoader(
        joined,
        BatchRule(lengths=joined.lengths.numpy().data, global_batch_size=16, batch_size=4),
        TrainingSection(num_workers=workers), rank=0, world_size=1, collate=pad,
    )
    most = 0
    for step in loader.steps(0):
        most = max(most, anonymous() - before)
    assert len(list(loader.rule.order(0))) == NUM_ROWS
    print(f"{most:.0f} MB")
assert sum(tensor.numel() * tensor.itemsize for tensor in (rows.token_ids, rows.is_target)) == 100_000_000
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_100_mb_of_rows_take_less_than_60_mb(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = [int(line.removesuffix(" MB")) for line in done.stdout.splitlines()]
    print(figures)
    assert len(figures) == 4
    assert max(figures) < 60
