"""Measure the cost of encoding, for docs/data.md: `python -m tests.data.measure_encoding ROWS PROCESSES…`."""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from transformers import AutoTokenizer

from finetune.config.config_files import resolve_shipped
from finetune.config.schema import DataSection
from finetune.data.encode import encode_rows
from finetune.data.examples import load_examples
from finetune.data.row_file import rows_in_memory
from finetune.data.rows import Examples
from finetune.data.templates import AnswerTokens, mark_targets, render_examples, tokenize
from finetune.fallbacks import Fallbacks
from tests.data.conftest import write_lines

TURNS = (("user", 40), ("assistant", 80), ("user", 20), ("assistant", 60))
"""Role and number of words."""


def main(num_rows: int, counts: list[int]) -> None:
    """Print the CPU seconds and the rows a second of each way."""
    words = (Path(__file__).resolve().parents[2] / "README.md").read_text().split()
    rng = random.Random(0)
    rows = [
        {"messages": [{"role": role, "content": " ".join(rng.choices(words, k=k))} for role, k in TURNS]}
        for _ in range(num_rows)
    ]
    tokens = AnswerTokens(AutoTokenizer.from_pretrained(resolve_shipped("shipped:phi_tiny")))
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(Path(folder) / "rows.jsonl", rows)
        examples = load_examples(DataSection(path=path, max_length=4096, cache_dir=folder)).train
        assert isinstance(examples, Examples)
        characters = sum(len(text) for row in examples for text in row.contents)
        print(f"{num_rows} rows of {characters / num_rows:.0f} characters")
        say_what_takes_time(examples, tokens)
        for count in counts:
            measure(examples, tokens, DataSection(path=path, max_length=4096, num_processes=count), num_rows)


def say_what_takes_time(examples: Examples, tokens: AnswerTokens) -> None:
    """Print the time of each part in one process."""
    marks = [time.process_time()]
    rendered = render_examples(tokens.template, examples.rows)
    marks.append(time.process_time())
    encodings = tokenize(tokens.tokenizer, [row.text for row in rendered])  # type: ignore[union-attr]
    marks.append(time.process_time())
    for row, encoding in zip(rendered, encodings, strict=True):
        mark_targets(row, encoding, tokens)  # type: ignore[arg-type]
    marks.append(time.process_time())
    parts = [end - start for start, end in pairwise(marks)]
    print("template {:.2f} s, tokenizer {:.2f} s, targets {:.2f} s".format(*parts))


def measure(examples: Examples, tokens: AnswerTokens, section: DataSection, num_rows: int) -> None:
    """One encoding of all rows."""
    before, own, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time(), time.perf_counter()
    rows_in_memory(lambda writer: encode_rows(examples, tokens, section, Fallbacks(strict=True), writer))
    after, own, wall = (
        resource.getrusage(resource.RUSAGE_CHILDREN),
        time.process_time() - own,
        time.perf_counter() - wall,
    )
    children = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{section.num_processes} processes: {own:.2f} s of CPU here, {children:.2f} s in children, {wall:.2f} s, "
        f"{num_rows / wall:.0f} rows/s"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
