"""How much memory a rank holds, and how long a step takes, with sharded weights and without: LoRA and full fine-tuning.

    python -m benchmarks.sharding

Each run is started by torchrun, with one thread a process. A model of 197 million parameters in fp32 (788 MB) trains on
rows of 20 to 60 tokens, two in a micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench import ONE_THREAD, QUIET, ROOT, Bench
from benchmarks.clock import Peak, memory
from benchmarks.job import FIRST_TEXT_ID, SIZES, Job
from benchmarks.worker import torchrun

_RUNS = {
    "lora": (("none", 1), ("none", 2), ("fsdp2", 2), ("fsdp2", 4)),
    "full": (("none", 1), ("fsdp2", 2), ("fsdp2", 4)),
}
"""By `training.method`: `parallel.sharding` and the number of ranks."""
_STEPS, _WARMUP, _ROWS_OF_A_STEP = 8, 2, 8
_LOOK_SECONDS = 0.005
_MOST_CHARACTERS = 2000
_SMALLEST_MAPPING = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Without it, glibc keeps what a process has freed, and no figure shows it."""


class Held(NamedTuple):
    """Anonymous memory of a rank beyond that before the model was read, its code being imported, in bytes."""

    loading: int
    """The most until the first step begins."""
    loaded: int
    """When the first step begins."""
    peak: int


def train(folder: Path, size: str, words: Sequence[str]) -> None:
    """Train as one rank, and write what it held to a file of this folder."""
    import peft  # noqa: F401
    import transformers.models.phi3.modeling_phi3  # noqa: F401

    from finetune import Trainer, add_lora, build_base_model, build_tokenizer, launch, load_config
    from finetune.data.encoded import EncodedExamples, EncodedSplits

    config = load_config(list(words))
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = EncodedSplits(EncodedExamples.from_rows(_rows(SIZES[size].vocabulary), end_id=2))
        with Peak(_LOOK_SECONDS) as held:
            model = build_base_model(config.model)
            model = add_lora(model, config.lora) if config.training.method == "lora" else model
            trainer = Trainer(runtime, config, model, tokenizer, splits)
            loader, _, _ = trainer.prepare_dataloaders()
            loading, loaded = held.most - held.before, memory("RssAnon") - held.before
            trainer.run_training(loader)
        made = Held(loading, loaded, held.most - held.before)
        (folder / f"rank-{runtime.rank}.json").write_text(json.dumps(made._asdict()))


def _rows(vocabulary: int) -> list[tuple[list[int], list[bool]]]:
    rng = random.Random(0)
    lengths = [rng.randint(20, 60) for _ in range(_ROWS_OF_A_STEP * _STEPS)]
    return [(rng.choices(range(FIRST_TEXT_ID, vocabulary), k=n), [False] + [True] * (n - 1)) for n in lengths]


def measure(
    base: Path, folder: Path, size: str, *, method: str, sharding: str, num_ranks: int, more: Sequence[str] = ()
) -> tuple[Held, float]:
    """Run a world of its own; return the most that any rank held, and the median seconds of a step after the first.

    Args:
        base: the folder of the base model.
        folder: for the run.
        size: of the base model.
        method: `training.method`.
        sharding: `parallel.sharding`.
        num_ranks: of the world.
        more: settings that come last.

    Raises:
        RuntimeError: the run failed.
    """
    words = [
        f"task=finetune_{method}",
        *(f"model.path={base}", "data.path=shipped:orders", f"output_dir={folder / 'run'}", "training.device=cpu"),
        *("lora.r=8", f"lora.target_modules={json.dumps(SIZES[size].lora_targets)}", "training.precision=fp32"),
        *(f"training.global_batch_size={_ROWS_OF_A_STEP}", "training.batch_size=2", f"training.max_steps={_STEPS}"),
        *(f"parallel.sharding={sharding}", *more),
    ]
    command = [sys.executable, *torchrun(num_ranks), "-m", "benchmarks.sharding", "--size", size]
    command += ["--rank-of", str(folder), *words]
    environment = os.environ | ONE_THREAD | QUIET | _SMALLEST_MAPPING
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-_MOST_CHARACTERS:])
    held = [Held(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    assert len(held) == num_ranks
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"][_WARMUP - _STEPS :]
    seconds = [event["num_tokens"] / event["tokens_per_second"] for event in steps]
    return Held(*map(max, zip(*held, strict=True))), statistics.median(seconds)


def main(words: Sequence[str]) -> int:
    """Print a table, a row for each kind of run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description="Memory with sharded weights")
    parser.add_argument("--size", choices=list(SIZES), default="sharded")
    parser.add_argument("--method", choices=list(_RUNS), help="default: both")
    parser.add_argument("--most-ranks", type=int, help="leave out worlds of more; default: none")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "benchmarks", help="for the base model")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # by torchrun
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    wish = parser.parse_args(words)
    if wish.rank_of is not None:
        train(wish.rank_of, wish.size, wish.words)
        return 0
    base = Bench(wish.folder).base(Job(size=wish.size))
    heads = (
        "`training.method`",
        "`parallel.sharding`",
        "ranks",
        "while loading",
        "after loading",
        "at the peak",
        "a step",
    )
    sys.stdout.write(f"| {' | '.join(heads)} |\n|---|---|---:|---:|---:|---:|---:|\n")
    runs = [(method, *run) for method in ([wish.method] if wish.method else _RUNS) for run in _RUNS[method]]
    runs = [run for run in runs if run[-1] <= (wish.most_ranks or run[-1])]
    for method, sharding, num_ranks in runs:
        with tempfile.TemporaryDirectory() as name:
            held, seconds = measure(base, Path(name), wish.size, method=method, sharding=sharding, num_ranks=num_ranks)
        cells = " | ".join(f"{num_bytes / 1e6:,.0f} MB" for num_bytes in held)
        sys.stdout.write(f"| {method} | {sharding} | {num_ranks} | {cells} | {seconds:.2f} s |\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
