"""Runs a recipe, several times if so told, in every process of a launch; each rank reports that it has trained.

Words: a folder to report to, then for each run its recipe as `module:function` and its words, `--` between two runs.
A process that has trained leaves `RUN.PID.json`, so that two processes that both believe they are rank 0 leave two.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from finetune.cli import command
from finetune.training.trainer import Trainer

# `python -m torch.distributed.launch` puts --local-rank=N before the words: the recipe gets it so.
_from_launcher = [word for word in sys.argv[1:2] if word.startswith("--local-rank")]
_folder, *_words = sys.argv[1 + len(_from_launcher) :]
_run_training = Trainer.run_training
trained: list[str] = []
"""The runs that this process took part in."""


def run_training(self: Trainer, train_loader: Any, val_loader: Any = None) -> Any:
    """Train as ever, then say who has."""
    results = _run_training(self, train_loader, val_loader)
    runtime, rule = self.runtime, train_loader.rule
    report = {
        "rank": runtime.rank,
        "world_size": runtime.world_size,
        "launcher": runtime.environment.launcher,
        "ranks_met": runtime.collectives.sum([2**runtime.rank])[0],
        "writes": self.journal is not None,
        "microbatches": [len(step) for step in rule.steps_of_rank(0, 0, runtime.rank, runtime.world_size)],
    }
    run = Path(self.config.output_dir).name
    trained.append(run)
    Path(_folder, f"{run}.{os.getpid()}.json").write_text(json.dumps(report))
    return results


# At the top, since the processes of torch.multiprocessing.spawn import this module and nothing more.
Trainer.run_training = run_training  # type: ignore[method-assign]


def main(words: list[str]) -> None:
    """Run one recipe after the other."""
    while words:
        end = words.index("--") if "--" in words else len(words)
        (recipe, *run), words = words[:end], words[end + 1 :]
        module, _, name = recipe.partition(":")
        num_before = len(trained)
        try:
            command(getattr(importlib.import_module(module), name), arguments=[*_from_launcher, *run])
        except SystemExit as ended:
            # The command line ends like this after a run; and so does a process that only started others.
            if ended.code or len(trained) == num_before:
                raise


if __name__ == "__main__":
    main(_words)
