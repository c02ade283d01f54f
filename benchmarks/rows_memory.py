"""Measure how much memory rows take: `python -m benchmarks.rows_memory`; with `--rows 400000 --words 0`, 2 GB of rows.

Each phase runs in a process of its own, and its memory is compared with that of the same process before it, after
torch, transformers and the tokenizer were loaded. RssAnon (/proc/self/status) is memory that is no page of a file.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.clock import Peak, memory
from finetune.terminal import say

if TYPE_CHECKING:
    from finetune.data.encoded import EncodedExamples

PHASES = ("list", "encode", "read", "epoch")
_EVERY_SECONDS = 0.1
_MADE_LENGTH = 1_000


def main() -> None:
    """Make the rows, and run each phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument(
        "--words", type=int, default=60, help="words of an answer; 0: tokens of no text, without a tokenizer"
    )
    parser.add_argument("--folder", type=Path, help="for the rows and the cache; default: a temporary one")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        run_phase(arguments.phase, arguments.folder, arguments.rows if arguments.words == 0 else None)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.words:
            write_rows(folder / "rows.jsonl", arguments.rows, arguments.words)
        for phase in PHASES if arguments.words else PHASES[1:]:
            own = ("--folder", str(folder), "--phase", phase)
            subprocess.run([sys.executable, "-m", "benchmarks.rows_memory", *sys.argv[1:], *own], check=True)
        for path in sorted(folder.rglob("*.safetensors")):
            say(f"the encoded rows take {path.stat().st_size / 1e6:,.0f} MB")


def write_rows(path: Path, num_rows: int, num_words: int) -> None:
    """Write chat rows, unless they are there."""
    if path.exists():
        return
    words = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8").split()
    words = [word for word in words if word.isalpha()]
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            turns = (("user", f"Question {number}"), ("assistant", " ".join(rng.choices(words, k=num_words))))
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def run_phase(phase: str, folder: Path, made: int | None) -> None:
    """Run one phase and print its memory. `made` rows are made where they are encoded, if given."""
    from transformers import AutoTokenizer

    from finetune.config.config_files import resolve_shipped
    from finetune.config.schema import DataSection, TrainingSection
    from finetune.data.batches import BatchRule, TrainLoader
    from finetune.data.encode import encode_examples
    from finetune.data.examples import load_examples

    tokenizer = AutoTokenizer.from_pretrained(resolve_shipped("shipped:phi_tiny"))
    section = DataSection(path=str(folder / "rows.jsonl"), cache_dir=str(folder / "cache"), max_length=4096)
    with measured(phase):
        if phase == "list":
            kept = list(load_examples(section).train)
            say(f"{len(kept):,} rows as a list, as they were held before they were written one by one")
            return
        if made is None:
            train = encode_examples(load_examples(section), tokenizer, section).train
        else:
            train = made_rows(folder / "cache", made)
        say(f"{len(train):,} rows, {int(train.lengths.sum()):,} tokens, fingerprint {train.fingerprint[:8]}")
        if phase == "epoch":
            lengths = train.lengths.numpy().data
            rule = BatchRule(lengths=lengths, global_batch_size=16, batch_size=4, tokens=train.tokens)
            loader = TrainLoader(train, rule, TrainingSection(), rank=0, world_size=1)
            tokens = sum(part.num_tokens for step in loader.steps(0) for _, part in step)
            say(f"{rule.steps_per_epoch:,} steps, {tokens:,} tokens")


def made_rows(folder: Path, num_rows: int) -> EncodedExamples:
    """Rows of random tokens, through the cache."""
    from finetune.data.encoded import EncodedExamples
    from finetune.data.row_file import RowFacts, RowWriter, load_or_encode
    from finetune.data.templates import TokenisedRow
    from finetune.fallbacks import Fallbacks

    def encode(writer: RowWriter) -> RowFacts:
        rng = random.Random(0)
        ids, is_target = rng.choices(range(30_000), k=2 * _MADE_LENGTH), bytearray(rng.choices((0, 1), k=_MADE_LENGTH))
        for number in range(num_rows):
            start = number % _MADE_LENGTH
            writer.add(number, TokenisedRow(ids[start : start + _MADE_LENGTH], is_target), max_length=_MADE_LENGTH)
        return RowFacts()

    return EncodedExamples.of(load_or_encode(folder, "0" * 64, encode, Fallbacks(strict=True), "made rows"), 0)


@contextmanager
def measured(phase: str) -> Iterator[None]:
    """Print the memory before, at most and after the block."""
    started = time.perf_counter()
    with Peak(_EVERY_SECONDS) as held:
        yield
        after, files = memory("RssAnon"), memory("RssFile")
    say(
        f"{phase}: RssAnon {held.before / 1e6:,.0f} MB before, {(max(held.most, after) - held.before) / 1e6:+,.0f} MB "
        f"at most, {(after - held.before) / 1e6:+,.0f} MB at the end; RssFile {files / 1e6:,.0f} MB; "
        f"{time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
