"""A script with rows, a loss, a metric, an optimizer and callbacks of its own: `own_code.py EXPERIMENT OVERRIDES…`."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys

import psutil
import torch
from torch.nn.functional import cross_entropy

import finetune

SHORT = (
    *("training.max_steps=4", "training.global_batch_size=8"),
    *("testing.num_samples=0", "testing.max_new_tokens=8", "validation.max_new_tokens=8"),
)
RANK = int(os.environ.get("RANK", "0"))
ROWS = [
    {"prompt": f"what is {number}?", "completion": f"it is {number * number % 7}."} for number in range(40)
]  # fewer: nothing is held out


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Label smoothing."""
    return cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)


def hungry(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Needs a GiB of addresses, and no memory."""
    torch.empty(1 << 28)
    return smoothed(logits, targets)


def length(answer: str, expected: str) -> float:
    """A metric."""
    return float(len(answer))


class Watch:
    """Writes down each call, and asks for what the experiment names."""

    def __init__(self, experiment: str) -> None:
        self.experiment = experiment
        self.calls: list[tuple[str, int]] = []

    def on_step(self, result) -> str | None:
        """Ask on the last rank only."""
        self.calls.append(("step", result.step))
        is_last_rank = int(os.environ.get("WORLD_SIZE", "1")) == RANK + 1
        if self.experiment == "fails" and result.step == 2 and is_last_rank:
            raise ValueError("no luck")
        if self.experiment == "leaves" and result.step == 2:
            sys.exit(0)
        if self.experiment == "kills a worker" and result.step == 2:
            multiprocessing.active_children()[0].kill()
        if self.experiment == "no address space" and result.step == 2:
            room = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
        if self.experiment == "moves":
            os.chdir("/")
            torch.set_grad_enabled(False)
        asked = {"asks": {2: "save", 3: "stop"}}.get(self.experiment, {})
        return asked.get(result.step) if is_last_rank else None

    def on_validation(self, result) -> None:
        """Note the step."""
        self.calls.append(("validation", result.step))

    def on_save(self, result) -> None:
        """The checkpoint is complete."""
        assert (result.path / "state.json").is_file()
        self.calls.append(("save", result.step))

    def on_end(self, result) -> None:
        """Note why training ended."""
        self.calls.append((result.reason, result.step))


def main(arguments: list[str]) -> None:
    """Train, and print the calls and the metrics of each rank."""
    experiment, *overrides = arguments
    watch = Watch(experiment)
    result = finetune.train(
        model="phi_tiny",
        data=ROWS,
        overrides=["testing.general_prompts=none", *overrides, *SHORT],
        callbacks=[watch],
        metrics={"length": length},
        loss=hungry if experiment == "no address space" else smoothed,
    )
    sys.stdout.write(f"rank {RANK} calls {watch.calls}\n")
    sys.stdout.write(f"rank {RANK} metrics {sorted(result.metrics)} in {result.folder.name}\n")


if __name__ == "__main__":
    finetune.command(main)
