"""Trains as `recipes/finetune_lora.py` does, and lets one thing go wrong on one rank, for real; see `test_faults`.

FAULT is `kind:rank:step`. When it happens is written into the file that FAULT_AT names.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from finetune import (
    Trainer,
    add_lora,
    build_base_model,
    build_tokenizer,
    command,
    encode_examples,
    launch,
    load_config,
    load_examples,
)
from finetune.data.encoded import EncodedExample, EncodedExamples, EncodedSplits
from finetune.distributed.runtime import Runtime
from finetune.errors import DataError

KIND, RANK, STEP = os.environ["FAULT"].split(":")
ROWS_PER_STEP = 2
"""Of a rank: one micro-batch."""


def note_time() -> None:
    """Just before it goes wrong."""
    file = Path(os.environ["FAULT_AT"])
    file.with_suffix(".part").write_text(repr(time.time()))
    file.with_suffix(".part").rename(file)


def raise_a_bug() -> None:
    raise ValueError("a row of three columns")


def raise_a_mistake() -> None:
    raise DataError("orders.jsonl:7 is no conversation. Mend the row.")


def hang() -> None:
    time.sleep(3600)


FAULTS = {
    "data": raise_a_mistake,
    "worker": raise_a_bug,
    "forward": raise_a_bug,
    "mistake": raise_a_mistake,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill-in-evaluation": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "saving": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": hang,
}


def provoke() -> None:
    note_time()
    FAULTS[KIND]()


class FaultyRows(EncodedExamples):
    """Rows that cannot be read from a step on."""

    num_read = 0

    def __getitem__(self, index: int) -> EncodedExample:
        self.num_read += 1
        if self.num_read > ROWS_PER_STEP * (int(STEP) - 1):
            provoke()
        return super().__getitem__(index)


def break_model(model: torch.nn.Module) -> None:
    """Let a forward pass fail: the one of step STEP, or the STEP-th one of an evaluation."""
    num_passes = 0
    is_in_training = "evaluation" not in KIND

    def before_forward(decoder: torch.nn.Module, *_: object) -> None:
        nonlocal num_passes
        num_passes += decoder.training == is_in_training
        if decoder.training != is_in_training or num_passes != int(STEP):
            return
        if KIND == "wait":  # for a signal from outside, in small steps
            note_time()
            time.sleep(30)
        else:
            provoke()

    model.get_base_model().get_decoder().register_forward_pre_hook(before_forward)  # type: ignore[operator]


def break_saving(runtime: Runtime) -> None:
    """Let a rank die while the others gather weights with it, for the STEP-th save."""
    full_tensors, saves = runtime.placement.full_tensors, itertools.count(1)

    @contextmanager
    def broken(tensors: Iterable[torch.Tensor]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        with full_tensors(tensors) as whole:
            if next(saves) == int(STEP):
                time.sleep(1.0)  # they have come to it
                provoke()
            yield whole

    runtime.placement.full_tensors = broken  # type: ignore[method-assign]


def main(words: list[str]) -> None:
    config = load_config(words, task="finetune_lora")
    with launch(config) as runtime:
        is_faulty = RANK in ("all", str(runtime.rank))
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        if is_faulty and KIND in ("data", "worker"):
            train = FaultyRows.of(splits.train.sources[0], splits.train.end_id)
            splits = EncodedSplits(train, splits.validation, splits.test)
        model = build_base_model(config.model)
        model = add_lora(model, config.lora) if config.training.method == "lora" else model
        if is_faulty and KIND == "saving":
            break_saving(runtime)
        elif is_faulty and KIND not in ("data", "worker", "none"):
            break_model(model)
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


if __name__ == "__main__":
    command(main)
