"""Trains as `finetune train` does, on ranks that have less memory than the machine; see `test_memory`.

ROOM_OF_RANK_1 is the memory that rank 1 finds free. SHORT is RANK:TOKENS: a pass over more tokens finds no memory on
that rank, by an allocation that no machine can serve; not in the first micro-batch, whose gradients are there then.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from finetune import command, launch, load_config
from finetune.distributed.runtime import Runtime
from finetune.training.memory import choice
from finetune.training.supervised import Supervised
from finetune.training.train import build_trainer
from finetune.training.trainer import Trainer

SHORT = os.environ.get("SHORT")
ROOM = os.environ.get("ROOM_OF_RANK_1")


def limit_free_memory(runtime: Runtime) -> None:
    """What the rank is told to have; the machine has more."""
    if ROOM is not None and runtime.rank == 1:
        choice.free_memory = lambda *_, **__: int(ROOM)


def run_short_of_memory(runtime: Runtime) -> None:
    """Let this rank's larger micro-batches fail, but for the first."""
    rank, _, tokens = (SHORT or "").partition(":")
    if rank != str(runtime.rank):
        return
    loss_of, num_passes = Supervised.loss, 0

    def short(model: torch.nn.Module, microbatch: Any, *, compute: Any) -> torch.Tensor:
        nonlocal num_passes
        num_passes += 1
        if microbatch.num_computed > int(tokens) and num_passes > 1:
            torch.empty(1 << 50, dtype=torch.uint8)
        result: torch.Tensor = compute(model, microbatch)
        return result

    Supervised.loss = lambda *given: partial(short, compute=loss_of(*given))  # type: ignore[method-assign]


def main(words: list[str]) -> None:
    config = load_config(words, task="finetune_lora")
    with launch(config) as runtime:
        limit_free_memory(runtime)
        run_short_of_memory(runtime)
        trainer: Any = build_trainer(runtime, config)
        assert isinstance(trainer, Trainer)
        decoder: torch.nn.Module = trainer.model.get_base_model().get_decoder()
        print(f"checkpointed: {decoder.gradient_checkpointing}")
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)


if __name__ == "__main__":
    command(main)
